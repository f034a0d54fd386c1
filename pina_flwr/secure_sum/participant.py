"""One member's side of SecAgg+ (Bell et al. 2020, eprint 2020/704, Algorithm 2), without any transport.

Each phase turns what the member knows into what it knows next, and into what it sends:

    advertise   two X25519 key pairs and a seed; sends the public keys and a commitment to the seed
    share       splits seed and mask key among its k neighbours, t of whom can join them; sends the shares
                sealed for each neighbour
    mask        adds to its vector the mask of its seed, and for every neighbour one that cancels in the sum
    unmask      for each neighbour one of the two shares: the seed's if it survived, the mask key's if not

The types are the phases, so nothing can be done out of order. What a member no longer needs is not in its
next type: keys and seed are gone once the vector is masked.

Whatever the server says is checked, and `Refused` ends the session for this member. With neighbours of which
no more than 2t - k - 1 collude, no server gets both shares of a member, even if it tells each neighbour
something else about who survived (`parameters.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pina_flwr.secure_sum.keys import (
    Tampered,
    agree,
    commitment,
    derive,
    new_private,
    public_of,
    seal,
    unseal,
)
from pina_flwr.secure_sum.masks import add_masks
from pina_flwr.secure_sum.packing import pack, packed_size
from pina_flwr.secure_sum.session import Session, Terms
from pina_flwr.secure_sum.shamir import split
from pina_flwr.secure_sum.wire import KEY, PUBLIC, SEALED

Bytes = NDArray[np.uint8]
CIPHER, PAIR, COMMITMENT = slice(0, KEY), slice(KEY, 2 * KEY), slice(2 * KEY, PUBLIC)  # of what is advertised
SECRET, PAIR_KEY = slice(0, KEY), slice(KEY, 2 * KEY)  # of what a member keeps for each neighbour
SEED_SHARE, PAIR_SHARE = slice(0, KEY), slice(KEY, 2 * KEY)  # of what a neighbour holds
PRIME = 2**255 - 19  # X25519's field; a key of RFC 7748 is a number below it
GONE, SURVIVED, VANISHED = 0, 1, 2  # status of a member: never shared, in the sum, shared but not in the sum

REASONS = (
    "stage out of order",
    "stale round",
    "terms differ from the rules",
    "too few members",
    "keys altered",
    "neighbours wrong",
    "not a registered key",
    "signature wrong",
    "too few neighbours",
    "shares altered",
    "survivors wrong",
)
"""All that a server is told when a member refuses. None of it depends on vectors."""


class Refused(Exception):
    """A member refuses to go on. `reason`, one of `REASONS`, is all that may be said about it."""

    def __init__(self, reason: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"{reason!r} is no reason that a server may be told")
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Roster:
    """Members and what they advertised. ids: int64 [r], ascending. public: uint8 [r, 96]."""

    ids: NDArray[np.int64]
    public: Bytes

    def position(self, member: int) -> int:
        """The row of a member, or -1."""
        place = int(np.searchsorted(self.ids, member))
        return place if place < len(self.ids) and self.ids[place] == member else -1

    def key(self, position: int, part: slice) -> bytes:
        """One public key of a member."""
        return self.public[position, part].tobytes()

    def check(self) -> None:
        """Refuse a roster in which one party could be several.

        Raises:
            Refused: ids that don't ascend, a key that two members share, or one in another form than X25519
                gives it, in which the same key would look like two.
        """
        if (np.diff(self.ids) <= 0).any() or (self.ids < 0).any():
            raise Refused("neighbours wrong")
        for part in (CIPHER, PAIR, COMMITMENT):
            keys = {self.key(i, part) for i in range(len(self.ids))}
            odd = part != COMMITMENT and any(int.from_bytes(key, "little") >= PRIME for key in keys)
            if odd or len(keys) < len(self.ids):
                raise Refused("keys altered")

    def digest(self) -> bytes:
        """SHA-256, 32 bytes, of all that is in it."""
        return sha256(self.ids.astype("<i8").tobytes() + self.public.tobytes()).digest()


@dataclass(frozen=True)
class Advertised:
    """What a member knows once it has advertised: two private keys and its mask's seed, 32 bytes each."""

    member: int
    cipher: bytes = field(repr=False)
    pair: bytes = field(repr=False)
    seed: bytes = field(repr=False)

    @classmethod
    def new(cls, member: int) -> Advertised:
        """Fresh keys, from the operating system's entropy."""
        return cls(member, new_private(), new_private(), new_private())

    def public(self, session: Session) -> bytes:
        """What it advertises, 96 bytes: the keys for shares and for masks, and the commitment to the seed."""
        committed = commitment(self.seed, session.to_bytes(), self.member)
        return public_of(self.cipher) + public_of(self.pair) + committed

    def share(self, terms: Terms, roster: Roster, neighbours: NDArray[np.int64]) -> tuple[Shared, Bytes]:
        """Split both secrets among the neighbours.

        Args:
            terms: of the sum; the caller has compared them with its rules.
            roster: checked, with the neighbours and this member.
            neighbours: positions in the roster, int64 [k].

        Returns:
            What it knows next, and for each neighbour sealed shares: uint8 [k, 92].

        Raises:
            Refused: its own keys are not what it advertised, the neighbours make no sense, or a key of theirs
                is none.
        """
        me = roster.position(self.member)
        if me < 0 or roster.public[me].tobytes() != self.public(terms.session):
            raise Refused("keys altered")
        _check_neighbours(terms, roster, neighbours, me)
        keys = self._keys(terms.session, roster, neighbours)
        secrets = np.frombuffer(self.seed + self.pair, np.uint8).reshape(2, KEY)
        shares = split(secrets, len(neighbours), terms.threshold)
        sealed = np.empty((len(neighbours), SEALED), np.uint8)
        for column, (them, row) in enumerate(zip(roster.ids[neighbours].tolist(), keys, strict=True)):
            key = share_key(row[SECRET].tobytes(), terms.session, self.member, them)
            text = seal(key, shares[:, column].tobytes(), _bound(terms.session, self.member, them))
            sealed[column] = np.frombuffer(text, np.uint8)
        return Shared(self.member, self.seed, neighbours, keys), sealed

    def _keys(self, session: Session, roster: Roster, neighbours: NDArray[np.int64]) -> Bytes:
        """The secret for shares and the key of the mask, with each neighbour: uint8 [k, 64]."""
        public = [[roster.key(other, part) for other in neighbours.tolist()] for part in (CIPHER, PAIR)]
        secrets = _agreed(self.cipher, public[0])
        masks = pair_keys(self.pair, public[1], session, self.member, roster.ids[neighbours].tolist())
        return np.frombuffer(b"".join(s + m for s, m in zip(secrets, masks, strict=True)), np.uint8).reshape(
            -1, 2 * KEY
        )


@dataclass(frozen=True)
class Shared:
    """What a member knows once it has shared; its private keys are gone.

    seed: of its mask, 32 bytes. neighbours: positions in the roster, int64 [k]. keys: with each of them, the
    secret for shares and the key of the mask, uint8 [k, 64].
    """

    member: int
    seed: bytes = field(repr=False)
    neighbours: NDArray[np.int64]
    keys: Bytes = field(repr=False)

    def open(self, terms: Terms, roster: Roster, present: NDArray[np.bool_], sealed: Bytes) -> Opened:
        """Take in the shares of the neighbours' secrets.

        Args:
            terms: of the sum.
            roster: as before.
            present: who of the roster has shared, [r].
            sealed: what the neighbours sent, uint8 [k, 92]; rows of those who did not share are not read.

        Raises:
            Refused: under t neighbours shared, or what they sent was altered.
        """
        if not present[roster.position(self.member)]:
            raise Refused("survivors wrong")
        columns = np.flatnonzero(present[self.neighbours])
        if len(columns) < terms.threshold:
            raise Refused("too few neighbours")
        ids = roster.ids[self.neighbours[columns]].tolist()
        held = np.zeros((len(self.neighbours), 2 * KEY), np.uint8)
        for column, them in zip(columns.tolist(), ids, strict=True):
            key = share_key(self.keys[column, SECRET].tobytes(), terms.session, them, self.member)
            bound = _bound(terms.session, them, self.member)
            try:
                held[column] = np.frombuffer(unseal(key, sealed[column].tobytes(), bound), np.uint8)
            except Tampered:
                raise Refused("shares altered") from None
        masks = list(zip(ids, (key.tobytes() for key in self.keys[columns, PAIR_KEY]), strict=True))
        plus = [key for them, key in masks if self.member < them]
        minus = [key for them, key in masks if self.member > them]
        own = self_key(self.seed, terms.session, self.member)
        return Opened(Masked(self.member, self.neighbours, held), [own, *plus], minus)


@dataclass(frozen=True)
class Opened:
    """What a member knows once it has its neighbours' shares, all that it needs to mask its vector.

    after: what it knows once that is done. plus, minus: keys of the masks to add and to subtract. It has no
    more reason to refuse, so that no vector is made in vain.
    """

    after: Masked
    plus: list[bytes] = field(repr=False)
    minus: list[bytes] = field(repr=False)

    def mask(self, terms: Terms, vector: NDArray[np.uint32]) -> tuple[Masked, Bytes]:
        """Mask a vector, uint32 [size] below 2^b.

        Returns:
            What it knows next, and the masked vector, packed to b bits a number.

        Raises:
            ValueError: the vector is of another type or shape, or a number of it is 2^b or more.
        """
        if vector.shape != (terms.size,) or vector.dtype != np.uint32:
            raise ValueError(f"vector {vector.dtype} {vector.shape}: must be uint32 [{terms.size}]")
        if int(vector.max()) >> terms.bits:
            raise ValueError(f"vector: its numbers must be below 2^{terms.bits}")
        total = vector.copy()
        add_masks(total, self.plus, self.minus)
        total &= np.uint32((1 << terms.bits) - 1)
        return self.after, pack(total, terms.bits)


@dataclass(frozen=True)
class Masked:
    """What a member knows once its vector is masked. held: its neighbours' shares, uint8 [k, 64]."""

    member: int
    neighbours: NDArray[np.int64]
    held: Bytes = field(repr=False)

    def check(self, terms: Terms, roster: Roster, present: NDArray[np.bool_], status: Bytes) -> None:
        """Refuse to take part in unmasking with this status; arguments as for `unmask`.

        Raises:
            Refused: the status makes no sense, or under t neighbours survived.
        """
        check_status(present, status)
        if status[roster.position(self.member)] != SURVIVED:
            raise Refused("survivors wrong")
        if (status[self.neighbours] == SURVIVED).sum() < terms.threshold:
            raise Refused("too few neighbours")

    def unmask(self, terms: Terms, roster: Roster, present: NDArray[np.bool_], status: Bytes) -> Bytes:
        """For each neighbour one share, uint8 [k, 32]: of its seed if it survived, of its mask key if not.

        Args:
            terms: of the sum.
            roster: as before.
            present: who of the roster had shared when the vector was masked, [r].
            status: of all in the roster: `GONE`, `SURVIVED` or `VANISHED`, uint8 [r].

        Raises:
            Refused: the status makes no sense, or under t neighbours survived.
        """
        self.check(terms, roster, present, status)
        theirs = status[self.neighbours]
        shares = np.zeros((len(self.neighbours), KEY), np.uint8)
        shares[theirs == SURVIVED] = self.held[theirs == SURVIVED, SEED_SHARE]
        shares[theirs == VANISHED] = self.held[theirs == VANISHED, PAIR_SHARE]
        return shares


def check_status(present: NDArray[np.bool_], status: Bytes) -> None:
    """Refuse a status of members that can't be: each that shared survived or vanished, others are gone.

    Raises:
        Refused: "survivors wrong".
    """
    known = (status == SURVIVED) | (status == VANISHED)
    if status.shape != present.shape or not np.array_equal(known, present) or (status[~known] != GONE).any():
        raise Refused("survivors wrong")


def self_key(seed: bytes, session: Session, member: int) -> bytes:
    """The key of a member's own mask."""
    return derive(seed, "self mask", session.to_bytes(), member, member)


def share_key(secret: bytes, session: Session, sender: int, receiver: int) -> bytes:
    """The key under which one member's shares are sealed for another."""
    return derive(secret, "shares", session.to_bytes(), sender, receiver)


def pair_keys(
    private: bytes, publics: Sequence[bytes], session: Session, me: int, others: Sequence[int]
) -> list[bytes]:
    """The keys of the masks that a member shares with others.

    Of the two, who has the smaller id adds the mask, the other subtracts it.

    Raises:
        Refused: a public key is none.
    """
    pairs = [sorted((me, them)) for them in others]
    secrets = _agreed(private, publics)
    return [derive(s, "pair mask", session.to_bytes(), *ids) for s, ids in zip(secrets, pairs, strict=True)]


def vector_bytes(terms: Terms) -> int:
    """Bytes of a masked vector on the wire."""
    return packed_size(terms.size, terms.bits)


def _agreed(private: bytes, publics: Sequence[bytes]) -> list[bytes]:
    try:
        return agree(private, publics)
    except ValueError:  # a point of low order: everybody would know the secret
        raise Refused("keys altered") from None


def _bound(session: Session, sender: int, receiver: int) -> bytes:
    """What sealed shares are bound to."""
    return session.to_bytes() + sender.to_bytes(8, "little") + receiver.to_bytes(8, "little")


def _check_neighbours(terms: Terms, roster: Roster, neighbours: NDArray[np.int64], me: int) -> None:
    """Exactly k, all different, all in the roster, and not oneself."""
    inside = ((neighbours >= 0) & (neighbours < len(roster.ids)) & (neighbours != me)).all()
    if len(neighbours) != terms.neighbours or not inside or len(set(neighbours.tolist())) < len(neighbours):
        raise Refused("neighbours wrong")
