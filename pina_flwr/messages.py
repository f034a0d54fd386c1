"""What server and nodes say to each other: one message a node carries the work for all of its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Message, MessageType, RecordDict

from pina_flwr.privacy.policy import Offer
from pina_flwr.secure_sum.wire import pack as pack  # one format for all messages
from pina_flwr.secure_sum.wire import plain as plain
from pina_flwr.secure_sum.wire import why as why

ARRAYS, CONFIG, OFFER = "arrays", "config", "offer"
REVEAL = "reveal"  # the step that asks for noise which turned out not to be needed
KEYS = "keys"  # the one record of a reply that reveals noise which turned out not to be needed
WHO = f"{MessageType.QUERY}.who"
TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE


@dataclass(frozen=True)
class Task:
    """What a node is asked to do.

    step: a key of the client's steps, e.g. "update". round: of the stage, from 1. users: those of this node
    that are in the cohort. choose: how a user finds its cluster. arrays: models, centroids and so on, by
    name. offer: how what the users release is protected; None if nothing is released. vanished: with step
    "reveal", how many of the cohort did not answer.
    """

    step: str
    round: int
    users: Sequence[int]
    choose: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    offer: Offer | None = None
    vanished: int = 0

    def to_record(self) -> RecordDict:
        """The content of the message."""
        settings: dict[str, ConfigRecordValues] = {
            "step": self.step,
            "round": self.round,
            "users": [int(user) for user in self.users],
            "choose": self.choose,
            "vanished": self.vanished,
        }
        content = RecordDict({ARRAYS: pack(self.arrays), CONFIG: ConfigRecord(settings)})
        if self.offer is not None:
            content[OFFER] = ConfigRecord(dict(self.offer.to_dict()))
        return content

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
            choose=str(settings["choose"]),
            vanished=int(settings["vanished"]),  # type: ignore[arg-type]
            arrays=unpack(content.array_records[ARRAYS]),
            offer=Offer.from_dict(content.config_records[OFFER]) if OFFER in content else None,
        )


def unpack(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays of a Flower record by name."""
    return {name: array.numpy() for name, array in record.items()}


def request(content: RecordDict, node: int, kind: str, round_: int) -> Message:
    """A message to a node."""
    return Message(content=content, message_type=kind, dst_node_id=node, group_id=str(round_))
