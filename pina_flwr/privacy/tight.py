"""A tighter ε, from privacy loss distributions, to stand beside that of Rényi DP.

A distribution of the privacy loss composes exactly, by convolution (Koskela, Jälkö and Honkela 2020).
dp-accounting discretises it by connecting the dots (Doroshenko et al. 2022, arXiv 2207.04380), rounding up,
so that the figure is an upper bound.

That needs a pair of distributions that dominates all neighbouring data. For the sampled Gaussian mechanism
it is known (Zhu, Dong and Wang 2022, arXiv 2106.08567), for integer noise in many dimensions it is not, nor
for zCDP in general. `gaussian_counterpart` gives the continuous mechanism that those approach as the scale
grows; its ε is not a guarantee of theirs and must be named as what it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce

from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

# Interval of the discretised loss. Connecting dots an interval h apart adds h²/4 or less to the variance of
# one round's loss, so a twentieth of its standard deviation costs less than 0.1 % of the spread.
COARSEST, FINEST = 1e-3, 1e-10
INTERVALS_A_DEVIATION = 20
# Cells that one round and the composition may have: above it the interval is widened, which costs tightness.
CELLS, COMPOSED_CELLS = 1e5, 1e6
# A larger noise multiplier, which would overflow, counts as this one.
LARGEST_Z = 1e9
# Standard deviations of the noise that a discretised loss covers; dp-accounting cuts off e^-50 of the mass.
DEVIATIONS = 10


class NoTightAccountant(ValueError):
    """No privacy loss distribution is known that dominates a release's."""


def tight_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Upper bound on ε at `delta` of Gaussian releases together, by privacy loss distributions.

    Args:
        releases: continuous Gaussian ones, and unprotected ones.
        delta: δ in (0, 1). Under about 1e-12, what is cut off the distributions makes ε infinite.

    Returns:
        ε; `inf` if a release is unprotected or ε is beyond what dp-accounting can hold (some millions), 0 if
        there are no releases.

    Raises:
        ValueError: `delta` is not in (0, 1).
        NoTightAccountant: a release of another mechanism.
        TypeError: a release of an unknown type.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and under 1")
    counts: Counter[tuple[float, float]] = Counter()
    unprotected = False
    for release in releases:
        if isinstance(release, UnprotectedRelease):
            unprotected |= release.count > 0
        elif isinstance(release, GaussianRelease):
            counts[min(release.noise_multiplier, LARGEST_Z), release.sampling_rate] += release.count
        elif isinstance(release, SkellamRelease | DiscreteGaussianRelease | ZcdpRelease):
            raise NoTightAccountant(
                f"no privacy loss distribution is known to dominate a {type(release).__name__}"
            )
        else:
            raise TypeError(f"no privacy accounting for a release of type {type(release).__name__}")
    if unprotected:
        return math.inf
    merged = _merge_unsampled(counts)
    return _composed(merged, delta) if merged else 0.0


def gaussian_counterpart(release: Release) -> GaussianRelease | UnprotectedRelease:
    """The continuous Gaussian release of the same noise over l2 sensitivity, sampling rate and count.

    ρ-zCDP has z = 1 / √(2ρ) and rate 1. Gaussian and unprotected releases are their own counterparts.

    Raises:
        TypeError: a release of an unknown type.
    """
    if isinstance(release, GaussianRelease | UnprotectedRelease):
        return release
    if isinstance(release, SkellamRelease | DiscreteGaussianRelease):
        z = math.sqrt(release.variance) / release.l2
        return GaussianRelease(z, release.sampling_rate, release.count)
    if isinstance(release, ZcdpRelease):
        return GaussianRelease(1 / math.sqrt(2 * release.rho), 1.0, release.count)
    raise TypeError(f"no Gaussian counterpart of a release of type {type(release).__name__}")


def _merge_unsampled(counts: Counter[tuple[float, float]]) -> list[GaussianRelease]:
    """The releases, those without sampling as the one Gaussian mechanism that they are together."""
    merged = [GaussianRelease(z, q, count) for (z, q), count in counts.items() if q < 1 and count]
    unsampled = [(z, count) for (z, q), count in counts.items() if q == 1 and count]
    if unsampled:
        weakest = min(z for z, _ in unsampled)
        inverse = math.sqrt(sum(count * (weakest / z) ** 2 for z, count in unsampled))
        merged.append(GaussianRelease(weakest / inverse, 1.0, 1))
    return merged


def _composed(releases: Sequence[GaussianRelease], delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld  # takes a second to import

    interval = _interval(releases)
    if not math.isfinite(interval):
        return math.inf
    try:
        losses = [
            pld.from_gaussian_mechanism(
                release.noise_multiplier,
                pessimistic_estimate=True,
                value_discretization_interval=interval,
                sampling_prob=release.sampling_rate,
                use_connect_dots=True,
            ).self_compose(release.count)
            for release in releases
        ]
        together = reduce(lambda one, other: one.compose(other), losses)
        return float(together.get_epsilon_for_delta(delta))
    except OverflowError:  # ε is in the millions
        return math.inf


def _interval(releases: Iterable[GaussianRelease]) -> float:
    """Interval to discretise by: fine against one round's loss, coarse enough for the cells there may be.

    The variance and the mean of one round's loss are about χ² = q²(e^(1/z²) - 1) and log(1 + χ²) or less.
    """
    rounds = square = mean = largest = 0.0
    for release in releases:
        precision = 1 / release.noise_multiplier / release.noise_multiplier
        log_loss = _log1p_exp(2 * math.log(release.sampling_rate) + _log_expm1(precision))
        rounds += release.count
        square += release.count * math.expm1(min(log_loss, 1.0))
        mean += release.count * log_loss
        tail = precision / 2 + DEVIATIONS * math.sqrt(precision)
        largest = max(largest, _log1p_exp(math.log(release.sampling_rate) + _log_expm1(tail)))
    finest = max(math.sqrt(square / rounds) / INTERVALS_A_DEVIATION, FINEST)
    return max(min(finest, COARSEST), largest / CELLS, mean / COMPOSED_CELLS)


def _log_expm1(x: float) -> float:
    """log(e^x - 1) for x ≥ 0, without overflow."""
    return x + math.log(-math.expm1(-x)) if x > 0 else -math.inf


def _log1p_exp(x: float) -> float:
    """log(1 + e^x), without overflow."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
