"""From releases to ε: their Rényi DP, on a Poisson sample, composed and converted to (ε, δ).

RDP adds up (Mironov 2017). Sampling amplifies it as `sampling` proves at whole orders; for the Gaussian
mechanism that sum is exact, and between whole orders the series of Mironov, Talwar and Zhang (2019, arXiv
1908.10530) is, as Opacus implements it. The conversion is that of Balle et al. (2020, arXiv 1905.09982,
Theorem 21; Eq. 3 of the PINA paper). Every order gives a valid ε: the choice of orders costs tightness, never
safety. Adjacency: add/remove of one user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pina_flwr.privacy.releases import (
    Curve,
    DiscreteGaussianRelease,
    GaussianRelease,
    ProtectedRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)
from pina_flwr.privacy.sampling import poisson

Orders = tuple[float, ...]

# Opacus' series for fractional orders stops too early at some large ones: it falls below 0 at α = 47.005,
# q = 0.505, z = 37.4. The sum at whole orders costs as many terms as the order.
LARGEST_FRACTIONAL_ORDER, LARGEST_SAMPLED_ORDER = 12, 1024
# Orders α to begin with, spaced evenly in log(α - 1); `_search` then looks between the best one's neighbours.
# Those under 2 are slow to compute and matter at large ε only, those over 1024 at very small ε only.
LOW: Orders = tuple(1 + 1.5**-k for k in range(17, 0, -1))
LOW_STEP = 4
MIDDLE: Orders = (
    *(1 + 1.2**k for k in range(13)),
    *(float(round(1 + 1.2**k)) for k in range(13, 38)),
    1024.0,
)
HIGH: Orders = tuple(float(2**k) for k in range(11, 21))
# What takes the place of LOW and MIDDLE for mechanisms whose RDP is known at whole orders only.
WHOLE: Orders = (*map(float, range(2, 65)), *(float(round(64 * 1.06**k)) for k in range(1, 48)), 1024.0)
REFINEMENTS, INNER_ORDERS = 2, 3

# Bound on the absolute error of Opacus' log A(α), whose series truncates and cancels. The worst found against
# 25-digit quadrature at 1,700 random points was 2e-13.
SERIES_ERROR = 1e-12
# Noise multipliers for which the series is used. Far outside it overflows, and ε is huge or next to nothing.
SERIES_Z = (1e-6, 1e9)


@dataclass(frozen=True)
class _Found:
    """ε, whether it is loose, and all orders tried."""

    epsilon: float
    loose: bool = False
    tried: Orders = ()


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """ε at `delta` of all releases together; `inf` if one of them is unprotected, 0 if there are none.

    Raises:
        ValueError: `delta` is not in (0, 1).
        TypeError: a release of an unknown type.
    """
    return _search(releases, delta).epsilon


def is_loose(releases: Sequence[Release], delta: float) -> bool:
    """Whether `epsilon` is valid but not tight: the Rényi order that suits it is beyond those there are."""
    return _search(releases, delta).loose


def epsilon_over_rounds(
    round_releases: Sequence[Release],
    rounds: Sequence[int],
    delta: float,
    before: Sequence[Release] = (),
) -> NDArray[np.float64]:
    """ε at `delta` after each number of rounds, each round of `round_releases`, all after `before`.

    The RDP of a round is computed once and each number of rounds has its own best order, among those that
    `epsilon` tries for the fewest and for the most rounds. So ε does not fall as rounds grow, is that of
    `epsilon` at the most, and within a percent of it elsewhere.

    Args:
        round_releases: what one round releases.
        rounds: numbers of rounds, at least 0, in any order.
        delta: δ in (0, 1).
        before: what was released ahead of the first round.

    Returns:
        float64 [rounds].

    Raises:
        ValueError: `delta` or a number of rounds is out of its bounds.
        TypeError: a release of an unknown type; `rounds` are not whole numbers.
    """
    _check_delta(delta)
    counts = _round_counts(rounds)
    past, each = _protected(before), _protected(round_releases)
    if past is None or not counts.size:
        return np.full(counts.shape, np.inf)
    if each is None:
        return np.where(counts > 0, np.inf, epsilon(before, delta))
    whole = _whole_only([*past, *each])
    orders: set[float] = set()
    for count in (int(counts.min()), int(counts.max())):
        orders |= set(_search_orders([*past, *_times(each, count)], delta, whole).tried)
    tried = tuple(sorted(orders))
    if not tried:
        return np.zeros(counts.shape)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        grown = np.where(counts[:, None] > 0, counts[:, None] * _total(each, tried), 0)
    spent = _convert(_total(past, tried) + grown, tried, delta).min(axis=1)
    return np.where(counts + len(past) > 0, np.maximum(spent, 0), 0)


def _round_counts(rounds: Sequence[int]) -> NDArray[np.int64]:
    counts = np.asarray(rounds)
    if counts.size and counts.dtype.kind not in "iu":
        raise TypeError(f"rounds of dtype {counts.dtype}: must be whole numbers")
    if counts.size and counts.min() < 0:
        raise ValueError(f"rounds = {counts.min()}: must be at least 0")
    return counts.astype(np.int64)


def _times(releases: Sequence[ProtectedRelease], rounds: int) -> list[ProtectedRelease]:
    return [replace(r, count=r.count * rounds) for r in releases] if rounds else []


def _search(releases: Sequence[Release], delta: float) -> _Found:
    """ε over the orders that suit the releases."""
    _check_delta(delta)
    protected = _protected(releases)
    if protected is None:
        return _Found(math.inf)
    return _search_orders(protected, delta, _whole_only(protected))


def _search_orders(releases: Sequence[ProtectedRelease], delta: float, whole: bool) -> _Found:
    """ε over whole or real orders, widened where the best one is the last, then refined around it."""
    if not releases:
        return _Found(0.0)
    lower, orders = ((), WHOLE) if whole else (LOW, MIDDLE)
    tried = set(orders)
    spent, order = _best(releases, orders, delta)
    if order == orders[-1]:
        lower, orders = (), orders + HIGH
        spent, order = _best(releases, orders, delta)
    while order == orders[0] and lower:  # a few at a time, because they are slow
        lower, orders = lower[:-LOW_STEP], lower[-LOW_STEP:] + orders[:2]
        tried.update(orders)
        spent, order = _best(releases, orders, delta)
    loose = 0 < spent < math.inf and (
        _wants_lower(spent, delta) if whole and order == 2 else order in (orders[0], orders[-1])
    )
    for _ in range(REFINEMENTS if math.isfinite(spent) else 0):
        orders = _around(order, orders, whole)
        tried.update(orders)
        spent, order = _best(releases, orders, delta)
    return _Found(max(spent, 0.0), loose, tuple(sorted(tried)))


def _wants_lower(at_two: float, delta: float) -> bool:
    """Whether orders under 2, if RDP were known there, would take 2 % or more off ε.

    At order 2, ε = R + b with b = -log 4δ. Were RDP R·α/2, ε would be about R·α/2 + b/(α - 1), whose least
    value is 2 % under R + b at R = 3b.
    """
    return at_two > -4 * math.log(4 * delta)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and under 1")


def _protected(releases: Sequence[Release]) -> list[ProtectedRelease] | None:
    """The releases that count; None if one of them has no finite ε."""
    found: list[ProtectedRelease] = []
    unprotected = False
    for release in releases:
        if isinstance(release, ProtectedRelease):
            found += [release] if release.count else []
        elif isinstance(release, UnprotectedRelease):
            unprotected |= release.count > 0
        else:
            raise TypeError(f"no privacy accounting for a release of type {type(release).__name__}")
    return None if unprotected else found


def _whole_only(releases: Sequence[ProtectedRelease]) -> bool:
    """Whether the RDP of one of them is known at whole orders only."""
    return any(
        isinstance(r, SkellamRelease) or (isinstance(r, DiscreteGaussianRelease) and r.sampling_rate < 1)
        for r in releases
    )


def _around(best: float, orders: Orders, whole: bool) -> Orders:
    """Finer orders between the neighbours of the best one, which is among them; whole ones if large."""
    i = orders.index(best)
    low, high = orders[max(i - 1, 0)], orders[min(i + 1, len(orders) - 1)]
    inner = 1 + np.geomspace(low - 1, high - 1, INNER_ORDERS + 2)[1:-1]
    finer = np.where(whole | (inner > LARGEST_FRACTIONAL_ORDER), np.round(inner), inner)
    return tuple(sorted({low, best, high, *finer.tolist()}))


def _best(releases: Sequence[ProtectedRelease], orders: Orders, delta: float) -> tuple[float, float]:
    """ε of the composition over `orders` and the order that gives it."""
    spent = _convert(_total(releases, orders), orders, delta)
    best = int(spent.argmin())
    return float(spent[best]), orders[best]


def _total(releases: Sequence[ProtectedRelease], orders: Orders) -> Curve:
    """RDP of the composition at each order."""
    total = np.zeros(len(orders))
    with np.errstate(over="ignore"):
        for release in releases:
            total += release.count * _curve(replace(release, count=1), orders)
    return total


def _convert(rdp: Curve, orders: Orders, delta: float) -> Curve:
    """ε of each order, [..., orders]; may be negative, where 0 holds.

    Raises:
        ArithmeticError: NaN, of which no ε may be made.
    """
    if np.isnan(rdp).any():
        raise ArithmeticError("RDP is NaN")
    alphas = np.array(orders)
    return rdp + np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)


@lru_cache(maxsize=4096)
def _curve(release: ProtectedRelease, orders: Orders) -> Curve:
    """RDP of one release at each order, rounded to the safe side.

    Sampling never hurts, so the curve without it holds wherever that with it is out of reach.
    """
    alphas = np.array(orders, dtype=np.float64)
    plain = release.curve(alphas)
    if release.sampling_rate == 1 or isinstance(release, ZcdpRelease):
        return plain
    sampled = np.full_like(alphas, np.inf)
    whole = (alphas == np.round(alphas)) & (alphas <= LARGEST_SAMPLED_ORDER)
    sampled[whole] = poisson(release.curve, release.sampling_rate, alphas[whole])
    if isinstance(release, GaussianRelease) and SERIES_Z[0] <= release.noise_multiplier <= SERIES_Z[1]:
        between = (alphas != np.round(alphas)) & (alphas < LARGEST_FRACTIONAL_ORDER)
        sampled[between] = _series(release, alphas[between])
        _check_rising(release, alphas[whole | between], sampled[whole | between])
    return np.minimum(sampled, plain)


def _series(release: GaussianRelease, alphas: Curve) -> Curve:
    """RDP of the sampled Gaussian mechanism at fractional orders, rounded up."""
    if not alphas.size:
        return alphas
    from opacus.accountants.analysis.rdp import compute_rdp  # takes seconds to import, being built on torch

    rdp = compute_rdp(
        q=release.sampling_rate, noise_multiplier=release.noise_multiplier, steps=1, orders=alphas.tolist()
    )
    return np.maximum(rdp, 0) + SERIES_ERROR / (alphas - 1)  # np.maximum keeps NaN


def _check_rising(release: GaussianRelease, alphas: Curve, rdp: Curve) -> None:
    """Refuse what no RDP curve can be: one that falls, or NaN.

    Raises:
        ArithmeticError: it does.
    """
    error = SERIES_ERROR / (alphas - 1)
    with np.errstate(invalid="ignore"):  # infinity less infinity at tiny z
        falls = rdp[1:] < (1 - 1e-9) * rdp[:-1] - 2 * error[:-1]
    if np.isnan(rdp).any() or falls.any():
        raise ArithmeticError(
            f"RDP falls with the order at z = {release.noise_multiplier}, q = {release.sampling_rate}"
        )
