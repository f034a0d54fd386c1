"""Counting people: how large a cohort may get, how many must survive it, and how often one user takes part.

All are public numbers that server and clients derive from the same configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import bdtrc, pdtrc

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.secure_sum.parameters import FAILURE, failures

CHANCE_OF_LARGER = 1e-9  # that a Poisson sample is larger than the encoding has room for
MOST_TRIALS = 2**30
ALONE_OF_DELTA = 1e-3  # of δ that rounds with one user may add to it
CHANCE_OF_MORE = 1e-3  # that a user would be sampled more often than the default cap allows


def largest_cohort(users: int, sampling_rate: float) -> int:
    """The cohort size that a Poisson sample of `users` exceeds with probability under 1e-9."""
    return max(1, _seldom_exceeded(users, sampling_rate, CHANCE_OF_LARGER))


def planned_rounds(config: RunConfig) -> tuple[int, int]:
    """Rounds of stage 1 and of stage 2 in which users release something."""
    has_stage1 = config.traits.start == "stage1" and config.stage1 != "random"
    return (config.t_in if has_stage1 else 0), config.t_tr


def participation_cap(config: RunConfig, stage: int) -> int:
    """Most rounds of a stage (1 or 2) in which one user takes part.

    The server asks no user beyond it and a client answers no more. Amplification by sampling still holds:
    given all that was released so far, a user joins a round with probability at most q, and the sampled
    mechanism's Rényi divergence grows with that probability. So the bound for recipients is the one without
    a cap, while the server's worst case falls from all rounds to the cap.

    With local sketches a user takes part in stage 1 once, in the private mean or with a sketch: a second
    sketch of the same ΔB would cost the noise of both.
    """
    rounds = planned_rounds(config)[stage - 1]
    if rounds == 0:
        return 0
    usual = max(1, _seldom_exceeded(rounds, config.sampling_rate, CHANCE_OF_MORE))
    if stage == 1 and config.stage1 == "sketch":
        usual = 1
    return min(rounds, config.participation_cap or usual)


def check_secure_sum(config: RunConfig, users: int, delta: float) -> None:
    """Refuse a run whose cohorts are too small for SecAgg+.

    A round of one user can't be summed securely. To drop it tells recipients that there was just one, which
    no account of privacy has; so its chance over all rounds must be nothing beside δ.

    Raises:
        ConfigError: that chance is too large, or no threshold suits the cohorts.
    """
    if config.secure_sum != "secagg+" or config.local_updates:
        return
    q, rounds = config.sampling_rate, sum(planned_rounds(config))
    alone = rounds * users * q * (1 - q) ** (users - 1)
    if config.private and not alone <= ALONE_OF_DELTA * delta:
        raise ConfigError(
            f"sampling-rate = {q:g}: of {users} users, one alone is sampled in some round with chance "
            f"{alone:.1g}; must be at most {ALONE_OF_DELTA * delta:.1g} (δ / 1000): set a higher rate"
        )
    try:
        config.secagg.parameters(max(2, round(q * users)))
    except ValueError as problem:
        raise ConfigError(f"secure-sum = 'secagg+': {problem}") from None
    if config.secagg_neighbours and config.private and config.colluding_share:
        _check_by_hand(config, users)


def _check_by_hand(config: RunConfig, users: int) -> None:
    """Refuse k and t with which those who collude, as `colluding-share` has them, may see single users.

    Without colluders nobody is exposed, and a split sum is stuck. Looked at are the usual cohort and those 5
    standard deviations off, as the chance falls or rises with it.
    """
    usual = config.sampling_rate * users
    spread = 5 * math.sqrt(usual * (1 - config.sampling_rate))
    for cohort in sorted({min(users, max(2, round(usual + off))) for off in (-spread, 0, spread)}):
        parameters = config.secagg.parameters(cohort)
        found = failures(parameters, cohort, config.dropout_tolerance, config.colluding_share)
        if (chance := min(1.0, found.exposed + found.split)) > FAILURE:
            given = f"secagg-neighbours = {parameters.neighbours}, secagg-threshold = {parameters.threshold}"
            raise ConfigError(
                f"{given}: with colluding-share = {config.colluding_share} a cohort of {cohort} may be seen "
                f"through with chance {chance:.1g}; must be at most 2^-40: set higher ones, or 0"
            )


@dataclass(frozen=True)
class Shares:
    """How the noise of a sum is shared out among a cohort.

    cohort: users asked. survivors: the fewest with whom the round counts. colluders: the most whose noise the
    server may know. Noise is complete if `honest` users contribute theirs.
    """

    cohort: int
    survivors: int
    colluders: int

    @property
    def honest(self) -> int:
        """The fewest survivors whose noise nobody else knows."""
        return self.survivors - self.colluders


def shares(config: RunConfig, cohort: int) -> Shares:
    """The shares for a cohort of that size.

    Raises:
        ValueError: a cohort under 1.
    """
    if cohort < 1:
        raise ValueError(f"cohort = {cohort}: must be at least 1")
    survivors = max(1, math.ceil(cohort * (1 - config.dropout_tolerance) - 1e-9))
    return Shares(cohort, survivors, math.floor(cohort * config.colluding_share + 1e-9))


def _seldom_exceeded(trials: int, rate: float, chance: float) -> int:
    """The least number that as many successes in `trials` exceed with probability `chance` at most."""
    low, high = -1, trials  # exceeded too often, and seldom enough
    while high - low > 1:
        middle = (low + high) // 2
        seldom = _exceeded(middle, trials, rate) <= chance
        low, high = (low, middle) if seldom else (middle, high)
    return high


def _exceeded(number: int, trials: int, rate: float) -> float:
    """Probability of more than `number` successes; for huge `trials` that of a Poisson variable."""
    if trials >= MOST_TRIALS:  # scipy's binomial gives NaN from 2^31 on
        return float(pdtrc(number, trials * rate))
    return float(bdtrc(number, trials, rate))
