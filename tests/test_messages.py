import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from pina_flwr.messages import ARRAYS, CONFIG, OFFER, TRAIN, Task, pack, request, unpack
from pina_flwr.privacy.policy import Offer
from pina_flwr.secure_sum.wire import size_of, why

OFFERED = Offer("skellam", 0.7, 1.0, 9, 8, 1, 20, 0.25, "12", 2, 2)


def task() -> Task:
    arrays = {"models": np.arange(6, dtype=np.float32).reshape(2, 3), "ids": np.array([3, 1])}
    return Task("update", 2, [4, 0], "loss", arrays, OFFERED, vanished=3)


def test_a_task_survives_the_message() -> None:
    back = Task.from_record(task().to_record())
    assert (back.step, back.round, back.users, back.choose) == ("update", 2, [4, 0], "loss")
    assert (back.offer, back.vanished) == (OFFERED, 3)
    assert set(back.arrays) == {"models", "ids"}
    for name, array in task().arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
        assert back.arrays[name].dtype == array.dtype


def test_numpy_integers_are_users_too() -> None:
    users = np.flatnonzero(np.array([True, False, True]))
    assert Task.from_record(Task("mean", 1, users).to_record()).users == [0, 2]  # type: ignore[arg-type]


def test_a_task_without_an_offer_has_none() -> None:
    record = Task("evaluate", 1, [0]).to_record()
    assert OFFER not in record
    assert Task.from_record(record).offer is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("survivors", 10),
        ("noise-multiplier", -1.0),
        ("noise-multiplier", float("nan")),
        ("cohort", 0),
        ("cohort", 9.0),
        ("more", 1),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    record = task().to_record()
    record[OFFER] = ConfigRecord(dict(record.config_records[OFFER]) | {field: value})
    with pytest.raises(ValueError, match=field):
        Task.from_record(record)


@pytest.mark.parametrize("field", list(OFFERED.to_dict()))
def test_an_offer_is_whole_or_refused(field: str) -> None:
    record = task().to_record()
    del record.config_records[OFFER][field]
    with pytest.raises(ValueError, match=f"field {field!r} is missing"):
        Task.from_record(record)


@pytest.mark.parametrize("missing", [ARRAYS, CONFIG])
def test_what_is_no_task_is_refused(missing: str) -> None:
    record = task().to_record()
    del record[missing]
    with pytest.raises(KeyError):
        Task.from_record(record)


def test_users_must_be_a_list() -> None:
    record = task().to_record()
    record[CONFIG] = ConfigRecord(dict(record.config_records[CONFIG]) | {"users": 3})
    with pytest.raises(TypeError, match="users"):
        Task.from_record(record)


def test_arrays_that_are_not_contiguous() -> None:
    array = np.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(unpack(pack({"a": array}))["a"], array)


def test_size_counts_all_arrays() -> None:
    numbers = np.zeros(1_000, dtype=np.float32)
    content = RecordDict(
        {"a": pack({"x": numbers, "y": numbers}), "b": pack({"z": numbers}), "c": ConfigRecord()}
    )
    assert 12_000 <= size_of(content) <= 12_600  # and a little of numpy's own
    assert size_of(RecordDict()) == 0


def test_request() -> None:
    message = request(RecordDict(), 7, TRAIN, 3)
    about = message.metadata
    assert (about.dst_node_id, about.message_type, about.group_id) == (7, "train", "3")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Error(2, "a\n  b\tc"), "a b c"),
        (Error(3), "error code 3"),
        (Error(4, ""), "error code 4"),
        (Error(2, "x" * 10**6), "x" * 300),
    ],
)
def test_why(error: Error, said: str) -> None:
    assert why(Message(error, reply_to=request(RecordDict(), 7, TRAIN, 3))) == said
