"""Mechanisms as data: what a run lets out about a user, in the form that the accountant composes.

Adjacency is add/remove of one user's whole data set (zero-out: the user's contribution becomes zero)
everywhere in this package. Each release knows its Rényi DP without sampling, `curve`; sampling, composition
and conversion are the accountant's. The sensitivity of a continuous release is 1 in units of the clip norm,
so its noise multiplier z is σ / S; those of integer releases are given in integers, as summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
"""RDP at some orders, or the orders themselves, float64 [orders]."""

SMALLEST_SHARE_VARIANCE = 0.25
"""Least variance of one client's discrete Gaussian for which sums of them are bounded."""


@dataclass(frozen=True)
class GaussianRelease:
    """`count` releases of a Gaussian mechanism of l2 sensitivity 1, each on a Poisson sample of the users.

    Attributes:
        noise_multiplier: z, standard deviation of the noise over the sensitivity; finite and above 0.
        sampling_rate: q in (0, 1], probability with which a user is in each sample; 1 is no amplification.
        count: how often it is released; at least 0.

    Raises:
        ValueError: a field is out of its bounds.
        TypeError: `count` is not an int.
    """

    noise_multiplier: float
    sampling_rate: float
    count: int

    def __post_init__(self) -> None:
        _check_positive("noise_multiplier", self.noise_multiplier)
        _check_rate(self.sampling_rate)
        _check_natural("count", self.count, least=0)

    def curve(self, orders: Curve) -> Curve:
        """RDP of one release without sampling at real orders above 1: α / (2z²) (Mironov 2017)."""
        with np.errstate(over="ignore"):
            return orders / 2 / self.noise_multiplier / self.noise_multiplier


@dataclass(frozen=True)
class SkellamRelease:
    """`count` releases of a sum of integer vectors with Skellam noise on every coordinate.

    Attributes:
        l1: l1 sensitivity of the integer sum; at least `l2`, which no vector's l1 norm is under.
        l2: its l2 sensitivity; finite and above 0.
        variance: μ, variance of the noise on each coordinate of the sum; finite and above 0.
        sampling_rate: q in (0, 1], probability with which a user is in each sample; 1 is no amplification.
        count: how often it is released; at least 0.

    Raises:
        ValueError: a field is out of its bounds.
        TypeError: `count` is not an int.
    """

    l1: float
    l2: float
    variance: float
    sampling_rate: float
    count: int

    def __post_init__(self) -> None:
        _check_positive("l2", self.l2)
        _check_positive("l1", self.l1)
        if self.l1 < self.l2:
            raise ValueError(f"l1 = {self.l1}: must be at least l2 = {self.l2}, as every vector's l1 norm is")
        _check_positive("variance", self.variance)
        _check_rate(self.sampling_rate)
        _check_natural("count", self.count, least=0)

    def curve(self, orders: Curve) -> Curve:
        """RDP of one release without sampling at whole orders from 2.

        α·l2² / (2μ) + min(((2α - 1)·l2² + 6·l1) / (4μ²), 3·l1 / (2μ)): Agarwal, Kairouz and Liu (2021, arXiv
        2110.04995), Corollary 3.6.

        Raises:
            ValueError: an order is not whole; the corollary holds for whole orders only.
        """
        if not np.all((orders >= 2) & (orders == np.round(orders))):
            raise ValueError("RDP of Skellam noise is bounded at whole orders from 2 only")
        mu, square = self.variance, self.l2 * self.l2
        with np.errstate(over="ignore"):
            small_scale = 3 * np.float64(self.l1) / mu / 2
            large_scale = ((2 * orders - 1) * square + 6 * self.l1) / mu / mu / 4
            return orders * square / mu / 2 + np.minimum(large_scale, small_scale)


@dataclass(frozen=True)
class DiscreteGaussianRelease:
    """`count` releases of a sum of integer vectors, each client adding discrete Gaussian noise of its own.

    The sum P of n discrete Gaussians of parameter σ² is close to G, the one of s² = nσ². Kairouz, Liu and
    Steinke (2021, arXiv 2102.06387), Proposition 14, bound its RDP by the smaller of

        α/2 · l2²/s² + τ·d   and   α/2 · (l2²/s² + 2τ·l1/s + τ²·d),   τ = 10 Σ_{k<n} exp(-2π²σ²·k/(k+1)).

    Proof. (1) Let X and Y be discrete Gaussians of σ² and ς², 1/v = 1/σ² + 1/ς². Completing the square, the
    law of X + Y over that of σ² + ς² is, up to a constant, a sum of exp(-j²/2v) over a shifted copy of Z. By
    Poisson summation that is constant up to factors in 1 ± 2Σ_{j>0} r^(j²), r = exp(-2π²v), so the ratio of
    the two laws is within exp(±5r) where r ≤ 0.3; for σ² ≥ 1/4 and ς² = kσ², r = exp(-2π²σ²·k/(k+1)) is. Add
    one client after the other: each coordinate of P is within exp(±τ/2) of G. (2) Hence log P(y-x)/P(y) is at
    most log G(y-x)/G(y) + τ a coordinate. The latter is linear in y, and P has the moment generating function
    of N(0, s²) or less (Canonne, Kamath and Steinke 2020), which gives the first bound. (3) Laws within
    exp(±c) are ½c²-zCDP (Bun and Steinke 2016), and by the weak triangle inequality (Mironov 2017,
    Proposition 11, at its best p) such c add up: P(·-x), G(·-x), G, P are τ/2, |x|/s and τ/2 apart in each
    coordinate, which gives the second. The l1 norm of d integers is at most l2·min(√d, l2).

    Attributes:
        l2: l2 sensitivity of the integer sum; finite and above 0.
        variance: s², parameter of the sum's noise on each coordinate; a client's is σ² = s² / n.
        clients: n, how many added noise; at least 1.
        size: d, coordinates of the vector; at least 1.
        sampling_rate: q in (0, 1], probability with which a user is in each sample; 1 is no amplification.
        count: how often it is released; at least 0.

    Raises:
        ValueError: a field is out of its bounds, or several clients add noise of σ² under 1/4.
        TypeError: `clients`, `size` or `count` is not an int.
    """

    l2: float
    variance: float
    clients: int
    size: int
    sampling_rate: float
    count: int

    def __post_init__(self) -> None:
        _check_positive("l2", self.l2)
        _check_positive("variance", self.variance)
        _check_natural("clients", self.clients, least=1)
        _check_natural("size", self.size, least=1)
        _check_rate(self.sampling_rate)
        _check_natural("count", self.count, least=0)
        if self.clients > 1 and self.variance < SMALLEST_SHARE_VARIANCE * self.clients:
            raise ValueError(
                f"variance = {self.variance}: must be at least {SMALLEST_SHARE_VARIANCE:g} for each of the "
                f"{self.clients} clients; scale the vectors up"
            )

    @property
    def tau(self) -> float:
        """τ: twice the bound on |log P/G| on a coordinate; 0 for one client."""
        k = np.arange(1, self.clients)
        return 10 * float(np.exp(-2 * math.pi**2 * self.variance / self.clients * k / (k + 1)).sum())

    def curve(self, orders: Curve) -> Curve:
        """RDP of one release without sampling at real orders above 1."""
        tau, deviation = self.tau, math.sqrt(self.variance)
        with np.errstate(over="ignore"):
            ratio = np.float64(self.l2) / deviation
            l1 = ratio * min(math.sqrt(self.size), self.l2)
            inside = ratio * ratio + 2 * tau * l1 + tau * tau * self.size
            return np.minimum(orders * ratio * ratio / 2 + tau * self.size, orders * inside / 2)


@dataclass(frozen=True)
class ZcdpRelease:
    """`count` releases that are each ρ-zCDP (Bun and Steinke 2016), without amplification.

    For what a user releases by itself, so that no sampling hides it.

    Attributes:
        rho: ρ; finite and above 0.
        count: how often it is released; at least 0.

    Raises:
        ValueError: a field is out of its bounds.
        TypeError: `count` is not an int.
    """

    rho: float
    count: int
    sampling_rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_positive("rho", self.rho)
        _check_natural("count", self.count, least=0)

    def curve(self, orders: Curve) -> Curve:
        """RDP of one release at real orders above 1: α·ρ."""
        with np.errstate(over="ignore"):
            return orders * self.rho


@dataclass(frozen=True)
class UnprotectedRelease:
    """`count` releases that no noise hides, so that no finite ε holds once `count` is above 0.

    Attributes:
        reason: why, as a sentence for the report.
        count: how often it is released; at least 0.

    Raises:
        ValueError: `count` is negative.
        TypeError: `count` is not an int.
    """

    reason: str
    count: int

    def __post_init__(self) -> None:
        _check_natural("count", self.count, least=0)


ProtectedRelease = GaussianRelease | SkellamRelease | DiscreteGaussianRelease | ZcdpRelease
Release = ProtectedRelease | UnprotectedRelease


def unamplified(release: Release) -> Release:
    """The release as those see it who know who was sampled."""
    if isinstance(release, ZcdpRelease | UnprotectedRelease):
        return release
    return replace(release, sampling_rate=1.0)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} = {value}: must be finite and above 0")


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"sampling_rate = {rate}: must be above 0 and at most 1")


def _check_natural(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: must be an int")
    if value < least:
        raise ValueError(f"{name} = {value}: must be at least {least}")
