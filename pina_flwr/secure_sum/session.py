"""What identifies one secure sum, and what all who take part in it must agree on."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields

from pina_flwr.secure_sum.parameters import Parameters, check, choose, complete
from pina_flwr.secure_sum.shamir import MOST_HOLDERS

LARGEST_ID = 2**63 - 1
LONGEST_RUN = 2**16


@dataclass(frozen=True)
class Session:
    """One secure sum of one run: keys, masks and messages of one session are of no use in another.

    run: name of the run, unique among those that share members. round: from 1, ascending within the run.

    Raises:
        ValueError: an empty or too long name, or a round out of bounds.
    """

    run: str
    round: int

    def __post_init__(self) -> None:
        if not 0 < len(self.run.encode()) < LONGEST_RUN:
            raise ValueError(f"run of {len(self.run)} characters: must be of 1 to {LONGEST_RUN - 1} bytes")
        if not 1 <= self.round <= LARGEST_ID:
            raise ValueError(f"round = {self.round}: must be from 1 to {LARGEST_ID}")

    def to_bytes(self) -> bytes:
        """Another string for each session, and none is the start of another."""
        run = self.run.encode()
        return struct.pack("<I", len(run)) + run + struct.pack("<Q", self.round)


@dataclass(frozen=True)
class Rules:
    """How a secure sum is set up. Servers and clients each take them from their own configuration.

    dropout: share of the members that may vanish. corrupted: share that may collude with the server.
    neighbours, threshold: k and t, or 0 to derive them. signed: keys are signed and the active set is agreed
    on (the malicious-server variant).

    Raises:
        ValueError: one of them is out of bounds, or t is given and k is not or leaves no room for it.
    """

    dropout: float = 0.1
    corrupted: float = 0.0
    neighbours: int = 0
    threshold: int = 0
    signed: bool = False

    def __post_init__(self) -> None:
        k, t = self.neighbours, self.threshold
        for name, share in (("dropout", self.dropout), ("corrupted", self.corrupted)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} = {share}: must be at least 0 and below 1")
        if k < 0 or k % 2:
            raise ValueError(f"neighbours = {k}: must be even (0: derived)")
        if t and not k:
            raise ValueError(f"threshold = {t}: must be 0 (derived) unless neighbours are given")
        if t and not k // 2 < t <= k:
            raise ValueError(f"threshold = {t}: must be above half of neighbours = {k}, and at most {k}")
        if self.signed and k:
            raise ValueError(f"neighbours = {k}: signed sums have all members as neighbours; set 0")

    def parameters(self, members: int) -> Parameters:
        """k and t for so many members: derived, or as given where they are many enough for that.

        Raises:
            ValueError: there are none, as too many may vanish or collude.
        """
        if self.signed:
            return complete(members, self.dropout, self.corrupted)
        if not self.neighbours:
            return choose(members, self.dropout, self.corrupted)
        if members <= self.neighbours + 1:
            return complete(members, self.dropout, self.corrupted)
        given = Parameters(self.neighbours, self.threshold or self.neighbours // 2 + 1)
        check(given, members)
        return given


@dataclass(frozen=True)
class Terms:
    """What is public about one sum, as the server says it and each client checks it.

    size: numbers of a vector. bits: b, they are mod 2^b. members: how many advertised keys. neighbours,
    threshold: k and t. fewest: members whose vectors must be in the sum.

    Raises:
        ValueError: a number is out of bounds.
    """

    session: Session
    size: int
    bits: int
    members: int
    neighbours: int
    threshold: int
    fewest: int

    def __post_init__(self) -> None:
        bounds = {
            "size": (1, 2**40),
            "bits": (8, 32),
            "members": (2, 2**31),
            "neighbours": (1, min(self.members - 1, MOST_HOLDERS)),
            "threshold": (self.neighbours // 2 + 1, self.neighbours),
            "fewest": (1, self.members),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from {low} to {high}")

    @classmethod
    def of(cls, session: Session, numbers: Mapping[str, int]) -> Terms:
        """Those of a session with these numbers by name; inverse of `numbers`.

        Raises:
            ValueError: a number is missing, unknown or out of bounds.
        """
        if set(numbers) != set(NUMBERS):
            raise ValueError(f"numbers {sorted(numbers)}: must be {sorted(NUMBERS)}")
        return cls(session, **numbers)

    @property
    def numbers(self) -> dict[str, int]:
        """All but the session, by name."""
        return {name: getattr(self, name) for name in NUMBERS}


NUMBERS = tuple(number.name for number in fields(Terms) if number.name != "session")
