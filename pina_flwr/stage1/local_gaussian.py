"""The Gaussian mechanism on one user's vector, as every sketch ends with it: bound the norm, add the noise.

The noise N(0, (z·S_in)²) on a vector of l2 norm at most S_in gives the Rényi divergences α / (2z²) between
the vector and the zero vector, in both directions (Mironov 2017, arXiv 1702.07476, Corollary 3): it is
1 / (2z²)-zCDP (Bun and Steinke 2016, arXiv 1605.02065) for zero-out neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pina_flwr.config import LEAST_NOISE
from pina_flwr.privacy.clipping import clip
from pina_flwr.privacy.noise import gaussian
from pina_flwr.stage1.directions import unit


@dataclass(frozen=True)
class LocalGaussian:
    """Brings vectors to l2 norm at most `bound` (S_in), or to exactly that if `normalise`, and adds noise.

    Raises:
        ValueError: `bound` is not finite or not above 0.
    """

    bound: float
    normalise: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise ValueError(f"bound = {self.bound}: must be finite and above 0")

    def bring(self, vectors: Tensor) -> Tensor:
        """Rows of [users, width] brought to the bound, float64; rows that are not finite become zero."""
        scaled = self.bound * unit(vectors).double() if self.normalise else vectors.double()
        return clip(scaled, self.bound)[0]

    def release(self, vectors: Tensor, noise_multiplier: float, generator: np.random.Generator) -> Tensor:
        """Rows of [users, width] brought to the bound plus N(0, (z·S_in)²) on every number, float64."""
        noise = gaussian(tuple(vectors.shape), noise_multiplier * self.bound, np.float64, generator)
        return self.bring(vectors) + torch.from_numpy(noise)


def gaussian_rho(noise_multiplier: float) -> float | None:
    """ρ = 1 / (2z²), the zCDP of a Gaussian mechanism; None without noise.

    Raises:
        ValueError: z is neither 0 nor finite and at least 1e-6.
    """
    if noise_multiplier == 0:
        return None
    if not LEAST_NOISE <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier = {noise_multiplier}: must be 0 or at least {LEAST_NOISE:g}")
    return 1 / (2 * noise_multiplier**2)


def finite_rows(deltas: Tensor, hidden: int) -> Tensor:
    """Updates [users, h] in float64; a user's that are not all finite become zero, as if it had none.

    Raises:
        ValueError: another shape.
    """
    if deltas.ndim != 2 or deltas.shape[1] != hidden:
        raise ValueError(f"updates of shape {tuple(deltas.shape)}: must be [users, {hidden}]")
    rows = deltas.double()
    return torch.where(torch.isfinite(rows).all(dim=1, keepdim=True), rows, 0)
