"""Empirical privacy audit: what the scores of canaries say about the ε of one release, against its claim.

Of m canaries each takes part or not by a fair coin of its own, and the auditor scores each from what was
released: the higher, the likelier it took part. With contribution S·e_i and the i-th coordinate of the noisy
sum as score, canaries do not disturb one another. Several rounds with fresh coins give canary-rounds, which
may be pooled: ε stays that of one release (proof in `_p_value`). Adjacency: add/remove of one canary.

- `one_run_bound` assumes nothing of the mechanism (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846). It
  is below ε with the stated confidence; for a Gaussian, far below.
- `gaussian_estimate` assumes Gaussian scores (after Andrew et al. 2024, arXiv 2302.03098). It is tight if
  they are, and no bound if they are not.

An audit can refute a claim, never prove it. Scores that fall with participation give 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, betaln, erfcx, expit, logit, ndtr, ndtri

Scores = NDArray[np.floating]
Coins = NDArray[np.bool_]

# Shares of the canaries that are guessed. Few are surer, which a Gaussian rewards; all serve small audits.
GUESSED = (1.0, 1 / 16)
BISECTIONS = 50  # halve an interval of ε under 50
UNFAIR = 1e-9  # chance that fair coins are refused


@dataclass(frozen=True)
class AuditResult:
    """What an audit found, next to what was claimed. Every ε is at `delta` and of one release.

    Attributes:
        claimed: the ε claimed.
        bound: lower bound on ε, see `one_run_bound`.
        estimate: ε of the Gaussian fitted to the scores, see `gaussian_estimate`.
        estimate_low: lower confidence limit of `estimate`.
        canaries: canary-rounds scored.
        delta: δ.
    """

    claimed: float
    bound: float
    estimate: float
    estimate_low: float
    canaries: int
    delta: float

    @property
    def holds(self) -> bool:
        """Whether the claim stands: neither lower limit is above it. False if a figure is NaN."""
        return self.bound <= self.claimed and self.estimate_low <= self.claimed


def audit(
    scores: Scores, included: Coins, claimed: float, delta: float, confidence: float = 0.95
) -> AuditResult:
    """Both estimators on the same scores; arguments and errors are theirs.

    If the scores are Gaussian, a true claim fails with a chance of at most 2·(1 - confidence).

    Raises:
        ValueError: `claimed`, the ε to refute, is negative or NaN.
    """
    if not claimed >= 0:
        raise ValueError(f"claimed = {claimed}: must be an ε of at least 0")
    bound = one_run_bound(scores, included, delta, confidence)
    estimate, low = gaussian_estimate(scores, included, delta, confidence)
    return AuditResult(claimed, bound, estimate, low, len(scores), delta)


def one_run_bound(scores: Scores, included: Coins, delta: float, confidence: float = 0.95) -> float:
    """Lower bound on ε of one release, whatever the mechanism: Steinke, Nasr and Jagielski (2023).

    The r/2 highest scores are guessed to be in, the r/2 lowest out. With W right ones of r, ε is refuted
    where W is too many for an (ε, δ)-DP mechanism (theorem and proof in `_p_value`). r is m and m/16,
    fixed beforehand, each tested at half the error allowed, and the best bound counts. Ties count
    against the auditor: of equal scores the wrong guesses come first, which gives at most the W of any order
    that was fixed without knowing the coins.

    Args:
        scores: shape (m,), finite; higher speaks for having taken part.
        included: shape (m,), bool: the coins.
        delta: δ of the claim, in (0, 1); the bound is useful where it is well under the share guessed.
        confidence: chance that the result is at most ε; in [0.5, 1).

    Raises:
        ValueError: shapes, types or values other than these; canaries of one kind only; coins so uneven that
            they cannot be fair.
    """
    values, coins = _checked(scores, included, delta, confidence)
    m = len(values)
    if abs(2 * np.count_nonzero(coins) - m) > math.sqrt(2 * m * math.log(2 / UNFAIR)):
        raise ValueError(f"included: {np.count_nonzero(coins)} of {m} canaries are in, not by fair coins")
    from_low = coins[np.lexsort((~coins, values))]
    from_high = coins[np.lexsort((coins, -values))]
    level = (1 - confidence) / len(GUESSED)
    best = 0.0
    for half in (int(share * m) // 2 for share in GUESSED):
        if half:
            right = np.count_nonzero(from_high[:half]) + np.count_nonzero(~from_low[:half])
            best = max(best, _refuted(m, 2 * half, int(right), delta, level))
    return best


def _refuted(m: int, r: int, v: int, delta: float, level: float) -> float:
    """The largest ε with `_p_value` up to `level`, rounded down; 0 if there is none."""
    if v == 0:
        return 0.0
    # Without δ the p-value is the binomial tail, whose inverse is thus an upper end.
    low, high = 0.0, float(logit(betaincinv(v, r - v + 1, level)))
    if high <= 0 or _p_value(m, r, v, low, delta) > level:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _p_value(m, r, v, middle, delta) <= level:
            low = middle
        else:
            high = middle
    return low


def _p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Bound on P[W >= v] for W right guesses of r among m canaries, under (ε, δ)-DP; non-decreasing in ε.

    Theorem. Let the coins be fair, M (ε, δ)-DP in each coin, r fixed, 1 <= v <= r, X ~ Binomial(r, q) with
    q = e^ε / (1 + e^ε), β = P[X >= v] and c = m·δ·β / (v·P[X = v]). Then P[W >= v] <= β + (1 - β)·min(1, c).

    This is the test of Steinke et al. (2023; their p-value is β + 2·m·δ·max_i P[v - i <= X < v] / i) with the
    largest tail that (ε, δ)-DP permits: in closed form and, wherever it is small, smaller.

    Proof. For a coin i and a set K of counts, call A the outputs whose guess of i is right with W in K. With
    coin i flipped, A are the outputs whose guess of i is wrong with W + 1 in K. So by DP, averaged over the
    coins, P[i right, W in K] <= e^ε·P[i wrong, W + 1 in K] + δ. Let p_k = P[W = k]. The sum over i is
    Σ_{k in K} D_k <= m·δ with D_k = k·p_k - e^ε·(r - k + 1)·p_{k-1}. Let x_k = P[X = k] and ρ_k = p_k / x_k.
    As k·x_k = e^ε·(r - k + 1)·x_{k-1}, D_k = k·x_k·(ρ_k - ρ_{k-1}). Summation by parts gives
    P[W >= v] - β = Σ_k x_k·ρ_k·(1[k >= v] - β) = Σ_{j>=1} (ρ_j - ρ_{j-1})·G_j = Σ_{j>=1} D_j·G_j / (j·x_j)
    with G_j = P[X >= max(j, v)] - β·P[X >= j] >= 0. G_j / (j·x_j) is largest at j = v: from v on it is
    (1 - β)·P[X >= j] / (j·x_j), falling since x is log-concave; up to v it is
    β·P[X < j] / (e^ε·(r - j + 1)·x_{j-1}), rising for the same reason. With K = {j: D_j > 0} the excess over
    β is at most m·δ·β·(1 - β) / (v·x_v). As β and β / x_v = Σ_{k>=v} x_k / x_v rise with ε, and the bound is
    1 - (1 - β)·(1 - min(1, c)), it rises too.

    Several rounds are one M with a coin for each canary-round. To flip one leaves earlier releases alone,
    changes one release within (ε, δ), and reaches later ones through releases only: post-processing.
    """
    q, not_q = float(expit(epsilon)), float(expit(-epsilon))
    tail = float(betainc(v, r - v + 1, q))
    log_point = v * math.log(q) + (r - v) * math.log(not_q) - math.log(r + 1) - betaln(v + 1, r - v + 1)
    # β / P[X = v], or the geometric series above it where both underflow.
    step = q / not_q * (r - v) / (v + 1)
    series = 1 / (1 - step) if step < 1 else math.inf
    ratio = min(series, math.exp(min(math.log(tail) - log_point, 700.0))) if tail > 0 else series
    return tail + (1 - tail) * min(1.0, m * delta * ratio / v)


def gaussian_estimate(
    scores: Scores, included: Coins, delta: float, confidence: float = 0.95
) -> tuple[float, float]:
    """ε of the Gaussian mechanism that fits the scores, and its lower confidence limit: (estimate, low).

    After Andrew et al. (2024). The scores of canaries in and out are taken for two normal samples of one
    variance, that of the noise. The distance of their means over the pooled standard deviation estimates μ of
    Gaussian DP (Dong et al. 2022), which is 1 / z at noise multiplier z. Its standard error is
    √(1/n_in + 1/n_out + μ² / (2·(m - 2))), from the means and from the deviation (Hedges and Olkin 1985).
    If the scores are not Gaussian, neither figure bounds anything.

    Args:
        scores: shape (m,), finite; higher speaks for having taken part.
        included: shape (m,), bool.
        delta: δ in (0, 1).
        confidence: one-sided, in [0.5, 1); asymptotic in m.

    Returns:
        Both at least 0; `inf` if the scores show participation without any noise.

    Raises:
        ValueError: shapes, types or values other than these; under two canaries of a kind; equal scores.
    """
    values, coins = _checked(scores, included, delta, confidence)
    within, without = values[coins], values[~coins]
    m, n_in, n_out = len(values), len(within), len(without)
    if min(n_in, n_out) < 2:
        raise ValueError(f"included: {n_in} canaries in and {n_out} out; the estimate needs two of each")
    if values.min() == values.max():
        raise ValueError(f"scores are all {values[0]:g}: nothing to fit")
    deviation = math.sqrt((np.var(within) * n_in + np.var(without) * n_out) / (m - 2))
    distance = float(np.mean(within) - np.mean(without))
    if deviation == 0:
        return (math.inf, math.inf) if distance > 0 else (0.0, 0.0)
    mu = distance / deviation
    error = math.sqrt(1 / n_in + 1 / n_out + mu**2 / (2 * (m - 2)))
    low = mu - float(ndtri(confidence)) * error
    return gaussian_epsilon(max(mu, 0.0), delta), gaussian_epsilon(max(low, 0.0), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least ε such that a Gaussian mechanism of sensitivity over deviation μ is (ε, δ)-DP.

    Balle and Wang (2018, arXiv 1805.06530, Theorem 8): δ(ε) = Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ). It is solved
    for t = ε/μ - μ/2, in which no term overflows: e^ε·Φ(-t - μ) = e^(-t²/2)·erfcx((t + μ) / √2) / 2.

    Raises:
        ValueError: `mu` is negative or NaN, or `delta` is not in (0, 1).
    """
    if not mu >= 0:
        raise ValueError(f"mu = {mu}: must be at least 0")
    _check_delta(delta)
    if mu in (0, math.inf):
        return float(mu)

    def excess(t: float) -> float:
        lost = ndtr(-t) - math.exp(-t * t / 2) * erfcx((t + mu) / math.sqrt(2)) / 2
        return float(min(lost, 2 * delta)) / delta - 1

    low = max(-mu / 2, -40.0)  # ε = 0, or Φ(-t) = 1 to the last bit
    if excess(low) <= 0:
        return 0.0
    # Without the term subtracted the root is -Φ⁻¹(δ), so it is below that; the rest is for rounding.
    high = max(-float(ndtri(delta)), low) + 1e-6
    t = brentq(excess, low, high, xtol=1e-12, maxiter=1000)
    return max(mu * (t + mu / 2), 0.0)


def _checked(
    scores: Scores, included: Coins, delta: float, confidence: float
) -> tuple[NDArray[np.float64], Coins]:
    """The scores, scaled to at most 1 so that no square overflows, and the coins; or a ValueError."""
    values, coins = np.asarray(scores), np.asarray(included)
    if values.ndim != 1 or coins.shape != values.shape:
        raise ValueError(f"scores {values.shape} and included {coins.shape}: must be vectors of one length")
    if not np.issubdtype(values.dtype, np.floating) or coins.dtype != np.bool_:
        raise ValueError(f"scores are {values.dtype}, included {coins.dtype}: must be floats and bools")
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("scores: NaN or infinite")
    if coins.all() or not coins.any():
        raise ValueError("included: canaries of both kinds are needed, in and out")
    _check_delta(delta)
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence = {confidence}: must be at least 0.5 and under 1")
    return values / (np.abs(values).max() or 1.0), coins


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: must be above 0 and under 1")
