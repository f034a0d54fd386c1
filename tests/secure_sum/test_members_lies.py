"""What a server can lie about in each phase: each lie is refused, and tells and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from lying_server import REGULAR, RUN, UNSIGNED, Server, in_bytes, played, signed, unchanged

from pina_flwr.secure_sum.keys import sign
from pina_flwr.secure_sum.members import Declined, answer, survivors_of
from pina_flwr.secure_sum.memory import HasMasked, HasShared, recall
from pina_flwr.secure_sum.packing import unpack
from pina_flwr.secure_sum.participant import CIPHER, COMMITMENT, PAIR, SURVIVED, VANISHED
from pina_flwr.secure_sum.registry import keys_message
from pina_flwr.secure_sum.session import Rules
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    ARRAYS,
    HEADER,
    MASK,
    PHASES,
    SHARE,
    UNMASK,
    Arrays,
    Header,
)

LOW_ORDER = (
    0,
    1,
    2**255 - 20,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)


class TestAdvertise:
    def test_no_members_named(self) -> None:
        server = Server()
        unchanged(server, ADVERTISE, server.request(ADVERTISE, 0, members=[]), "phase, run or members")

    @pytest.mark.parametrize("members", [[10, 10], [-1], [10, 20, 10]])
    def test_members_named_twice_or_impossible(self, members: list[int]) -> None:
        server = Server()
        unchanged(server, ADVERTISE, server.request(ADVERTISE, 0, members=members), "each named once")

    @pytest.mark.parametrize("phase", [SHARE, MASK, UNMASK])
    def test_members_that_never_advertised(self, phase: str) -> None:
        server = played(*UNSIGNED[: UNSIGNED.index(phase)])
        for members in ([20], [10, 20]):
            rows = {
                name: np.repeat(array[:1], len(members), axis=0)
                for name, array in server.arrays(phase, 0).items()
                if name in ("neighbours", "sealed")
            }
            content = server.request(phase, 0, rows, members=members)
            unchanged(server, phase, content, "members: not all in the session")

    @pytest.mark.parametrize("phase", PHASES)
    def test_signed_members_of_other_nodes(self, phase: str) -> None:
        server = signed().play(*PHASES[: PHASES.index(phase)])
        for members in ([20], [10, 20]):
            content = server.request(phase, 0, members=members)
            unchanged(server, phase, content, "not those whose keys are here")

    def test_signatures_are_of_these_keys_in_this_session(self) -> None:
        server = signed().play(ADVERTISE)
        for row, member in enumerate(server.ids.tolist()):
            message = keys_message(server.session, member, server.public[row].tobytes())
            assert server.signatures[row].tobytes() == sign(server.keys[member], message)

    def test_unsigned_sums_have_no_signatures(self) -> None:
        reply = played(ADVERTISE).replies[ADVERTISE, 0]
        assert set(reply.array_records[ARRAYS]) == {"public"}


class TestTerms:
    @pytest.mark.parametrize("name", ["size", "bits", "members", "neighbours", "threshold", "fewest"])
    @pytest.mark.parametrize("value", [-1, 0, 2**62])
    def test_out_of_bounds(self, name: str, value: int) -> None:
        server = played(ADVERTISE)
        content = server.request(SHARE, 0, terms={name: value})
        assert server.refused(SHARE, 0, content) == "terms differ from the rules"

    @pytest.mark.parametrize(
        "lie",
        [
            {"threshold": 4},
            {"threshold": 5},
            {"neighbours": 4},
            {"neighbours": 4, "threshold": 3},
            {"members": 7},
            {"members": 2**31},
            {"members": 3, "neighbours": 2, "threshold": 1},
            {"unknown": 1},
        ],
    )
    @pytest.mark.parametrize("kind", [Server, signed], ids=["unsigned", "signed"])
    def test_other_than_the_rules_say(self, lie: dict[str, int], kind: Callable[[], Server]) -> None:
        server = kind().play(ADVERTISE)
        content = server.request(SHARE, 0, terms=lie)
        assert server.refused(SHARE, 0, content) == "terms differ from the rules"

    def test_rules_of_another_configuration(self) -> None:
        server = played(ADVERTISE, rules=REGULAR, members=14)
        for rules in (Rules(neighbours=6, threshold=4), Rules(neighbours=4, threshold=4)):
            other = replace(server.side(0), rules=rules)
            reply = answer(SHARE, server.request(SHARE, 0), server.contexts[0], other)
            assert set(Header.from_record(reply).refused) == {"terms differ from the rules"}

    @pytest.mark.parametrize("name", ["size", "bits", "members", "neighbours", "threshold", "fewest"])
    def test_missing(self, name: str) -> None:
        server = played(ADVERTISE)
        numbers = {k: v for k, v in server.terms.numbers.items() if k != name}
        content = server.request(SHARE, 0)
        content[HEADER] = Header(server.session, SHARE, [10], numbers).to_record()
        assert server.refused(SHARE, 0, content) == "terms differ from the rules"


class TestRoster:
    def test_changes_of_its_own_key(self) -> None:
        server = played(ADVERTISE)
        for bit in range(0, 96 * 8, 37):
            public = server.public.copy()
            public[0, bit // 8] ^= 1 << (bit % 8)
            assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "keys altered"

    @pytest.mark.parametrize("part", [CIPHER, PAIR, COMMITMENT, slice(0, 96)])
    @pytest.mark.parametrize(("to", "of"), [(0, 1), (1, 0), (4, 5)])
    def test_keys_of_two_members_alike(self, part: slice, to: int, of: int) -> None:
        server = played(ADVERTISE)
        public = server.public.copy()
        public[to, part] = public[of, part]
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "keys altered"

    @pytest.mark.parametrize("part", [CIPHER, PAIR])
    def test_one_key_in_two_forms(self, part: slice) -> None:
        """X25519 ignores the highest bit, so that one key can look like two."""
        server = played(ADVERTISE)
        public = server.public.copy()
        public[2, part] = public[3, part]
        public[2, part.stop - 1] |= 0x80
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "keys altered"

    @pytest.mark.parametrize(
        ("part", "point"),
        [(CIPHER, point) for point in LOW_ORDER]
        + [(p, x) for p in (CIPHER, PAIR) for x in (2**255 - 19, 2**255 - 18, 2**255, 2**256 - 1)],
    )
    def test_points_of_low_order_or_none(self, part: slice, point: int) -> None:
        server = played(ADVERTISE)
        public = server.public.copy()
        public[3, part] = np.frombuffer(point.to_bytes(32, "little"), np.uint8)
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "keys altered"

    @pytest.mark.parametrize("point", LOW_ORDER)
    def test_points_of_low_order_to_make_masks_with(self, point: int) -> None:
        """Noticed before anything is shared, and so before anybody makes a vector."""
        server = played(ADVERTISE)
        server.public[3, PAIR] = np.frombuffer(point.to_bytes(32, "little"), np.uint8)  # who colludes
        for node in (0, 1, 2, 4, 5):
            assert server.refused(SHARE, node, server.request(SHARE, node)) == "keys altered"

    @pytest.mark.parametrize(
        "order", [[0, 2, 1, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 2, 3, 4, 5], [0, 1, 2, 3, 5, 5]]
    )
    def test_members_that_do_not_ascend(self, order: list[int]) -> None:
        server = played(ADVERTISE)
        told = {name: server.arrays(SHARE, 0)[name][order] for name in ("ids", "public")}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, told)) == "neighbours wrong"

    def test_members_below_0(self) -> None:
        server = played(ADVERTISE)
        ids = server.ids - 11
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"ids": ids})) == "neighbours wrong"

    def test_too_few_or_too_many_for_a_complete_graph(self) -> None:
        server = played(ADVERTISE)
        few = {"ids": server.ids[:5], "public": server.public[:5]}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, few)) == "too few members"
        ids = np.append(server.ids, 70)
        public = np.append(server.public, [np.arange(96)], axis=0).astype(np.uint8)
        many = {"ids": ids, "public": public}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, many)) == "neighbours wrong"

    def test_too_many_for_a_graph_that_is_not_complete(self) -> None:
        server = played(ADVERTISE, rules=REGULAR, members=14)
        public = np.append(server.public, [np.arange(96)], axis=0).astype(np.uint8)
        neighbours = server.neighbours[:1]
        told = {"ids": np.append(server.ids, 150), "public": public, "neighbours": neighbours}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, told)) == "neighbours wrong"

    def test_without_the_member_itself(self) -> None:
        server = played(ADVERTISE, rules=REGULAR, members=14)
        told = {"ids": server.ids[1:], "public": server.public[1:]}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, told)) == "keys altered"


class TestNeighbours:
    @pytest.mark.parametrize(
        "row",
        [
            [1, 2, 3],
            [],
            [1, 2, 3, 4, 5],
            [1, 2, 3, 3],
            [0, 1, 2, 3],
            [1, 2, 3, 14],
            [1, 2, 3, 2**62],
            [1, 2, 3, -1],
            [1, 2, 3, -13],
        ],
        ids=["few", "none", "many", "twice", "itself", "unknown", "far", "-1", "wrapped"],
    )
    def test_wrong(self, row: list[int]) -> None:
        server = played(ADVERTISE, rules=REGULAR, members=14)
        told = {"ids": server.ids, "public": server.public, "neighbours": np.array([row], np.int64)}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, told)) == "neighbours wrong"

    def test_of_one_of_two_members_on_a_node(self) -> None:
        server = played(ADVERTISE, members=6, hosted=2)
        neighbours = server.arrays(SHARE, 0)["neighbours"].copy()
        neighbours[1, 0] = 1
        reply = server.send(SHARE, 0, server.request(SHARE, 0, {"neighbours": neighbours}))
        header = Header.from_record(reply)
        assert list(header.members) == [10]
        assert list(header.refused) == ["neighbours wrong"]
        assert Arrays.of(reply).read("sealed", np.uint8, (1, 5, 92)).any()
        stage = recall(server.contexts[0].state)
        assert isinstance(stage, HasShared)
        assert [m.member for m in stage.members] == [10]  # who refused is out


class TestMask:
    def test_too_few_neighbours_shared(self) -> None:
        server = played(ADVERTISE, SHARE)
        assert server.parameters.threshold == 3
        for count in range(6):
            present = np.arange(6) <= count
            content = server.request(MASK, 0, {"present": present})
            if count < 3:
                assert server.refused(MASK, 0, content) == "too few neighbours"
        assert not server.asked_for_vectors
        assert not Header.from_record(server.send(MASK, 0, content)).refused

    def test_flags_that_are_neither_0_nor_1_count_once(self) -> None:
        server = played(ADVERTISE, SHARE)
        present = np.array([255, 255, 255, 0, 0, 0], np.uint8).view(np.bool_)
        content = server.request(MASK, 0, {"present": present})
        assert server.refused(MASK, 0, content) == "too few neighbours"

    def test_it_is_said_not_to_have_shared_itself(self) -> None:
        server = played(ADVERTISE, SHARE)
        present = np.arange(6) > 0
        content = server.request(MASK, 0, {"present": present})
        assert server.refused(MASK, 0, content) == "survivors wrong"

    @pytest.mark.parametrize("how", ["bit", "swapped", "another's", "zero", "of another receiver"])
    def test_shares_altered(self, how: str) -> None:
        server = played(ADVERTISE, SHARE)
        sealed = server.for_rows([0])
        if how == "bit":
            sealed[0, 2, 40] ^= 4
        elif how == "swapped":
            sealed[0, [1, 2]] = sealed[0, [2, 1]]
        elif how == "another's":
            sealed[0, 1] = sealed[0, 2]
        elif how == "zero":
            sealed[0, 4] = 0
        else:
            sealed = server.for_rows([1])
        content = server.request(MASK, 0, {"sealed": sealed})
        assert server.refused(MASK, 0, content) == "shares altered"
        assert not server.asked_for_vectors

    def test_what_is_not_there_is_not_read(self) -> None:
        server = played(ADVERTISE, SHARE)
        sealed, present = server.for_rows([0]), np.array([1, 1, 1, 1, 0, 0], np.bool_)
        sealed[0, 3:] = 99
        reply = server.send(MASK, 0, server.request(MASK, 0, {"sealed": sealed, "present": present}))
        assert list(Header.from_record(reply).members) == [10]
        stage = recall(server.contexts[0].state)
        assert isinstance(stage, HasMasked)
        assert not stage.members[0].held[3:].any()

    @pytest.mark.parametrize(
        "vectors",
        [
            np.zeros(5, np.uint32),
            np.zeros((1, 4), np.uint32),
            np.zeros((2, 5), np.uint32),
            np.zeros((1, 5, 1), np.uint32),
            np.zeros((0, 5), np.uint32),
            np.zeros((1, 5), np.int64),
            np.zeros((1, 5), np.float32),
            np.full((1, 5), np.nan),
            np.full((1, 5), 2**20, np.uint32),
            np.full((1, 5), 2**32 - 1, np.uint32),
            [[0, 0, 0, 0, 0]],
            None,
        ],
        ids=repr,
    )
    def test_vectors_of_another_kind_go_nowhere(self, vectors: Any) -> None:
        server = played(ADVERTISE, SHARE)
        before = server.remembered(0)
        side = replace(server.side(0), vectors=lambda *_: vectors)
        with pytest.raises(ValueError, match=r"^vectors? ?[^\n]*: .*must be "):
            answer(MASK, server.request(MASK, 0), server.contexts[0], side)
        assert server.remembered(0) == before

    def test_vectors_laid_out_otherwise_are_masked_alike(self) -> None:
        server = played(ADVERTISE, SHARE, members=6, hosted=2)
        rows = np.asfortranarray(np.arange(10, dtype=np.uint32).reshape(2, 5))
        side = replace(server.side(0), vectors=lambda *_: rows)
        states = [Context(RUN, 0, {}, RecordDict(dict(server.contexts[0].state)), {}) for _ in range(2)]
        replies = [
            answer(MASK, server.request(MASK, 0), states[0], side),
            answer(
                MASK, server.request(MASK, 0), states[1], replace(side, vectors=lambda *_: rows.copy("C"))
            ),
        ]
        assert in_bytes(replies[0]) == in_bytes(replies[1])
        assert rows.tolist() == np.arange(10).reshape(2, 5).tolist()

    def test_the_app_may_decline(self) -> None:
        server = played(ADVERTISE, SHARE)

        def decline(*_: object) -> Any:
            raise Declined("budget spent")

        before = server.remembered(0)
        reply = answer(
            MASK, server.request(MASK, 0), server.contexts[0], replace(server.side(0), vectors=decline)
        )
        assert list(Header.from_record(reply).refused) == ["budget spent"]
        assert not reply.array_records[ARRAYS]
        assert server.remembered(0) == before

    def test_an_app_that_fails_changes_nothing(self) -> None:
        server = played(ADVERTISE, SHARE)

        def fail(*_: object) -> Any:
            raise RuntimeError("no data")

        before = server.remembered(0)
        with pytest.raises(RuntimeError, match="no data"):
            answer(MASK, server.request(MASK, 0), server.contexts[0], replace(server.side(0), vectors=fail))
        assert server.remembered(0) == before

    def test_who_refuses_has_no_vector_made(self) -> None:
        server = played(ADVERTISE, SHARE, members=6, hosted=2)
        sealed = server.for_rows([0, 1])
        sealed[0, 0, 0] ^= 1
        asked: list[list[int]] = []

        def vectors(request: RecordDict, members: Any, terms: object) -> np.ndarray:
            asked.append(list(members))
            return np.zeros((len(members), 5), np.uint32)

        side = replace(server.side(0), vectors=vectors)
        reply = answer(MASK, server.request(MASK, 0, {"sealed": sealed}), server.contexts[0], side)
        header = Header.from_record(reply)
        assert (list(header.members), list(header.refused)) == ([20], ["shares altered"])
        assert asked == [[20]]

    def test_masks_hide_the_vector_and_are_never_alike(self) -> None:
        words = []
        for _ in range(2):
            server = played(ADVERTISE, SHARE, MASK, size=100)
            packed = Arrays.of(server.replies[MASK, 0]).record["masked"].numpy()[0]
            words.append(unpack(packed, 20, 100))
        assert (words[0] != 10).all()
        assert np.mean(words[0] == words[1]) < 0.05


class TestUnmask:
    """Server: 6 members in a complete graph, t = 3; node 0 hosts member 10."""

    @staticmethod
    def masked(**more: Any) -> Server:
        return played(ADVERTISE, SHARE, MASK, **more)

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            ([2, 1, 1, 1, 1, 1], "survivors wrong"),
            ([0, 1, 1, 1, 1, 1], "survivors wrong"),
            ([1, 1, 1, 1, 1, 0], "survivors wrong"),
            ([1, 1, 1, 1, 1, 3], "survivors wrong"),
            ([1, 1, 1, 1, 1, 255], "survivors wrong"),
            ([1, 1, 1, 2, 2, 2], "too few neighbours"),
            ([1, 2, 2, 2, 2, 1], "too few neighbours"),
        ],
        ids=str,
    )
    def test_statuses_that_can_not_be(self, status: list[int], reason: str) -> None:
        server = self.masked()
        survivors = {"survivors": status.count(SURVIVED)}
        content = server.request(UNMASK, 0, {"status": np.array(status, np.uint8)}, survivors)
        assert server.refused(UNMASK, 0, content) == reason

    @pytest.mark.parametrize("code", [SURVIVED, VANISHED, 3])
    def test_who_never_shared_is_neither_there_nor_vanished(self, code: int) -> None:
        server = played(ADVERTISE).play(SHARE, MASK, nodes=range(5))
        assert server.status.tolist() == [1, 1, 1, 1, 1, 0]
        lie = np.array([1, 1, 1, 1, 1, code], np.uint8)
        content = server.request(UNMASK, 0, {"status": lie}, {"survivors": 5 + (code == SURVIVED)})
        assert server.refused(UNMASK, 0, content) == "survivors wrong"
        server.play(UNMASK, nodes=range(5))

    @pytest.mark.parametrize("stated", [-1, 0, 4, 6, 7, 2**62])
    def test_another_number_of_survivors_than_the_list_says(self, stated: int) -> None:
        server = self.masked()
        status = np.array([1, 1, 1, 1, 1, 2], np.uint8)
        content = server.request(UNMASK, 0, {"status": status}, {"survivors": stated})
        assert server.refused(UNMASK, 0, content) == "survivors wrong"

    def test_no_number_of_survivors(self) -> None:
        server = self.masked()
        content = server.request(UNMASK, 0)
        content[HEADER] = Header(server.session, UNMASK, [10], {}).to_record()
        assert server.refused(UNMASK, 0, content) == "survivors wrong"

    def test_numbers_of_survivors_beyond_the_neighbours(self) -> None:
        server = self.masked(rules=REGULAR, members=14)
        for stated in (-1, 4, 15, 2**62):  # it sees 5 of 14
            content = server.request(UNMASK, 0, terms={"survivors": stated})
            assert server.refused(UNMASK, 0, content) == "survivors wrong"
        server.send(UNMASK, 0, server.request(UNMASK, 0, terms={"survivors": 13}))
        assert survivors_of(server.contexts[0].state, server.session) == (14, 13)

    def test_fewer_than_the_terms_say(self) -> None:
        server = self.masked(fewest=6)
        status = np.array([1, 1, 1, 1, 1, 2], np.uint8)
        content = server.request(UNMASK, 0, {"status": status}, {"survivors": 5})
        assert server.refused(UNMASK, 0, content) == "too few members"
        for rules, members in ((REGULAR, 14),):
            server = self.masked(rules=rules, members=members, fewest=10)
            content = server.request(UNMASK, 0, terms={"survivors": 9})
            assert server.refused(UNMASK, 0, content) == "too few members"

    def test_refusing_is_no_answer_and_may_be_followed_by_one(self) -> None:
        server = self.masked()
        lie = np.array([1, 1, 1, 2, 2, 2], np.uint8)
        for _ in range(3):
            server.refused(UNMASK, 0, server.request(UNMASK, 0, {"status": lie}, {"survivors": 3}))
        server.play(UNMASK)

    def test_gives_the_share_that_fits_the_status_and_no_other(self) -> None:
        server = self.masked()
        stage = recall(server.contexts[0].state)
        assert isinstance(stage, HasMasked)
        held = stage.members[0].held
        status = np.array([1, 1, 2, 1, 2, 1], np.uint8)
        reply = server.send(UNMASK, 0, server.request(UNMASK, 0, {"status": status}, {"survivors": 4}))
        shares = Arrays.of(reply).read("shares", np.uint8, (1, 5, 32))[0]
        for column, neighbour in enumerate(stage.members[0].neighbours.tolist()):
            half = slice(0, 32) if status[neighbour] == SURVIVED else slice(32, 64)
            assert (shares[column] == held[column, half]).all()
        hidden = [held[0, 32:], held[1, :32], held[2, 32:], held[3, :32], held[4, 32:]]
        assert not [half for half in hidden if half.tobytes() in in_bytes(reply)]
