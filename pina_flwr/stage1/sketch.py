"""Sketches: what one user sends by itself in stage 1 (local differential privacy), and k-means on the server.

Paper, §3.2. ρ is the zCDP of one sketch at noise multiplier z for zero-out neighbours: a user's vector and
the zero vector. Between two vectors that are not zero it is at most 4ρ (group privacy, Bun and Steinke 2016).

| name | positions | ρ of a sketch | numbers sent |
|---|---|---|---|
| projection | none: a public random subspace | 1 / (2z²) | n |
| coordinates | public, random | 1 / (2z²) | n |
| private-support | chosen privately | 1 / (2z²) | h, about n of them not 0 |
| paper | the largest entries, in the clear | not finite | h, n of them not 0 |
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from sklearn.cluster import KMeans
from torch import Tensor

from pina_flwr.config import ConfigError
from pina_flwr.stage1.local_gaussian import LocalGaussian
from pina_flwr.stage1.paper_sketch import PaperSketch
from pina_flwr.stage1.private_support import PrivateSupport
from pina_flwr.stage1.projection import LinearSketch, random_coordinates, random_subspace


class SketchMechanism(Protocol):
    """A way to make sketches of ΔB."""

    @property
    def width(self) -> int:
        """Numbers of a sketch as it leaves the client."""
        ...

    def release(
        self, deltas: Tensor, noise_multiplier: float, generator: np.random.Generator | None = None
    ) -> Tensor:
        """Sketches as they leave the clients, float32 [users, width].

        Args:
            deltas: ΔB of each user, [users, h]; those not all finite count as zero vectors.
            noise_multiplier: z; 0 for no noise.
            generator: source of the noise; None takes a fresh secret one.

        Raises:
            ValueError: another shape, or a z that cannot be.
        """
        ...

    def rho(self, noise_multiplier: float) -> float | None:
        """ρ of one sketch, zCDP for zero-out neighbours; None if none is finite."""
        ...

    def lift(self, centroids: Tensor) -> Tensor:
        """Centroids of sketches [C, width] as points of B's space [C, h]."""
        ...


def open_sketch(
    kind: str, hidden: int, size: int, bound: float, normalise: bool, seed: int
) -> SketchMechanism:
    """The mechanism of that name.

    Args:
        kind: "projection", "coordinates", "private-support" or "paper".
        hidden: h, length of ΔB.
        size: n.
        bound: S_in, l2 norm to which values are brought before noise.
        normalise: scale up to it too, rather than only down.
        seed: of the public part, which all users share.

    Raises:
        ConfigError: n does not fit h.
        ValueError: unknown kind, or a bound that is not finite and above 0.
    """
    values = LocalGaussian(bound, normalise)
    if kind == "paper":
        return PaperSketch(hidden, size, values)
    most = hidden - (kind == "private-support")
    if not 1 <= size <= most:
        raise ConfigError(f"sketch-size = {size}: must be 1..{most} with sketch = {kind!r}, h = {hidden}")
    if kind == "private-support":
        return PrivateSupport(hidden, size, values)
    if kind == "projection":
        return LinearSketch(random_subspace(seed, size, hidden), values)
    if kind == "coordinates":
        return LinearSketch(random_coordinates(seed, size, hidden), values)
    raise ValueError(f"unknown kind of sketch {kind!r}")


def sketch_clip_norm(clip_norm: float, size: int, hidden: int) -> float:
    """Eq. 5: S_in = sqrt(n / h)·S."""
    return clip_norm * math.sqrt(size / hidden)


def cluster_sketches(sketches: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """K-means on all sketches [n, width]; centroids [C, width].

    The order in which sketches arrived does not matter. With fewer distinct ones than clusters the missing
    centroids repeat what there is, or are zero; k-means on such data could not tell them apart either.
    """
    usable = sketches[np.any(sketches != 0, axis=1)]
    usable = usable[np.lexsort(usable.T)]
    distinct = np.unique(usable, axis=0)
    if len(distinct) <= clusters:
        filled = np.zeros((clusters, sketches.shape[1]), dtype=np.float32)
        for c in range(clusters if len(distinct) else 0):
            filled[c] = distinct[c % len(distinct)]
        return filled
    fit = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(usable)
    return fit.cluster_centers_.astype(np.float32)
