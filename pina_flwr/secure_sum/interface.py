"""What a secure sum offers: a round's messages through its phases, then the sum or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from pina_flwr.secure_sum.session import Rules, Session

VECTOR = "protected"  # the one record that a protected reply holds
REFUSAL = "refusal"  # the one record that a reply holds in which a client refuses, with its reason

Survivors = Mapping[int, Sequence[int]]
"""Members by node whose vectors are in the sum."""


@dataclass(frozen=True)
class SumRound:
    """What is public about one sum.

    session: of which run and round. size: length of a vector. bits: b of integers mod 2^b, or 0 for floats.
    members: ids of those whose vectors are asked for, by node. fewest: members that must survive. reasons:
    phrases with which the app's clients may refuse. reveal: asks nodes for noise that turned out not to be
    needed, given the survivors and how many vanished; None if there is none.
    """

    session: Session
    size: int
    bits: int
    members: Mapping[int, Sequence[int]]
    fewest: int
    reasons: Collection[str] = ()
    reveal: Callable[[Survivors, int], list[Message]] | None = None

    @property
    def cohort(self) -> int:
        """Members that were asked."""
        return sum(map(len, self.members.values()))


@dataclass(frozen=True)
class SumResult:
    """The outcome of a secure sum.

    total: [size], integers mod 2^b (int64) or float64; None if the round has to be dropped, for `reason`.
    survivors: members whose vectors are in it. revealed: replies of nodes about noise that can be removed.
    refusals: reasons that clients gave, with how many members they speak for. lost: members that vanished, by
    phase. ignored: messages that were late, double or not asked for. bytes_up, bytes_down: of all arrays.
    """

    total: np.ndarray | None
    reason: str = ""
    survivors: int = 0
    revealed: tuple[Message, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    ignored: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class SecureSum(Protocol):
    """A secure sum over nodes, from the server's side."""

    def run(self, grid: Grid, requests: Sequence[Message], about: SumRound, timeout: float) -> SumResult:
        """Ask nodes for their members' vectors and add these, through all phases of the protocol.

        Args:
            grid: where nodes are.
            requests: the app's own message to each node in `about.members`.
            about: the sum.
            timeout: seconds for all phases together.
        """
        ...


def open_secure_sum(name: str, rules: Rules) -> SecureSum:
    """The secure sum of the run option `secure-sum`."""
    from pina_flwr.secure_sum.secagg_plus import SecAggPlus
    from pina_flwr.secure_sum.trusted import TrustedSum

    kinds: dict[str, Callable[[], SecureSum]] = {"secagg+": lambda: SecAggPlus(rules), "trusted": TrustedSum}
    return kinds[name]()
