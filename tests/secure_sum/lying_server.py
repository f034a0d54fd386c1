"""A server that plays a sum by hand, node by node, and can say something else to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from numpy.typing import NDArray

from pina_flwr.secure_sum.graph import draw
from pina_flwr.secure_sum.keys import new_signing_key, verify_key_of
from pina_flwr.secure_sum.members import Side, answer
from pina_flwr.secure_sum.memory import HasAdvertised, HasMasked, HasShared, recall
from pina_flwr.secure_sum.participant import GONE, SURVIVED, VANISHED, Bytes
from pina_flwr.secure_sum.registry import Identity
from pina_flwr.secure_sum.session import Rules, Session, Terms
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    ARRAYS,
    HEADER,
    MASK,
    SHARE,
    UNMASK,
    Arrays,
    Header,
    Malformed,
    pack,
)

RUN = 7
UNSIGNED = (ADVERTISE, SHARE, MASK, UNMASK)
COMPLETE = Rules(neighbours=20)  # that is, for up to 21 members
REGULAR = Rules(neighbours=4, threshold=3)
APP = "app"


@dataclass
class Server:
    """All members on nodes 0, 1, …, of which each hosts so many; it knows what an honest server knows.

    Rows of its arrays are members in ascending order, whose ids are 10, 20, ….
    """

    rules: Rules = COMPLETE
    members: int = 6
    hosted: int = 1
    round: int = 1
    size: int = 5
    bits: int = 20
    fewest: int = 2
    public: Bytes = field(init=False)
    signatures: Bytes = field(init=False)
    sealed: Bytes = field(init=False)
    status: Bytes = field(init=False)
    agreed: dict[int, Bytes] = field(init=False, default_factory=dict)
    replies: dict[tuple[str, int], RecordDict] = field(init=False, default_factory=dict)
    asked_for_vectors: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.ids = np.arange(1, self.members + 1, dtype=np.int64) * 10
        self.nodes = range(self.members // self.hosted)
        self.contexts = {node: Context(RUN, node, {}, RecordDict(), {}) for node in self.nodes}
        self.vectors = {i: np.full(self.size, i, np.uint32) for i in self.ids.tolist()}
        self.keys = {i: new_signing_key() for i in self.ids.tolist()}
        self.registry = {i: verify_key_of(key) for i, key in self.keys.items()}
        self.parameters = self.rules.parameters(self.members)
        self.neighbours = draw(self.members, self.parameters.neighbours)
        self.public = np.zeros((self.members, 96), np.uint8)
        self.signatures = np.zeros((self.members, 64), np.uint8)
        self.sealed = np.zeros((self.members, self.parameters.neighbours, 92), np.uint8)
        self.status = np.full(self.members, GONE, np.uint8)

    @property
    def session(self) -> Session:
        return Session(str(RUN), self.round)

    @property
    def terms(self) -> Terms:
        k, t = self.parameters.neighbours, self.parameters.threshold
        return Terms(self.session, self.size, self.bits, self.members, k, t, self.fewest)

    def rows(self, node: int) -> list[int]:
        return list(range(node * self.hosted, (node + 1) * self.hosted))

    def own(self, node: int) -> list[int]:
        return [int(self.ids[row]) for row in self.rows(node)]

    def seen(self, node: int) -> NDArray[np.int64]:
        rows = self.rows(node)
        return np.union1d(rows, self.neighbours[rows].ravel()).astype(np.int64)

    def side(self, node: int) -> Side:
        signing = {member: self.keys[member] for member in self.own(node)}
        identity = Identity(self.registry, signing) if self.rules.signed else None
        return Side(self.rules, self.make_vectors, identity)

    def make_vectors(self, request: RecordDict, members: Sequence[int], terms: Terms) -> NDArray[np.uint32]:
        assert APP in request
        assert set(request) == {APP}
        self.asked_for_vectors += 1
        return np.stack([self.vectors[member] for member in members])

    # What an honest server says ---------------------------------------------------------------------------

    def arrays(self, phase: str, node: int) -> dict[str, Any]:
        rows, seen = self.rows(node), self.seen(node)
        if phase == SHARE:
            neighbours = np.searchsorted(seen, self.neighbours[rows])
            found = {"ids": self.ids[seen], "public": self.public[seen], "neighbours": neighbours}
            return found | ({"signatures": self.signatures[seen]} if self.rules.signed else {})
        if phase == MASK:
            return {"sealed": self.for_rows(rows), "present": (self.status != GONE)[seen]}
        if phase == AGREE:
            return {"status": self.status[seen]}
        if phase == UNMASK:
            signatures = np.array(list(self.agreed.values()), np.uint8).reshape(-1, 64)
            signed = {"signers": np.array(list(self.agreed), np.int64), "signatures": signatures}
            return {"status": self.status[seen]} | (signed if self.rules.signed else {})
        return {}

    def for_rows(self, rows: Sequence[int]) -> Bytes:
        """What the neighbours of some members sealed for them: uint8 [rows, k, 92]."""
        found = np.zeros((len(rows), *self.sealed.shape[1:]), np.uint8)
        for i, row in enumerate(rows):
            for column, other in enumerate(self.neighbours[row].tolist()):
                found[i, column] = self.sealed[other, self.neighbours[other].tolist().index(row)]
        return found

    def numbers(self, phase: str) -> dict[str, int]:
        survivors = {"survivors": int((self.status == SURVIVED).sum())}
        return {SHARE: self.terms.numbers, UNMASK: survivors}.get(phase, {})

    def request(
        self,
        phase: str,
        node: int = 0,
        arrays: Mapping[str, Any] | None = None,
        terms: Mapping[str, int] | None = None,
        members: Sequence[int] | None = None,
        session: Session | None = None,
    ) -> RecordDict:
        """The message to a node, with some arrays and numbers others than an honest server's."""
        told = {k: v for k, v in (self.arrays(phase, node) | dict(arrays or {})).items() if v is not None}
        numbers = self.numbers(phase) | dict(terms or {})
        own = self.own(node) if members is None else members
        header = Header(session or self.session, phase, own, numbers)
        app = {APP: ConfigRecord({"step": "update"})} if phase == MASK else {}
        return RecordDict({HEADER: header.to_record(), ARRAYS: pack(told), **app})

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, phase: str, node: int, content: RecordDict) -> RecordDict:
        """A node's answer. As in a deployment, what it remembers passes through Flower's wire format."""
        context = context_from_proto(context_to_proto(self.contexts[node]))
        try:
            return answer(phase, content, context, self.side(node))
        finally:
            self.contexts[node] = context_from_proto(context_to_proto(context))

    def play(self, *phases: str, nodes: Sequence[int] | None = None) -> Server:
        """Phases as an honest server plays them, with some nodes only."""
        for phase in phases:
            for node in self.nodes if nodes is None else nodes:
                reply = self.send(phase, node, self.request(phase, node))
                self.replies[phase, node] = reply
            self.take(phase, list(self.nodes if nodes is None else nodes))
        return self

    def take(self, phase: str, nodes: Sequence[int]) -> None:
        """Read the replies of a phase."""
        for node in nodes:
            header, rows = Header.from_record(self.replies[phase, node]), self.rows(node)
            assert list(header.members) == self.own(node), header.refused
            arrays = Arrays.of(self.replies[phase, node]).record
            if phase == ADVERTISE:
                self.public[rows] = arrays["public"].numpy()
                if self.rules.signed:
                    self.signatures[rows] = arrays["signatures"].numpy()
            elif phase == SHARE:
                self.sealed[rows], self.status[rows] = arrays["sealed"].numpy(), VANISHED
            elif phase == MASK:
                self.status[rows] = SURVIVED
            elif phase == AGREE:
                self.agreed |= dict(zip(header.members, arrays["signatures"].numpy(), strict=True))

    def refused(self, phase: str, node: int, content: RecordDict) -> str:
        """Why a node refuses: the one phrase that is all its answer, while it remembers what it did."""
        before, secrets = self.remembered(node), self.secrets(node)
        reply = self.send(phase, node, content)
        assert self.remembered(node) == before
        header = Header.from_record(reply)
        assert set(reply) == {HEADER, ARRAYS}
        assert not header.members
        assert not header.terms
        assert not reply.array_records[ARRAYS]
        assert not [secret for secret in secrets if secret in in_bytes(reply)]
        (reason,) = set(header.refused)
        return reason

    def remembered(self, node: int) -> bytes:
        return in_bytes(self.contexts[node].state)

    def secrets(self, node: int) -> list[bytes]:
        """All that a node knows and the server must not: 32 bytes each."""
        stage, found = recall(self.contexts[node].state), []
        if isinstance(stage, HasAdvertised):
            for own in stage.members:
                found += [own.cipher, own.pair, own.seed]
        if isinstance(stage, HasShared):
            for shared in stage.members:
                found += [shared.seed, *(half.tobytes() for half in shared.keys.reshape(-1, 32))]
        if isinstance(stage, HasMasked):
            for masked in stage.members:
                found += [half.tobytes() for half in masked.held.reshape(-1, 32) if half.any()]
        return found


def in_bytes(content: RecordDict) -> bytes:
    """All that is in records, as they are on the wire."""
    return bytes(context_to_proto(Context(0, 0, {}, content, {})).SerializeToString(deterministic=True))


def signed(members: int = 6, **more: int) -> Server:
    """One whose members sign."""
    return Server(rules=Rules(signed=True), members=members, **more)


def played(*phases: str, **more: Any) -> Server:
    """A server of unsigned sums after some phases."""
    return Server(**more).play(*phases)


def next_round(server: Server) -> Server:
    """The same nodes, with another round to play."""
    later = replace(server, round=server.round + 1)
    later.contexts, later.keys, later.registry = server.contexts, server.keys, server.registry
    return later


def unchanged(server: Server, phase: str, content: RecordDict, match: str, node: int = 0) -> None:
    """A message that makes no sense changes nothing."""
    before = server.remembered(node)
    with pytest.raises(Malformed, match=match):
        server.send(phase, node, content)
    assert server.remembered(node) == before
