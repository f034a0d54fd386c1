"""The Gaussian mechanism on a sum over users: bound each contribution, add each client's share of noise.

Paper, Eq. 7 and §2.2: updates are clipped to l2 norm S and the sum carries N(0, (z·S)²) a coordinate. With
the noise of a larger cohort simulated (pfl-research's `noise_cohort_size`), the noise on the mean is that
of N participants: the sum over a cohort of expected size q·|K| then carries z·S·q·|K| / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pina_flwr.privacy.noise import gaussian

# float32 rounding may lift a clipped norm over the bound by about 1e-7 of it: aim that much lower.
ROUNDING = 1e-6


@dataclass(frozen=True)
class GaussianSum:
    """Gaussian mechanism for a secure sum.

    clip_norm: S. noise_multiplier: z, 0 for no noise. expected_cohort: q·|K|. noise_cohort: N, or 0 for the
    cohort itself.
    """

    clip_norm: float
    noise_multiplier: float
    expected_cohort: float
    noise_cohort: int = 0

    @property
    def mean_std(self) -> float:
        """σ a coordinate on the mean (the sum divided by the expected cohort)."""
        return self.noise_multiplier * self.clip_norm / (self.noise_cohort or self.expected_cohort)

    @property
    def sum_std(self) -> float:
        """σ a coordinate on the sum."""
        return self.mean_std * self.expected_cohort

    def share(self, users: int, cohort: int, size: int) -> np.ndarray:
        """The noise [size] that `users` of a cohort of `cohort` add together; all shares make up `sum_std`.

        Raises:
            ValueError: no such share exists (fails closed rather than add too little).
        """
        if not 1 <= users <= cohort:
            raise ValueError(f"noise share of {users} users in a cohort of {cohort}")
        return gaussian((size,), self.sum_std * math.sqrt(users / cohort))


def clip(vectors: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Eq. 7: scale rows of [users, d] down to l2 norm `bound`; rows that are not finite become zero.

    Returns the vectors and which users were left out that way, bool [users].
    """
    norms = torch.linalg.vector_norm(vectors.double(), dim=1)
    left_out = ~torch.isfinite(norms)
    factors = (bound * (1 - ROUNDING) / norms).clamp(max=1)  # a zero norm gives inf, hence 1
    clipped = vectors * factors[:, None].to(vectors.dtype)
    return torch.where(left_out[:, None], 0, clipped), left_out
