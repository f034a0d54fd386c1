"""How the server rescales each cluster's aggregate: the paper's Eq. 8 and Eq. 9, and alternatives.

Every rule is a function from the noisy aggregates of one round to a factor w_i for each cluster. All are
post-processing of what the secure sum released, so none costs privacy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pina_flwr.config import RunConfig

ENERGY_DEVIATIONS = 3.0  # standard deviations of pure noise's energy over which an aggregate counts as signal
COUNT_DEVIATIONS = 2.0  # standard deviations of the noisy count under which it is not trusted


@dataclass(frozen=True)
class Aggregates:
    """One round's result of the secure sum, divided by the expected cohort.

    means: float64 [C, d]. noise_std: σ a coordinate of `means`. shares: noisy share of the cohort that chose
    each cluster [C] with its own σ `shares_std`, or None without a count channel.
    """

    means: np.ndarray
    noise_std: float
    shares: np.ndarray | None = None
    shares_std: float = 0.0


Rule = Callable[[Aggregates], np.ndarray]


def shapiro_wilk(values: np.ndarray) -> float | None:
    """The statistic W, or None where it is not defined: fewer than 3 values, or all the same.

    W does not depend on scale, but scipy takes a range under 1e-19 for none. Over 5,000 values it warns that
    its p-value is inaccurate; W is not affected.
    """
    if values.size < 3 or np.ptp(values) == 0:
        return None
    from scipy.stats import shapiro  # takes half a second to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*p-value.*")
        return float(shapiro(values / np.ptp(values)).statistic)


def equal_norms(aggregates: Aggregates) -> np.ndarray:
    """Eq. 8: bring every aggregate to the smallest l2 norm among clusters.

    A cluster without any update or noise (norm 0) is left aside: taken literally it would stop all training.
    """
    norms = np.linalg.norm(aggregates.means, axis=1)
    present = norms > 0
    factors = np.zeros_like(norms)
    factors[present] = norms[present].min(initial=np.inf) / norms[present]
    return factors


def by_normality(aggregates: Aggregates, threshold: float) -> np.ndarray:
    """Eq. 9: w_i = W_i / Σ_j W_j, and 0 where W_i reaches the threshold. Undefined statistics give 0."""
    statistics = [shapiro_wilk(mean) for mean in aggregates.means]
    w = np.array([0.0 if value is None else value for value in statistics])
    factors = w / w.sum() if w.sum() > 0 else w
    return np.where(w < threshold, factors, 0.0)


def by_energy(aggregates: Aggregates) -> np.ndarray:
    """Eq. 8 on the part of the norm that noise does not explain; clusters with the energy of noise get 0.

    ‖Δ_i‖² of pure noise has mean dσ² and standard deviation σ²√(2d); σ is public.
    """
    d, variance = aggregates.means.shape[1], aggregates.noise_std**2
    excess = (aggregates.means**2).sum(axis=1) - d * variance
    present = excess > ENERGY_DEVIATIONS * variance * math.sqrt(2 * d)
    factors = np.zeros(len(excess))
    signal = np.sqrt(excess[present])
    factors[present] = signal.min(initial=np.inf) / signal
    return factors


def by_count(aggregates: Aggregates) -> np.ndarray:
    """Divide by the share of the cohort that chose the cluster, from the private count beside the update.

    With noise, a share is never taken to be under a quarter of an even one, nor under its own noise: that
    bounds by how much the noise of a (nearly) empty cluster is amplified. Without, each cluster gets its
    exact mean, and one that nobody chose gets 0.
    """
    shares = aggregates.shares
    assert shares is not None  # `rule` pairs this rule with a count channel
    if aggregates.shares_std == 0:
        return np.divide(1, shares, out=np.zeros_like(shares), where=shares > 0)
    return 1 / np.maximum(shares, max(0.25 / len(shares), COUNT_DEVIATIONS * aggregates.shares_std))


def unscaled(aggregates: Aggregates) -> np.ndarray:
    """No rescaling: the plain mean over the cohort, as in FedAvg."""
    return np.ones(len(aggregates.means))


def rule_name(config: RunConfig) -> str:
    """The rule in force: that of the strategy's definition, if it has one, or else the option's.

    FedAvg has none; IFCA and the oracle take each cluster's own mean.
    """
    return config.traits.rule or config.normality


def rule(config: RunConfig, round_: int) -> tuple[Rule, float]:
    """The rule and the server learning rate of stage-2 round `round_` (from 1).

    Eq. 8 runs up to T_no for the paper's rules; `energy` is Eq. 8 in all rounds. With plain steps the server
    learning rates undo the shrinking of PINA's rules, so strategies with a rule of their own keep 1. Another
    `server-optimizer` has a step size of its own, which the learning rates set for all strategies.
    """
    early, name = round_ <= config.t_no, rule_name(config)
    rate = config.server_lr_no if early else config.server_lr
    rate = 1.0 if config.traits.rule and config.server_optimizer == "sgd" else rate
    if name in ("paper", "paper-no-zeroing"):
        threshold = config.normality_threshold if name == "paper" else math.inf
        return (equal_norms if early else lambda a: by_normality(a, threshold)), rate
    return {"count": by_count, "energy": by_energy, "none": unscaled}[name], rate
