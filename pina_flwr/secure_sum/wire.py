"""What goes over the wire: one header and some arrays a message, read strictly.

A node may host many members (simulation), so every array has one row a member, in the header's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, Message, MessageType, RecordDict
from numpy.typing import DTypeLike

from pina_flwr.secure_sum.session import LARGEST_ID, Session

HEADER, ARRAYS = "secagg-header", "secagg-arrays"  # records of the layer beside those of the app
ADVERTISE, SHARE, MASK, AGREE, UNMASK = "advertise", "share", "mask", "agree", "unmask"
PHASES = (ADVERTISE, SHARE, MASK, AGREE, UNMASK)
KEY = 32  # bytes of a key or seed
PUBLIC = 3 * KEY  # a member's two public keys and the commitment to its seed
SEALED = 12 + 2 * KEY + 16  # nonce, two shares, tag
SIGNATURE = 64
LONGEST_REASON = 300  # characters of an error that are passed on

T = TypeVar("T", int, str)


class Malformed(ValueError):
    """A message is not what the protocol says. The text holds nothing that came from data."""


@dataclass(frozen=True)
class Header:
    """Of which session and phase a message is, and for which members it speaks.

    terms: numbers of the session that the phase needs, by name. refused: in a reply, why members that were
    asked are not among `members`, one phrase each.
    """

    session: Session
    phase: str
    members: Sequence[int]
    terms: Mapping[str, int]
    refused: Sequence[str] = ()

    def to_record(self) -> ConfigRecord:
        """The header as a Flower record."""
        values: dict[str, ConfigRecordValues] = {
            "run": self.session.run,
            "round": self.session.round,
            "phase": self.phase,
            "members": list(self.members),
            "refused": list(self.refused),
            "terms": list(self.terms),
            "values": list(self.terms.values()),
        }
        return ConfigRecord(values)

    @classmethod
    def from_record(cls, content: RecordDict) -> Header:
        """Inverse of `to_record`, of a whole message.

        Raises:
            Malformed: there is none, or it makes no sense.
        """
        if HEADER not in content.config_records:
            raise Malformed("no header")
        record = content.config_records[HEADER]
        members = _list(record, "members", int)
        if len(set(members)) < len(members) or not all(0 <= member <= LARGEST_ID for member in members):
            raise Malformed("members: must be ids from 0, each named once")
        phase, names, values = record.get("phase"), _list(record, "terms", str), _list(record, "values", int)
        if phase not in PHASES or len(names) != len(values) or len(set(names)) < len(names):
            raise Malformed("phase or terms: make no sense")
        terms = dict(zip(names, values, strict=True))
        return cls(_session(record), str(phase), members, terms, _list(record, "refused", str))


def _session(record: ConfigRecord) -> Session:
    run, round_ = record.get("run"), record.get("round")
    if not isinstance(run, str) or not isinstance(round_, int) or isinstance(round_, bool):
        raise Malformed("run or round: of a wrong type")
    try:
        return Session(run, round_)
    except ValueError:
        raise Malformed("run or round: out of bounds") from None


def _list(record: ConfigRecord, name: str, kind: type[T]) -> list[T]:
    values = record.get(name)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise Malformed(f"{name}: must be a list of {kind.__name__}")
    return [value for value in values if isinstance(value, kind)]


def action_of(phase: str) -> str:
    """Name of the ClientApp's action that answers a phase."""
    return f"secagg_{phase}"


def kind_of(phase: str) -> str:
    """Flower's message type of a phase."""
    return f"{MessageType.TRAIN}.{action_of(phase)}"


def pack(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Arrays by name as a Flower record (numpy's own format, no pickle)."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def size_of(content: RecordDict) -> int:
    """Bytes of all arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def bytes_of(messages: Iterable[Message]) -> int:
    """Bytes of all arrays in some messages; errors hold none."""
    return sum(size_of(message.content) for message in messages if not message.has_error())


def why(reply: Message) -> str:
    """The reason that an error reply gives, not too long, as `plain` text."""
    return plain((reply.error.reason or f"error code {reply.error.code}")[: 4 * LONGEST_REASON])[
        :LONGEST_REASON
    ]


def plain(text: str) -> str:
    """What a node wrote, for logs and terminals: one line, nothing that steers a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


@dataclass(frozen=True)
class Arrays:
    """The arrays of a message, each read with the type and shape that it must have."""

    record: ArrayRecord

    @classmethod
    def of(cls, content: RecordDict, name: str = ARRAYS) -> Arrays:
        """Those in a message.

        Raises:
            Malformed: there are none.
        """
        if name not in content.array_records:
            raise Malformed("no arrays")
        return cls(content.array_records[name])

    def read(self, name: str, dtype: DTypeLike, shape: tuple[int | None, ...]) -> np.ndarray:
        """One array; None in `shape` is any length.

        Raises:
            Malformed: it is missing, or of another type or shape.
        """
        if name not in self.record:
            raise Malformed(f"{name}: missing")
        try:
            array = self.record[name].numpy()
        except Exception:  # bytes that are not numpy's format make it raise many kinds
            raise Malformed(f"{name}: not in numpy's format") from None
        same = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape)
        if not same or not all(n in (length, None) for n, length in zip(shape, array.shape, strict=True)):
            raise Malformed(f"{name}: of another type or shape")
        return np.ascontiguousarray(array)
