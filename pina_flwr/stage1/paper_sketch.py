"""The paper's sketch: the few largest entries of ΔB, noised (arXiv 2604.20596, §3.2, Eq. 5).

The noise protects the values of a sketch. Which positions were kept is a noiseless function of the user's
data, so there is no finite ε.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pina_flwr.privacy.noise import secret_generator
from pina_flwr.stage1.local_gaussian import LocalGaussian, finite_rows, gaussian_rho


@dataclass(frozen=True)
class PaperSketch:
    """Keeps the n/2 largest positive and the n/2 largest negative entries, and adds noise to those.

    hidden: h. size: n. values: how they are bounded and noised.
    """

    hidden: int
    size: int
    values: LocalGaussian

    @property
    def width(self) -> int:
        """See `SketchMechanism.width`."""
        return self.hidden

    def release(
        self, deltas: Tensor, noise_multiplier: float, generator: np.random.Generator | None = None
    ) -> Tensor:
        """See `SketchMechanism.release`."""
        gaussian_rho(noise_multiplier)
        kept = keep_largest(finite_rows(deltas, self.hidden), self.size)
        noisy = self.values.release(kept, noise_multiplier, generator or secret_generator())
        return torch.where(kept != 0, noisy, 0).float()

    def rho(self, noise_multiplier: float) -> None:
        """See `SketchMechanism.rho`: never finite, since positions are not protected."""
        gaussian_rho(noise_multiplier)

    def lift(self, centroids: Tensor) -> Tensor:
        """See `SketchMechanism.lift`: they are in B's space already."""
        return centroids


def keep_largest(deltas: Tensor, size: int) -> Tensor:
    """Keep the n/2 largest positive and n/2 largest negative entries of each row, no other: [users, h]."""
    half = min(size // 2, deltas.shape[1])
    kept = torch.zeros_like(deltas)
    for sign in (1, -1):
        values, where = (sign * deltas).topk(half, dim=1)
        kept.scatter_add_(1, where, sign * values.clamp(min=0))
    return kept
