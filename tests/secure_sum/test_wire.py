from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pina_flwr.secure_sum.session import LARGEST_ID, Session
from pina_flwr.secure_sum.wire import (
    ARRAYS,
    HEADER,
    LONGEST_REASON,
    PHASES,
    SEALED,
    SHARE,
    Arrays,
    Header,
    Malformed,
    action_of,
    bytes_of,
    kind_of,
    pack,
    size_of,
    why,
)

THERE = Header(Session("7", 2), SHARE, [3, 1, LARGEST_ID], {"size": 5, "bits": -3}, ["keys altered", ""])


def of(values: dict[str, Any]) -> RecordDict:
    return RecordDict({HEADER: ConfigRecord(values)})


def over_the_wire(content: RecordDict) -> RecordDict:
    message = Message(content, message_type="train", dst_node_id=1)
    return message_from_proto(message_to_proto(message)).content


class TestHeader:
    @pytest.mark.parametrize("phase", PHASES)
    def test_goes_there_and_back(self, phase: str) -> None:
        for header in (
            Header(THERE.session, phase, THERE.members, THERE.terms, THERE.refused),
            Header(Session("é" * 99, LARGEST_ID), phase, [], {}),
        ):
            read = Header.from_record(over_the_wire(RecordDict({HEADER: header.to_record()})))
            assert (read.session, read.phase, list(read.members)) == (
                header.session,
                phase,
                list(header.members),
            )
            assert (dict(read.terms), list(read.refused)) == (dict(header.terms), list(header.refused))
            assert list(read.terms) == list(header.terms)

    def test_holds_no_array(self) -> None:
        assert size_of(RecordDict({HEADER: THERE.to_record()})) == 0

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"run": ""}, "out of bounds"),
            ({"run": 7}, "of a wrong type"),
            ({"run": b"7"}, "of a wrong type"),
            ({"run": ["7"]}, "of a wrong type"),
            ({"run": "a" * 2**16}, "out of bounds"),
            ({"round": 0}, "out of bounds"),
            ({"round": -1}, "out of bounds"),
            ({"round": True}, "of a wrong type"),
            ({"round": 2.0}, "of a wrong type"),
            ({"round": "2"}, "of a wrong type"),
            ({"phase": ""}, "make no sense"),
            ({"phase": "Share"}, "make no sense"),
            ({"phase": 1}, "make no sense"),
            ({"phase": [SHARE]}, "make no sense"),
            ({"members": 3}, "members: must be a list of int"),
            ({"members": [3.0]}, "members: must be a list of int"),
            ({"members": [True]}, "members: must be a list of int"),
            ({"members": ["3"]}, "members: must be a list of int"),
            ({"members": [3, 3]}, "members: must be ids from 0, each named once"),
            ({"members": [-1]}, "members: must be ids from 0, each named once"),
            ({"refused": "no"}, "refused: must be a list of str"),
            ({"refused": [1]}, "refused: must be a list of str"),
            ({"terms": ["size"]}, "make no sense"),
            ({"terms": ["size", "size"]}, "make no sense"),
            ({"terms": [1, 2]}, "terms: must be a list of str"),
            ({"values": [1]}, "make no sense"),
            ({"values": []}, "make no sense"),
            ({"values": [1.0, 2.0]}, "values: must be a list of int"),
            ({"values": [True, False]}, "values: must be a list of int"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_refuses_what_makes_no_sense(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(Malformed, match=message):
            Header.from_record(over_the_wire(of(dict(THERE.to_record()) | change)))

    @pytest.mark.parametrize("name", list(THERE.to_record()))
    def test_refuses_one_with_something_missing(self, name: str) -> None:
        with pytest.raises(Malformed):
            Header.from_record(of({k: v for k, v in THERE.to_record().items() if k != name}))

    def test_refuses_a_message_without_one(self) -> None:
        for content in (
            RecordDict(),
            RecordDict({HEADER: pack({})}),
            RecordDict({"other": THERE.to_record()}),
        ):
            with pytest.raises(Malformed, match="no header"):
                Header.from_record(content)

    @settings(
        max_examples=200,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def test_only_ever_raises_malformed(self, data: st.DataObject) -> None:
        single = (st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=4), st.binary(max_size=4))
        lists = [st.lists(kind, max_size=4) for kind in (*single, st.booleans())]
        values = st.one_of(*single, st.booleans(), *lists, st.sampled_from(PHASES))
        names = st.sampled_from([*THERE.to_record(), "other"])
        changes = data.draw(st.dictionaries(names, values, max_size=7))
        kept = {k: v for k, v in THERE.to_record().items() if data.draw(st.integers(0, 9))}
        try:
            read = Header.from_record(of(kept | changes))
        except Malformed as problem:
            said = str(problem)
        else:
            said = ""
            assert isinstance(read.session, Session)
            assert read.phase in PHASES
            assert len(set(read.members)) == len(read.members)
            assert all(type(number) is int for number in [*read.members, *read.terms.values()])
            assert all(type(text) is str for text in [*read.refused, *read.terms])
        assert "\n" not in said


def written(array: np.ndarray, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


def one(array: Array) -> Arrays:
    return Arrays(ArrayRecord({"x": array}))


class TestArrays:
    @pytest.mark.parametrize(
        "array",
        [
            np.arange(6, dtype=np.int64).reshape(2, 3),
            np.zeros((0, 3), np.int64),
            np.arange(6, dtype=np.int64).reshape(3, 2).T,
            np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
            np.arange(60, dtype=np.int64).reshape(10, 6)[::5, ::2],
        ],
        ids=str,
    )
    def test_go_there_and_back(self, array: np.ndarray) -> None:
        content = over_the_wire(RecordDict({ARRAYS: pack({"x": array})}))
        read = Arrays.of(content).read("x", np.int64, (None, 3))
        assert read.tolist() == array.tolist()
        assert read.flags.c_contiguous
        assert size_of(content) == len(content.array_records[ARRAYS]["x"].data)

    def test_in_other_orders_come_out_alike(self) -> None:
        array = np.arange(6, dtype=np.int64).reshape(2, 3)
        read = one(Array("int64", (2, 3), "numpy.ndarray", written(np.asfortranarray(array)))).read(
            "x", np.int64, (2, 3)
        )
        assert read.tolist() == array.tolist()
        assert read.flags.c_contiguous

    @pytest.mark.parametrize("shape", [(None, 3), (2, None), (2, 3), (None, None)])
    def test_of_a_shape_that_fits(self, shape: tuple[int | None, ...]) -> None:
        assert one(Array(np.zeros((2, 3), np.uint8))).read("x", np.uint8, shape).shape == (2, 3)

    @pytest.mark.parametrize(
        "shape", [(), (6,), (None,), (2, 3, 1), (3, 2), (None, 2), (3, None), (None, None, None)]
    )
    def test_of_another_shape(self, shape: tuple[int | None, ...]) -> None:
        with pytest.raises(Malformed, match=r"^x: of another type or shape$"):
            one(Array(np.zeros((2, 3), np.uint8))).read("x", np.uint8, shape)

    @pytest.mark.parametrize(
        "dtype",
        [np.int8, np.bool_, np.float32, ">i8", np.uint64, "S1", "U1", "M8[s]", [("a", "i8")], np.int32],
    )
    def test_of_another_type(self, dtype: Any) -> None:
        with pytest.raises(Malformed, match=r"^x: of another type or shape$"):
            one(Array(np.zeros(3, dtype))).read("x", np.int64, (3,))

    def test_missing(self) -> None:
        with pytest.raises(Malformed, match=r"^y: missing$"):
            one(Array(np.zeros(3))).read("y", np.float64, (3,))
        for content in (RecordDict(), RecordDict({ARRAYS: ConfigRecord({"x": 1})})):
            with pytest.raises(Malformed, match="no arrays"):
                Arrays.of(content)

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x93NUMPY",
            b"PK\3\4",
            b"PK\5\6" + bytes(18),
            pickle.dumps(np.zeros(3)),
            pickle.dumps("text"),
            written(np.zeros(3, np.int64))[:-1],
            written(np.zeros(3, np.int64))[:60],
            written(np.array([None, 1], object), allow_pickle=True),
            written(np.zeros(3, np.int64)).replace(b"(3,)", b"(9,)"),
            written(np.zeros(3, np.int64)).replace(b"(3,)", b"(-3)"),
            written(np.zeros(3, np.int64)).replace(b"(3,), }   ", b"(3333333,)"),
            written(np.zeros(3, np.int64)).replace(b"<i8", b"|O8"),
            written(np.zeros(3, np.int64)).replace(b"descr", b"other"),
        ],
        ids=lambda data: repr(data[:12]) + str(len(data)),
    )
    def test_not_in_the_format(self, data: bytes) -> None:
        with pytest.raises(Malformed, match=r"^x: (not in numpy's format|of another type or shape)$"):
            one(Array("int64", (3,), "numpy.ndarray", data)).read("x", np.int64, (3,))

    def test_several_arrays_in_one_file(self) -> None:
        file = io.BytesIO()
        np.savez(file, x=np.zeros(3, np.int64))
        with pytest.raises(Malformed, match=r"^x: "):
            one(Array("int64", (3,), "numpy.ndarray", file.getvalue())).read("x", np.int64, (3,))

    def test_in_another_form_of_flower(self) -> None:
        with pytest.raises(Malformed, match=r"^x: not in numpy's format$"):
            one(Array("int64", (3,), "other", written(np.zeros(3, np.int64)))).read("x", np.int64, (3,))

    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    @given(
        st.binary(max_size=40),
        st.integers(0, 150),
        st.integers(0, 40),
        st.sampled_from([(SEALED,), (2,), (None, 2), ()]),
    )
    def test_only_ever_raise_malformed(
        self, noise: bytes, at: int, cut: int, shape: tuple[int | None, ...]
    ) -> None:
        data = bytearray(written(np.arange(2, dtype=np.int64)))
        data[at : at + len(noise)] = noise
        try:
            read = one(Array("int64", (2,), "numpy.ndarray", bytes(data[: len(data) - cut])))
            assert read.read("x", np.int64, shape).dtype == np.int64
        except Malformed as problem:
            said = str(problem)
            assert said in ("x: not in numpy's format", "x: of another type or shape")


class TestNames:
    def test_actions_are_flowers(self) -> None:
        app = ClientApp()
        for phase in PHASES:
            app.train(action_of(phase))(lambda message, context: message)
            assert kind_of(phase) == f"train.{action_of(phase)}"
        assert len({action_of(phase) for phase in PHASES}) == len(PHASES)


class TestSizes:
    def test_of_all_arrays_of_all_messages_that_have_any(self) -> None:
        content = RecordDict({"a": pack({"x": np.zeros(5, np.uint8)}), "b": pack({"y": np.zeros(7)})})
        message = Message(content, message_type="train", dst_node_id=1)
        error = Message(Error(2, "no"), reply_to=message)
        assert size_of(content) == 128 + 5 + 128 + 56  # and numpy's own headers
        assert bytes_of([message, error, message]) == 2 * size_of(content)


class TestWhy:
    def test_is_one_short_line(self) -> None:
        message = Message(RecordDict(), message_type="train", dst_node_id=1)
        assert why(Message(Error(2, "a\n  b\tc"), reply_to=message)) == "a b c"
        assert why(Message(Error(2, "x" * 1000), reply_to=message)) == "x" * LONGEST_REASON
        for nothing in (None, ""):
            assert why(Message(Error(5, nothing), reply_to=message)) == "error code 5"
