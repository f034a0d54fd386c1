"""Secure sums over a network in one process that keeps all that passes, and does to it what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from pina_flwr.secure_sum.interface import VECTOR, SumResult, SumRound, open_secure_sum
from pina_flwr.secure_sum.keys import new_signing_key, verify_key_of
from pina_flwr.secure_sum.local_grid import LocalGrid
from pina_flwr.secure_sum.members import Side, mount
from pina_flwr.secure_sum.packing import unpack
from pina_flwr.secure_sum.registry import Identity
from pina_flwr.secure_sum.session import Rules, Session
from pina_flwr.secure_sum.wire import ARRAYS, HEADER, PHASES, Arrays, Header, pack

RUN = "1"  # of LocalGrid
MEMBERS = "members"  # in the app's request

Change = Callable[[str, Message, Message], list[Message]]
"""What arrives at the server, given the phase, a request and its reply."""


def as_it_is(phase: str, request: Message, reply: Message) -> list[Message]:
    """A network that works."""
    return [reply]


@dataclass
class Passed:
    """One request, its reply, and what arrived in its place."""

    phase: str
    request: Message
    reply: Message
    arrived: list[Message]


@dataclass
class Trial:
    """A cohort and its vectors.

    rules: of the server, and of nodes unless `rules_of` says otherwise. members: by node 0, 1, …. vectors:
    uint32 [size] of each member. passed: all messages so far.
    """

    rules: Rules
    members: Mapping[int, Sequence[int]]
    vectors: Mapping[int, np.ndarray]
    bits: int = 20
    fewest: int = 2
    rules_of: Mapping[int, Rules] = field(default_factory=dict)
    passed: list[Passed] = field(default_factory=list)
    change: Change = as_it_is

    def __post_init__(self) -> None:
        self.keys = {member: new_signing_key() for member in self.vectors}
        registry = {member: verify_key_of(key) for member, key in self.keys.items()}
        own = {node: {m: self.keys[m] for m in members} for node, members in self.members.items()}
        app = ClientApp()

        def side(context: Context) -> Side:
            node = context.node_id
            rules = self.rules_of.get(node, self.rules)
            return Side(rules, self._vectors, Identity(registry, own[node]) if rules.signed else None)

        mount(app, side)
        app.train()(self._trusted)
        self.grid = LocalGrid(app, max(self.members) + 1, self._network)

    def _vectors(self, request: RecordDict, members: Sequence[int], terms: Any) -> np.ndarray:
        assert set(members) <= set(request.config_records["app"][MEMBERS])  # type: ignore[arg-type]
        return np.stack([self.vectors[member] for member in members])

    def _trusted(self, message: Message, context: Context) -> Message:
        """What a node answers where everybody trusts the server."""
        total = self.plain(message.content.config_records["app"][MEMBERS])  # type: ignore[arg-type]
        return Message(
            RecordDict({VECTOR: ArrayRecord([total.astype(np.uint32)])}),
            reply_to=message,
        )

    def _network(self, request: Message, reply: Message) -> Iterable[Message]:
        phase = request.metadata.message_type.removeprefix("train.secagg_")
        arrived = self.change(phase, request, reply)
        self.passed.append(Passed(phase, request, reply, arrived))
        return arrived

    @property
    def size(self) -> int:
        return len(next(iter(self.vectors.values())))

    def about(self, round_: int = 1) -> SumRound:
        return SumRound(Session(RUN, round_), self.size, self.bits, self.members, self.fewest)

    def requests(self) -> list[Message]:
        """The app's own message to each node."""
        return [
            Message(
                RecordDict({"app": ConfigRecord({MEMBERS: list(own)})}),
                message_type="train",
                dst_node_id=node,
            )
            for node, own in self.members.items()
        ]

    def run(self, about: SumRound | None = None, timeout: float = 1e6, kind: str = "secagg+") -> SumResult:
        about = self.about() if about is None else about
        return open_secure_sum(kind, self.rules).run(self.grid, self.requests(), about, timeout)

    def plain(self, members: Iterable[int]) -> np.ndarray:
        """The sum that members' vectors have, int64 [size]."""
        total = sum((self.vectors[m].astype(np.int64) for m in members), np.zeros(self.size, np.int64))
        return total % (1 << self.bits)

    def phases(self) -> list[str]:
        """Those that have begun, in their order."""
        return list(dict.fromkeys(one.phase for one in self.passed))

    def replies(self, phase: str, round_: int | None = None) -> Iterator[tuple[Header, Arrays]]:
        """What nodes sent in a phase."""
        for one in self.passed:
            if one.phase == phase and one.reply.has_content():
                header, arrays = read(one.reply)
                if round_ in (None, header.session.round):
                    yield header, arrays

    def masked(self, round_: int | None = None) -> dict[int, np.ndarray]:
        """The masked vector of each member as the server gets it, uint32 [size]."""
        found = {}
        for header, arrays in self.replies("mask", round_):
            for member, packed in zip(header.members, arrays.record["masked"].numpy(), strict=True):
                found[member] = unpack(packed, self.bits, self.size)
        return found

    def graph(self) -> dict[int, list[int]]:
        """Neighbours of each member, as the server told them."""
        found = {}
        for one in self.passed:
            if one.phase == "share":
                header, arrays = read(one.request)
                ids = arrays.record["ids"].numpy()
                for member, row in zip(header.members, arrays.record["neighbours"].numpy(), strict=True):
                    found[member] = ids[row].tolist()
        return found


def spread(members: Sequence[int], sizes: Sequence[int]) -> dict[int, list[int]]:
    """Members dealt to nodes, so many to each in turn, over and over."""
    found: dict[int, list[int]] = {}
    start = 0
    while start < len(members):
        size = sizes[len(found) % len(sizes)]
        found[len(found)] = list(members[start : start + size])
        start += size
    return found


def trial(nodes: int, per: int = 1, size: int = 5, bits: int = 20, seed: int = 0, **more: Any) -> Trial:
    """A trial of members 0, 1, …, so many on each node, with random vectors."""
    rng = np.random.default_rng(seed)
    vectors = {m: rng.integers(0, 1 << bits, size, dtype=np.uint32) for m in range(nodes * per)}
    rules = more.pop("rules", Rules())
    return Trial(rules, spread(list(vectors), [per]), vectors, bits, **more)


def read(message: Message) -> tuple[Header, Arrays]:
    return Header.from_record(message.content), Arrays.of(message.content)


def rewritten(reply: Message, header: Header | None = None, arrays: Mapping | None = None) -> Message:
    """The same reply with another header or other arrays."""
    reply.content = RecordDict(
        {
            HEADER: reply.content[HEADER] if header is None else header.to_record(),
            ARRAYS: reply.content[ARRAYS] if arrays is None else pack(arrays),
        }
    )
    return reply


def arrays_of(reply: Message) -> dict[str, np.ndarray]:
    """All arrays of a reply, to be changed."""
    return {name: array.numpy().copy() for name, array in read(reply)[1].record.items()}


def without(reply: Message, lost: Iterable[int]) -> Message:
    """A reply that says nothing about some members."""
    header, lost = Header.from_record(reply.content), set(lost)
    keep = [row for row, member in enumerate(header.members) if member not in lost]
    left = [header.members[row] for row in keep]
    arrays = {name: array[keep] for name, array in arrays_of(reply).items()} if left else {}
    return rewritten(reply, replace(header, members=left), arrays)


def failed(reply: Message, request: Message, reason: str = "no memory") -> Message:
    """An error in a reply's place."""
    return Message(Error(2, reason), reply_to=request)


def later(phase: str) -> list[str]:
    """A phase and all after it."""
    return list(PHASES[PHASES.index(phase) :])
