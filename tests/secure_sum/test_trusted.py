from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from support import Wire

from pina_flwr.messages import KEYS, TRAIN, request
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR, SumResult, SumRound, Survivors, open_secure_sum
from pina_flwr.secure_sum.secagg_plus import SecAggPlus
from pina_flwr.secure_sum.session import Rules, Session
from pina_flwr.secure_sum.trusted import TrustedSum, protected_vector, refusal_in

SIZE = 3
REASONS = ("budget spent", "stale round")  # what the app's clients may say


def members(spread: Mapping[int, int]) -> dict[int, list[int]]:
    """So many members on each node, with ids of their own."""
    return {node: [1000 * node + i for i in range(count)] for node, count in spread.items()}


def sum_round(spread: Mapping[int, int], fewest: int, bits: int = 20) -> SumRound:
    return SumRound(Session("1", 1), SIZE, bits, members(spread), fewest, REASONS)


FLOATS = sum_round({7: 1, 8: 1}, fewest=2, bits=0)
INTEGERS = replace(FLOATS, bits=20)


def question(node: int) -> Message:
    return request(RecordDict(), node, TRAIN, 1)


def answer(node: int, content: RecordDict | Error) -> Message:
    return Message(content, reply_to=question(node))


def vector(node: int, values: list[float] | np.ndarray) -> Message:
    array = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.float32)
    return answer(node, RecordDict({VECTOR: ArrayRecord([array])}))


def integers(node: int, values: list[int]) -> Message:
    return vector(node, np.array(values, dtype=np.uint32))


def refuses(node: int, reason: str = "budget spent") -> Message:
    return answer(node, RecordDict({REFUSAL: ConfigRecord({"reason": reason})}))


def raw(
    data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (SIZE,), stype: str = "numpy.ndarray"
) -> RecordDict:
    return RecordDict({VECTOR: ArrayRecord({"0": Array(dtype, shape, stype, data)})})


def good() -> ArrayRecord:
    return ArrayRecord([np.ones(SIZE, dtype=np.float32)])


def add(about: SumRound, *replies: Message) -> SumResult:
    return TrustedSum().add(about, replies)


def test_is_what_the_option_names() -> None:
    rules = Rules(dropout=0.2)
    assert isinstance(open_secure_sum("trusted", rules), TrustedSum)
    assert open_secure_sum("secagg+", rules) == SecAggPlus(rules)
    with pytest.raises(KeyError):
        open_secure_sum("none", rules)


class TestSum:
    def test_of_floats(self) -> None:
        result = add(FLOATS, vector(8, [1, 2, 3]), vector(7, [10, 20, 30]))
        assert result.total is not None
        assert result.total.dtype == np.float64
        assert result.total.tolist() == [11, 22, 33]
        assert (result.reason, result.survivors) == ("", 2)

    def test_adds_in_float64(self) -> None:
        about = replace(FLOATS, members=members({1: 1, 2: 1, 3: 1}))
        result = add(about, vector(1, [1e8, 0, 0]), vector(2, [1, 0, 0]), vector(3, [-1e8, 0, 0]))
        assert result.total is not None
        assert result.total[0] == 1

    @pytest.mark.parametrize("bits", [8, 20, 31, 32])
    def test_of_integers_is_modular(self, bits: int) -> None:
        top = 2**bits - 1
        result = add(replace(INTEGERS, bits=bits), integers(7, [1, top, top]), integers(8, [2, 1, top]))
        assert result.total is not None
        assert result.total.dtype == np.int64
        assert result.total.tolist() == [3, 0, top - 1]

    def test_of_nobody_is_empty(self) -> None:
        total = add(replace(FLOATS, members={}, fewest=0)).total
        assert total is not None
        assert not total.any()

    def test_survivors_are_users_not_nodes(self) -> None:
        about = replace(FLOATS, members=members({7: 5, 8: 4, 9: 1}), fewest=9)
        assert about.cohort == 10
        assert add(about, vector(7, [1, 1, 1]), vector(8, [1, 1, 1])).survivors == 9


MALFORMED: dict[str, Callable[[], RecordDict]] = {
    "nan": lambda: vector(8, [1, np.nan, 3]).content,
    "inf": lambda: vector(8, [1, np.inf, 3]).content,
    "too long": lambda: vector(8, [1, 2, 3, 4]).content,
    "too short": lambda: vector(8, [1, 2]).content,
    "two-dimensional": lambda: vector(8, np.ones((1, SIZE), dtype=np.float32)).content,
    "float64": lambda: vector(8, np.ones(SIZE)).content,
    "float16": lambda: vector(8, np.ones(SIZE, dtype=np.float16)).content,
    "big-endian": lambda: vector(8, np.ones(SIZE, dtype=">f4")).content,
    "integers": lambda: vector(8, np.ones(SIZE, dtype=np.int32)).content,
    "unsigned integers": lambda: vector(8, np.ones(SIZE, dtype=np.uint32)).content,
    "text": lambda: vector(8, np.array(["a", "b", "c"])).content,
    "nothing": lambda: RecordDict(),
    "another name": lambda: RecordDict({"vector": good()}),
    "two vectors": lambda: RecordDict({VECTOR: ArrayRecord([np.ones(SIZE, dtype=np.float32)] * 2)}),
    "no vector": lambda: RecordDict({VECTOR: ArrayRecord()}),
    "arrays beside it": lambda: RecordDict({VECTOR: good(), "more": good()}),
    "metrics beside it": lambda: RecordDict({VECTOR: good(), "metrics": MetricRecord({"loss": 0.1})}),
    "a config beside it": lambda: RecordDict({VECTOR: good(), "config": ConfigRecord({"cluster": 1})}),
    "a refusal beside it": lambda: RecordDict({VECTOR: good()} | dict(refuses(8).content)),
    "keys beside it": lambda: RecordDict({VECTOR: good(), KEYS: ConfigRecord({"keys": [b"1"]})}),
    "metrics in its place": lambda: RecordDict({VECTOR: MetricRecord({"loss": 0.1})}),
    "a refusal in the wrong record": lambda: RecordDict({REFUSAL: MetricRecord({"reason": 1})}),
    "no bytes": lambda: raw(b""),
    "bytes of something else": lambda: raw(b"\x00" * 12),
    "a zip file": lambda: raw(b"PK\x05\x06" + b"\x00" * 18),
    "a wrong shape in its label": lambda: raw(np_bytes(np.ones(5, dtype=np.float32))),
    "another kind of tensor": lambda: raw(np_bytes(np.ones(SIZE, dtype=np.float32)), stype="torch.Tensor"),
}
MALFORMED_INTEGERS: dict[str, Callable[[], RecordDict]] = {
    "2^b": lambda: integers(8, [0, 1 << 20, 0]).content,
    "the largest uint32": lambda: integers(8, [0, 0, 2**32 - 1]).content,
    "floats": lambda: vector(8, [1, 2, 3]).content,
    "nan": lambda: vector(8, [1, np.nan, 3]).content,
    "signed": lambda: vector(8, np.ones(SIZE, dtype=np.int32)).content,
    "uint64": lambda: vector(8, np.ones(SIZE, dtype=np.uint64)).content,
    "uint16": lambda: vector(8, np.ones(SIZE, dtype=np.uint16)).content,
    "big-endian": lambda: vector(8, np.ones(SIZE, dtype=">u4")).content,
    "too long": lambda: integers(8, [1, 2, 3, 4]).content,
    "metrics beside it": lambda: RecordDict(
        {VECTOR: ArrayRecord([np.ones(SIZE, dtype=np.uint32)]), "m": MetricRecord({"loss": 0.1})}
    ),
}


def np_bytes(array: np.ndarray) -> bytes:
    return Array(array).data


class TestMalformed:
    """What else a node sends says nothing about its users; those count as vanished."""

    @pytest.mark.parametrize("kind", MALFORMED)
    def test_floats(self, kind: str) -> None:
        reply = answer(8, MALFORMED[kind]())
        result = add(FLOATS, vector(7, [1, 2, 3]), reply)
        assert result.total is None
        assert result.survivors == 1
        assert result.reason == (
            "1 of 2 members survived, 2 are needed (a node sent something else than 3 numbers)"
        )
        tolerant = add(replace(FLOATS, fewest=1), reply, vector(7, [1, 2, 3]))
        assert tolerant.total is not None
        assert tolerant.total.tolist() == [1, 2, 3]
        assert (tolerant.survivors, tolerant.reason) == (1, "")

    @pytest.mark.parametrize("kind", MALFORMED_INTEGERS)
    def test_integers(self, kind: str) -> None:
        reply = answer(8, MALFORMED_INTEGERS[kind]())
        assert protected_vector(reply, SIZE, 20) is None
        assert add(INTEGERS, integers(7, [1, 2, 3]), reply).total is None
        tolerant = add(replace(INTEGERS, fewest=1), reply, integers(7, [1, 2, 3]))
        assert tolerant.total is not None
        assert tolerant.total.tolist() == [1, 2, 3]

    def test_the_largest_that_fits_is_none(self) -> None:
        assert protected_vector(integers(8, [0, 2**20 - 1, 0]), SIZE, 20) is not None
        assert protected_vector(integers(8, [0, 2**32 - 1, 0]), SIZE, 32) is not None


class TestDropout:
    """A round counts with the fewest survivors for whom the noise is sized, and not with one less."""

    ABOUT = sum_round(dict.fromkeys(range(10), 1), fewest=9)

    def replies(self, count: int) -> list[Message]:
        return [integers(node, [node, 0, 1]) for node in range(count)]

    @pytest.mark.parametrize(
        ("last", "refusals"),
        [
            (lambda: [], {}),
            (lambda: [answer(9, Error(5, "out of memory"))], {}),
            (lambda: [vector(9, [1, 2, 3])], {}),
            (lambda: [refuses(9)], {"budget spent": 1}),
        ],
        ids=["lost", "failed", "malformed", "refused"],
    )
    def test_one_of_ten_may_vanish(self, last: Callable[[], list[Message]], refusals: dict[str, int]) -> None:
        result = add(self.ABOUT, *last(), *self.replies(9))
        assert result.total is not None
        assert result.total.tolist() == [36, 0, 9]
        assert (result.survivors, result.refusals) == (9, refusals)

    @pytest.mark.parametrize(
        ("rest", "reason"),
        [
            (lambda: [], ", the others sent no answer in time"),
            (
                lambda: [answer(9, Error(5, "\nException:\n  no\tdisk"))],
                " (a node failed: Exception: no disk)",
            ),
            (
                lambda: [answer(8, Error(5, None)), answer(9, Error(5, None))],
                " (a node failed: error code 5)",
            ),
            (
                lambda: [refuses(8), refuses(9, "stale round")],
                " (clients refused: budget spent; clients refused: stale round)",
            ),
            (
                lambda: [refuses(8), vector(9, [1, 2, 3])],
                " (a node sent something else than 3 numbers; clients refused: budget spent)",
            ),
        ],
        ids=["lost", "failed", "failed twice", "refused", "mixed"],
    )
    def test_two_of_ten_may_not(self, rest: Callable[[], list[Message]], reason: str) -> None:
        result = add(self.ABOUT, *self.replies(8), *rest())
        assert result.total is None
        assert result.survivors == 8
        assert result.reason == f"8 of 10 members survived, 9 are needed{reason}"

    def test_a_node_speaks_for_its_users(self) -> None:
        about = sum_round({1: 12, 2: 1, 3: 7}, fewest=18)
        two = add(about, integers(1, [1, 1, 1]), refuses(2), integers(3, [1, 1, 1]))
        assert (two.survivors, two.refusals) == (19, {"budget spent": 1})
        assert two.total is not None
        seven = add(about, integers(1, [1, 1, 1]), integers(2, [1, 1, 1]), refuses(3))
        assert (seven.survivors, seven.refusals) == (13, {"budget spent": 7})
        assert seven.total is None

    @pytest.mark.parametrize("first", [lambda: refuses(8), lambda: answer(8, Error(5, "late"))])
    def test_who_refused_or_failed_has_answered(self, first: Callable[[], Message]) -> None:
        result = add(replace(FLOATS, fewest=1), vector(7, [1, 2, 3]), first(), vector(8, [1, 2, 3]))
        assert result.total is None
        assert result.reason == "a node answered twice, or was not asked"

    @pytest.mark.parametrize("node", [7, 9], ids=["twice", "not asked"])
    def test_every_node_answers_once(self, node: int) -> None:
        """Which of two vectors counts can't be told; both together would break the users' bound."""
        replies = [vector(7, [1, 2, 3]), vector(8, [1, 2, 3]), vector(node, [1, 2, 3])]
        result = add(FLOATS, *replies)
        assert result.total is None
        assert result.reason == "a node answered twice, or was not asked"


class TestRefusal:
    def test_its_reason_is_all_that_is_read(self) -> None:
        assert refusal_in(refuses(7, "stale round"), REASONS) == "stale round"
        assert refusal_in(vector(7, [1, 2, 3]), REASONS) is None
        assert refusal_in(answer(7, Error(1, "refusal")), REASONS) is None
        more = RecordDict(dict(refuses(7).content) | {"m": MetricRecord({"loss": 0.1})})
        assert refusal_in(answer(7, more), REASONS) is None

    def test_whatever_a_node_writes_there(self) -> None:
        """A node of another make may write anything, and it ends up in a log."""
        unknown = "no reason that is known"
        assert refusal_in(refuses(7, "x" * 10**6), REASONS) == unknown
        assert refusal_in(refuses(7, "a\n  forged\tline \x1b[2J"), REASONS) == unknown
        assert refusal_in(answer(7, RecordDict({REFUSAL: ConfigRecord({"other": 1})})), REASONS) == unknown
        assert refusal_in(answer(7, RecordDict({REFUSAL: ConfigRecord({"reason": [1]})})), REASONS) == unknown

    def test_only_what_this_apps_clients_say_is_known(self) -> None:
        assert refusal_in(refuses(7, "budget spent"), ("stale round",)) == "no reason that is known"
        assert refusal_in(refuses(7, "budget spent"), ()) == "no reason that is known"
        result = add(replace(FLOATS, fewest=1, reasons=()), vector(7, [1, 2, 3]), refuses(8))
        assert result.refusals == {"no reason that is known": 1}


def revealed(node: int) -> Message:
    """Keys of noise that a node added in vain."""
    return answer(node, RecordDict({KEYS: ConfigRecord({"keys": [b"k"], "users": [2]})}))


class TestPhases:
    def asks(self) -> tuple[SumRound, list[tuple[Survivors, int]]]:
        """A round of four nodes of which two may vanish, and what its reveal phase was asked for."""
        asked: list[tuple[Survivors, int]] = []

        def reveal(survivors: Survivors, vanished: int) -> list[Message]:
            asked.append((survivors, vanished))
            return [question(node) for node in survivors] if vanished < 2 else []

        return replace(sum_round(dict.fromkeys([1, 2, 3, 4], 2), fewest=4), reveal=reveal), asked

    def run(self, about: SumRound, *phases: list[Message]) -> tuple[SumResult, Wire]:
        wire = Wire(*phases)
        questions = [question(node) for node in about.members]
        return TrustedSum().run(wire, questions, about, 1.0), wire

    def all_of(self, *nodes: int) -> list[Message]:
        return [integers(node, [1, 0, 0]) for node in nodes]

    def sources(self, result: SumResult) -> list[int]:
        return [reply.metadata.src_node_id for reply in result.revealed]

    def test_one_phase_without_removable_noise(self) -> None:
        about, _ = self.asks()
        result, wire = self.run(replace(about, reveal=None, fewest=2), [integers(1, [1, 2, 3])])
        assert [len(sent) for sent in wire.sent] == [4]
        assert result.total is not None
        assert result.total.tolist() == [1, 2, 3]
        assert (result.survivors, result.revealed) == (2, ())

    def test_survivors_are_asked_for_what_was_added_in_vain(self) -> None:
        about, asked = self.asks()
        result, wire = self.run(about, self.all_of(1, 2, 3, 4), [revealed(node) for node in (1, 2, 3, 4)])
        assert asked == [(about.members, 0)]
        assert len(wire.sent) == 2
        assert result.total is not None
        assert result.total.tolist() == [4, 0, 0]
        assert result.survivors == 8
        assert self.sources(result) == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("fault", "there"),
        [
            (lambda: [answer(4, Error(5, "out of memory"))], [1, 2, 3]),
            (lambda: [refuses(4)], [1, 2, 3, 4]),
            (lambda: [answer(4, RecordDict())], [1, 2, 3, 4]),
            (lambda: [], [1, 2, 3]),
        ],
        ids=["failed", "refused", "malformed", "lost"],
    )
    def test_who_does_not_reveal_stays_in_the_sum(
        self, fault: Callable[[], list[Message]], there: Sequence[int]
    ) -> None:
        """Its noise is then more than is needed, which is no reason to drop a round that is paid for.

        What revealed noise is, only the app can tell: see `remove_excess`.
        """
        about, _ = self.asks()
        keys = [revealed(node) for node in (1, 2, 3)]
        result, _ = self.run(about, self.all_of(1, 2, 3, 4), keys + fault())
        assert (result.reason, result.refusals, result.survivors) == ("", {}, 8)
        assert result.total is not None
        assert result.total.tolist() == [4, 0, 0]
        assert self.sources(result) == there

    def test_those_who_vanished_are_not(self) -> None:
        about, asked = self.asks()
        vectors = [*self.all_of(1), refuses(2), *self.all_of(3, 4)]
        result, wire = self.run(about, vectors)
        assert asked == [({node: about.members[node] for node in (1, 3, 4)}, 2)]
        assert len(wire.sent) == 1  # nothing of what they added was in vain
        assert result.total is not None
        assert (result.survivors, result.revealed) == (6, ())

    def test_only_what_a_survivor_added_can_be_taken_away(self) -> None:
        """Node 2, which has vanished, or node 9, which nobody asked, can't be in the sum's way."""

        def reveal(survivors: Survivors, vanished: int) -> list[Message]:
            return [question(node) for node in survivors]

        about, _ = self.asks()
        keys = [revealed(node) for node in (1, 2, 3, 4, 9)]
        result, _ = self.run(replace(about, reveal=reveal), self.all_of(1, 3, 4), keys)
        assert self.sources(result) == [1, 3, 4]

    def test_nobody_is_if_the_round_is_dropped(self) -> None:
        about, asked = self.asks()
        result, wire = self.run(about, self.all_of(1))
        assert asked == []
        assert len(wire.sent) == 1
        assert result.total is None
        assert result.revealed == ()

    def test_without_anybody_to_ask_nothing_is_sent(self) -> None:
        wire = Wire()
        result = TrustedSum().run(wire, [], sum_round({}, fewest=0), 1.0)
        assert wire.sent == []
        assert result.total is not None

    def test_bytes_are_those_of_all_arrays(self) -> None:
        """Up those of the vectors, whether they count or not; config records are no arrays."""
        about, _ = self.asks()
        vectors = [*self.all_of(1, 2, 3), integers(4, [1, 2, 3, 4])]
        size = [len(array.data) for v in vectors for array in v.content.array_records[VECTOR].values()]
        sent = RecordDict({"models": ArrayRecord([np.ones(5)])})
        requests = [request(sent, node, TRAIN, 1) for node in about.members]
        result = TrustedSum().run(Wire(vectors), requests, replace(about, reveal=None), 1.0)
        assert result.bytes_up == sum(size)
        assert result.bytes_down == 4 * len(Array(np.ones(5)).data)
