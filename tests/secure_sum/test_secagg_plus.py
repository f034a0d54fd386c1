"""The server's side of SecAgg+: what it makes of what arrives, and what it gets to see."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from forgeries import IGNORED, LOST, late, sent_by, with_header
from scipy.stats import chi2
from sum_trial import RUN, Trial, arrays_of, failed, read, rewritten, spread, trial, without

from pina_flwr.secure_sum import participant, secagg_plus
from pina_flwr.secure_sum.interface import SumResult, SumRound, Survivors
from pina_flwr.secure_sum.local_grid import LocalGrid, over_the_wire
from pina_flwr.secure_sum.masks import add_masks, expand
from pina_flwr.secure_sum.participant import COMMITMENT, PAIR
from pina_flwr.secure_sum.session import LARGEST_ID, Rules, Session
from pina_flwr.secure_sum.wire import HEADER, KEY, PHASES

UNSIGNED = [phase for phase in PHASES if phase != "agree"]
RETAINED = Rules(dropout=0.34, signed=True)  # of 6 members 2 may vanish


def of_node(node: int, phase: str, change: Callable[[Message, Message], list[Message]]) -> Callable:
    """A network that changes one reply of a phase."""

    def changed(at: str, request: Message, reply: Message) -> list[Message]:
        hit = at == phase and request.metadata.dst_node_id == node
        return change(request, reply) if hit else [reply]

    return changed


def losing(phase: str, nodes: Iterable[int]) -> Callable:
    """A network that loses some nodes' replies in a phase."""
    lost = set(nodes)
    return lambda at, request, reply: [] if at == phase and request.metadata.dst_node_id in lost else [reply]


def is_exact(sums: Trial, result: SumResult, survivors: Iterable[int]) -> bool:
    """Whether the result is the plain sum of these members."""
    survivors = list(survivors)
    assert result.reason == ""
    assert result.total is not None
    assert result.survivors == len(survivors)
    return np.array_equal(result.total, sums.plain(survivors))


class TestSum:
    @pytest.mark.parametrize("rules", [Rules(), Rules(0.1, 0.2), Rules(neighbours=4), RETAINED])
    def test_is_exact(self, rules: Rules) -> None:
        sums = trial(nodes=5, per=2, rules=rules)
        result = sums.run()
        assert is_exact(sums, result, range(10))
        assert (result.lost, result.refusals, result.ignored) == ({}, {}, 0)
        assert sums.phases() == (list(PHASES) if rules.signed else UNSIGNED)

    @pytest.mark.parametrize("bits", range(8, 33))
    def test_mod_2_to_the_b(self, bits: int) -> None:
        sums = trial(nodes=3, bits=bits, size=33)
        for vector in sums.vectors.values():
            vector[:3] = (1 << bits) - 1
        result = sums.run()
        assert is_exact(sums, result, range(3))
        assert result.total is not None
        assert result.total[0] == (1 << bits) - 3

    def test_of_two(self) -> None:
        sums = trial(nodes=2)
        assert is_exact(sums, sums.run(), range(2))

    def test_where_one_node_hosts_all(self) -> None:
        sums = trial(nodes=1, per=40, rules=Rules(neighbours=6))
        assert is_exact(sums, sums.run(), range(40))

    @pytest.mark.parametrize("rules", [Rules(), RETAINED])
    def test_of_the_largest_ids(self, rules: Rules) -> None:
        ids = [LARGEST_ID - i for i in range(5)] + [0]
        vectors = {member: np.full(3, row, np.uint32) for row, member in enumerate(ids)}
        sums = Trial(rules, spread(ids, [2]), vectors)
        assert is_exact(sums, sums.run(), ids)

    def test_on_nodes_with_the_largest_ids(self) -> None:
        """Flower draws ids of 64 bits."""
        sums = trial(nodes=4)
        rename = {node: 2**64 - 1 - node for node in sums.members}
        sums.members = {rename[node]: own for node, own in sums.members.items()}
        contexts = {rename[node]: context for node, context in sums.grid.contexts.items()}
        sums.grid.contexts = contexts
        assert is_exact(sums, sums.run(), range(4))

    def test_counts_what_it_sends_and_gets(self) -> None:
        sums = trial(nodes=6, per=1, size=1000, bits=8)
        result = sums.run()
        k, label = sums.rules.parameters(6).neighbours, 128  # bytes of an array's own header
        arrays = 96 + k * 92 + 1024 + k * 32 + 4 * label  # keys, shares, vector, shares
        assert result.bytes_up == 6 * arrays
        assert result.bytes_down > 6 * (6 * (8 + 96) + k * (8 + 92))

    def test_gives_the_graph_only_once_all_have_advertised(self) -> None:
        """Who knew the graph before could choose its keys by it."""
        sums = trial(nodes=5)
        sums.run()
        first = [one for one in sums.passed if one.phase == "advertise"]
        assert all(set(one.request.content) == {HEADER, "secagg-arrays"} for one in first)
        assert all(not arrays_of(one.request) for one in first)
        assert all(not read(one.request)[0].terms for one in first)


class TestAsTrusted:
    """Given the same vectors, both secure sums give the same."""

    @pytest.mark.parametrize("lost", [[], [3], [1, 3]])
    @pytest.mark.parametrize(("bits", "fewest"), [(8, 4), (20, 8), (32, 10)])
    def test_equal(self, lost: list[int], bits: int, fewest: int) -> None:
        sums = trial(nodes=5, per=2, bits=bits, fewest=fewest, rules=Rules(dropout=0.4))
        sums.change = losing("mask", lost)
        ours = sums.run()
        sums.change = losing("train", lost)
        trusted = sums.run(kind="trusted")
        assert (ours.survivors, ours.refusals, ours.revealed) == (10 - 2 * len(lost), {}, ())
        assert (trusted.survivors, trusted.refusals, trusted.revealed) == (10 - 2 * len(lost), {}, ())
        if 10 - 2 * len(lost) < fewest:
            assert ours.total is trusted.total is None
            return
        assert ours.total is not None
        assert trusted.total is not None
        assert ours.total.dtype == trusted.total.dtype == np.int64
        assert np.array_equal(ours.total, trusted.total)


def silent(nodes: int, of: int, phase: str) -> str:
    """What is said of nodes that were lost, of 10^6 s in all."""
    seconds = 625000 if phase == "mask" else 125000
    return f"{nodes} of {of} nodes did not answer {phase} within {seconds} s"


class TestThreshold:
    """Of the other 9 each of 10 members needs 6: 3 may vanish, in whatever phase, and no more."""

    RULES = Rules(dropout=0.3, corrupted=0.2)

    @pytest.mark.parametrize("signed", [False, True])
    @pytest.mark.parametrize("phase", ["share", "mask", "agree", "unmask"])
    def test_is_kept_to(self, phase: str, signed: bool) -> None:
        if phase == "agree" and not signed:
            return  # not a phase of these
        rules = replace(self.RULES, signed=signed)
        assert (rules.parameters(10).neighbours, rules.parameters(10).threshold) == (9, 6)
        sums = trial(nodes=10, rules=rules, change=losing(phase, range(3)))
        assert is_exact(sums, sums.run(), range(3 if phase in ("share", "mask") else 0, 10))
        sums = trial(nodes=10, rules=rules, change=losing(phase, range(4)))
        result = sums.run()
        assert result.total is None
        assert result.reason
        assert sums.phases()[-1] == phase

    @pytest.mark.parametrize("phase", UNSIGNED[:-1])
    def test_of_survivors(self, phase: str) -> None:
        sums = trial(nodes=10, rules=self.RULES, fewest=8, change=losing(phase, [0, 1]))
        assert is_exact(sums, sums.run(), range(2, 10))
        sums = trial(nodes=10, rules=self.RULES, fewest=9, change=losing(phase, [0, 1]))
        result = sums.run()
        assert result.total is None
        assert result.reason == f"8 of 10 members were left, 9 are needed ({silent(2, 10, phase)})"
        assert result.survivors == (8 if phase == "mask" else 0)
        assert sums.phases()[-1] == phase


class TestPartly:
    """Of a node's members some go on where others don't."""

    def test_refuse(self) -> None:
        """What was altered for one member concerns nobody else."""

        def alter(request: Message, reply: Message) -> list[Message]:
            arrays = arrays_of(reply)
            arrays["sealed"][0, 0, 20] ^= 1  # of member 0 for its first neighbour, member 1 on the same node
            return [rewritten(reply, arrays=arrays)]

        sums = trial(nodes=3, per=3, rules=Rules(0.3, neighbours=8), change=of_node(0, "share", alter))
        result = sums.run()
        assert is_exact(sums, result, [0, *range(2, 9)])
        assert result.lost == {"mask": 1}
        assert result.refusals == {"shares altered": 1}

    @pytest.mark.parametrize("phase", PHASES)
    def test_vanish(self, phase: str) -> None:
        """The rest of the node is asked on, and knows of the same members as before."""
        change = of_node(0, phase, lambda request, reply: [without(reply, [1])])
        sums = trial(nodes=5, per=3, rules=Rules(dropout=0.2, signed=True), change=change)
        there = [m for m in range(15) if m != 1 or phase in ("agree", "unmask")]
        assert is_exact(sums, sums.run(), there)

    def test_in_a_sparse_graph(self) -> None:
        sums = trial(nodes=12, per=2, rules=Rules(neighbours=8, threshold=5))
        sums.change = lambda phase, request, reply: [without(reply, [1])] if phase == "share" else [reply]
        assert is_exact(sums, sums.run(), [m for m in range(24) if m != 1])


class TestGivenUp:
    """A sum that is given up has a reason, and the next one is none the worse for it."""

    @pytest.mark.parametrize("signed", [False, True])
    def test_in_each_phase_and_then_had(self, signed: bool) -> None:
        sums = trial(nodes=6, per=2, rules=Rules(dropout=0.2, signed=signed), fewest=10)
        phases = list(PHASES) if signed else UNSIGNED
        for round_, phase in enumerate(phases, 1):
            sums.passed.clear()
            sums.change = losing(phase, range(5))
            result = sums.run(sums.about(round_))
            assert result.total is None
            assert result.reason
            assert sums.phases() == phases[: phases.index(phase) + 1]
        sums.change = lambda phase, request, reply: [reply]
        assert is_exact(sums, sums.run(sums.about(len(phases) + 1)), range(12))

    def test_a_round_is_had_once(self) -> None:
        sums = trial(nodes=4)
        assert is_exact(sums, sums.run(), range(4))
        again = sums.run()
        assert again.total is None
        assert again.refusals == {"stale round": 4}
        assert again.reason == "0 of 4 members were left, 2 are needed (clients refused: stale round)"
        assert is_exact(sums, sums.run(sums.about(2)), range(4))

    def test_before_vectors_are_made_if_neighbours_are_too_few(self) -> None:
        """Making vectors takes time, and of a privacy budget."""
        sums = trial(nodes=20, rules=Rules(neighbours=4, threshold=4), change=losing("share", [7]))
        result = sums.run()
        why = "a member has too few neighbours left to unmask the sum"
        assert result.reason == f"{why} ({silent(1, 20, 'share')})"
        assert sums.phases() == ["advertise", "share"]

    def test_tells_what_nodes_tell(self) -> None:
        sums = trial(nodes=4)
        sums.change = lambda phase, request, reply: (
            [failed(reply, request, "\nException:\n  no\tmemory")]
            if reply.metadata.src_node_id < 3
            else [reply]
        )
        result = sums.run()
        assert result.reason == "1 of 4 members were left, 2 are needed (a node failed: Exception: no memory)"

    def test_but_nothing_that_steers_a_terminal(self) -> None:
        sums = trial(nodes=4)
        evil = "\x1b]0;owned\x07\x1b[2J\u202eevil" + "x" * 5000
        sums.change = lambda phase, request, reply: [failed(reply, request, evil)]
        reason = sums.run().reason
        assert reason.isprintable()
        assert "?]0;owned??[2J?evil" in reason
        assert len(reason) < 500

    def test_names_a_few_of_many_problems(self) -> None:
        sums = trial(nodes=9)
        sums.change = lambda phase, request, reply: [
            failed(reply, request, "x" * 10**5 + str(reply.metadata.src_node_id))
            if reply.metadata.src_node_id
            else failed(reply, request, f"no memory at {reply.metadata.src_node_id}")
        ]
        assert len(sums.run().reason) < 1500

    def test_rules_that_leave_no_room(self) -> None:
        sums = trial(nodes=4, rules=Rules(dropout=0.5, corrupted=0.5))
        result = sums.run()
        assert result.total is None
        assert result.reason.startswith("dropout = 0.5, corrupted = 0.5: of 4 members")
        assert sums.phases() == ["advertise"]

    def test_nodes_with_other_rules(self) -> None:
        sums = trial(nodes=12, rules=Rules(neighbours=4), rules_of={5: Rules(neighbours=6)})
        result = sums.run()
        assert result.refusals == {"terms differ from the rules": 1}
        assert result.lost == {"share": 1}

    def test_nobody_was_asked(self) -> None:
        sums = trial(nodes=2)
        result = sums.run(replace(sums.about(), members={}))
        assert (result.total, result.survivors) == (None, 0)
        assert result.reason == "0 of 0 members were left, 2 are needed"

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"size": 0}, "size = 0: must be at least 1"),
            ({"bits": 0}, "bits = 0: must be from 8 to 32"),
            ({"bits": 33}, "bits = 33: must be from 8 to 32"),
            ({"fewest": 0}, "fewest = 0: must be at least 1"),
            ({"members": {0: [1, 2], 1: [2, 3]}}, "members: must each be on one node"),
            ({"members": {0: [1, 2], 1: [3, 3]}}, "members: must each be on one node"),
            ({"members": {0: [-1], 1: [3]}}, "members: must be from 0 to 9223372036854775807"),
            ({"members": {0: [1], 1: [2**63]}}, "members: must be from 0 to 9223372036854775807"),
            ({"members": {0: [1], 7: [2]}}, "requests to 2 nodes: must be one to each of 2"),
        ],
    )
    def test_a_sum_that_makes_no_sense_is_an_error(self, change: dict, problem: str) -> None:
        sums = trial(nodes=2)
        with pytest.raises(ValueError, match=f"^{problem}$"):
            sums.run(replace(sums.about(), **change))
        assert sums.passed == []


class TestForged:
    """Whatever a node or the network sends, the sum is that of the vectors that arrived."""

    @pytest.mark.parametrize("kind", IGNORED)
    @pytest.mark.parametrize("phase", PHASES)
    def test_ignored(self, phase: str, kind: str) -> None:
        forgery, count = IGNORED[kind]
        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=6)
        sums.change = of_node(1, phase, lambda request, reply: forgery(sums, request, reply))
        result = sums.run()
        assert is_exact(sums, result, range(6))
        assert (result.ignored, result.lost) == (count, {})

    @pytest.mark.parametrize("phase", PHASES)
    def test_late(self, phase: str) -> None:
        """Replies of earlier phases, then of an earlier round."""
        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=6)
        sums.change = of_node(1, phase, lambda request, reply: late(sums, request, reply))
        assert sums.run().ignored == PHASES.index(phase)
        result = sums.run(sums.about(2))
        assert is_exact(sums, result, range(6))
        assert (result.ignored, result.lost) == (len(PHASES) + PHASES.index(phase), {})

    # Each kind in two phases: what reads them is the same in all. Random mixes are tried elsewhere.
    @pytest.mark.parametrize(
        ("phase", "kind"),
        [(PHASES[(i + j) % len(PHASES)], kind) for i, kind in enumerate(LOST) for j in (0, 2)],
    )
    def test_lost(self, phase: str, kind: str) -> None:
        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=4)
        sums.change = of_node(1, phase, lambda request, reply: LOST[kind](sums, request, reply))
        result = sums.run()
        there = range(6) if phase in ("agree", "unmask") else [0, 1, 4, 5]
        assert is_exact(sums, result, there)
        assert result.lost == {phase: 2}
        assert result.refusals == {}
        assert result.ignored == (1 if kind == "an error before it" else 0)

    def test_a_stranger_with_a_reply_of_its_own(self) -> None:
        """A node that was not asked does not speak for members that nobody knows, either."""
        stranger = sent_by(10**9)
        sums = trial(nodes=3, per=2)
        sums.change = lambda phase, request, reply: [
            stranger(with_header(members=[100, 101])(over_the_wire(reply))),
            reply,
        ]
        result = sums.run()
        assert is_exact(sums, result, range(6))
        assert result.ignored == 3 * 4

    def test_a_reply_to_another_nodes_question(self) -> None:
        """What node 0 sends counts for its members, however often it comes and whoever is to have sent it."""
        sums = trial(nodes=4, rules=Rules(dropout=0.25), fewest=3)
        sums.change = of_node(0, "mask", lambda request, reply: [sent_by(1)(over_the_wire(reply)), reply])
        result = sums.run()
        assert is_exact(sums, result, [0, 2, 3])
        assert result.lost == {"mask": 1}
        assert result.ignored == 1  # of node 1, which has answered by then

    def test_numbers_beyond_the_last_one(self) -> None:
        """2^b or more can't be written in b bits; what can is bits after the end."""

        def fill(request: Message, reply: Message) -> list[Message]:
            arrays = arrays_of(reply)
            arrays["masked"][0, -1] |= 0x80
            return [rewritten(reply, arrays=arrays)]

        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=4, change=of_node(1, "mask", fill))
        result = sums.run()
        assert is_exact(sums, result, [0, 1, 4, 5])
        assert result.lost == {"mask": 2}

    @pytest.mark.parametrize("reasons", [["stale round"] * 9, ["stale round", "\x1b[2J" * 10**4], ["a", "b"]])
    def test_reasons_are_known_ones_and_one_a_member(self, reasons: list[str]) -> None:
        def refuse(request: Message, reply: Message) -> list[Message]:
            header = replace(read(reply)[0], members=[], refused=reasons)
            return [rewritten(reply, header, {})]

        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=4, change=of_node(1, "mask", refuse))
        result = sums.run()
        assert is_exact(sums, result, [0, 1, 4, 5])
        assert sum(result.refusals.values()) == 2
        assert set(result.refusals) <= {"stale round", "no reason that is known"}

    def test_the_apps_reasons_are_known(self) -> None:
        def refuse(request: Message, reply: Message) -> list[Message]:
            header = replace(read(reply)[0], members=[], refused=["budget spent"] * 2)
            return [rewritten(reply, header, {})]

        sums = trial(nodes=3, per=2, rules=RETAINED, fewest=4, change=of_node(1, "mask", refuse))
        result = sums.run(replace(sums.about(), reasons=["budget spent"]))
        assert result.refusals == {"budget spent": 2}

    @pytest.mark.parametrize("part", [slice(0, KEY), PAIR, COMMITMENT])
    @pytest.mark.parametrize("key", [bytes(KEY), b"\x01" + bytes(KEY - 1), b"\xff" * KEY])
    def test_keys_that_are_none(self, part: slice, key: bytes) -> None:
        """Points of low order among them. Its owner notices that it is not its own, and all others go on."""

        def swap(request: Message, reply: Message) -> list[Message]:
            arrays = arrays_of(reply)
            arrays["public"][:, part] = np.frombuffer(key, np.uint8)
            return [rewritten(reply, arrays=arrays)]

        sums = trial(nodes=6, rules=Rules(dropout=0.34), fewest=4, change=of_node(1, "advertise", swap))
        result = sums.run()
        assert result.total is None or is_exact(sums, result, [0, 2, 3, 4, 5])

    def test_a_pair_key_that_is_none_of_a_member_that_colludes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        remove = secagg_plus.remove_masks

        def with_low_order(members: secagg_plus._Members, *rest: np.ndarray) -> None:
            members.public[3, PAIR] = 0
            remove(members, *rest)

        monkeypatch.setattr(secagg_plus, "remove_masks", with_low_order)
        sums = trial(nodes=6, rules=Rules(0.2, neighbours=6), change=losing("mask", [0]))
        why = "a member advertised a key that is none"
        assert sums.run().reason == f"{why} ({silent(1, 6, 'mask')})"


class TestShares:
    """7 others hold each member's secrets, and 4 of them can join these."""

    RULES = Rules(dropout=0.2, neighbours=8)

    def lying(self, liars: Sequence[int], lost: Sequence[int] = ()) -> tuple[Trial, SumResult]:
        """A sum in which some give random bytes for all shares, and others no answer, in the last phase."""

        def lie(phase: str, request: Message, reply: Message) -> list[Message]:
            if phase == "unmask" and request.metadata.dst_node_id in liars:
                shape = arrays_of(reply)["shares"].shape
                wrong = np.frombuffer(os.urandom(int(np.prod(shape))), np.uint8).reshape(shape)
                return [rewritten(reply, arrays={"shares": wrong})]
            return losing("unmask", lost)(phase, request, reply)

        sums = trial(nodes=8, rules=self.RULES, change=lie)
        assert (sums.rules.parameters(8).neighbours, sums.rules.parameters(8).threshold) == (7, 4)
        return sums, sums.run()

    @pytest.mark.parametrize("liars", [[0], [3], [7], [0, 1], [5, 6, 7], [7, 0, 1]])
    def test_wrong_ones_are_worked_around(self, liars: list[int]) -> None:
        sums, result = self.lying(liars)
        assert is_exact(sums, result, range(8))

    @pytest.mark.parametrize(
        ("liars", "lost"), [([0, 4], []), ([0, 2, 5], []), ([1], [0, 2, 3]), (range(4), []), (range(8), [])]
    )
    def test_or_the_sum_is_given_up(self, liars: list[int], lost: list[int]) -> None:
        sums, result = self.lying(liars, lost)
        if result.total is None:
            why = "shares of a member do not fit what it advertised"
            assert result.reason == (f"{why} ({silent(len(lost), 8, 'unmask')})" if lost else why)
        else:
            assert is_exact(sums, result, range(8))
        assert result.total is None or len(liars) + len(lost) <= 3

    def test_one_share_too_few(self) -> None:
        _, result = self.lying([], lost=range(4))
        assert result.total is None
        why = "too few members were left to unmask the sum"
        assert result.reason == f"{why} ({silent(4, 8, 'unmask')})"
        assert result.survivors == 8

    def test_one_too_few_never_decode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even if the server joins what it has: what comes out is not what was advertised."""
        remove = secagg_plus.remove_masks

        def with_fewer(
            members: secagg_plus._Members, total: np.ndarray, given: np.ndarray, helped: np.ndarray
        ) -> None:
            members.terms = replace(members.terms, threshold=members.terms.threshold - 1)
            remove(members, total, given, helped)

        monkeypatch.setattr(secagg_plus, "remove_masks", with_fewer)
        sums = trial(nodes=12, rules=Rules(neighbours=6, threshold=6))
        assert sums.run().reason == "shares of a member do not fit what it advertised"

    @pytest.mark.parametrize("vanished", [[], [2], [2, 5]])
    def test_the_server_gets_one_of_a_members_two_secrets(self, vanished: list[int]) -> None:
        """Shares in the last phase are of the seed of who survived, and of the mask key of who did not."""
        sums = trial(nodes=8, rules=self.RULES, change=losing("mask", vanished))
        sums.run()
        held: dict[int, Counter[bytes]] = {member: Counter() for member in range(8)}
        for header, arrays in sums.replies("unmask"):
            for member, row in zip(header.members, arrays.record["shares"].numpy(), strict=True):
                for other, share in zip(sums.graph()[member], row, strict=True):
                    held[other][share.tobytes()] += 1
        for member, shares in held.items():
            assert len(shares) == 7 - len(set(vanished) - {member})
            assert set(shares.values()) == {1}
            assert bytes(KEY) not in shares


# What the server sees -------------------------------------------------------------------------------------

BINS = 256
ALARM = 1e-9  # chance of a false one, each test; of all tests here together under 1e-6
INPUTS = {"zero": 0, "largest": -1}


def excess(words: np.ndarray, bits: int) -> float:
    """Pearson's chi-square of the top or low 8 bits, whichever is larger, as a share of the critical value.

    Uniform words exceed 1 with a chance of 2e-9.
    """
    worst = 0.0
    for part in (words >> (bits - 8), words & (BINS - 1)):
        counts = np.bincount(part, minlength=BINS)
        expected = len(words) / BINS
        worst = max(worst, float(((counts - expected) ** 2).sum() / expected))
    return worst / float(chi2.isf(ALARM, BINS - 1))


def seen(bits: int, value: int, per: int = 1) -> dict[int, np.ndarray]:
    """Masked vectors as the server gets them, where all inputs are the same number."""
    vectors = {member: np.full(6000, value % (1 << bits), np.uint32) for member in range(8)}
    sums = Trial(Rules(neighbours=4), spread(list(vectors), [per]), vectors, bits)
    sums.run()
    return sums.masked()


def single(masked: dict[int, np.ndarray], bits: int) -> float:
    """The worst of the members' vectors, each by itself."""
    return max(excess(words, bits) for words in masked.values())


def together(masked: dict[int, np.ndarray], bits: int) -> float:
    """All words of all members."""
    return excess(np.concatenate(list(masked.values())), bits)


def differences(masked: dict[int, np.ndarray], bits: int) -> float:
    """Each member's words less the next one's, mod 2^b: independent if the words are."""
    rows = [masked[member] for member in sorted(masked)]
    return excess(np.concatenate([(b - a) & np.uint32((1 << bits) - 1) for a, b in pairwise(rows)]), bits)


CHECKS = (single, together, differences)


class TestTranscript:
    """Masked vectors look the same, whatever is in them."""

    @pytest.mark.parametrize("value", INPUTS)
    @pytest.mark.parametrize("bits", [8, 20, 32])
    def test_is_uniform(self, bits: int, value: str) -> None:
        masked = seen(bits, INPUTS[value])
        assert [check(masked, bits) < 1 for check in CHECKS] == [True] * 3

    def test_is_uniform_on_one_node(self) -> None:
        masked = seen(16, -1, per=8)
        assert [check(masked, 16) < 1 for check in CHECKS] == [True] * 3

    @pytest.mark.parametrize(
        ("mask", "uniform"),
        [
            (lambda key, size: np.zeros(size, np.uint32), [False, False, False]),
            (lambda key, size: expand(b"k" * KEY, size), [True, False, False]),
            (lambda key, size: expand(key, size) & np.uint32(0xFFFFFF00), [False, False, False]),
            (lambda key, size: expand(key, size) >> 1, [False, False, False]),
        ],
        ids=["no masks", "one mask for all", "all but the low bits", "all but the top bit"],
    )
    def test_would_not_be_if_masks_leaked(
        self, mask: Callable, uniform: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The control: the same checks on members that mask worse."""

        def masked_worse(total: np.ndarray, plus: list[bytes], minus: list[bytes]) -> None:
            total += mask(plus[0], len(total))

        monkeypatch.setattr(participant, "add_masks", masked_worse)
        masked = seen(32, 0)
        assert [check(masked, 32) < 1 for check in CHECKS] == uniform

    def test_differs_in_the_same_round_with_the_same_inputs(self) -> None:
        one, other = seen(32, 0), seen(32, 0)
        assert excess(np.concatenate([one[m] - other[m] for m in one]), 32) < 1


class TestFresh:
    """Nothing secret is used twice: in 20 rounds all keys, seeds, sealed shares, nonces and masks differ."""

    def test_over_rounds_and_members(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys: Counter[bytes] = Counter()

        def noted(total: np.ndarray, plus: list[bytes], minus: list[bytes]) -> None:
            keys.update([*plus, *minus])
            add_masks(total, plus, minus)

        monkeypatch.setattr(participant, "add_masks", noted)
        members, rounds, size = 6, 20, 8
        vectors = {member: np.zeros(size, np.uint32) for member in range(members)}
        sums = Trial(Rules(neighbours=6), spread(list(vectors), [2]), vectors, bits=32)
        for round_ in range(1, rounds + 1):
            assert is_exact(sums, sums.run(sums.about(round_)), range(members))
        k = members - 1
        assert Counter(keys.values()) == {2: rounds * members * k // 2, 1: rounds * members}  # pairs, selves

        public, sealed, masked, shares = (self.rows(sums, *what) for what in ROWS)
        for part in (slice(0, KEY), PAIR, COMMITMENT):
            self.all_differ(public[:, part], rounds * members)
        self.all_differ(public.reshape(-1, KEY), 3 * rounds * members)
        self.all_differ(sealed, rounds * members * k)
        self.all_differ(sealed[:, :12], rounds * members * k)  # nonces
        self.all_differ(sealed[:, 12:44], rounds * members * k)
        self.all_differ(masked, rounds * members)
        self.all_differ(shares, rounds * members * k)

    @staticmethod
    def rows(sums: Trial, phase: str, name: str) -> np.ndarray:
        found = [arrays.record[name].numpy() for _, arrays in sums.replies(phase)]
        return np.concatenate([array.reshape(-1, array.shape[-1]) for array in found])

    @staticmethod
    def all_differ(rows: np.ndarray, count: int) -> None:
        assert len(rows) == count
        assert len(np.unique(rows, axis=0)) == count


ROWS = (("advertise", "public"), ("share", "sealed"), ("mask", "masked"), ("unmask", "shares"))


# Time and what comes after --------------------------------------------------------------------------------


class Clock:
    """Time that passes only in the grid: of what a phase may take, a share."""

    def __init__(self, sums: Trial, monkeypatch: pytest.MonkeyPatch, share: dict[str, float] | float) -> None:
        self.share = share if isinstance(share, dict) else dict.fromkeys([*PHASES, "train"], share)
        self.now, self.given = 1000.0, list[tuple[str, float]]()
        monkeypatch.setattr(secagg_plus, "monotonic", lambda: self.now)
        self.send = sums.grid.send_and_receive
        monkeypatch.setattr(sums.grid, "send_and_receive", self.slowly)

    def slowly(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        assert timeout is not None
        phase = messages[0].metadata.message_type.removeprefix("train.secagg_")
        self.given.append((phase, timeout))
        self.now += self.share.get(phase, 0.0) * timeout
        return self.send(messages, timeout=timeout)


def with_reveal(sums: Trial, ask: Callable[..., list[Message]] | None = None) -> SumRound:
    """A sum after which the app asks nodes for something else."""

    def reveal(survivors: Survivors, vanished: int) -> list[Message]:
        return [
            Message(
                RecordDict({"app": ConfigRecord({"members": []})}), message_type="train", dst_node_id=node
            )
            for node in survivors
        ]

    return replace(sums.about(), reveal=ask or reveal)


class TestTime:
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_is_kept_to(self, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        sums = trial(nodes=4, rules=RETAINED)
        clock = Clock(sums, monkeypatch, share)
        result = sums.run(with_reveal(sums), timeout=80.0)
        assert is_exact(sums, result, range(4))
        assert len(result.revealed) == 4
        assert [phase for phase, _ in clock.given] == [*PHASES, "train"]
        assert all(0 < given <= 10 for phase, given in clock.given if phase != "mask")
        assert dict(clock.given)["mask"] == pytest.approx(80 - 2 * share * 10 - 30)
        assert clock.now - 1000 <= 80 + 1e-9

    def test_is_short_after_a_phase_that_took_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flower's grid waits some seconds longer than it should."""
        sums = trial(nodes=4)
        clock = Clock(sums, monkeypatch, 1.5)
        result = sums.run(timeout=80.0)
        assert clock.given == [("advertise", 10), ("share", 10), ("mask", 20), ("unmask", 10)]
        assert is_exact(sums, result, range(4))

    @pytest.mark.parametrize(
        ("share", "phase"),
        [
            ({"advertise": 8.0}, "share"),
            ({"advertise": 2.5, "share": 2.5}, "mask"),
            ({"mask": 1.6}, "unmask"),
        ],
    )
    def test_is_over(self, share: dict[str, float], phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sums = trial(nodes=4)
        clock = Clock(sums, monkeypatch, share)
        result = sums.run(timeout=80.0)
        assert result.total is None
        assert result.reason == f"no time was left to {phase}"
        assert clock.given[-1][0] == UNSIGNED[UNSIGNED.index(phase) - 1]

    @pytest.mark.parametrize("timeout", [0.0, -1.0])
    def test_there_is_none(self, timeout: float) -> None:
        sums = trial(nodes=4)
        assert sums.run(timeout=timeout).reason == "no time was left to advertise"
        assert sums.passed == []


class TestReveal:
    def test_is_asked_of_survivors(self) -> None:
        sums = trial(nodes=5, per=2, rules=Rules(dropout=0.4), change=losing("mask", [3]))
        asked = []

        def ask(survivors: dict, vanished: int) -> list[Message]:
            asked.append(({node: sorted(own) for node, own in survivors.items()}, vanished))
            return []

        result = sums.run(with_reveal(sums, ask))
        assert is_exact(sums, result, [0, 1, 2, 3, 4, 5, 8, 9])
        assert asked == [({node: [2 * node, 2 * node + 1] for node in (0, 1, 2, 4)}, 2)]
        assert result.revealed == ()

    def test_is_not_if_there_is_no_sum(self) -> None:
        sums = trial(nodes=4, change=losing("unmask", [0, 1, 2]))
        result = sums.run(with_reveal(sums, lambda survivors, vanished: pytest.fail("was asked")))
        assert result.total is None

    def test_of_one_answer_a_node(self) -> None:
        """Late, double and unknown ones are ignored; who fails or is silent keeps its noise in the sum."""

        def change(phase: str, request: Message, reply: Message) -> list[Message]:
            node = request.metadata.dst_node_id
            if phase != "train":
                return [reply]
            late = next(one.reply for one in sums.passed if one.phase == "unmask")
            late = sent_by(node)(over_the_wire(late))
            stranger = sent_by(99)(over_the_wire(reply))
            return {
                0: [late, reply, over_the_wire(reply), stranger],
                1: [failed(reply, request), reply],
                2: [],
                3: [reply],
            }[node]

        sums = trial(nodes=4, change=change)
        result = sums.run(with_reveal(sums))
        assert is_exact(sums, result, range(4))
        assert [reply.metadata.src_node_id for reply in result.revealed] == [0, 3]
        assert result.ignored == 4


def test_an_app_on_the_same_grid_keeps_its_run() -> None:
    """Another run's sum is none of a node's business."""
    sums = trial(nodes=3)
    result = sums.run(replace(sums.about(), session=Session(RUN + "0", 1)))
    assert result.total is None
    assert "a node failed: Malformed" in result.reason
    assert isinstance(sums.grid, LocalGrid)
    assert is_exact(sums, sums.run(), range(3))
