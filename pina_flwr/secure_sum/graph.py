"""Who masks with whom: a random regular graph over the members of a secure sum.

The members are put on a circle in a random order, and each is adjacent to the k/2 next to it on either side:
a Harary graph H(k, n) on a random order, as in section 3 of Bell et al., «Secure Single-Server Aggregation
with (Poly)Logarithmic Overhead» (CCS 2020). `parameters` says how many neighbours it takes.
"""

from __future__ import annotations

from secrets import SystemRandom

import numpy as np


def draw(count: int, neighbours: int) -> np.ndarray:
    """A random graph, int64 [count, neighbours]: row i holds the positions adjacent to i, ascending.

    Symmetric, without loops or double edges; complete if `neighbours` is count - 1. The order is drawn with
    the operating system's entropy, uniformly over all orders.

    Raises:
        ValueError: there is no such graph; see `check_degree`.
    """
    check_degree(count, neighbours)
    if neighbours == count - 1:
        others = np.arange(count - 1)
        return others + (others >= np.arange(count)[:, None])
    order = list(range(count))
    SystemRandom().shuffle(order)
    side = np.arange(1, neighbours // 2 + 1)
    around = np.arange(count)[:, None] + np.concatenate([-side, side])
    circle = np.array(order, dtype=np.int64)
    rows = np.empty((count, neighbours), dtype=np.int64)
    rows[circle] = np.sort(circle[around % count], axis=1)
    return rows


def check_degree(members: int, neighbours: int) -> None:
    """Whether `draw` makes a graph in which each of the members has so many neighbours.

    Raises:
        ValueError: under 2 members, or neighbours that are neither even and at least 2 nor all others.
    """
    if not members >= 2:
        raise ValueError(f"members = {members}: must be at least 2")
    if not (neighbours == members - 1 or (2 <= neighbours < members and neighbours % 2 == 0)):
        raise ValueError(
            f"neighbours = {neighbours}: must be even and from 2 to {members - 1}, or {members - 1}, "
            f"for {members} members"
        )
