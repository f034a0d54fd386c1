"""Sketches whose positions say nothing: a public linear map to n numbers, then the Gaussian mechanism.

The map is drawn from the run's seed before anyone looks at data, the same for all users and rounds. Its rows
are orthonormal: a random subspace ("projection"; it keeps all distances about alike, Johnson and
Lindenstrauss 1984), or n random coordinates ("coordinates").

Guarantee. The map does not depend on data, and the norm is bounded after it. What is released is a Gaussian
mechanism of l2 sensitivity S_in for zero-out neighbours, with noise z·S_in on all n numbers: 1 / (2z²)-zCDP,
whatever the map. Nodes whose linear algebra rounds differently lose nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pina_flwr.privacy.noise import secret_generator
from pina_flwr.seeding import generator as public_generator
from pina_flwr.stage1.local_gaussian import LocalGaussian, finite_rows, gaussian_rho


@dataclass(frozen=True, eq=False)
class LinearSketch:
    """Coordinates of a user's update in a public basis, noised.

    basis: n orthonormal rows, float64 [n, h]. values: how the n numbers are bounded and noised.
    """

    basis: Tensor
    values: LocalGaussian

    @property
    def width(self) -> int:
        """See `SketchMechanism.width`."""
        return self.basis.shape[0]

    def release(
        self, deltas: Tensor, noise_multiplier: float, generator: np.random.Generator | None = None
    ) -> Tensor:
        """See `SketchMechanism.release`."""
        gaussian_rho(noise_multiplier)
        projected = finite_rows(deltas, self.basis.shape[1]) @ self.basis.mT
        return self.values.release(projected, noise_multiplier, generator or secret_generator()).float()

    def rho(self, noise_multiplier: float) -> float | None:
        """See `SketchMechanism.rho`: that of the Gaussian mechanism."""
        return gaussian_rho(noise_multiplier)

    def lift(self, centroids: Tensor) -> Tensor:
        """See `SketchMechanism.lift`: by the transposed map, so that inner products stay as they are."""
        return (centroids.double() @ self.basis).to(centroids.dtype)


@lru_cache(maxsize=8)
def random_subspace(seed: int, size: int, hidden: int) -> Tensor:
    """Orthonormal rows that span a uniformly random subspace, float64 [n, h]."""
    draw = public_generator(seed, "sketch projection").standard_normal((hidden, size))
    q, r = np.linalg.qr(draw)
    return torch.from_numpy((q * np.sign(np.diag(r))).T.copy())  # the signs make it uniform (Mezzadri 2007)


@lru_cache(maxsize=8)
def random_coordinates(seed: int, size: int, hidden: int) -> Tensor:
    """Rows of the identity at n distinct random positions, float64 [n, h]."""
    chosen = public_generator(seed, "sketch coordinates").permutation(hidden)[:size]
    return torch.from_numpy(np.eye(hidden)[np.sort(chosen)])
