"""What a network or a node may send in a reply's place, to try how a server takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from sum_trial import RUN, Trial, arrays_of, failed, read, rewritten, without

from pina_flwr.secure_sum.interface import REFUSAL
from pina_flwr.secure_sum.local_grid import over_the_wire
from pina_flwr.secure_sum.session import LARGEST_ID, Session
from pina_flwr.secure_sum.wire import ARRAYS, HEADER, PHASES

STRANGER = 2**64 - 1  # a node that nobody knows

Forgery = Callable[[Trial, Message, Message], list[Message]]
"""What arrives, given the trial so far, a request and its reply."""
Of = Callable[[Message], Message]


def instead(change: Of) -> Forgery:
    """A changed reply arrives, and the true one does not."""
    return lambda trial, request, reply: [change(over_the_wire(reply))]


def before(change: Of) -> Forgery:
    """A changed reply arrives, then the true one."""
    return lambda trial, request, reply: [change(over_the_wire(reply)), reply]


def with_header(**changes: Any) -> Of:
    """Another header; values may depend on the old one."""

    def change(reply: Message) -> Message:
        header = read(reply)[0]
        found = {name: value(header) if callable(value) else value for name, value in changes.items()}
        return rewritten(reply, replace(header, **found))

    return change


def with_field(name: str, value: object) -> Of:
    """A header with one field of another type, or without it (None)."""

    def change(reply: Message) -> Message:
        record = reply.content.config_records[HEADER]
        kept = {key: held for key, held in record.items() if key != name}
        reply.content[HEADER] = ConfigRecord(kept if value is None else {**kept, name: value})  # type: ignore[dict-item]
        return reply

    return change


def with_arrays(change: Callable[[np.ndarray], np.ndarray]) -> Of:
    """All arrays changed."""

    def changed(reply: Message) -> Message:
        return rewritten(reply, arrays={name: change(array) for name, array in arrays_of(reply).items()})

    return changed


def with_bytes(change: Callable[[bytes], bytes]) -> Of:
    """All arrays with other bytes than their label says."""

    def changed(reply: Message) -> Message:
        arrays = reply.content.array_records[ARRAYS].items()
        reply.content[ARRAYS] = ArrayRecord(
            {name: Array(a.dtype, a.shape, a.stype, change(a.data)) for name, a in arrays}
        )
        return reply

    return changed


def with_kind(stype: str) -> Of:
    """Arrays that say they are of another kind."""

    def changed(reply: Message) -> Message:
        arrays = reply.content.array_records[ARRAYS].items()
        reply.content[ARRAYS] = ArrayRecord({k: Array(a.dtype, a.shape, stype, a.data) for k, a in arrays})
        return reply

    return changed


def with_records(**records: object) -> Of:
    """More records, in the place of those with the same name; None takes one away."""
    names = {"header": HEADER, "arrays": ARRAYS}

    def changed(reply: Message) -> Message:
        new = {names.get(name, name): record for name, record in records.items()}
        reply.content = RecordDict({k: v for k, v in {**reply.content, **new}.items() if v is not None})  # type: ignore[misc]
        return reply

    return changed


def sent_by(node: int) -> Of:
    """Another sender on the label."""

    def changed(reply: Message) -> Message:
        proto = message_to_proto(reply)
        proto.metadata.src_node_id = node
        return message_from_proto(proto)

    return changed


def flipped(reply: Message, places: list[int]) -> Message | None:
    """Some bits of the whole message flipped; None if Flower can't read it then."""
    data = bytearray(message_to_proto(reply).SerializeToString())
    for place in places:
        data[place // 8 % len(data)] ^= 1 << place % 8
    try:
        return message_from_proto(ProtoMessage.FromString(bytes(data)))
    except Exception:
        return None


def late(trial: Trial, request: Message, reply: Message) -> list[Message]:
    """All that this node has sent before, once more and first."""
    node = reply.metadata.src_node_id
    earlier = [one.reply for one in trial.passed if one.reply.metadata.src_node_id == node]
    return [*(over_the_wire(message) for message in earlier if message.has_content()), reply]


def _others(trial: Trial, request: Message, reply: Message) -> list[Message]:
    """In the name of another node's members."""
    node = reply.metadata.src_node_id
    them = next(list(own) for other, own in trial.members.items() if other != node)
    return [with_header(members=them)(reply)]


def _header(name: str, value: object) -> Forgery:
    return instead(with_field(name, value))


def _next(session: Session) -> Session:
    return Session(session.run, session.round + 1)


IGNORED: dict[str, tuple[Forgery, int]] = {
    "twice": (lambda trial, request, reply: [reply, over_the_wire(reply)], 1),
    "three times": (lambda trial, request, reply: [reply, over_the_wire(reply), over_the_wire(reply)], 2),
    "an error after it": (lambda trial, request, reply: [reply, failed(reply, request)], 1),
    "of a stranger": (before(sent_by(STRANGER)), 1),
    "of the next round": (before(with_header(session=lambda h: _next(h.session))), 1),
    "of another run": (before(with_header(session=Session(RUN + "1", 1))), 1),
    "of another phase": (
        before(with_header(phase=lambda h: PHASES[(PHASES.index(h.phase) + 1) % len(PHASES)])),
        1,
    ),
}
"""The true reply counts and what else arrives is ignored: so many messages."""

LOST: dict[str, Forgery] = {
    "nothing": lambda trial, request, reply: [],
    "an error": lambda trial, request, reply: [failed(reply, request)],
    "an error before it": lambda trial, request, reply: [failed(reply, request), reply],
    "an empty message": instead(with_records(header=None, arrays=None)),
    "no members": lambda trial, request, reply: [without(reply, read(reply)[0].members)],
    "others' members": _others,
    "a stranger's members too": instead(with_header(members=lambda h: [*h.members, 10**6])),
    "a member twice": instead(with_header(members=lambda h: [h.members[0]] * len(h.members))),
    "a member in place of another": instead(with_header(members=lambda h: [*h.members[1:], 10**6])),
    "fewer members than rows": instead(with_header(members=lambda h: h.members[1:])),
    "a negative id": instead(with_header(members=lambda h: [-1, *h.members[1:]])),
    "too large an id": instead(with_field("members", [2**64 - 1])),
    "the largest id": instead(with_header(members=[LARGEST_ID])),
    "no header": instead(with_records(header=None)),
    "a header of numbers": instead(with_records(header=MetricRecord({"round": 1}))),
    "a header of arrays": instead(with_records(header=ArrayRecord())),
    "an empty header": instead(with_records(header=ConfigRecord())),
    "no run": _header("run", None),
    "a run that is a number": _header("run", 1),
    "an empty run": _header("run", ""),
    "too long a run": _header("run", "1" * 10**5),
    "a round that is text": _header("round", "1"),
    "a round that is a fraction": _header("round", 1.0),
    "a round that is a truth value": _header("round", True),
    "round 0": _header("round", 0),
    "a phase that is none": _header("phase", "unmask it all"),
    "a phase that is a list": _header("phase", ["unmask"]),
    "a phase in bytes": _header("phase", b"unmask"),
    "members that are text": _header("members", "1, 2"),
    "members that are a list of text": _header("members", ["1", "2"]),
    "members that are fractions": _header("members", [1.0, 2.0]),
    "members that are truth values": _header("members", [True, False]),
    "reasons that are numbers": _header("refused", [1, 2]),
    "no reasons": _header("refused", None),
    "terms without values": _header("terms", ["size"]),
    "a term twice": lambda trial, request, reply: [
        with_field("values", [1, 2])(with_field("terms", ["size", "size"])(reply))
    ],
    "no arrays": instead(with_records(arrays=None)),
    "empty arrays": instead(with_records(arrays=ArrayRecord())),
    "text for arrays": instead(with_records(arrays=ConfigRecord({"masked": b"1"}))),
    "another record": instead(with_records(more=ConfigRecord())),
    "a refusal beside it": instead(with_records(**{REFUSAL: ConfigRecord({"reason": "stale round"})})),
    "arrays of another name": instead(
        lambda reply: rewritten(reply, arrays={f"{name}s": a for name, a in arrays_of(reply).items()})
    ),
    "a row more": instead(with_arrays(lambda a: np.concatenate([a, a[:1]]))),
    "a row less": instead(with_arrays(lambda a: a[1:])),
    "a column more": instead(with_arrays(lambda a: np.concatenate([a, a[:, :1]], axis=1))),
    "a column less": instead(with_arrays(lambda a: a[:, 1:])),
    "flat arrays": instead(with_arrays(np.ravel)),
    "no numbers": instead(with_arrays(lambda a: np.zeros(0, a.dtype))),
    "one number": instead(with_arrays(lambda a: a.reshape(-1)[0])),
    "arrays of int64": instead(with_arrays(lambda a: a.astype(np.int64))),
    "arrays of int8": instead(with_arrays(lambda a: a.astype(np.int8))),
    "arrays of floats": instead(with_arrays(lambda a: np.full(a.shape, np.nan))),
    "arrays of text": instead(with_arrays(lambda a: a.astype("U3"))),
    "arrays of records": instead(with_arrays(lambda a: a.view([("a", np.uint8)]))),
    "no bytes": instead(with_bytes(lambda data: b"")),
    "garbage": instead(with_bytes(lambda data: b"\x93NUMPY\x01\x00" + b"\xff" * 40)),
    "half of the bytes": instead(with_bytes(lambda data: data[: len(data) // 2])),
    "a zip file": instead(with_bytes(lambda data: b"PK\x05\x06" + b"\x00" * 18)),
    "a pickle": instead(with_bytes(lambda data: b"\x80\x04K\x01.")),
    "more numbers than there is memory": instead(with_bytes(lambda data: _npy_header(f"({2**60},)"))),
    "more numbers than were sent": instead(with_bytes(lambda data: _npy_header(f"({2**30},)"))),
    "a shape that is none": instead(with_bytes(lambda data: _npy_header("(1 << 60,)"))),
    "a shape nested deep": instead(with_bytes(lambda data: _npy_header("(" * 5000))),
    "another kind of tensor": instead(with_kind("torch.Tensor")),
}
"""The reply says nothing about its members, who are lost; nothing that comes after it counts either."""


def _npy_header(shape: str) -> bytes:
    """The start of a file in numpy's format."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
