import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.stats import binom

from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.audit import (
    AuditResult,
    _p_value,
    _refuted,
    audit,
    gaussian_epsilon,
    gaussian_estimate,
    one_run_bound,
)
from pina_flwr.privacy.releases import GaussianRelease

# Of 200 simulated audits of halved noise, the one-run bound refuted the claim in each; with half the canaries
# in 299 of 300, with a quarter in 87 of 100. Of 100 with the right noise none was refuted.
Z, DELTA, CANARIES = 1.5, 5e-4, 16_384
Release = tuple[NDArray[np.float64], NDArray[np.bool_]]


def gaussian(
    rng: np.random.Generator, z: float, canaries: int = CANARIES, contribution: float = 1.0
) -> Release:
    """Scores and coins of one release with clip norm 1."""
    coins = rng.random(canaries) < 0.5
    return contribution * coins + z * rng.standard_normal(canaries), coins


def claim(z: float = Z, delta: float = DELTA) -> float:
    return epsilon([GaussianRelease(z, 1.0, 1)], delta)


def most(level: float, repetitions: int) -> int:
    """How many failures are plausible when each has the chance `level`: more occur once in 1,000 tests."""
    return int(binom.isf(1e-3, repetitions, level))


class TestBreaches:
    def test_right_noise_holds(self) -> None:
        rng = np.random.default_rng(1)
        for _ in range(10):
            result = audit(*gaussian(rng, Z), claim(), DELTA)
            assert result.holds
            assert 0.3 * claim() < result.bound < 0.8 * claim()
            assert 0.75 * claim() < result.estimate_low < result.estimate
            assert (result.canaries, result.delta, result.claimed) == (CANARIES, DELTA, claim())

    @pytest.mark.parametrize(
        ("z", "contribution"), [(Z / 2, 1.0), (Z, 10.0)], ids=["noise halved", "clip skipped"]
    )
    def test_both_estimators_catch_a_broken_mechanism(self, z: float, contribution: float) -> None:
        rng = np.random.default_rng(2)
        for _ in range(10):
            result = audit(*gaussian(rng, z, contribution=contribution), claim(), DELTA)
            assert not result.holds
            assert result.bound > 1.05 * claim()
            assert result.estimate_low > 1.5 * claim()

    def test_no_noise_is_caught(self) -> None:
        scores, coins = gaussian(np.random.default_rng(3), 0.0)
        result = audit(scores, coins, claim(), DELTA)
        assert result.bound > claim()
        assert result.estimate == result.estimate_low == math.inf
        assert not result.holds

    def test_rounds_with_fresh_coins_pool(self) -> None:
        rng = np.random.default_rng(4)
        rounds = [gaussian(rng, Z / 2, CANARIES // 16) for _ in range(16)]
        scores, coins = (np.concatenate(part) for part in zip(*rounds, strict=True))
        assert one_run_bound(scores, coins, DELTA) > claim()
        assert np.median([one_run_bound(*one, DELTA) for one in rounds]) < claim()


class TestOneRunBound:
    @pytest.mark.parametrize("confidence", [0.6, 0.95])
    def test_randomised_response_is_bounded_with_the_stated_confidence_and_tightly(
        self, confidence: float
    ) -> None:
        rng, true, m, repetitions = np.random.default_rng(5), 2.0, 20_000, 100
        bounds = []
        for _ in range(repetitions):
            coins = rng.random(m) < 0.5
            answers = coins ^ (rng.random(m) < 1 / (1 + math.exp(true)))
            # The answer decides; the rest of the score only breaks ties.
            bounds.append(one_run_bound(answers + 0.5 * rng.random(m), coins, 1e-9, confidence))
        assert sum(bound > true for bound in bounds) <= most(1 - confidence, repetitions)
        assert np.median(bounds) > 0.95 * true

    def test_delta_is_spent_on_coins_that_are_revealed(self) -> None:
        """Each coin is revealed with chance δ and nothing else: (0, δ)-DP, so ε = 0."""
        rng, delta, m, repetitions = np.random.default_rng(6), 0.02, 4_000, 100
        refuted = too_small = 0
        for _ in range(repetitions):
            coins = rng.random(m) < 0.5
            scores = rng.standard_normal(m) + np.where(rng.random(m) < delta, 100 * (2 * coins - 1), 0)
            refuted += one_run_bound(scores, coins, delta) > 0
            too_small += one_run_bound(scores, coins, delta / 100) > 0
        assert refuted <= most(0.05, repetitions)
        assert too_small > 0.9 * repetitions

    def test_gaussian_release_is_bounded(self) -> None:
        rng = np.random.default_rng(7)
        for z, delta in ((0.5, 1e-5), (1.0, 1e-3), (3.0, 1e-4)):
            true = gaussian_epsilon(1 / z, delta)
            bounds = [one_run_bound(*gaussian(rng, z, 4_096), delta) for _ in range(40)]
            assert np.median(bounds) > 0
            assert sum(bound > true for bound in bounds) <= most(0.05, 40)

    def test_laplace_release_is_bounded_though_not_gaussian(self) -> None:
        rng, true = np.random.default_rng(8), 1.0
        bounds = []
        for _ in range(40):
            coins = rng.random(CANARIES) < 0.5
            bounds.append(one_run_bound(coins + rng.laplace(size=CANARIES) / true, coins, 1e-9))
        assert sum(bound > true for bound in bounds) <= most(0.05, 40)
        assert np.median(bounds) > 0.7 * true

    def test_grows_with_the_canaries(self) -> None:
        rng = np.random.default_rng(9)
        sizes = (256, 1_024, 4_096, 16_384, 65_536)
        medians = [np.median([one_run_bound(*gaussian(rng, 1.0, m), 1e-5) for _ in range(15)]) for m in sizes]
        assert medians[0] > 0
        assert np.all(np.diff(medians) > 0.05)
        assert medians[-1] < gaussian_epsilon(1.0, 1e-5)

    def test_falls_with_delta_and_with_confidence(self) -> None:
        scores, coins = gaussian(np.random.default_rng(10), Z / 2)
        assert one_run_bound(scores, coins, 1e-6) > one_run_bound(scores, coins, 1e-4) > 0
        assert one_run_bound(scores, coins, 1e-6, 0.9) > one_run_bound(scores, coins, 1e-6, 0.99) > 0
        assert one_run_bound(scores, coins, 0.5) == 0

    def test_order_of_canaries_tells_nothing(self) -> None:
        """Equal scores in the order of the coins would be guessed right by any stable sort."""
        coins = np.arange(1_000) >= 500
        assert one_run_bound(np.zeros(1_000), coins, 1e-5) == 0
        assert one_run_bound(np.zeros(1_000), ~coins, 1e-5) == 0
        # The same at one end only, fair guesses at the other.
        rng = np.random.default_rng(18)
        coins = np.concatenate([np.arange(3_000) >= 1_500, rng.random(1_000) < 0.5])
        scores = np.concatenate([np.zeros(3_000), rng.random(1_000)])
        assert one_run_bound(scores, coins, 1e-5) == 0
        assert one_run_bound(-scores, ~coins, 1e-5) == 0

    def test_scores_that_fall_with_participation_show_nothing(self) -> None:
        scores, coins = gaussian(np.random.default_rng(11), 0.1)
        assert one_run_bound(-scores, coins, 1e-5) == 0
        assert gaussian_estimate(-scores, coins, 1e-5) == (0, 0)

    def test_few_canaries_prove_little(self) -> None:
        assert one_run_bound(np.array([0.0, 1.0]), np.array([False, True]), 1e-5) == 0
        coins = np.arange(11) % 2 == 0
        # Ten right of ten at level 1/40, all that eleven canaries allow.
        q = 0.025**0.1
        assert one_run_bound(1.0 * coins, coins, 1e-12) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)

    def test_refuses_unfair_coins(self) -> None:
        scores, _ = gaussian(np.random.default_rng(12), 1.0, 1_000)
        with pytest.raises(ValueError, match="350 of 1000 canaries are in"):
            one_run_bound(scores, np.arange(1_000) < 350, 1e-5)


def published_p_value(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """That of Steinke et al. (2023), Corollary 5.4, as their Appendix D computes it."""
    q = 1 / (1 + math.exp(-eps))
    beta = binom.sf(v - 1, r, q)
    i = np.arange(1, v + 1)
    return float(beta + 2 * m * delta * np.max((binom.sf(v - i - 1, r, q) - beta) / i))


def largest_tail(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """max P[W >= v] over all (ε, δ)-DP mechanisms whose guesses are exchangeable, by linear programming.

    p_k = P[W = k]; flipping one guessed coin turns k right guesses into k - 1 or k + 1. `over` is what each k
    takes of δ where the coin was guessed right, `under` where it was guessed wrong.
    """
    k = np.arange(r + 1)
    right, wrong = np.diag(1.0 * k), np.diag(1.0 * (r - k))
    for j in range(r):
        right[j + 1, j] = -math.exp(eps) * (r - j)
        wrong[j, j + 1] = -math.exp(eps) * (j + 1)
    over, zero = -np.eye(r + 1), np.zeros((r + 1, r + 1))
    budget = np.concatenate([np.zeros(r + 1), np.ones(2 * (r + 1))])
    solved = linprog(
        -np.concatenate([k >= v, np.zeros(2 * (r + 1))]),
        A_ub=np.vstack([np.hstack([right, over, zero]), np.hstack([wrong, zero, over]), budget]),
        b_ub=np.concatenate([np.zeros(2 * (r + 1)), [m * delta]]),
        A_eq=np.concatenate([np.ones(r + 1), np.zeros(2 * (r + 1))])[None],
        b_eq=[1.0],
    )
    return float(-solved.fun)


class TestPValue:
    def test_is_the_largest_tail_that_privacy_permits(self) -> None:
        rng = np.random.default_rng(13)
        for _ in range(40):
            r = int(rng.integers(1, 30))
            case = (r * int(rng.integers(1, 9)), r, int(rng.integers(1, r + 1)))
            eps, delta = rng.uniform(0, 3), 10 ** rng.uniform(-6, -1.5)
            assert _p_value(*case, eps, delta) == pytest.approx(largest_tail(*case, eps, delta), abs=1e-5)

    def test_is_below_the_published_one_where_it_matters(self) -> None:
        rng = np.random.default_rng(14)
        compared = 0
        for _ in range(300):
            r, eps, delta = int(rng.integers(1, 300)), rng.uniform(0, 4), 10 ** rng.uniform(-8, -1)
            likely = math.ceil(r / (1 + math.exp(-eps)))
            case = (r * int(rng.integers(1, 50)), r, int(rng.integers(likely, r + 1)))
            published = published_p_value(*case, eps, delta)
            if published < 0.5:
                compared += 1
                assert _p_value(*case, eps, delta) <= published * (1 + 1e-9)
        assert compared > 50  # of about 150

    @pytest.mark.parametrize(
        ("case", "delta", "published"),
        [((1_000, 100, 75), 1e-4, 0.673), ((100_000, 1_510, 1_439), 1e-5, 2.675)],
    )
    def test_bound_is_at_least_the_published_figure(
        self, case: tuple[int, int, int], delta: float, published: float
    ) -> None:
        # The published test is at its level there, so the figures belong to these counts.
        assert published_p_value(*case, published, delta) == pytest.approx(0.05, rel=0.01)
        assert published < _refuted(*case, delta, 0.05) < 1.06 * published

    def test_is_the_binomial_tail_without_delta(self) -> None:
        for r, v in ((10, 10), (400, 300), (1_000_000, 600_000)):
            q = 1 / (1 + math.exp(-0.4))
            assert _p_value(2 * r, r, v, 0.4, 0.0) == pytest.approx(binom.sf(v - 1, r, q), rel=1e-9)

    def test_rises_with_epsilon_and_never_fails(self) -> None:
        for r, v in ((1, 1), (50, 3), (50, 50), (5_000, 4_000), (1_000_000, 999_999), (1_000_000, 1)):
            values = [_p_value(8 * r, r, v, eps, 1e-4) for eps in np.linspace(0, 36, 60)]
            assert np.all(np.diff(values) >= -1e-9)
            assert 0 <= values[0] <= values[-1] <= 1


class TestGaussianEstimate:
    @pytest.mark.parametrize(("z", "canaries"), [(0.3, 100), (1.0, 1_000), (2.0, 5_000)])
    def test_low_limit_is_below_epsilon_with_the_stated_confidence(self, z: float, canaries: int) -> None:
        rng, true, repetitions = np.random.default_rng(15), gaussian_epsilon(1 / z, 1e-5), 400
        found = np.array([gaussian_estimate(*gaussian(rng, z, canaries), 1e-5) for _ in range(repetitions)])
        missed = int((found[:, 1] > true).sum())
        # Neither too often, nor so seldom that the limit is loose.
        assert binom.ppf(1e-3, repetitions, 0.05) <= missed <= most(0.05, repetitions)
        assert np.median(found[:, 0]) == pytest.approx(true, rel=0.05)

    def test_is_free_of_scale_and_place(self) -> None:
        scores, coins = gaussian(np.random.default_rng(16), 1.0, 500)
        expected = pytest.approx(gaussian_estimate(scores, coins, 1e-5), rel=1e-6)
        for moved in (scores * 1e200, scores * 1e-200, scores - 100, scores.astype(np.float32)):
            assert gaussian_estimate(moved, coins, 1e-5) == expected

    def test_refuses_what_it_cannot_fit(self) -> None:
        with pytest.raises(ValueError, match="1 canaries in and 3 out"):
            gaussian_estimate(np.arange(4.0), np.array([True, False, False, False]), 1e-5)
        with pytest.raises(ValueError, match="nothing to fit"):
            gaussian_estimate(np.full(4, 0.1), np.array([True, False, True, False]), 1e-5)


class TestGaussianEpsilon:
    @pytest.mark.parametrize("mu", [1e-3, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1e4])
    @pytest.mark.parametrize("delta", [1e-20, 1e-9, 1e-5, 0.01, 0.5, 0.999])
    def test_agrees_with_another_implementation(self, mu: float, delta: float) -> None:
        assert gaussian_epsilon(mu, delta) == pytest.approx(
            get_epsilon_gaussian(1 / mu, delta), rel=1e-9, abs=1e-9
        )

    def test_is_at_most_what_the_accountant_claims(self) -> None:
        for z, delta in ((0.5, 1e-5), (1.5, 5e-4), (4.0, 1e-2)):
            assert 0.7 * claim(z, delta) < gaussian_epsilon(1 / z, delta) < claim(z, delta)

    def test_extremes(self) -> None:
        assert gaussian_epsilon(0.0, 1e-5) == 0
        assert gaussian_epsilon(1e-300, 1e-5) == 0
        assert gaussian_epsilon(math.inf, 1e-5) == math.inf
        assert gaussian_epsilon(1e200, 1e-5) == math.inf
        assert gaussian_epsilon(1e100, 1e-5) == pytest.approx(5e199)
        # ε is between 0 and the bound without the second term, here 39·μ, whatever is left of δ.
        assert 30e-6 < gaussian_epsilon(1e-6, 5e-324) < 39e-6
        assert gaussian_epsilon(1.0, 1 - 1e-16) == 0
        # Here under 5,000 - 100·Φ⁻¹(δ), by the second term.
        assert 4_390 < gaussian_epsilon(100.0, 1 - 1e-9) < 5_000 - 100 * 5.9978

    @pytest.mark.parametrize(("mu", "delta"), [(-1.0, 0.1), (math.nan, 0.1), (1.0, 0.0), (1.0, math.nan)])
    def test_refuses_nonsense(self, mu: float, delta: float) -> None:
        with pytest.raises(ValueError, match="must be"):
            gaussian_epsilon(mu, delta)


class TestAuditResult:
    def test_each_limit_alone_refutes(self) -> None:
        result = AuditResult(2.0, 1.0, 3.0, 1.9, 100, 1e-5)
        assert result.holds  # the estimate itself is no limit
        assert not dataclasses.replace(result, bound=2.1).holds
        assert not dataclasses.replace(result, estimate_low=2.1).holds

    @pytest.mark.parametrize("field", ["claimed", "bound", "estimate_low"])
    def test_unknown_is_not_held(self, field: str) -> None:
        unknown: Any = {field: math.nan}
        assert not dataclasses.replace(AuditResult(2.0, 1.0, 1.5, 1.2, 100, 1e-5), **unknown).holds

    @pytest.mark.parametrize("claimed", [math.nan, -1.0])
    def test_refuses_a_claim_that_is_none(self, claimed: float) -> None:
        with pytest.raises(ValueError, match="claimed"):
            audit(*gaussian(np.random.default_rng(17), 1.0, 100), claimed, 1e-5)


COINS = np.array([True, False, True, False])


@pytest.mark.parametrize("estimator", [one_run_bound, gaussian_estimate])
@pytest.mark.parametrize(
    ("scores", "coins", "delta", "confidence", "message"),
    [
        (np.arange(3.0), COINS, 1e-5, 0.95, "one length"),
        (np.zeros((4, 1)), COINS[:, None], 1e-5, 0.95, "vectors"),
        (np.array([]), np.array([], bool), 1e-5, 0.95, "both kinds"),
        (np.arange(4), COINS, 1e-5, 0.95, "must be floats and bools"),
        (np.arange(4.0), COINS.astype(int), 1e-5, 0.95, "must be floats and bools"),
        (np.array([0, 1, math.nan, 2]), COINS, 1e-5, 0.95, "NaN"),
        (np.array([0, 1, math.inf, 2]), COINS, 1e-5, 0.95, "infinite"),
        (np.arange(4.0), np.ones(4, bool), 1e-5, 0.95, "both kinds"),
        (np.arange(4.0), np.zeros(4, bool), 1e-5, 0.95, "both kinds"),
        (np.arange(4.0), COINS, 0.0, 0.95, "delta"),
        (np.arange(4.0), COINS, math.nan, 0.95, "delta"),
        (np.arange(4.0), COINS, 1e-5, 1.0, "confidence"),
        (np.arange(4.0), COINS, 1e-5, 0.05, "confidence"),
        (np.arange(4.0), COINS, 1e-5, math.nan, "confidence"),
    ],
)
def test_refuses_bad_input(
    estimator: Any, scores: Any, coins: Any, delta: float, confidence: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        estimator(scores, coins, delta, confidence)
