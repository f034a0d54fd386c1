from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from pina_flwr.secure_sum.parameters import Parameters, choose, complete
from pina_flwr.secure_sum.session import LARGEST_ID, LONGEST_RUN, Rules, Session, Terms

NUMBERS = {"size": 100, "bits": 20, "members": 30, "neighbours": 10, "threshold": 7, "fewest": 20}


class TestSession:
    def test_bytes_are_as_they_say(self) -> None:
        assert Session("ab", 258).to_bytes() == b"\2\0\0\0ab\2\1\0\0\0\0\0\0"
        assert Session("é", 1).to_bytes() == b"\2\0\0\0\xc3\xa9\1" + bytes(7)

    def test_no_bytes_are_the_start_of_others(self) -> None:
        runs = ["a", "aa", "b", "\0", "\0\0", "1", "11", "a\1", "a" + "\0" * 7, "é", "\2\0\0\0"]
        sessions = [Session(run, round_) for run in runs for round_ in (1, 2, 256, 97, LARGEST_ID)]
        for one, other in itertools.permutations(sessions, 2):
            assert not one.to_bytes().startswith(other.to_bytes())

    @pytest.mark.parametrize("run", ["", "a" * LONGEST_RUN, "é" * (LONGEST_RUN // 2)])
    def test_refuses_names_too_short_or_long(self, run: str) -> None:
        with pytest.raises(ValueError, match=r"^run of \d+ characters: must be of 1 to 65535 bytes$"):
            Session(run, 1)

    @pytest.mark.parametrize("round_", [0, -1, LARGEST_ID + 1])
    def test_refuses_rounds_out_of_bounds(self, round_: int) -> None:
        with pytest.raises(ValueError, match=rf"^round = {round_}: must be from 1 to {LARGEST_ID}$"):
            Session("a", round_)

    def test_takes_the_longest_and_the_last(self) -> None:
        assert len(Session("a" * (LONGEST_RUN - 1), LARGEST_ID).to_bytes()) == 4 + LONGEST_RUN - 1 + 8


class TestRules:
    def test_derive_parameters(self) -> None:
        for members in (5, 50, 500):
            assert Rules(0.05, 0.1).parameters(members) == choose(members, 0.05, 0.1)

    def test_take_parameters_that_are_given_where_members_are_many_enough(self) -> None:
        rules = Rules(0.05, 0.1, neighbours=10, threshold=8)
        assert rules.parameters(12) == rules.parameters(1000) == Parameters(10, 8)
        assert rules.parameters(11) == complete(11, 0.05, 0.1)
        assert rules.parameters(5) == complete(5, 0.05, 0.1)

    def test_of_neighbours_alone_take_the_least_threshold(self) -> None:
        assert Rules(neighbours=10).parameters(12) == Parameters(10, 6)

    def test_of_signed_sums_are_of_complete_graphs(self) -> None:
        for members in (3, 40, 200):
            assert Rules(0.1, 0.2, signed=True).parameters(members) == complete(members, 0.1, 0.2)

    def test_say_if_there_are_no_parameters(self) -> None:
        for rules in (Rules(0.5), Rules(0.5, signed=True), Rules(0.5, neighbours=40), Rules(0, 0.9)):
            with pytest.raises(ValueError, match="must be at most"):
                rules.parameters(10)
        with pytest.raises(ValueError, match="members = 1: must be at least 2"):
            Rules().parameters(1)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"dropout": -0.1}, "dropout = -0.1: must be at least 0 and below 1"),
            ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and below 1"),
            ({"dropout": math.nan}, "dropout = nan: must be at least 0 and below 1"),
            ({"corrupted": 1.5}, "corrupted = 1.5: must be at least 0 and below 1"),
            ({"corrupted": math.nan}, "corrupted = nan: must be at least 0 and below 1"),
            ({"neighbours": 3}, "neighbours = 3: must be even (0: derived)"),
            ({"neighbours": -2}, "neighbours = -2: must be even (0: derived)"),
            ({"threshold": 3}, "threshold = 3: must be 0 (derived) unless neighbours are given"),
            (
                {"neighbours": 10, "threshold": 5},
                "threshold = 5: must be above half of neighbours = 10, and at most 10",
            ),
            (
                {"neighbours": 10, "threshold": 11},
                "threshold = 11: must be above half of neighbours = 10, and at most 10",
            ),
            (
                {"neighbours": 10, "threshold": -1},
                "threshold = -1: must be above half of neighbours = 10, and at most 10",
            ),
            (
                {"neighbours": 10, "signed": True},
                "neighbours = 10: signed sums have all members as neighbours; set 0",
            ),
        ],
        ids=str,
    )
    def test_refuse_what_makes_no_sense(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=r"must be|set 0") as raised:
            Rules(**wrong)
        assert str(raised.value) == message


class TestTerms:
    def test_numbers_go_there_and_back(self) -> None:
        terms = Terms(Session("a", 1), **NUMBERS)
        assert terms.numbers == NUMBERS
        assert list(terms.numbers) == list(NUMBERS)
        assert Terms.of(terms.session, terms.numbers) == terms

    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [
            ("size", 1, 2**40),
            ("bits", 8, 32),
            ("members", 20, 2**31),
            ("neighbours", 7, 13),
            ("threshold", 6, 10),
            ("fewest", 1, 30),
        ],
    )
    def test_bounds(self, name: str, low: int, high: int) -> None:
        for inside in (low, high):
            Terms.of(Session("a", 1), NUMBERS | {name: inside})
        for outside in (low - 1, high + 1, -1, 0 if low else -1, 2**63 - 1):
            with pytest.raises(ValueError, match=r"^\w+ = -?\d+: must be from \d+ to \d+$"):
                Terms.of(Session("a", 1), NUMBERS | {name: outside})

    def test_at_least_two_members(self) -> None:
        least = {"members": 2, "neighbours": 1, "threshold": 1, "fewest": 1}
        Terms.of(Session("a", 1), NUMBERS | least)
        with pytest.raises(ValueError, match="members = 1: must be from 2 to"):
            Terms.of(Session("a", 1), NUMBERS | least | {"members": 1})

    def test_no_threshold_of_half_the_neighbours_or_less(self) -> None:
        for neighbours, threshold in ((10, 5), (11, 5), (2, 1), (1, 0)):
            with pytest.raises(ValueError, match=f"threshold = {threshold}: must be from"):
                Terms.of(Session("a", 1), NUMBERS | {"neighbours": neighbours, "threshold": threshold})

    def test_no_more_neighbours_than_there_are_shares(self) -> None:
        numbers = NUMBERS | {"members": 10**6, "threshold": 40000}
        Terms.of(Session("a", 1), numbers | {"neighbours": 65535})
        with pytest.raises(ValueError, match="neighbours = 65536: must be from 1 to 65535"):
            Terms.of(Session("a", 1), numbers | {"neighbours": 65536})

    def test_numbers_missing_or_unknown(self) -> None:
        for name in NUMBERS:
            with pytest.raises(ValueError, match="numbers"):
                Terms.of(Session("a", 1), {k: v for k, v in NUMBERS.items() if k != name})
        with pytest.raises(ValueError, match="numbers"):
            Terms.of(Session("a", 1), NUMBERS | {"session": 1})
