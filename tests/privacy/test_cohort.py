"""Cohorts against binomial probabilities summed term by term, shares against exact fractions."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import scipy.stats

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.privacy.cohort import (
    check_secure_sum,
    largest_cohort,
    participation_cap,
    planned_rounds,
    shares,
)


def configured(**options: Any) -> RunConfig:
    usual = {"secure_sum": "trusted"}  # which adds vectors of every mechanism
    return parse({name.replace("_", "-"): value for name, value in (usual | options).items()})


def chance_of_more(k: int, n: int, q: float) -> float:
    """P(Binomial(n, q) > k)."""
    return math.fsum(math.comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(k + 1, n + 1))


@pytest.mark.parametrize("users", [1, 2, 14, 232, 900])
@pytest.mark.parametrize("q", [0.002, 0.1, 0.215, 0.7, 0.999, 1.0])
def test_largest_cohort(users: int, q: float) -> None:
    largest = largest_cohort(users, q)
    assert 1 <= largest <= users
    assert chance_of_more(largest, users, q) < 1e-9
    assert largest == 1 or chance_of_more(largest - 1, users, q) > 1e-9  # and no larger than need be


def test_largest_cohort_of_many() -> None:
    """A million users: six standard deviations over the mean."""
    mean, deviation = 1e6 * 0.01, math.sqrt(1e6 * 0.01 * 0.99)
    assert mean + 5.9 * deviation < largest_cohort(10**6, 0.01) < mean + 6.3 * deviation


@pytest.mark.parametrize("rounds", [1, 2, 20, 300])
@pytest.mark.parametrize("q", [0.005, 0.215, 0.9, 1.0])
def test_the_usual_cap_is_what_one_user_in_a_thousand_would_exceed(rounds: int, q: float) -> None:
    cap = participation_cap(configured(sampling_rate=q, t_tr=rounds), 2)
    assert 1 <= cap <= rounds
    assert chance_of_more(cap, rounds, q) <= 1e-3
    assert cap == 1 or chance_of_more(cap - 1, rounds, q) > 1e-3


def test_the_cap_is_of_one_stage() -> None:
    c = configured(t_in=10, t_tr=20)
    assert participation_cap(c, 1) < participation_cap(c, 2)
    assert participation_cap(configured(strategy="fedavg"), 1) == 0
    assert participation_cap(configured(stage1="random"), 1) == 0


def test_a_cap_that_is_given() -> None:
    c = configured(participation_cap=7, t_in=3, t_tr=20)
    assert [participation_cap(c, stage) for stage in (1, 2)] == [3, 7]
    assert participation_cap(configured(participation_cap=7, strategy="fedavg"), 1) == 0


def test_a_local_sketch_is_sent_once_unless_the_cap_says_otherwise() -> None:
    assert participation_cap(configured(stage1="sketch"), 1) == 1
    assert participation_cap(configured(stage1="sketch", participation_cap=4), 1) == 4
    assert participation_cap(configured(stage1="sketch"), 2) == participation_cap(configured(), 2)


def test_planned_rounds() -> None:
    assert planned_rounds(configured(t_in=9, t_tr=13)) == (9, 13)
    for options in ({"strategy": "fedavg"}, {"strategy": "pina-ri"}, {"stage1": "random"}):
        assert planned_rounds(configured(t_in=9, t_tr=13, **options)) == (0, 13)


THETAS = ["0", "0.05", "0.1", "0.2", "0.3", "0.33", "0.5", "0.9"]
COLLUDING = ["0", "0.01", "0.05", "0.1", "0.3", "0.6"]
PAIRS = [(t, c) for t in THETAS for c in COLLUDING if Fraction(t) + Fraction(c) < 1]


@pytest.mark.parametrize(("theta", "colluding"), PAIRS)
def test_shares(theta: str, colluding: str) -> None:
    """Enough for the fewest survivors less those who collude, and at most 1 / (1 - θ - c) times too much."""
    config = configured(dropout_tolerance=float(theta), colluding_share=float(colluding))
    spare = 1 - Fraction(theta) - Fraction(colluding)
    for cohort in range(1, 201):
        split = shares(config, cohort)
        assert split.cohort == cohort
        assert split.survivors == math.ceil(cohort * (1 - Fraction(theta)))
        assert split.colluders == math.floor(cohort * Fraction(colluding))
        assert split.honest == split.survivors - split.colluders >= 1
        assert Fraction(cohort, split.honest) <= 1 / spare


def test_without_dropout_and_collusion_everybody_counts() -> None:
    split = shares(configured(dropout_tolerance=0.0), 37)
    assert (split.survivors, split.colluders, split.honest) == (37, 0, 37)


@pytest.mark.parametrize("cohort", [0, -1])
def test_no_cohort_no_shares(cohort: int) -> None:
    with pytest.raises(ValueError, match=f"cohort = {cohort}"):
        shares(RunConfig(), cohort)


@pytest.mark.parametrize("users", [2**30 - 1, 2**30, 2**31, 10**12, 10**15])
def test_the_largest_cohort_of_huge_deployments(users: int) -> None:
    """About 1,000 users a round: 6 standard deviations more, however many users there are."""
    assert 1_180 <= largest_cohort(users, 1000 / users) <= 1_210


class TestCohortsForSecAgg:
    """One user alone can't be summed securely, and to drop its round would tell."""

    def secagg(self, **options: Any) -> RunConfig:
        return configured(secure_sum="secagg+", **options)

    def test_the_chance_of_one_alone_is_nothing_beside_delta(self) -> None:
        config = self.secagg(num_users=60, sampling_rate=0.2, t_in=2, t_tr=8)
        alone = 10 * scipy.stats.binom.pmf(1, 60, 0.2)
        check_secure_sum(config, 60, delta=1001 * alone)
        with pytest.raises(ConfigError, match=r"^sampling-rate = 0\.2: of 60 users, one alone is sampled"):
            check_secure_sum(config, 60, delta=999 * alone)
        check_secure_sum(replace(config, secure_sum="trusted"), 60, delta=0)
        check_secure_sum(replace(config, epsilon=math.inf), 60, delta=0)

    def test_with_everybody_in_each_round_there_is_none(self) -> None:
        check_secure_sum(self.secagg(num_users=4, sampling_rate=1.0), 4, delta=1e-9)

    def test_no_threshold_for_so_few(self) -> None:
        config = self.secagg(num_users=2, sampling_rate=1.0, dropout_tolerance=0.1, colluding_share=0.6)
        with pytest.raises(ConfigError, match=r"^secure-sum = 'secagg\+': dropout = 0\.1, corrupted = 0\.6"):
            check_secure_sum(config, 2, delta=0.1)

    def test_numbers_by_hand_must_hold_out_against_those_who_collude(self) -> None:
        few = {"num_users": 200, "sampling_rate": 0.3, "secagg_neighbours": 4, "secagg_threshold": 3}
        config = self.secagg(**few, colluding_share=0.3)
        with pytest.raises(
            ConfigError, match=r"^secagg-neighbours = 4, secagg-threshold = 3: .*2\^-40"
        ) as raised:
            check_secure_sum(config, 200, delta=0.1)
        assert len(str(raised.value).splitlines()) == 1
        check_secure_sum(replace(config, colluding_share=0.0), 200, delta=0.1)  # 2t - k = 2 must collude
        check_secure_sum(replace(config, epsilon=math.inf), 200, delta=0.1)  # a run that promises nothing
        derived = replace(config, secagg_neighbours=0, secagg_threshold=0)
        usual = derived.secagg.parameters(60)
        check_secure_sum(derived, 200, delta=0.1)
        with pytest.raises(ConfigError, match="a cohort of 92 "):  # enough for 60 users, too few for more
            check_secure_sum(
                replace(config, secagg_neighbours=usual.neighbours, secagg_threshold=usual.threshold),
                200,
                delta=0.1,
            )

    def test_the_default_run_is_fine(self) -> None:
        config = self.secagg()
        check_secure_sum(config, config.num_users, delta=config.num_users**-1.1)
