"""What a secure sum offers: a round's messages through its phases, then the sum or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

VECTOR = "protected"  # the one record that a protected reply holds


@dataclass(frozen=True)
class SumResult:
    """The sum over a cohort, float64, or None with the reason why the round has to be dropped."""

    total: np.ndarray | None
    reason: str = ""


class SecureSum(Protocol):
    """A secure sum over nodes, from the server's side."""

    def collect(self, grid: Grid, requests: list[Message], timeout: float) -> list[Message]:
        """Send the requests, go through the protocol's phases, and return the replies of the last one."""
        ...

    def add(self, asked: set[int], replies: Iterable[Message], size: int) -> SumResult:
        """The sum of the protected vectors [size] of all nodes that were asked."""
        ...


def open_secure_sum(name: str) -> SecureSum:
    """The secure sum of the run option `secure-sum`."""
    from pina_flwr.secure_sum.trusted import TrustedSum

    kinds: dict[str, Callable[[], SecureSum]] = {"trusted": TrustedSum}
    return kinds[name]()
