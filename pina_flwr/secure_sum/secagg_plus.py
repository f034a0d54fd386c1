"""SecAgg+ (Bell et al. 2020, eprint 2020/704) over Flower's Message API, from the server's side.

    advertise   members send public keys; those that do are the members of the sum
    share       the server draws a random k-regular graph; each member splits its secrets among its neighbours
    mask        each member that still takes part sends its vector under masks; the server adds them up
    agree       signed sums only: members sign the list of those whose vectors arrived
    unmask      of each of them t neighbours give shares of its seed, of each that vanished after sharing,
                shares of its mask key; the server takes away the masks, which leaves the sum and nothing else

A member may vanish at any time. If too few are left, the sum is given up before anything is unmasked, or
can't be unmasked at all. Secrets that are joined are checked against what their owner advertised, so a wrong
share is noticed and never added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from pina_flwr.secure_sum.graph import draw
from pina_flwr.secure_sum.interface import SumResult, SumRound
from pina_flwr.secure_sum.keys import commitment, public_of
from pina_flwr.secure_sum.masks import add_masks
from pina_flwr.secure_sum.packing import FEWEST_BITS, MOST_BITS, packed_size, unpack
from pina_flwr.secure_sum.parameters import agreement
from pina_flwr.secure_sum.participant import (
    COMMITMENT,
    GONE,
    PAIR,
    REASONS,
    SURVIVED,
    VANISHED,
    Bytes,
    Refused,
    pair_keys,
    self_key,
)
from pina_flwr.secure_sum.session import LARGEST_ID, Rules, Terms
from pina_flwr.secure_sum.shamir import join
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    ARRAYS,
    HEADER,
    KEY,
    MASK,
    PHASES,
    PUBLIC,
    SEALED,
    SHARE,
    SIGNATURE,
    UNMASK,
    Arrays,
    Header,
    Malformed,
    kind_of,
    pack,
    size_of,
    why,
)

SHORT_PHASE = 1 / 8  # of the time for a sum: the most for a phase that trains nothing
AFTER_MASK = 3  # such phases: agree, unmask and the app's own
MOST_PROBLEMS = 3  # of nodes that failed, named in the reason for which a sum is given up
Row = tuple[np.ndarray, ...]


class GivenUp(Exception):
    """The sum can't be had, for this reason; nothing was unmasked, or nothing came of it."""


@dataclass(frozen=True)
class SecAggPlus:
    """The secure sum of some rules, which clients must share."""

    rules: Rules

    def run(self, grid: Grid, requests: Sequence[Message], about: SumRound, timeout: float) -> SumResult:
        """See `SecureSum.run`. A phase that trains nothing gets an eighth of the time at most.

        Raises:
            ValueError: the sum is not described right, or a node's request is missing.
        """
        asked = {request.metadata.dst_node_id: request.content for request in requests}
        _check(about, asked)
        exchange = _Exchange(grid, about, timeout)
        try:
            members = _advertise(self.rules, exchange)
            sealed = _share(members, exchange)
            total = _mask(members, sealed, asked, exchange)
            signed = _agree(members, exchange) if self.rules.signed else {}
            _unmask(members, total, signed, exchange)
        except GivenUp as problem:
            return exchange.result(None, str(problem))
        return exchange.result(total.astype(np.int64), "", exchange.reveal(members))


def _check(about: SumRound, requests: Mapping[int, RecordDict]) -> None:
    """Tell the caller's mistakes before anybody is asked.

    Raises:
        ValueError: there is one.
    """
    hosts, node_of = {node for node, own in about.members.items() if own}, _hosts(about)
    problems = {
        f"size = {about.size}: must be at least 1": about.size < 1,
        f"bits = {about.bits}: must be from {FEWEST_BITS} to {MOST_BITS}": (
            not FEWEST_BITS <= about.bits <= MOST_BITS
        ),
        f"fewest = {about.fewest}: must be at least 1": about.fewest < 1,
        "members: must each be on one node": len(node_of) < about.cohort,
        f"members: must be from 0 to {LARGEST_ID}": not all(0 <= m <= LARGEST_ID for m in node_of),
        f"requests to {len(requests)} nodes: must be one to each of {len(hosts)}": not hosts <= set(requests),
    }
    for problem, holds in problems.items():
        if holds:
            raise ValueError(problem)


def _hosts(about: SumRound) -> dict[int, int]:
    """The node of each member."""
    return {member: node for node, own in about.members.items() for member in own}


@dataclass
class _Members:
    """All who advertised. The row of each is its position, by which the graph names it.

    terms: of the sum. ids: int64 [n], ascending. hosted: the same by node. public: uint8 [n, 96]. signatures:
    uint8 [n, 64], or [n, 0]. neighbours: int64 [n, k], ascending. signers: how many must agree. columns: of
    [i, j], in which column neighbour [i, j] has i. status: of each, uint8 [n]. present: who shared, [n].
    """

    terms: Terms
    ids: NDArray[np.int64]
    hosted: Mapping[int, Sequence[int]]
    public: Bytes
    signatures: Bytes
    neighbours: NDArray[np.int64]
    signers: int
    columns: NDArray[np.int64] = field(init=False)
    status: Bytes = field(init=False)
    present: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = _columns(self.neighbours)
        self.status = np.full(len(self.ids), GONE, np.uint8)
        self.present = np.zeros(len(self.ids), np.bool_)

    def positions(self, members: Iterable[int]) -> NDArray[np.int64]:
        """Rows of some members."""
        return np.searchsorted(self.ids, np.fromiter(members, np.int64))

    def roster(self, node: int) -> NDArray[np.int64]:
        """Positions that a node has to know of: of its members and their neighbours, lost since or not."""
        rows = self.positions(self.hosted[node])
        return np.union1d(rows, self.neighbours[rows].ravel())


def _columns(neighbours: NDArray[np.int64]) -> NDArray[np.int64]:
    """In which column neighbour [i, j] has i: edges sorted by their far end meet those by their near end."""
    count, k = neighbours.shape
    near, far = np.repeat(np.arange(count), k), neighbours.ravel()
    back = np.empty(count * k, np.int64)
    back[np.lexsort((near, far))] = np.arange(count * k)
    return (back % k).reshape(count, k)


@dataclass
class _Exchange:
    """The messages of one sum. What is late, double or not asked for is ignored and counted."""

    grid: Grid
    about: SumRound
    timeout: float
    began: float = field(init=False)
    node_of: dict[int, int] = field(init=False)
    lost: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    survivors: int = 0
    ignored: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __post_init__(self) -> None:
        self.began, self.node_of = monotonic(), _hosts(self.about)

    def by_node(self, members: Iterable[int]) -> dict[int, list[int]]:
        """Members by the node that hosts them."""
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(self.node_of[member], []).append(member)
        return found

    def ask(
        self,
        phase: str,
        members: Sequence[int],
        content: Callable[[int, list[int]], tuple[dict[str, np.ndarray], RecordDict]],
        read: Callable[[Arrays, int], Row],
        terms: Mapping[str, int],
    ) -> dict[int, Row]:
        """One phase: what each member that answered well has sent, one row of each array.

        Args:
            phase: of the protocol.
            members: who is asked.
            content: for a node and its members, arrays of the layer and records of the app.
            read: the arrays of a reply, with as many rows as it speaks of members.
            terms: that go with the message.

        Raises:
            GivenUp: there is no time for it.
        """
        asked, messages = self.by_node(members), []
        for node, own in asked.items():
            arrays, records = content(node, own)
            header = Header(self.about.session, phase, own, terms).to_record()
            records = RecordDict({**records, HEADER: header, ARRAYS: pack(arrays)})
            kind, group = kind_of(phase), str(self.about.session.round)
            messages.append(Message(content=records, message_type=kind, dst_node_id=node, group_id=group))
        found: dict[int, Row] = {}
        if (timeout := self.time_for(phase)) <= 0:
            raise GivenUp(f"no time was left to {phase}")
        for reply in self.send(messages, timeout):
            node = reply.metadata.src_node_id
            answered = self._read(phase, reply, asked.get(node, []), read)
            if answered is None:
                self.ignored += 1
                continue
            del asked[node]
            found |= answered
        if asked:
            self.problems[
                f"{len(asked)} of {len(messages)} nodes did not answer {phase} within {timeout:.0f} s"
            ] += 1
        self.lost[phase] += len(members) - len(found)
        return found

    def send(self, messages: list[Message], timeout: float) -> Iterable[Message]:
        """Send some messages, and give the replies one by one as they are counted."""
        self.bytes_down += sum(size_of(message.content) for message in messages)
        for reply in self.grid.send_and_receive(messages, timeout=timeout) if messages else []:
            if not reply.has_error():
                self.bytes_up += size_of(reply.content)
            yield reply

    def time_for(self, phase: str) -> float:
        """Seconds that a phase may take; there is no time for it if they are not above 0."""
        left = self.timeout - (monotonic() - self.began)
        short = self.timeout * SHORT_PHASE
        return left - AFTER_MASK * short if phase == MASK else min(left, short)

    def _read(
        self, phase: str, reply: Message, asked: list[int], read: Callable[[Arrays, int], Row]
    ) -> dict[int, Row] | None:
        """What a reply says about each member; None if it is not an answer to this phase.

        An answer that makes no sense says nothing about anybody.
        """
        if not asked:
            return None
        if reply.has_error():
            self.problems[f"a node failed: {why(reply)}"] += 1
            return {}
        try:
            header = Header.from_record(reply.content)
            if header.session != self.about.session or header.phase != phase:
                return None
            if set(reply.content) != {HEADER, ARRAYS} or not set(header.members) <= set(asked):
                raise Malformed("another reply than this phase has")
            known = {*REASONS, *self.about.reasons}
            for reason in header.refused[: len(asked) - len(header.members)]:
                self.refusals[reason if reason in known else "no reason that is known"] += 1
            if not header.members:
                return {}
            rows = read(Arrays.of(reply.content), len(header.members))
        except Malformed:
            self.problems[f"a node's reply to {phase} makes no sense"] += 1
            return {}
        return {member: tuple(array[i] for array in rows) for i, member in enumerate(header.members)}

    def reveal(self, members: _Members) -> tuple[Message, ...]:
        """Ask nodes for noise that turned out not to be needed; who does not answer in time keeps it."""
        timeout = self.time_for(UNMASK)
        if self.about.reveal is None or timeout <= 0:
            return ()
        survivors = self.by_node(members.ids[members.status == SURVIVED].tolist())
        questions = self.about.reveal(survivors, self.about.cohort - self.survivors)
        waiting = {question.metadata.dst_node_id for question in questions}
        found = []
        for reply in self.send(questions, timeout):
            node, late = reply.metadata.src_node_id, not reply.has_error() and HEADER in reply.content
            if node not in waiting or late:
                self.ignored += 1
                continue
            waiting.remove(node)
            if not reply.has_error():
                found.append(reply)
        return tuple(found)

    def result(self, total: np.ndarray | None, reason: str, revealed: tuple[Message, ...] = ()) -> SumResult:
        """What the sum came to."""
        lost = {phase: self.lost[phase] for phase in PHASES if self.lost[phase]}
        causes = [problem for problem, _ in self.problems.most_common(MOST_PROBLEMS)]
        causes += [f"clients refused: {phrase}" for phrase in self.refusals]
        full = f"{reason} ({'; '.join(causes)})" if reason and causes else reason
        traffic = self.ignored, self.bytes_up, self.bytes_down
        return SumResult(total, full, self.survivors, revealed, dict(self.refusals), lost, *traffic)


# The phases -----------------------------------------------------------------------------------------------


def _advertise(rules: Rules, exchange: _Exchange) -> _Members:
    """Who takes part, with what keys; then the graph, which nobody could know before."""
    about = exchange.about

    def read(arrays: Arrays, rows: int) -> Row:
        public = arrays.read("public", np.uint8, (rows, PUBLIC))
        if not rules.signed:
            return public, np.zeros((rows, 0), np.uint8)
        return public, arrays.read("signatures", np.uint8, (rows, SIGNATURE))

    found = exchange.ask(ADVERTISE, list(exchange.node_of), lambda node, own: ({}, RecordDict()), read, {})
    _enough(len(found), max(about.fewest, 2), exchange)
    try:
        parameters = rules.parameters(len(found))
        signers = agreement(len(found), rules.corrupted) if rules.signed else 1
        k, t = parameters.neighbours, parameters.threshold
        terms = Terms(about.session, about.size, about.bits, len(found), k, t, about.fewest)
    except ValueError as problem:
        raise GivenUp(str(problem)) from None
    ids = np.array(sorted(found), np.int64)
    hosted = exchange.by_node(ids.tolist())
    public, signatures = (np.array([found[i][part] for i in ids.tolist()], np.uint8) for part in (0, 1))
    return _Members(terms, ids, hosted, public, signatures, draw(len(ids), k), signers)


def _share(members: _Members, exchange: _Exchange) -> Bytes:
    """What each member sealed for each neighbour, uint8 [n, k, 92]."""
    terms, k = members.terms, members.terms.neighbours

    def content(node: int, own: list[int]) -> tuple[dict[str, np.ndarray], RecordDict]:
        rows, seen = members.positions(own), members.roster(node)
        arrays: dict[str, np.ndarray] = {
            "ids": members.ids[seen],
            "public": members.public[seen],
            "neighbours": np.searchsorted(seen, members.neighbours[rows]),
        }
        if members.signatures.size:
            arrays["signatures"] = members.signatures[seen]
        return arrays, RecordDict()

    def read(arrays: Arrays, rows: int) -> Row:
        return (arrays.read("sealed", np.uint8, (rows, k, SEALED)),)

    names = ("size", "bits", "members", "neighbours", "threshold", "fewest")
    stated = {name: getattr(terms, name) for name in names}
    found = exchange.ask(SHARE, members.ids.tolist(), content, read, stated)
    sealed = np.zeros((len(members.ids), k, SEALED), np.uint8)
    for row, (text,) in zip(members.positions(found), found.values(), strict=True):
        sealed[row] = text
        members.present[row] = True
    _check_left(members, members.present, exchange)
    return sealed


def _mask(
    members: _Members, sealed: Bytes, requests: Mapping[int, RecordDict], exchange: _Exchange
) -> NDArray[np.uint32]:
    """The sum of the masked vectors, uint32 [size], of those whose status is then `SURVIVED`."""
    terms, total = members.terms, np.zeros(members.terms.size, np.uint32)

    def content(node: int, own: list[int]) -> tuple[dict[str, np.ndarray], RecordDict]:
        rows = members.positions(own)
        theirs = sealed[members.neighbours[rows], members.columns[rows]]
        return {"sealed": theirs, "present": members.present[members.roster(node)]}, requests[node]

    def read(arrays: Arrays, rows: int) -> Row:
        packed = arrays.read("masked", np.uint8, (rows, packed_size(terms.size, terms.bits)))
        try:
            vectors = [unpack(row, terms.bits, terms.size) for row in packed]
        except ValueError:
            raise Malformed("masked: not packed right") from None
        for vector in vectors:
            np.add(total, vector, out=total)
        return (np.zeros((rows, 0)),)

    found = exchange.ask(MASK, members.ids[members.present].tolist(), content, read, {})
    members.status[members.present] = VANISHED
    members.status[members.positions(found)] = SURVIVED
    exchange.survivors = len(found)
    _check_left(members, members.status == SURVIVED, exchange)
    return total


def _agree(members: _Members, exchange: _Exchange) -> dict[int, Row]:
    """Signatures of the list of survivors, uint8 [64] each, by member."""

    def read(arrays: Arrays, rows: int) -> Row:
        return (arrays.read("signatures", np.uint8, (rows, SIGNATURE)),)

    survivors = members.ids[members.status == SURVIVED].tolist()

    def content(node: int, own: list[int]) -> tuple[dict[str, np.ndarray], RecordDict]:
        return {"status": members.status[members.roster(node)]}, RecordDict()

    found = exchange.ask(AGREE, survivors, content, read, {})
    _enough(len(found), members.signers, exchange)
    return found


def _unmask(
    members: _Members, total: NDArray[np.uint32], signed: Mapping[int, Row], exchange: _Exchange
) -> None:
    """Take all masks off the total, in place."""
    terms, k = members.terms, members.terms.neighbours
    agreed: dict[str, np.ndarray] = {}
    if signed:
        signatures = np.array([row[0] for row in signed.values()], np.uint8)
        agreed = {"signers": np.array(list(signed), np.int64), "signatures": signatures}

    def content(node: int, own: list[int]) -> tuple[dict[str, np.ndarray], RecordDict]:
        return {"status": members.status[members.roster(node)]} | agreed, RecordDict()

    def read(arrays: Arrays, rows: int) -> Row:
        return (arrays.read("shares", np.uint8, (rows, k, KEY)),)

    # Who did not sign can't unmask: its state says that nothing was agreed on.
    asked = list(signed) if signed else members.ids[members.status == SURVIVED].tolist()
    found = exchange.ask(UNMASK, asked, content, read, {"survivors": exchange.survivors})
    given = np.zeros((len(members.ids), k, KEY), np.uint8)
    helped = np.zeros(len(members.ids), np.bool_)
    for row, (shares,) in zip(members.positions(found), found.values(), strict=True):
        given[row], helped[row] = shares, True
    remove_masks(members, total, given, helped)
    total &= np.uint32((1 << terms.bits) - 1)


def remove_masks(
    members: _Members, total: NDArray[np.uint32], given: Bytes, helped: NDArray[np.bool_]
) -> None:
    """Join everybody's shares and take the masks off the total, in place mod 2^32.

    Args:
        members: of the sum.
        total: of the masked vectors, uint32 [size].
        given: the shares that each member gave for its neighbours, uint8 [n, k, 32].
        helped: who gave any, [n].

    Raises:
        GivenUp: under t neighbours of a member helped, or their shares don't fit what it advertised.
    """
    plus: list[bytes] = []
    minus: list[bytes] = []
    for row in np.flatnonzero(members.present).tolist():
        secret = _joined(members, row, given, helped)
        if members.status[row] == SURVIVED:
            minus.append(self_key(secret, members.terms.session, int(members.ids[row])))
        else:
            _add_pairs(members, row, secret, plus, minus)
    add_masks(total, plus, minus)


def _add_pairs(members: _Members, row: int, secret: bytes, plus: list[bytes], minus: list[bytes]) -> None:
    """Keys of the masks that a vanished member shares with survivors, to add and to subtract."""
    me, others = int(members.ids[row]), members.neighbours[row]
    others = others[members.status[others] == SURVIVED]
    ids, publics = members.ids[others].tolist(), [text.tobytes() for text in members.public[others, PAIR]]
    try:
        keys = pair_keys(secret, publics, members.terms.session, me, ids)
    except Refused:  # only a neighbour that colludes masks with a key that is none
        raise GivenUp("a member advertised a key that is none") from None
    for them, key in zip(ids, keys, strict=True):
        (minus if them < me else plus).append(key)  # who has the smaller id had added it


def _joined(members: _Members, row: int, given: Bytes, helped: NDArray[np.bool_]) -> bytes:
    """A member's seed if it survived, else its mask key, from t shares that give what it had advertised."""
    holders, threshold = members.neighbours[row], members.terms.threshold
    at = np.flatnonzero(helped[holders])
    if len(at) < threshold:
        raise GivenUp("too few members were left to unmask the sum")
    shares = given[holders[at], members.columns[row, at]]
    part, check = (COMMITMENT, _committed) if members.status[row] == SURVIVED else (PAIR, _public)
    # Any t of the shares do. Beside a wrong one, or some in a row, t that follow each other are all right.
    for start in range(len(at) if len(at) > threshold else 1):
        some = (start + np.arange(threshold)) % len(at)
        secret = join((at[some] + 1).tolist(), shares[some])
        if check(members, row, secret) == members.public[row, part].tobytes():
            return secret
    raise GivenUp("shares of a member do not fit what it advertised")


def _committed(members: _Members, row: int, seed: bytes) -> bytes:
    return commitment(seed, members.terms.session.to_bytes(), int(members.ids[row]))


def _public(members: _Members, row: int, private: bytes) -> bytes:
    return public_of(private)


def _check_left(members: _Members, left: NDArray[np.bool_], exchange: _Exchange) -> None:
    """Whether the members that are left, [n], can still make a sum and unmask it.

    Raises:
        GivenUp: they are too few, or somebody's neighbours are.
    """
    _enough(int(left.sum()), max(members.terms.fewest, members.signers), exchange)
    if (left[members.neighbours[members.present]].sum(axis=1) < members.terms.threshold).any():
        raise GivenUp("a member has too few neighbours left to unmask the sum")


def _enough(found: int, needed: int, exchange: _Exchange) -> None:
    if found < needed:
        raise GivenUp(f"{found} of {exchange.about.cohort} members were left, {needed} are needed")
