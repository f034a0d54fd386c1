"""What a secure sum offers: a round's messages through its phases, then the sum or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

VECTOR = "protected"  # the one record that a protected reply holds
REFUSAL = "refusal"  # the one record that a reply holds in which a client refuses, with its reason


@dataclass(frozen=True)
class SumRound:
    """What is public about one sum.

    size: length of a vector. bits: b of integers mod 2^b, or 0 for floats. members: users by node that was
    asked. fewest: users that must survive. reveal: asks nodes for noise that turned out not to be needed,
    given how many users vanished; None if there is none.
    """

    size: int
    bits: int
    members: Mapping[int, int]
    fewest: int
    reveal: Callable[[list[int], int], list[Message]] | None = None

    @property
    def cohort(self) -> int:
        """Users that were asked."""
        return sum(self.members.values())


@dataclass(frozen=True)
class SumResult:
    """The outcome of a secure sum.

    total: [size], integers mod 2^b or float64; None if the round has to be dropped, for `reason`. survivors:
    users whose vectors are in it. revealed: replies of nodes about noise that can be removed. refusals:
    reasons that clients gave, with how many of the users they speak for.
    """

    total: np.ndarray | None
    reason: str = ""
    survivors: int = 0
    revealed: tuple[Message, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)


class SecureSum(Protocol):
    """A secure sum over nodes, from the server's side."""

    def collect(self, grid: Grid, requests: list[Message], about: SumRound, timeout: float) -> list[Message]:
        """Send the requests, go through the protocol's phases, and return all replies."""
        ...

    def add(self, about: SumRound, replies: Iterable[Message]) -> SumResult:
        """The sum of the protected vectors of the nodes that answered."""
        ...


def open_secure_sum(name: str) -> SecureSum:
    """The secure sum of the run option `secure-sum`."""
    from pina_flwr.secure_sum.trusted import TrustedSum

    kinds: dict[str, Callable[[], SecureSum]] = {"trusted": TrustedSum}
    return kinds[name]()
