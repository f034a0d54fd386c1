import itertools
import math
import time
from collections.abc import Sequence

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import integrate
from scipy.special import log_ndtr, ndtr

from pina_flwr.privacy import accountant
from pina_flwr.privacy.accountant import epsilon, is_loose
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease

DELTA = 1e-5
# (z, q, T) with ε between 0.02 and 30.
CASES = [
    (1.0, 0.215, 20),
    (0.8, 0.01, 100),
    (2.5, 0.215, 20),
    (1.2, 0.02, 1000),
    (5.0, 0.5, 50),
    (30.0, 0.9, 20),
    (0.6, 0.001, 500),
    (3.0, 1.0, 5),
    (100.0, 0.2, 1),
]


# dp-accounting's own orders without those under 2, which it leaves out with a warning.
ORDERS = [*np.arange(2, 11, 0.1), *range(11, 128), *range(128, 1025, 64)]


def event(releases: Sequence[GaussianRelease]) -> dp_accounting.DpEvent:
    """The same releases in the words of dp-accounting."""
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    r.sampling_rate, dp_accounting.GaussianDpEvent(r.noise_multiplier)
                ),
                r.count,
            )
            for r in releases
        ]
    )


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact ε of the Gaussian mechanism with sensitivity over σ = mu (Balle and Wang 2018), by bisection."""

    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        spent = ndtr(mu / 2 - middle / mu) - math.exp(middle + log_ndtr(-mu / 2 - middle / mu))
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


@pytest.mark.parametrize(("z", "q", "count"), CASES)
def test_agrees_with_rdp_of_dp_accounting(z: float, q: float, count: int) -> None:
    releases = [GaussianRelease(z, q, count)]
    other = rdp.RdpAccountant(ORDERS).compose(event(releases)).get_epsilon(DELTA)
    assert epsilon(releases, DELTA) == pytest.approx(other, rel=0.01)


@pytest.mark.parametrize(("z", "q", "count"), CASES)
def test_is_an_upper_bound(z: float, q: float, count: int) -> None:
    releases = [GaussianRelease(z, q, count)]
    tight = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event(releases)).get_epsilon(DELTA)
    # PLD's ε is itself rounded up to its interval. RDP is at its loosest for small q and z.
    assert tight - 1e-3 <= epsilon(releases, DELTA) <= 2.1 * tight + 0.05


def test_two_mechanisms_compose() -> None:
    releases = [GaussianRelease(1.5, 0.215, 8), GaussianRelease(0.9, 0.215, 20), GaussianRelease(4.0, 1.0, 3)]
    other = rdp.RdpAccountant(ORDERS).compose(event(releases)).get_epsilon(DELTA)
    tight = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event(releases)).get_epsilon(DELTA)
    joint = epsilon(releases, DELTA)
    assert joint == pytest.approx(other, rel=0.01)
    assert joint >= tight
    assert max(epsilon([r], DELTA) for r in releases) < joint < sum(epsilon([r], DELTA) for r in releases)


def test_known_value() -> None:
    assert epsilon([GaussianRelease(1.0, 0.215, 20)], 1e-5) == pytest.approx(8.0, abs=0.05)


def test_closed_form_without_sampling() -> None:
    """RDP of the Gaussian is α/(2z²); minimising Balle's conversion over real α gives ε."""
    z, count = 4.0, 10
    alphas = 1 + np.geomspace(1e-3, 1e4, 200_001)
    best = count * alphas / (2 * z**2) + np.log1p(-1 / alphas) - np.log(DELTA * alphas) / (alphas - 1)
    assert epsilon([GaussianRelease(z, 1.0, count)], DELTA) == pytest.approx(best.min(), rel=2e-3)
    assert epsilon([GaussianRelease(z, 1.0, count)], DELTA) >= gaussian_epsilon(math.sqrt(count) / z, DELTA)


@pytest.mark.parametrize(
    ("z", "q", "alpha"), [(1, 0.215, 2.2), (3, 0.6, 5.3), (0.7, 0.01, 1.7), (20, 0.4, 12), (37.4, 0.505, 47)]
)
def test_curve_against_quadrature(z: float, q: float, alpha: float) -> None:
    def integrand(x: float) -> float:
        density = math.exp(-(x**2) / (2 * z**2)) / (z * math.sqrt(2 * math.pi))
        return density * (1 - q + q * math.exp((2 * x - 1) / (2 * z**2))) ** alpha

    moment, _ = integrate.quad(integrand, -15 * z, 15 * z + 2 * alpha, epsabs=1e-13, epsrel=1e-12, limit=500)
    curve = accountant._curve(z, q, (alpha,))[0]
    assert curve == pytest.approx(math.log(moment) / (alpha - 1), rel=1e-6)


def test_orders_at_which_the_series_of_opacus_breaks_down() -> None:
    """At α = 47.005, q = 0.505, z = 37.4 it falls below 0, with which ε would be 0.1."""
    assert epsilon([GaussianRelease(37.4, 0.505, 20_000)], DELTA) == pytest.approx(10.1, abs=0.1)
    below, at = accountant._curve(37.4, 0.505, (47.0, 47.005))
    assert at > below


def test_a_falling_curve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: float) -> None:
        monkeypatch.setattr(accountant, "compute_rdp", lambda orders, **_: np.array([0.5, value]))
        accountant._curve.cache_clear()

    for value in (0.4, math.nan):
        broken(value)
        with pytest.raises(ArithmeticError, match="RDP"):
            accountant._curve(1.0, 0.5, (2.0, 3.0))
    broken(0.6)
    assert accountant._curve(1.0, 0.5, (2.0, 3.0)) == pytest.approx([0.5, 0.6])
    accountant._curve.cache_clear()


@pytest.mark.parametrize("z", [1e-9, 0.05, 0.3, 1.0, 7.0, 200.0, 1e12])
def test_sampling_never_hurts(z: float) -> None:
    for orders in (accountant.LOW[-3:], accountant.MIDDLE, accountant.HIGH):
        sampled, plain = accountant._curve(z, 0.3, orders), accountant._curve(z, 1.0, orders)
        assert np.all(np.isfinite(sampled))
        assert np.all((sampled <= plain) & (sampled >= 0))


def test_epsilon_is_monotone() -> None:
    def at(z: float = 1.0, q: float = 0.2, count: int = 20, delta: float = DELTA) -> float:
        return epsilon([GaussianRelease(z, q, count)], delta)

    for falling in (
        [at(z=z) for z in (0.5, 1.0, 1.01, 2.0, 10.0, 300.0)],
        [at(q=q) for q in (1.0, 0.9, 0.5, 0.2, 0.01, 1e-4)],
        [at(count=count) for count in (100, 20, 2, 1, 0)],
        [at(delta=delta) for delta in (1e-12, 1e-8, 1e-5, 1e-2)],
    ):
        assert all(a > b for a, b in itertools.pairwise(falling))


def test_nothing_released_costs_nothing() -> None:
    assert epsilon([], DELTA) == 0
    assert epsilon([GaussianRelease(1.0, 0.5, 0), UnprotectedRelease("why", 0)], DELTA) == 0


def test_unprotected_release_has_no_finite_epsilon() -> None:
    assert epsilon([GaussianRelease(10.0, 0.1, 1), UnprotectedRelease("why", 1)], DELTA) == math.inf


def test_unknown_mechanism_is_refused() -> None:
    class LaplaceRelease:
        count = 0

    releases: list[Release] = [UnprotectedRelease("why", 1), LaplaceRelease()]  # type: ignore[list-item]
    with pytest.raises(TypeError, match="LaplaceRelease"):
        epsilon(releases, DELTA)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        epsilon([], delta)


def test_orders_widen_at_both_ends() -> None:
    much, little = GaussianRelease(0.05, 1.0, 10), GaussianRelease(5000.0, 1.0, 10)
    # Exact values: μ = √T / z; RDP loses less than a fifth of ε.
    for release, loosest in ((much, 1.03), (little, 1.6)):
        exact = gaussian_epsilon(math.sqrt(release.count) / release.noise_multiplier, DELTA)
        assert exact <= epsilon([release], DELTA) <= loosest * exact
        assert not is_loose([release], DELTA)


def test_loose_if_the_best_order_is_still_the_last() -> None:
    releases = [GaussianRelease(1e-4, 1.0, 100)]
    assert 1e9 < epsilon(releases, DELTA) < math.inf
    assert is_loose(releases, DELTA)
    assert not is_loose([], DELTA)
    assert not is_loose([UnprotectedRelease("why", 1)], DELTA)


def test_extreme_noise_multipliers_stay_on_the_safe_side() -> None:
    assert epsilon([GaussianRelease(1e-200, 0.5, 1)], DELTA) == math.inf
    assert 0 <= epsilon([GaussianRelease(1e200, 0.5, 1)], DELTA) < 1e-4


def test_a_thousand_rounds_take_under_two_seconds() -> None:
    accountant._curve.cache_clear()
    start = time.process_time()
    epsilon([GaussianRelease(1.1, 0.2, 1000), GaussianRelease(2.0, 0.2, 10)], DELTA)
    assert time.process_time() - start < 2
