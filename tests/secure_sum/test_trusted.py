from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from pina_flwr.messages import TRAIN, request
from pina_flwr.secure_sum.interface import VECTOR, open_secure_sum
from pina_flwr.secure_sum.trusted import TrustedSum

SIZE = 3


def question(node: int) -> Message:
    return request(RecordDict(), node, TRAIN, 1)


def answer(node: int, content: RecordDict | Error) -> Message:
    return Message(content, reply_to=question(node))


def vector(node: int, values: list[float] | np.ndarray) -> Message:
    array = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.float32)
    return answer(node, RecordDict({VECTOR: ArrayRecord([array])}))


def raw(
    data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (SIZE,), stype: str = "numpy.ndarray"
) -> RecordDict:
    return RecordDict({VECTOR: ArrayRecord({"0": Array(dtype, shape, stype, data)})})


def good() -> ArrayRecord:
    return ArrayRecord([np.ones(SIZE, dtype=np.float32)])


def test_is_what_the_option_names() -> None:
    assert isinstance(open_secure_sum("trusted"), TrustedSum)


def test_sum() -> None:
    result = TrustedSum().add({7, 8}, [vector(8, [1, 2, 3]), vector(7, [10, 20, 30])], SIZE)
    assert result.total is not None
    assert result.total.dtype == np.float64
    assert result.total.tolist() == [11, 22, 33]
    assert result.reason == ""


def test_adds_in_float64() -> None:
    result = TrustedSum().add(
        {1, 2, 3}, [vector(1, [1e8, 0, 0]), vector(2, [1, 0, 0]), vector(3, [-1e8, 0, 0])], SIZE
    )
    assert result.total is not None
    assert result.total[0] == 1


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
    "text": lambda: vector(8, np.array(["a", "b", "c"])).content,
    "nothing": lambda: RecordDict(),
    "another name": lambda: RecordDict({"vector": good()}),
    "two vectors": lambda: RecordDict({VECTOR: ArrayRecord([np.ones(SIZE, dtype=np.float32)] * 2)}),
    "no vector": lambda: RecordDict({VECTOR: ArrayRecord()}),
    "arrays beside it": lambda: RecordDict({VECTOR: good(), "more": good()}),
    "metrics beside it": lambda: RecordDict({VECTOR: good(), "metrics": MetricRecord({"loss": 0.1})}),
    "a config beside it": lambda: RecordDict({VECTOR: good(), "config": ConfigRecord({"cluster": 1})}),
    "metrics in its place": lambda: RecordDict({VECTOR: MetricRecord({"loss": 0.1})}),
    "no bytes": lambda: raw(b""),
    "bytes of something else": lambda: raw(b"\x00" * 12),
    "a zip file": lambda: raw(b"PK\x05\x06" + b"\x00" * 18),
    "a wrong shape in its label": lambda: raw(np_bytes(np.ones(5, dtype=np.float32))),
    "another kind of tensor": lambda: raw(np_bytes(np.ones(SIZE, dtype=np.float32)), stype="torch.Tensor"),
}


def np_bytes(array: np.ndarray) -> bytes:
    return Array(array).data


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_reply_drops_the_round(kind: str) -> None:
    replies = [vector(7, [1, 2, 3]), answer(8, MALFORMED[kind]())]
    result = TrustedSum().add({7, 8}, replies, SIZE)
    assert result.total is None
    assert result.reason == "a node sent something else than 3 finite numbers"


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([], "2 of 2 nodes sent no answer in time"),
        ([(7, [1, 2, 3])], "1 of 2 nodes sent no answer in time"),
        ([(7, [1, 2, 3]), (7, [1, 2, 3]), (8, [1, 2, 3])], "a node answered twice, or was not asked"),
        ([(7, [1, 2, 3]), (8, [1, 2, 3]), (9, [1, 2, 3])], "a node answered twice, or was not asked"),
    ],
)
def test_every_node_must_answer_once(replies: list[tuple[int, list[float]]], reason: str) -> None:
    result = TrustedSum().add({7, 8}, [vector(*reply) for reply in replies], SIZE)
    assert result.total is None
    assert result.reason == reason


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("out of memory", "out of memory"),
        ("\nException:\n  no\tdisk", "Exception: no disk"),
        (None, "error code 5"),
    ],
)
def test_an_error_reply_drops_the_round(reason: str | None, said: str) -> None:
    replies = [vector(7, [1, 2, 3]), answer(8, Error(5, reason))]
    result = TrustedSum().add({7, 8}, replies, SIZE)
    assert result.total is None
    assert result.reason == f"a node failed: {said}"


def test_nobody_asked_is_an_empty_sum() -> None:
    total = TrustedSum().add(set(), [], SIZE).total
    assert total is not None
    assert not total.any()
