"""From a user's ΔB or mean features to directions, and from centroids to the B of the initial models.

What is said of ΔB holds for features too (`stage1-signal`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pina_flwr.seeding import normal


def unit(vectors: Tensor) -> Tensor:
    """Rows scaled to l2 norm 1; zero rows and rows that are not finite become zero: [n, h]."""
    norms = torch.linalg.vector_norm(vectors.double(), dim=-1, keepdim=True)
    usable = torch.isfinite(norms) & (norms > 0)
    return torch.where(usable, vectors / torch.where(usable, norms, 1), 0).to(torch.float32)


def centred(deltas: Tensor, mean: Tensor | None) -> Tensor:
    """ΔB minus what all users share: ΔB_k - ‖ΔB_k‖·m, with m the (private) mean of unit updates: [users, h].

    Rows that are zero or not finite become zero.
    """
    directions = unit(deltas)
    usable = (directions != 0).any(dim=1, keepdim=True)
    norms = torch.linalg.vector_norm(torch.where(usable, deltas, 0).double(), dim=1, keepdim=True)
    return norms.to(deltas.dtype) * (
        directions if mean is None else torch.where(usable, directions - mean, 0)
    )


def directions(signals: Tensor, mean: np.ndarray | None) -> Tensor:
    """What is clustered, and what nearest centroids go by: centred, of length 1, [users, h]."""
    return unit(centred(signals, None if mean is None else torch.from_numpy(mean)))


def random_directions(seed: int, purpose: str, count: int, size: int) -> Tensor:
    """Unit vectors in random directions, from the seed that all share: [count, size]."""
    return unit(normal(seed, purpose, shape=(count, size), std=1.0))


def initial_b(centroids: Tensor, norm: float) -> Tensor:
    """B of each cluster model from its centroid: [C, h].

    What centroids have in common tells clusters apart in nothing, so their mean goes; equal norms keep a
    cluster from starting ahead. norm = 0 leaves them as they are (the paper's reading).
    """
    if norm == 0:
        return centroids
    return norm * unit(centroids - centroids.mean(dim=0))
