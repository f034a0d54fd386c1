"""A sketch of few large entries that protects their positions too: a private support, then noisy values.

Mechanism. u is the user's update scaled to norm 1. Each position i is kept with probability
p_i = logistic(b + λ|u_i|), independently, with the public b = logit(n/h): of the zero vector n are kept on
average. This is the exponential mechanism on {drop, keep} (McSherry and Talwar 2007), or report-noisy-max of
each entry against a public threshold, with Gumbel noise on both. Kept positions all carry values, also where
the entry is 0: x on them is brought to norm S_in and noised.

Guarantee. For zero-out neighbours (x and the zero vector) the support is ρ_s-zCDP with
ρ_s = λ²·v / 2, v = max of σ²(a) over log-odds a in [b, b + λ], σ²(a) = tanh(a/2) / (2a) ≤ 1/4.
- A Bernoulli variable of log-odds a is sub-Gaussian with variance proxy σ²(a), the best possible (Kearns and
  Saul 1998); σ² is even and falls with |a|.
- P, Q: distributions of the support for x and for zero. The privacy loss L = ln P/Q is Σ_i λ|u_i|·k_i minus a
  constant, with k_i = 1 if i is kept. Under P and under Q the k_i are independent with log-odds in
  [b, b + λ]; as Σ_i u_i² ≤ 1, L is sub-Gaussian with proxy λ²v = 2ρ_s under either.
- E_P[e^-L] = 1, hence 0 ≤ -E_P[L] + ρ_s. So D_α(P‖Q) = ln E_P[e^((α-1)L)] / (α-1) ≤ E_P[L] + (α-1)·ρ_s
  ≤ α·ρ_s for every α > 1. D_α(Q‖P) ≤ α·ρ_s in the same way, with -L under Q.
- With v = 1/4 this is Hoeffding's lemma, and the λ²/8 of a mechanism of bounded range λ (Dong, Durfee and
  Rogers 2020; Cesar and Rogers 2021).
Given the support, the values are a Gaussian mechanism of l2 sensitivity S_in, 1 / (2z_v²)-zCDP
(`local_gaussian`). Adaptive composition adds both up (Bun and Steinke 2016): with
ρ_s = κ / (2z²), z_v = z / √(1 - κ), the sketch is 1 / (2z²)-zCDP, as the Gaussian mechanism at z.

Why not the n largest by one-shot Gumbel noise (Durfee and Rogers 2019)? That composes n
choices, each of range λ, to n·λ²/8: every choice may be swayed by one large entry. Independent choices share
the norm, Σ u_i² ≤ 1, so that λ is √n times larger here at the same ρ, and more where n/h is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from pina_flwr.privacy.clipping import clip
from pina_flwr.privacy.noise import secret_generator
from pina_flwr.stage1.directions import unit
from pina_flwr.stage1.local_gaussian import LocalGaussian, finite_rows, gaussian_rho

# κ: share of ρ that the support takes. At κ = 0.2, 0.35, 0.5, 0.65, 0.8 the adjusted Rand index, of sketches
# and of users by their nearest centroid, was 0.42, 0.46, 0.46, 0.47, 0.46: mean of 32 settings, of real and
# made updates (h = 64, 256, 1536; n = 4, 16; z from 0.06 to 0.5).
SUPPORT_SHARE = 0.5


@dataclass(frozen=True)
class PrivateSupport:
    """Keeps about n entries, large ones more often, and adds noise to those.

    hidden: h. size: n, expected number of entries kept of a zero vector. values: how they are bounded and
    noised.

    Raises:
        ValueError: n is not within 1..h-1.
    """

    hidden: int
    size: int
    values: LocalGaussian

    def __post_init__(self) -> None:
        if not 1 <= self.size < self.hidden:
            raise ValueError(f"size = {self.size}: must be within 1..{self.hidden - 1}")

    @property
    def width(self) -> int:
        """See `SketchMechanism.width`."""
        return self.hidden

    @property
    def threshold(self) -> float:
        """b, log-odds of keeping a position whose entry is 0."""
        return math.log(self.size / (self.hidden - self.size))

    def release(
        self, deltas: Tensor, noise_multiplier: float, generator: np.random.Generator | None = None
    ) -> Tensor:
        """See `SketchMechanism.release`."""
        rows, generator = finite_rows(deltas, self.hidden), generator or secret_generator()
        keep = self.support(rows, noise_multiplier, generator)
        of_values = noise_multiplier / math.sqrt(1 - SUPPORT_SHARE)
        noisy = self.values.release(torch.where(keep, rows, 0), of_values, generator)
        return torch.where(keep, noisy, 0).float()

    def support(self, rows: Tensor, noise_multiplier: float, generator: np.random.Generator) -> Tensor:
        """Which positions are kept, bool [users, h]; without noise the n largest by magnitude."""
        magnitudes = clip(unit(rows).double(), 1.0)[0].abs()
        rho = gaussian_rho(noise_multiplier)
        if rho is None:
            largest = magnitudes.topk(self.size, dim=1).indices
            return torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(1, largest, True)
        slope = steepest_slope(SUPPORT_SHARE * rho, self.threshold)
        draws = torch.from_numpy(generator.random(tuple(magnitudes.shape)))
        return draws < torch.sigmoid(self.threshold + slope * magnitudes)

    def rho(self, noise_multiplier: float) -> float | None:
        """See `SketchMechanism.rho`: support and values together."""
        return gaussian_rho(noise_multiplier)

    def lift(self, centroids: Tensor) -> Tensor:
        """See `SketchMechanism.lift`: they are in B's space already."""
        return centroids


def variance_proxy(log_odds: float) -> float:
    """σ²(a) = tanh(a/2) / (2a), the sub-Gaussian variance proxy of a Bernoulli variable of log-odds a."""
    a = abs(log_odds)
    return math.tanh(a / 2) / (2 * a) if a > 1e-6 else 0.25


def support_rho(slope: float, threshold: float) -> float:
    """ρ_s = λ²·v / 2 of a support with slope λ and threshold b."""
    nearest_to_even = min(max(0.0, threshold), threshold + slope)
    return slope**2 * variance_proxy(nearest_to_even) / 2


def steepest_slope(rho: float, threshold: float) -> float:
    """The largest λ whose support is `rho`-zCDP."""
    most = math.sqrt(2 * rho / variance_proxy(threshold)) * (1 + 1e-9)  # v is at least σ²(b)
    share = brentq(lambda x: support_rho(x * most, threshold) / rho - 1, 0.0, 1.0)
    return share * most * (1 - 1e-9)  # the root's own error must not lift it above rho
