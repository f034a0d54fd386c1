import math
import warnings

import numpy as np
import pytest

from pina_flwr.config import NORMALITY, STRATEGIES, RunConfig, parse
from pina_flwr.normality import (
    Aggregates,
    by_count,
    by_energy,
    by_normality,
    equal_norms,
    rule,
    rule_name,
    shapiro_wilk,
    unscaled,
)

SEED = 20260101


def of(*means: list[float], std: float = 0.0) -> Aggregates:
    return Aggregates(np.array(means, dtype=float), std)


def gauss(size: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size)


# W of three values is (x3 - x1)² / 2 / Σ(x - mean)²: the figures below are worked out by hand from it.
SKEWED, STEP, EVEN = [0.0, 1.0, 3.0], [0.0, 0.0, 1.0], [0.0, 1.0, 2.0]
W_SKEWED, W_STEP, W_EVEN = 27 / 28, 3 / 4, 1.0


class TestShapiroWilk:
    @pytest.mark.parametrize(
        ("values", "w"), [(SKEWED, W_SKEWED), (STEP, W_STEP), (EVEN, W_EVEN), (EVEN[::-1], W_EVEN)]
    )
    def test_of_three_values(self, values: list[float], w: float) -> None:
        assert shapiro_wilk(np.array(values)) == pytest.approx(w, abs=1e-9)

    def test_published_example(self) -> None:
        """Weights of 11 men, Shapiro and Wilk 1965, example 3: W = 0.79."""
        weights = [148, 154, 158, 160, 161, 162, 166, 170, 182, 195, 236]
        assert shapiro_wilk(np.array(weights, dtype=float)) == pytest.approx(0.79, abs=0.005)

    @pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0] * 3, [0.0] * 50])
    def test_undefined(self, values: list[float]) -> None:
        assert shapiro_wilk(np.array(values)) is None

    @pytest.mark.parametrize("size", [5_001, 40_000])
    def test_no_warning_over_5000(self, size: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            noise, mixed = shapiro_wilk(gauss(size)), shapiro_wilk(gauss(size) ** 3)
        assert noise is not None
        assert mixed is not None
        assert noise > 0.999
        assert mixed < 0.9

    @pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e30])
    def test_does_not_depend_on_scale(self, scale: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert shapiro_wilk(scale * gauss(300)) == pytest.approx(shapiro_wilk(gauss(300)), abs=1e-9)


class TestEqualNorms:
    def test_eq_8(self) -> None:
        factors = equal_norms(of([3, 4], [0, 2], [6, 8]))
        np.testing.assert_allclose(factors, [2 / 5, 1, 2 / 10])

    def test_all_scaled_aggregates_have_the_smallest_norm(self) -> None:
        means = np.stack([gauss(50, seed) * (seed + 1) for seed in range(4)])
        scaled = equal_norms(Aggregates(means, 0.0))[:, None] * means
        np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), np.linalg.norm(means, axis=1).min())

    def test_an_empty_cluster_does_not_stop_the_others(self) -> None:
        np.testing.assert_allclose(equal_norms(of([3, 4], [0, 0], [0, 1])), [1 / 5, 0, 1])

    def test_nothing_at_all(self) -> None:
        np.testing.assert_array_equal(equal_norms(of([0, 0], [0, 0])), [0, 0])

    def test_one_cluster(self) -> None:
        np.testing.assert_allclose(equal_norms(of([3, 4])), [1])


class TestByNormality:
    def test_eq_9(self) -> None:
        """The third reaches the threshold and gets 0, but its W stays in the sum."""
        total = W_SKEWED + W_STEP + W_EVEN
        factors = by_normality(of(SKEWED, STEP, EVEN), 0.99)
        np.testing.assert_allclose(factors, [W_SKEWED / total, W_STEP / total, 0], atol=1e-9)

    def test_the_threshold_is_not_under_it(self) -> None:
        w = shapiro_wilk(np.array(SKEWED))
        assert w is not None
        assert by_normality(of(SKEWED), w)[0] == 0
        assert by_normality(of(SKEWED), math.nextafter(w, 2))[0] == 1

    def test_no_zeroing(self) -> None:
        factors = by_normality(of(SKEWED, STEP, EVEN), math.inf)
        np.testing.assert_allclose(
            factors, np.array([W_SKEWED, W_STEP, W_EVEN]) / (W_SKEWED + W_STEP + W_EVEN)
        )

    def test_undefined_statistics_give_zero(self) -> None:
        constant = [2.0, 2.0, 2.0]
        np.testing.assert_allclose(by_normality(of(STEP, constant), 0.99), [1, 0])
        np.testing.assert_allclose(by_normality(of(STEP, constant), math.inf), [1, 0])

    @pytest.mark.parametrize("means", [[[1.0, 2.0]] * 2, [[0.0] * 9] * 3])
    def test_all_undefined(self, means: list[list[float]]) -> None:
        assert not by_normality(of(*means), 0.99).any()

    def test_noise_is_zeroed_and_signal_is_not(self) -> None:
        signal = gauss(6_000) + 3 * gauss(6_000, 1) ** 3
        factors = by_normality(Aggregates(np.stack([gauss(6_000, 2), signal]), 1.0), 0.99)
        assert factors[0] == 0
        assert factors[1] > 0


class TestByEnergy:
    def test_without_noise_it_is_eq_8(self) -> None:
        aggregates = of([3, 4], [0, 2], [0, 0])
        np.testing.assert_allclose(by_energy(aggregates), [2 / 5, 1, 0])

    def test_excess_over_noise(self) -> None:
        """d = 2, σ = 1: noise has energy 2 with deviation √(2d) = 2, so that 8 is the least that counts."""
        at_bound, over, more = [2.0, 2.0], [3.0, 1.0], [5.0, 3.0]
        np.testing.assert_allclose(by_energy(of(at_bound, over, more, std=1.0)), [0, 1, (8 / 32) ** 0.5])

    def test_pure_noise_is_zeroed(self) -> None:
        means = np.stack([0.1 * gauss(2_000, 1), 0.1 * gauss(2_000, 2), 0.1 * gauss(2_000, 3) + 0.1])
        np.testing.assert_allclose(by_energy(Aggregates(means, 0.1)), [0, 0, 1])

    def test_nothing_at_all(self) -> None:
        assert not by_energy(of([0, 0], [0, 0])).any()


class TestByCount:
    def counted(self, *shares: float, std: float = 0.0) -> np.ndarray:
        return by_count(Aggregates(np.ones((len(shares), 3)), 0.0, np.array(shares), std))

    def test_divides_by_the_share(self) -> None:
        np.testing.assert_allclose(self.counted(0.5, 0.25, 0.2), [2, 4, 5])

    def test_the_scaled_aggregate_is_the_clusters_own_mean(self) -> None:
        """10 users expected; 6 of them chose cluster 0 and sent 1 each, 3 chose cluster 1 and sent 2 each."""
        aggregates = Aggregates(np.array([[6.0], [6.0]]) / 10, 0.0, np.array([6, 3]) / 10)
        np.testing.assert_allclose(by_count(aggregates)[:, None] * aggregates.means, [[1], [2]])

    @pytest.mark.parametrize("share", [0.05, 0.0, -0.3])
    def test_a_small_share_counts_as_a_quarter_of_an_even_one(self, share: float) -> None:
        np.testing.assert_allclose(self.counted(1.0, share, std=1e-9), [1, 8])

    def test_without_noise_a_small_share_is_exact_and_an_empty_one_zero(self) -> None:
        np.testing.assert_allclose(self.counted(0.95, 0.05, 0.0), [1 / 0.95, 20, 0])

    def test_a_share_counts_as_two_deviations_of_its_noise(self) -> None:
        np.testing.assert_allclose(self.counted(1.0, 0.3, std=0.2), [1, 1 / 0.4])

    def test_needs_a_count(self) -> None:
        with pytest.raises(AssertionError):
            by_count(of([1.0]))


def test_none_leaves_aggregates_as_they_are() -> None:
    np.testing.assert_array_equal(unscaled(of([3, 4], [0, 0])), [1, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("normality", NORMALITY)
def test_rule_in_force(strategy: str, normality: str) -> None:
    config = RunConfig(strategy=strategy, normality=normality)
    fixed = {"pina": normality, "pina-ri": normality, "ifca": "count", "oracle": "count"}
    expected = fixed.get(strategy, "none")
    assert rule_name(config) == expected


class TestRuleOfARound:
    means = of([3, 4, 0], [0, 0, 1])

    def factors(self, normality: str, round_: int, **options: object) -> tuple[np.ndarray, float]:
        values = {"t-no": 2, "server-lr-no": 4.0, "server-lr": 16.0, "normality": normality}
        values |= {"secure-sum": "trusted"} | options
        scale, rate = rule(parse(values), round_)
        aggregates = Aggregates(self.means.means, 0.0, np.array([0.5, 0.25]))
        return scale(aggregates), rate

    @pytest.mark.parametrize("normality", ["paper", "paper-no-zeroing"])
    def test_eq_8_up_to_t_no_then_eq_9(self, normality: str) -> None:
        for round_ in (1, 2):
            factors, rate = self.factors(normality, round_)
            np.testing.assert_allclose(factors, [1 / 5, 1])
            assert rate == 4
        factors, rate = self.factors(normality, 3)
        w = [shapiro_wilk(mean) for mean in self.means.means]
        np.testing.assert_allclose(factors, np.array(w) / sum(x for x in w if x is not None))
        assert rate == 16

    def test_the_threshold_is_the_options(self) -> None:
        first, second = self.factors("paper", 3, **{"normality-threshold": 0.8})[0]  # W is 12/13 and 3/4
        assert first == 0
        assert second == pytest.approx(0.75 / (12 / 13 + 0.75))

    def test_zeroing_is_off_without_a_threshold(self) -> None:
        low = self.factors("paper-no-zeroing", 3, **{"normality-threshold": 0.1})[0]
        assert (low > 0).all()

    @pytest.mark.parametrize(
        ("normality", "expected"), [("count", [2, 4]), ("energy", [1 / 5, 1]), ("none", [1, 1])]
    )
    def test_other_rules_hold_in_all_rounds(self, normality: str, expected: list[float]) -> None:
        for round_, rate in ((1, 4), (3, 16)):
            factors, got = self.factors(normality, round_)
            np.testing.assert_allclose(factors, expected)
            assert got == rate

    @pytest.mark.parametrize(
        ("strategy", "rates"),
        [
            ("pina", (4, 16)),
            ("pina-ri", (4, 16)),
            ("fedavg", (1, 1)),
            ("fedprox", (1, 1)),
            ("ifca", (1, 1)),
            ("oracle", (1, 1)),
        ],
    )
    def test_server_learning_rates_are_pinas(self, strategy: str, rates: tuple[int, int]) -> None:
        options = {"strategy": strategy, "epsilon": math.inf, "secure-sum": "trusted"}
        assert tuple(self.factors("count", round_, **options)[1] for round_ in (2, 3)) == rates
