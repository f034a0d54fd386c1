import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pina_flwr.config import RunConfig, parse
from pina_flwr.privacy.cohort import participation_cap
from pina_flwr.strategies import sampler as module
from pina_flwr.strategies.sampler import Sampler

TINY_P = 1e-8  # how rarely a statistical test may fail by chance
USERS = 60


def configured(**options: Any) -> RunConfig:
    usual = {"num_users": USERS, "sampling_rate": 0.3, "t_in": 40, "t_tr": 80, "noise_cohort_size": 0}
    return parse({name.replace("_", "-"): value for name, value in (usual | options).items()})


def drawn(config: RunConfig, rounds: int, stage: int = 2) -> list[list[int]]:
    sampler = Sampler(config, USERS)
    return [sampler.cohort(stage, t) for t in range(1, rounds + 1)]


def has_rate(cohorts: list[list[int]], q: float) -> bool:
    """Whether each of the users was in each cohort with probability q, as far as counts tell."""
    hits, trials = sum(map(len, cohorts)), USERS * len(cohorts)
    return stats.binomtest(hits, trials, q).pvalue > TINY_P


def has_variance(counts: Sequence[int] | np.ndarray, variance: float) -> bool:
    """Whether counts, nearly normal, have this variance, by the two-sided χ² test; fixed ones have none."""
    low, high = stats.chi2.ppf([TINY_P / 2, 1 - TINY_P / 2], len(counts) - 1)
    return bool(low < np.var(counts, ddof=1) * (len(counts) - 1) / variance < high)


@pytest.mark.parametrize("cap", [1, 3, 0])
def test_nobody_takes_part_more_often_than_the_cap(cap: int) -> None:
    config = configured(participation_cap=cap, sampling_rate=0.5)
    sampler, taken = Sampler(config, USERS), dict[int, Counter[int]]({1: Counter(), 2: Counter()})
    for t in range(1, 121):
        stage = 1 if t <= 40 else 2
        taken[stage].update(sampler.cohort(stage, t))
    for stage in (1, 2):
        assert max(taken[stage].values()) <= participation_cap(config, stage)
    if cap:  # everybody reaches it in each stage: stages are counted apart
        assert set(taken[1].values()) == set(taken[2].values()) == {cap}


@pytest.mark.parametrize(
    "options", [{"participation_cap": 80}, {"epsilon": math.inf}, {"reproducible_noise": True}]
)
def test_is_a_poisson_sample(options: dict[str, Any]) -> None:
    cohorts = drawn(configured(**options), 80)
    assert has_rate(cohorts, 0.3)
    assert not has_rate(cohorts, 0.4)  # the test would see a third
    assert all(cohort == sorted(set(cohort)) and set(cohort) <= set(range(USERS)) for cohort in cohorts)
    assert has_variance([len(cohort) for cohort in cohorts], USERS * 0.3 * 0.7)
    assert has_variance(np.bincount(np.concatenate(cohorts), minlength=USERS), 80 * 0.3 * 0.7)


def test_those_under_the_cap_join_at_the_same_rate() -> None:
    config = configured(participation_cap=5, sampling_rate=0.3)
    sampler, taken, joined, free = Sampler(config, USERS), Counter[int](), 0, 0
    for t in range(1, 81):
        cohort = sampler.cohort(2, t)
        free += sum(taken[user] < 5 for user in range(USERS))
        joined += len(cohort)
        taken.update(cohort)
    assert stats.binomtest(joined, free, 0.3).pvalue > TINY_P
    assert free < 80 * USERS


def test_a_seed_tells_nothing_about_private_cohorts() -> None:
    config = configured()
    assert drawn(config, 5) != drawn(config, 5)
    reproducible = configured(reproducible_noise=True)
    assert drawn(reproducible, 5) == drawn(reproducible, 5)
    assert drawn(reproducible, 5) != drawn(configured(reproducible_noise=True, seed=2), 5)
    assert len(set(map(tuple, drawn(reproducible, 5)))) == 5


def test_without_privacy_the_seed_decides_and_nobody_is_held_back() -> None:
    config = configured(epsilon=math.inf, participation_cap=1)
    cohorts = drawn(config, 20)
    assert cohorts == drawn(config, 20)
    assert max(Counter(user for cohort in cohorts for user in cohort).values()) > 1


def test_more_than_there_is_room_for_are_not_asked_nor_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(configured(participation_cap=1, sampling_rate=1.0), USERS)
    monkeypatch.setattr(module, "largest_cohort", lambda users, q: 5)
    assert sampler.cohort(2, 1) == []
    monkeypatch.undo()
    assert sampler.cohort(2, 2) == list(range(USERS))
    assert sampler.cohort(2, 3) == []
