"""From releases to ε: Rényi DP of the sampled Gaussian mechanism, composed and converted to (ε, δ).

The curve is that of Mironov, Talwar and Zhang (2019, arXiv 1908.10530), the conversion that of Balle et al.
(2020, arXiv 1905.09982, Theorem 21; Eq. 3 of the PINA paper), both as Opacus implements them. Every order
gives a valid ε: the choice of orders costs tightness, never safety. Adjacency: add/remove of one user.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease

Curve = NDArray[np.float64]

# Opacus' series for fractional orders stops too early at some large ones: it falls below 0 at α = 47.005,
# q = 0.505, z = 37.4. That for whole orders works with binomial coefficients, which overflow above 1024.
LARGEST_FRACTIONAL_ORDER, LARGEST_SERIES_ORDER = 12, 1024
# Orders α to begin with, spaced evenly in log(α - 1); `epsilon` then looks between the best one's neighbours.
# Those under 2 are slow to compute and matter at large ε only, those over 1024 at very small ε only.
LOW = tuple(1 + 1.5**-k for k in range(17, 0, -1))
MIDDLE = (*(1 + 1.2**k for k in range(13)), *(float(round(1 + 1.2**k)) for k in range(13, 38)), 1024.0)
HIGH = tuple(float(2**k) for k in range(11, 21))
REFINEMENTS, INNER_ORDERS = 2, 5

# Bound on the absolute error of Opacus' log A(α), whose series truncates and cancels. The worst found against
# 25-digit quadrature at 1,700 random points was 2e-13.
SERIES_ERROR = 1e-12
# Noise multipliers for which the series is used. Far outside it overflows, and ε is huge or next to nothing.
SERIES_Z = (1e-6, 1e9)


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """ε at `delta` of all releases together; `inf` if one of them is unprotected, 0 if there are none.

    Raises:
        ValueError: `delta` is not in (0, 1).
        TypeError: a release of an unknown type.
    """
    return _search(releases, delta)[0]


def is_loose(releases: Sequence[Release], delta: float) -> bool:
    """Whether the best Rényi order for `epsilon` is the last one tried: valid, but not tight."""
    return _search(releases, delta)[1]


def _search(releases: Sequence[Release], delta: float) -> tuple[float, bool]:
    """ε and whether it is loose."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and under 1")
    gaussians = _gaussians(releases)
    if gaussians is None:
        return math.inf, False
    if not gaussians:
        return 0.0, False
    orders, loose = MIDDLE, False
    spent, order = _convert(gaussians, orders, delta)
    if order == MIDDLE[0]:
        orders = LOW + MIDDLE
    elif order == MIDDLE[-1]:
        orders = MIDDLE + HIGH
    if orders is not MIDDLE:
        spent, order = _convert(gaussians, orders, delta)
        loose = order in (orders[0], orders[-1]) and 0 < spent < math.inf
    for _ in range(REFINEMENTS if math.isfinite(spent) else 0):
        orders = _around(order, orders)
        spent, order = _convert(gaussians, orders, delta)
    return max(spent, 0.0), loose


def _around(best: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Finer orders between the neighbours of the best one, which is among them; whole ones if large."""
    i = orders.index(best)
    low, high = orders[max(i - 1, 0)], orders[min(i + 1, len(orders) - 1)]
    inner = 1 + np.geomspace(low - 1, high - 1, INNER_ORDERS + 2)[1:-1]
    finer = np.where(inner > LARGEST_FRACTIONAL_ORDER, np.round(inner), inner)
    return tuple(sorted({low, best, high, *finer.tolist()}))


def _gaussians(releases: Sequence[Release]) -> list[GaussianRelease] | None:
    """The releases that count; None if one of them has no finite ε."""
    found: list[GaussianRelease] = []
    unprotected = False
    for release in releases:
        if isinstance(release, GaussianRelease):
            found += [release] if release.count else []
        elif isinstance(release, UnprotectedRelease):
            unprotected |= release.count > 0
        else:
            raise TypeError(f"no privacy accounting for a release of type {type(release).__name__}")
    return None if unprotected else found


def _convert(releases: list[GaussianRelease], orders: tuple[float, ...], delta: float) -> tuple[float, float]:
    """ε of the composition over `orders` and the order that gives it."""
    total = sum(r.count * _curve(r.noise_multiplier, r.sampling_rate, orders) for r in releases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an optimum at the edge is dealt with by `epsilon`
        spent, order = get_privacy_spent(orders=list(orders), rdp=total, delta=delta)
    return (math.inf if math.isnan(spent) else float(spent)), float(order)


@lru_cache(maxsize=4096)
def _curve(noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...]) -> Curve:
    """RDP of one release at each order, rounded to the safe side.

    Sampling never hurts, so the curve without it, α / (2z²), holds wherever the series is out of reach.

    Raises:
        ArithmeticError: the series gives what no RDP curve can be: one that falls, or NaN.
    """
    alphas = np.array(orders, dtype=np.float64)
    with np.errstate(over="ignore"):
        plain = alphas / 2 / noise_multiplier / noise_multiplier
    if sampling_rate == 1 or not SERIES_Z[0] <= noise_multiplier <= SERIES_Z[1]:
        return plain
    whole = alphas == np.round(alphas)
    in_reach = np.where(whole, alphas <= LARGEST_SERIES_ORDER, alphas < LARGEST_FRACTIONAL_ORDER)
    series = compute_rdp(
        q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=alphas[in_reach].tolist()
    )
    error = SERIES_ERROR / (alphas[in_reach] - 1)
    if not np.all(np.diff(series) >= -1e-9 * series[1:] - 2 * error[:-1]):
        raise ArithmeticError(f"RDP falls with the order at z = {noise_multiplier}, q = {sampling_rate}")
    sampled = np.full_like(alphas, np.inf)
    sampled[in_reach] = np.maximum(series, 0) + error
    return np.minimum(sampled, plain)
