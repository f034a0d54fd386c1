"""A node's side of SecAgg+: all its members through the phases, one Flower action each.

A node hosts one member in a deployment, where every message meets a new process, and many in a simulation.
What members know between two messages is in Flower's `Context.state`: some kilobytes a member, and no secrets
of a session that is over. Members that refuse are left out; the others go on.

An app mounts the layer on its ClientApp and says how vectors are made:

    def side(context):
        def vectors(request, members, terms):
            return my_vectors(request, members)       # uint32 [members, terms.size], below 2^terms.bits
        return Side(Rules(dropout=0.1), vectors)

    mount(app, side)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from pina_flwr.secure_sum.memory import (
    HasAdvertised,
    HasMasked,
    HasShared,
    HasUnmasked,
    Stage,
    recall,
    remember,
)
from pina_flwr.secure_sum.once import Once
from pina_flwr.secure_sum.parameters import agreement
from pina_flwr.secure_sum.participant import SURVIVED, Advertised, Bytes, Refused, Roster, check_status
from pina_flwr.secure_sum.registry import Identity, keys_message, survivors_message
from pina_flwr.secure_sum.session import Rules, Session, Terms
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    ARRAYS,
    HEADER,
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
    action_of,
    pack,
)

Vectors = Callable[[RecordDict, Sequence[int], Terms], NDArray[np.uint32]]
"""From the app's request, the members that take part and the terms: uint32 [members, size], below 2^b.

It may raise `Declined`. It sees to it that the members are this node's and that the terms will do, of which
size, bits and fewest are the server's word. Flower sends the text of any other exception to the server.
"""
In = TypeVar("In")
Out = TypeVar("Out")
S = TypeVar("S", HasAdvertised, HasShared, HasMasked)


class Declined(Exception):
    """The app's own refusal, for all members of a node.

    Its text is all that the server is told: a phrase that the app's server knows.
    """


@dataclass(frozen=True)
class Side:
    """What an app brings to the layer on a node.

    rules: from the node's own configuration. vectors: makes what goes into the sum.
    identity: keys for signed sums; None in others. once: lasting memory of what this node, and no
    other, has answered; None where only `Context.state` keeps it from answering twice.

    Raises:
        ValueError: signed sums without an identity, or an identity that would not be used.
    """

    rules: Rules
    vectors: Vectors
    identity: Identity | None = None
    once: Once | None = None

    def __post_init__(self) -> None:
        if self.rules.signed != (self.identity is not None):
            raise ValueError("identity: must be given for signed sums, and for these only")


def mount(app: ClientApp, side: Callable[[Context], Side]) -> None:
    """Answer the protocol's phases on this ClientApp; `side` is asked at every message."""
    for phase in PHASES:
        app.train(action_of(phase))(_action(phase, side))


def _action(phase: str, side: Callable[[Context], Side]) -> Callable[[Message, Context], Message]:
    def act(message: Message, context: Context) -> Message:
        return Message(answer(phase, message.content, context, side(context)), reply_to=message)

    return act


def survivors_of(state: RecordDict, session: Session) -> tuple[int, int] | None:
    """How many members advertised keys and how many survived, once a node has helped to unmask a sum.

    Both are the server's word, unless the graph was complete. None if there is no such sum.
    """
    stage = recall(state)
    if not isinstance(stage, HasUnmasked) or stage.session != session:
        return None
    return stage.advertised, stage.survivors


# One message ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A message of a phase to a node. stage: what the node remembers."""

    header: Header
    content: RecordDict
    side: Side
    stage: Stage | None

    @property
    def arrays(self) -> Arrays:
        return Arrays.of(self.content)

    def expect(self, kind: type[S]) -> S:
        """The stage in which this message makes sense."""
        session = self.header.session
        if self.stage is not None and self.stage.session != session and _is_stale(self.stage, session):
            raise Refused("stale round")
        if not isinstance(self.stage, kind) or self.stage.session != session:
            raise Refused("stage out of order")
        return self.stage


@dataclass(frozen=True)
class _Answer:
    """stage: to be remembered. arrays: a row for each member that goes on. refused: why others do not."""

    stage: Stage
    arrays: dict[str, np.ndarray]
    refused: dict[int, str]


def answer(phase: str, content: RecordDict, context: Context, side: Side) -> RecordDict:
    """A node's answer to a message of a phase. If it raises, nothing changes and nothing leaves.

    If all members refuse, nothing changes either. If some do, these are out of the session.

    Raises:
        Malformed: the message is none of this phase and run, or of members that are not in the session.
    """
    header = Header.from_record(content)
    if header.phase != phase or header.session.run != str(context.run_id) or not header.members:
        raise Malformed("phase, run or members: not those of this message")
    if side.identity is not None and not set(header.members) <= set(side.identity.own):
        raise Malformed("members: not those whose keys are here")
    try:
        found = _STEPS[phase](_Call(header, content, side, recall(context.state)))
    except (Refused, Declined) as refusal:
        return _reply(header, {}, dict.fromkeys(header.members, str(refusal)))
    reply = _reply(header, found.arrays, found.refused)
    if len(found.refused) == len(header.members):
        return reply
    if not _is_first(side.once, header):
        return _reply(header, {}, dict.fromkeys(header.members, "stale round"))
    remember(context.state, found.stage)
    return reply


def _reply(header: Header, arrays: dict[str, np.ndarray], refused: dict[int, str]) -> RecordDict:
    going_on = [member for member in header.members if member not in refused]
    record = Header(header.session, header.phase, going_on, {}, list(refused.values())).to_record()
    return RecordDict({HEADER: record, ARRAYS: pack(arrays if going_on else {})})


def _is_first(once: Once | None, header: Header) -> bool:
    try:
        return once is None or once.claim(header.session, header.phase)
    except (OSError, ValueError) as problem:  # names the node's files, which Flower would tell the server
        raise RuntimeError("what was answered can't be looked up; the node's log says why") from problem


def _is_stale(stage: Stage | None, session: Session) -> bool:
    return stage is not None and stage.session.run == session.run and stage.session.round >= session.round


def _each(ids: Sequence[int], act: Callable[[int], Out]) -> tuple[list[Out], dict[int, str]]:
    """What `act` gives for the row of each member, and why some refuse."""
    found: list[Out] = []
    refused: dict[int, str] = {}
    for row, member in enumerate(ids):
        try:
            found.append(act(row))
        except Refused as refusal:
            refused[member] = refusal.reason
    return found, refused


# The phases -----------------------------------------------------------------------------------------------


def _advertise(call: _Call) -> _Answer:
    """Fresh keys of each member, signed if there is a registry."""
    session, ids = call.header.session, call.header.members
    if _is_stale(call.stage, session):
        raise Refused("stale round")
    members = [Advertised.new(member) for member in ids]
    public = [member.public(session) for member in members]
    arrays = {"public": _rows(public, PUBLIC)}
    if (identity := call.side.identity) is not None:
        messages = [keys_message(session, *pair) for pair in zip(ids, public, strict=True)]
        signed = [identity.sign(*pair) for pair in zip(ids, messages, strict=True)]
        arrays["signatures"] = _rows(signed, SIGNATURE)
    return _Answer(HasAdvertised(session, members), arrays, {})


def _share(call: _Call) -> _Answer:
    """Each member's secrets, split among the neighbours that the server drew for it."""
    stage, ids = call.expect(HasAdvertised), call.header.members
    terms = _terms(call)
    roster = _roster(call, terms)
    rows = call.arrays.read("neighbours", np.int64, (len(ids), None))
    own = _pick(stage.members, ids, [member.member for member in stage.members])
    found, refused = _each(ids, lambda row: own[row].share(terms, roster, rows[row]))
    sealed = np.array([sealed for _, sealed in found], np.uint8)
    return _Answer(HasShared(terms, roster, [shared for shared, _ in found]), {"sealed": sealed}, refused)


def _mask(call: _Call) -> _Answer:
    """Each member's vector, masked. Vectors are made last: until then it is checked that they are safe."""
    stage, ids = call.expect(HasShared), call.header.members
    terms, roster = stage.terms, stage.roster
    present = call.arrays.read("present", np.bool_, (len(roster.ids),))
    sealed = call.arrays.read("sealed", np.uint8, (len(ids), terms.neighbours, SEALED))
    own = _pick(stage.members, ids, [member.member for member in stage.members])
    opened, refused = _each(ids, lambda row: own[row].open(terms, roster, present, sealed[row]))
    if not opened:
        return _Answer(HasMasked(terms, roster, present, [], np.zeros(0, np.uint8)), {}, refused)
    request = RecordDict({k: v for k, v in call.content.items() if k not in (HEADER, ARRAYS)})
    vectors = call.side.vectors(request, [member.after.member for member in opened], terms)
    if not isinstance(vectors, np.ndarray) or vectors.shape != (len(opened), terms.size):
        kind = getattr(vectors, "shape", type(vectors).__name__)
        raise ValueError(f"vectors {kind}: must be a numpy array [{len(opened)}, {terms.size}]")
    done = [member.mask(terms, row) for member, row in zip(opened, vectors, strict=True)]
    after = HasMasked(terms, roster, present, [masked for masked, _ in done], np.zeros(0, np.uint8))
    return _Answer(after, {"masked": np.array([packed for _, packed in done], np.uint8)}, refused)


def _agree(call: _Call) -> _Answer:
    """Signed sums: each member signs the list of survivors, once."""
    stage, identity = call.expect(HasMasked), call.side.identity
    if identity is None or stage.agreed.size:
        raise Refused("stage out of order")
    terms, roster, present, ids = stage.terms, stage.roster, stage.present, call.header.members
    status = call.arrays.read("status", np.uint8, (len(roster.ids),))
    own = _pick(stage.members, ids, [member.member for member in stage.members])
    _check_survivors(call, stage, status, int((status == SURVIVED).sum()))
    _, refused = _each(ids, lambda row: own[row].check(terms, roster, present, status))
    signers = [member for member in own if member.member not in refused]
    message = _list_of(stage, status)
    signatures = _rows([identity.sign(member.member, message) for member in signers], SIGNATURE)
    return _Answer(HasMasked(terms, roster, present, signers, status), {"signatures": signatures}, refused)


def _unmask(call: _Call) -> _Answer:
    """For each neighbour one share, and never another."""
    stage, ids = call.expect(HasMasked), call.header.members
    if call.side.identity is not None and not stage.agreed.size:
        raise Refused("stage out of order")
    status = call.arrays.read("status", np.uint8, (len(stage.roster.ids),))
    survivors = call.header.terms.get("survivors", 0)
    _check_survivors(call, stage, status, survivors)
    if call.side.identity is not None:
        _check_agreed(call, stage, status)
    own = _pick(stage.members, ids, [member.member for member in stage.members])
    terms, roster, present = stage.terms, stage.roster, stage.present
    shares, refused = _each(ids, lambda row: own[row].unmask(terms, roster, present, status))
    after = HasUnmasked(stage.session, stage.terms.members, survivors)
    return _Answer(after, {"shares": np.array(shares, np.uint8)}, refused)


_STEPS: dict[str, Callable[[_Call], _Answer]] = {
    ADVERTISE: _advertise,
    SHARE: _share,
    MASK: _mask,
    AGREE: _agree,
    UNMASK: _unmask,
}

# Checks ---------------------------------------------------------------------------------------------------


def _terms(call: _Call) -> Terms:
    """The terms that the server states, if they are what this node's rules say.

    Raises:
        Refused: they are not.
    """
    try:
        terms = Terms.of(call.header.session, call.header.terms)
        expected = call.side.rules.parameters(terms.members)
    except ValueError:
        raise Refused("terms differ from the rules") from None
    if (terms.neighbours, terms.threshold) != (expected.neighbours, expected.threshold):
        raise Refused("terms differ from the rules")
    return terms


def _roster(call: _Call, terms: Terms) -> Roster:
    """Who the server says takes part, with keys that are distinct, and signed if there is a registry.

    Raises:
        Refused: it makes no sense, or a signature is wrong.
    """
    ids = call.arrays.read("ids", np.int64, (None,))
    roster = Roster(ids, call.arrays.read("public", np.uint8, (len(ids), PUBLIC)))
    roster.check()
    complete = terms.neighbours == terms.members - 1
    if len(ids) > terms.members or (complete and len(ids) < terms.members):
        raise Refused("too few members" if len(ids) < terms.members else "neighbours wrong")
    if (identity := call.side.identity) is not None:
        signatures = call.arrays.read("signatures", np.uint8, (len(ids), SIGNATURE))
        for member, public, signature in zip(ids.tolist(), roster.public, signatures, strict=True):
            if member not in identity.registry:
                raise Refused("not a registered key")
            message = keys_message(call.header.session, member, public.tobytes())
            if not identity.verify(member, message, signature.tobytes()):
                raise Refused("signature wrong")
    return roster


def _check_survivors(call: _Call, stage: HasMasked, status: Bytes, survivors: int) -> None:
    """Refuse a status that can't be, or a number of survivors that does not fit it or is too small.

    Raises:
        Refused: "survivors wrong" or "too few members".
    """
    check_status(stage.present, status)
    terms, seen = stage.terms, int((status == SURVIVED).sum())
    whole = len(stage.roster.ids) == terms.members
    if not seen <= survivors <= terms.members or (whole and seen != survivors):
        raise Refused("survivors wrong")
    needed = agreement(terms.members, call.side.rules.corrupted) if call.side.identity else 1
    if survivors < max(terms.fewest, needed):
        raise Refused("too few members")


def _check_agreed(call: _Call, stage: HasMasked, status: Bytes) -> None:
    """Refuse to unmask unless enough members signed the same list of survivors as this node did.

    Raises:
        Refused: they did not.
    """
    identity = call.side.identity
    assert identity is not None  # the caller checks
    if not np.array_equal(stage.agreed, status):
        raise Refused("survivors wrong")
    signers = call.arrays.read("signers", np.int64, (None,))
    signatures = call.arrays.read("signatures", np.uint8, (len(signers), SIGNATURE))
    survivors = stage.roster.ids[status == SURVIVED].tolist()
    message = _list_of(stage, status)
    if len(set(signers.tolist())) < len(signers) or not set(signers.tolist()) <= set(survivors):
        raise Refused("signature wrong")
    if len(signers) < agreement(stage.terms.members, call.side.rules.corrupted):
        raise Refused("too few members")
    for signer, signature in zip(signers.tolist(), signatures, strict=True):
        if not identity.verify(signer, message, signature.tobytes()):
            raise Refused("signature wrong")


def _list_of(stage: HasMasked, status: Bytes) -> bytes:
    """What a member signs about a status."""
    survivors = stage.roster.ids[status == SURVIVED].tolist()
    return survivors_message(stage.terms, stage.roster.digest(), survivors)


def _pick(items: Sequence[In], ids: Sequence[int], known: Sequence[int]) -> list[In]:
    """The items of these members, in their order.

    Raises:
        Malformed: one is not among those that are still in the session.
    """
    place = {member: row for row, member in enumerate(known)}
    if not set(ids) <= set(place):
        raise Malformed("members: not all in the session")
    return [items[place[member]] for member in ids]


def _rows(texts: Sequence[bytes], width: int) -> Bytes:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), width)
