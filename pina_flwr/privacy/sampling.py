"""RDP of a noisy sum over a Poisson sample of the users, from the RDP of the sum itself.

A user is in the sample with probability q and adds v; otherwise, and with its data removed, it adds nothing.
For whole α ≥ 2, ε(l) bounding the RDP at order l without sampling,

    exp((α - 1)·ε'(α)) = Σ_{l=0..α} C(α, l)·(1 - q)^(α-l)·q^l·exp((l - 1)·ε(l)),

the terms l < 2 without exp. Zhu and Wang (2019), "Poission Subsampled Rényi Differential Privacy", put a
factor 3 on the terms l > 2 for mechanisms in general. It is not needed if the noise of the sum has one law P
whatever the data and whoever is in the sample (shares of noise must make up one total in every round), which
is positive everywhere and symmetric, P(x) = P(-x). Gaussian, discrete Gaussian and Skellam noise and sums of
them are, on Z^d as on R^d.

Proof. (1) Fix what all other users add (their sampling and rounding included) and how v is rounded. The
laws with and without the user are mixtures of the laws given these, with the same weights, and Rényi
divergence is jointly quasi-convex (van Erven and Harremoës 2014, Theorem 13), so the worst fixed case bounds
it. There the sum has law P or, with the user sampled, Q(x) = P(x - v). Reduction mod 2^b is post-processing.
(2) Removal. With t = Q/P and w = 1 - q + q·t, exp((α - 1)·D_α((1-q)P + qQ ‖ P)) = E_P[w^α]. Expand the power:
E_P[t^l] = exp((l - 1)·D_l(Q ‖ P)), and 1 for l < 2.
(3) Addition costs no more, for all real α ≥ 1: E_P[w^(1-α)] ≤ E_P[w^α]. The map x → v - x takes P to Q and Q
to P (the involution of Mironov, Talwar and Zhang 2019, Theorem 5, whose proof is for α at which derivatives
exist), so E_P[f(t)] = E_P[t·f(1/t)] for every f. With f(t) = w^α - w^(1-α) it is then enough that
f(t) + t·f(1/t) ≥ 0 for every t > 0, and as this expression at 1/t is 1/t times itself, for t ≥ 1. Put
a = 1 - q + q·t ≥ 1, b = 1 - q + q/t ≤ 1, A = log a, B = log 1/b, β = α - 1/2. To show is

    √a·sinh(βA) ≥ t·√b·sinh(βB).

At β = 1/2 both sides are q(t - 1)/2. As ab = 1 + q(1 - q)(t + 1/t - 2) ≥ 1, A ≥ B, so that sinh(βA)/sinh(βB)
does not fall as β grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from pina_flwr.privacy.releases import Curve

ROUNDINGS = 8
"""Bound on the roundings in a term's exponent, each relative to the sum of what enters it."""
LOG_RANGE = 1000
"""|log x| of any positive float64 x is under it."""


def poisson(curve: Callable[[Curve], Curve], rate: float, orders: Curve) -> Curve:
    """RDP of one release on a Poisson sample, rounded up; the smaller of ε' and ε.

    The weights C(α, l)(1-q)^(α-l)q^l sum to 1, so the sum is 1 plus theirs times expm1((l - 1)·ε(l)) over
    l ≥ 2, in which nothing cancels. Cost: the sum of the orders.

    Args:
        curve: RDP without sampling, from whole orders float64 [n] to float64 [n]; not NaN.
        rate: q in (0, 1).
        orders: whole orders from 2, float64 [orders].

    Returns:
        float64 [orders].

    Raises:
        ValueError: `rate` or an order is out of bounds, or `curve` gives NaN.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate = {rate}: must be above 0 and under 1")
    if not np.all((orders >= 2) & (orders == np.round(orders))):
        raise ValueError("Poisson sampling is accounted at whole orders from 2 only")
    if not orders.size:
        return orders.astype(np.float64)
    plain = curve(np.arange(2, orders.max() + 1))
    if np.isnan(plain).any():
        raise ValueError("the curve to be amplified has NaN in it")
    whole = orders.astype(np.int64)
    weights, starts, terms = _log_weights(tuple(whole.tolist()), rate)
    with np.errstate(divide="ignore", over="ignore"):
        powers = plain * np.arange(1, len(plain) + 1)
        powers = powers + np.log(-np.expm1(-powers))  # log expm1
    log_sum = _log_sums(weights + powers[terms], starts)
    largest = LOG_RANGE + 3 * gammaln(whole + 1) - whole * math.log(rate) - whole * math.log1p(-rate)
    error = ROUNDINGS * np.finfo(np.float64).eps * (largest + np.maximum(log_sum, 0))
    return np.minimum(np.logaddexp(0, log_sum + error) / (orders - 1) * (1 + 1e-15), plain[whole - 2])


def _log_sums(exponents: Curve, starts: np.ndarray) -> Curve:
    """log Σ exp over the segments that begin at `starts`."""
    top = np.maximum.reduceat(exponents, starts)
    lengths = np.diff(np.append(starts, len(exponents)))
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(over="ignore", divide="ignore"):
        return safe + np.log(np.add.reduceat(np.exp(exponents - np.repeat(safe, lengths)), starts))


@lru_cache(maxsize=32)
def _log_weights(orders: tuple[int, ...], rate: float) -> tuple[Curve, np.ndarray, np.ndarray]:
    """log C(α, l)(1-q)^(α-l)q^l for l = 2..α, one order after the other; where each begins; l - 2 of each."""
    terms = np.concatenate([np.arange(2, order + 1) for order in orders])
    alphas = np.repeat(orders, np.array(orders) - 1)
    starts = np.cumsum([0, *(order - 1 for order in orders[:-1])])
    binomials = gammaln(alphas + 1) - gammaln(terms + 1) - gammaln(alphas - terms + 1)
    weights = binomials + (alphas - terms) * math.log1p(-rate) + terms * math.log(rate)
    return weights, starts, terms - 2
