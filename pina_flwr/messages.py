"""What server and nodes say to each other: one message a node carries the work for all of its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, Message, MessageType, RecordDict

ARRAYS, CONFIG = "arrays", "config"
WHO = f"{MessageType.QUERY}.who"
TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE


@dataclass(frozen=True)
class Task:
    """What a node is asked to do.

    step: a key of the client's steps, e.g. "update". round: of the stage, from 1. users: those of this node
    that are in the cohort. cohort: size of the whole cohort, which sets each user's share of the noise.
    choose: how a user finds its cluster. arrays: models, centroids and so on, by name.
    """

    step: str
    round: int
    users: Sequence[int]
    cohort: int = 0
    choose: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def to_record(self) -> RecordDict:
        """The content of the message."""
        settings: dict[str, ConfigRecordValues] = {
            "step": self.step,
            "round": self.round,
            "users": [int(user) for user in self.users],
            "cohort": self.cohort,
            "choose": self.choose,
        }
        return RecordDict({ARRAYS: pack(self.arrays), CONFIG: ConfigRecord(settings)})

    @classmethod
    def from_record(cls, content: RecordDict) -> Task:
        """Read the content of a message.

        Raises:
            KeyError, TypeError, ValueError: it is no task.
        """
        settings = content.config_records[CONFIG]
        users = settings["users"]
        if not isinstance(users, list):
            raise TypeError("users: must be a list")
        return cls(
            step=str(settings["step"]),
            round=int(settings["round"]),  # type: ignore[arg-type]
            users=[int(user) for user in users],
            cohort=int(settings["cohort"]),  # type: ignore[arg-type]
            choose=str(settings["choose"]),
            arrays=unpack(content.array_records[ARRAYS]),
        )


def pack(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Arrays by name as a Flower record (numpy's own format, no pickle)."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def unpack(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays of a Flower record by name."""
    return {name: array.numpy() for name, array in record.items()}


def size_of(content: RecordDict) -> int:
    """Bytes of all arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def why(reply: Message) -> str:
    """The reason that an error reply gives, on one line (Flower's may hold several)."""
    return " ".join((reply.error.reason or f"error code {reply.error.code}").split())


def request(content: RecordDict, node: int, kind: str, round_: int) -> Message:
    """A message to a node."""
    return Message(content=content, message_type=kind, dst_node_id=node, group_id=str(round_))
