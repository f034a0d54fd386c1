import itertools
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import integrate
from scipy.special import log_ndtr, ndtr

from pina_flwr.privacy import accountant
from pina_flwr.privacy.accountant import epsilon, epsilon_over_rounds, is_loose
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

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


def skellam(z: float, q: float, count: int, scale: float = 2000.0, size: int = 20_000) -> SkellamRelease:
    """Noise of z times the l2 sensitivity `scale` in integers, on vectors of `size` coordinates."""
    return SkellamRelease(scale * min(math.sqrt(size), scale), scale, (z * scale) ** 2, q, count)


def discrete(z: float, q: float, count: int, scale: float = 2000.0) -> DiscreteGaussianRelease:
    return DiscreteGaussianRelease(scale, (z * scale) ** 2, 100, 20_000, q, count)


def test_known_value() -> None:
    assert epsilon([GaussianRelease(1.0, 0.215, 20)], 1e-5) == pytest.approx(8.0, abs=0.05)


@pytest.mark.parametrize(
    ("z", "q", "count", "delta", "published"),
    [(1.3, 150 / 60_000, 6000, 1e-5, 0.7242), (1.0, 1e-3, 30_000, 1e-7, 1.4155)],
)
def test_published_values(z: float, q: float, count: int, delta: float, published: float) -> None:
    """From the tests of TensorFlow Privacy for DP-SGD: RDP with the conversion of Balle et al."""
    assert epsilon([GaussianRelease(z, q, count)], delta) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(("z", "q", "count"), CASES)
def test_integer_noise_at_a_large_scale_costs_what_gaussian_noise_does(
    z: float, q: float, count: int
) -> None:
    """But for whole orders only, which matter at large ε, and never less."""
    plain = epsilon([GaussianRelease(z, q, count)], DELTA)
    for integer in (skellam(z, q, count, 1e6), discrete(z, q, count, 1e6)):
        assert plain * (1 - 1e-3) <= epsilon([integer], DELTA) <= plain * (1.07 if plain < 12 else 1.3)


def test_the_smaller_the_scale_the_more_skellam_noise_costs() -> None:
    spent = [epsilon([skellam(1.0, 0.215, 20, scale)], DELTA) for scale in (1e6, 1e3, 100.0, 30.0)]
    assert all(a < b for a, b in itertools.pairwise(spent))
    assert spent[1] < 1.01 * spent[0]


def test_all_mechanisms_compose() -> None:
    releases: list[Release] = [
        skellam(1.5, 0.215, 8),
        discrete(1.2, 0.215, 5),
        GaussianRelease(2.0, 0.215, 4),
        ZcdpRelease(0.05, 3),
        UnprotectedRelease("never", 0),
    ]
    counterparts = [GaussianRelease(1.5, 0.215, 8), GaussianRelease(1.2, 0.215, 5), releases[2]]
    counterparts.append(GaussianRelease(1 / math.sqrt(0.1), 1.0, 3))
    joint = epsilon(releases, DELTA)
    assert joint == pytest.approx(epsilon(counterparts, DELTA), rel=0.03)
    assert max(epsilon([r], DELTA) for r in releases) < joint < sum(epsilon([r], DELTA) for r in releases)
    assert epsilon([*releases, UnprotectedRelease("why", 1)], DELTA) == math.inf


def test_zcdp_and_a_discrete_gaussian_without_sampling_use_fractional_orders() -> None:
    """They cost what the Gaussian mechanism does, 1 / (2z²)-zCDP; Skellam noise has no such orders."""
    plain = epsilon([GaussianRelease(0.5, 1.0, 10)], DELTA)
    assert epsilon([ZcdpRelease(2.0, 10)], DELTA) == pytest.approx(plain, rel=1e-9)
    assert epsilon([discrete(0.5, 1.0, 10)], DELTA) == pytest.approx(plain, rel=1e-9)
    assert epsilon([skellam(0.5, 1.0, 10, 1e6)], DELTA) > 1.02 * plain


def test_discrete_epsilon_is_monotone() -> None:
    for kind in (skellam, discrete):
        for falling in (
            [epsilon([kind(z, 0.2, 20)], DELTA) for z in (0.5, 1.0, 1.01, 2.0, 10.0, 300.0)],
            [epsilon([kind(1.0, q, 20)], DELTA) for q in (1.0, 0.9, 0.5, 0.2, 0.01, 1e-4)],
            [epsilon([kind(1.0, 0.2, count)], DELTA) for count in (100, 20, 2, 1, 0)],
        ):
            assert all(a > b for a, b in itertools.pairwise(falling))


def test_whole_orders_widen_upwards_and_are_loose_at_two() -> None:
    little, much = skellam(5000.0, 1.0, 10), skellam(0.05, 1.0, 10)
    exact = gaussian_epsilon(math.sqrt(10) / 5000, DELTA)
    assert exact <= epsilon([little], DELTA) <= 1.6 * exact
    assert not is_loose([little], DELTA)
    assert not is_loose([skellam(1.0, 0.215, 20)], DELTA)
    assert not is_loose([skellam(0.8, 0.215, 20)], 2.5e-3)  # order 2 for a Gaussian's 2.2
    assert is_loose([skellam(0.8, 1.0, 20)], 2.5e-3)  # 2 for 1.6, which costs 8 %
    assert is_loose([much], DELTA)


def test_extreme_integer_noise_stays_on_the_safe_side() -> None:
    assert epsilon([SkellamRelease(1e200, 1e200, 1e-200, 0.5, 1)], DELTA) == math.inf
    assert epsilon([SkellamRelease(1.0, 1.0, 1e-300, 0.5, 1)], DELTA) > 1e100
    assert 0 <= epsilon([SkellamRelease(1.0, 1.0, 1e300, 0.5, 1)], DELTA) < 1e-4
    assert epsilon([DiscreteGaussianRelease(1e200, 1e-200, 1, 1, 0.5, 1)], DELTA) == math.inf
    assert epsilon([ZcdpRelease(1e308, 10)], DELTA) == math.inf


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
    curve = accountant._curve(GaussianRelease(z, q, 1), (alpha,))[0]
    assert curve == pytest.approx(math.log(moment) / (alpha - 1), rel=1e-6)


def test_orders_at_which_the_series_of_opacus_breaks_down() -> None:
    """At α = 47.005, q = 0.505, z = 37.4 it falls below 0, with which ε would be 0.1."""
    assert epsilon([GaussianRelease(37.4, 0.505, 20_000)], DELTA) == pytest.approx(10.1, abs=0.1)
    below, at = accountant._curve(GaussianRelease(37.4, 0.505, 1), (47.0, 47.005))
    assert at > below


def test_a_falling_curve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    release, orders = GaussianRelease(1.0, 0.5, 1), (1.5, 1.8, 2.0)
    sound = accountant._curve(release, orders)

    def broken(value: float) -> None:
        monkeypatch.setattr(accountant, "_series", lambda *_: np.array([sound[0], value]))
        accountant._curve.cache_clear()

    for value in (0.5 * sound[0], 2 * sound[2], math.nan):
        broken(value)
        with pytest.raises(ArithmeticError, match="RDP"):
            accountant._curve(release, orders)
    broken(sound[1])
    assert accountant._curve(release, orders) == pytest.approx(sound)
    accountant._curve.cache_clear()


def test_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (SkellamRelease, DiscreteGaussianRelease, ZcdpRelease, GaussianRelease):
        monkeypatch.setattr(kind, "curve", lambda _, orders: np.full_like(orders, np.nan))
    accountant._curve.cache_clear()
    for release in (skellam(1.0, 1.0, 1), discrete(1.0, 1.0, 1), ZcdpRelease(1.0, 1), skellam(1.0, 0.5, 1)):
        with pytest.raises((ArithmeticError, ValueError), match="NaN"):
            epsilon([release], DELTA)
    accountant._curve.cache_clear()


@pytest.mark.parametrize("z", [1e-9, 0.05, 0.3, 1.0, 7.0, 200.0, 1e12])
def test_sampling_never_hurts(z: float) -> None:
    for orders in (accountant.LOW[-3:], accountant.MIDDLE, accountant.HIGH):
        sampled, plain = (accountant._curve(GaussianRelease(z, q, 1), orders) for q in (0.3, 1.0))
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


@pytest.mark.parametrize("release", [skellam(0.8, 0.215, 1), GaussianRelease(1.1, 0.1, 1)])
def test_epsilon_over_rounds(release: Release) -> None:
    rounds = [0, 1, 2, 5, 20, 60, 150, 400, 1000]
    before = [ZcdpRelease(0.02, 5)]
    spent = epsilon_over_rounds([release], rounds, 1e-3, before)
    each = [epsilon([*before, replace(release, count=n)], 1e-3) for n in rounds]
    assert spent == pytest.approx(each, rel=0.01)
    assert np.all(np.diff(spent) > 0)
    assert spent[-1] == pytest.approx(each[-1], rel=1e-12)
    assert list(epsilon_over_rounds([release], rounds[::-1], 1e-3, before)) == list(spent[::-1])


def test_epsilon_over_rounds_without_guarantee_or_rounds() -> None:
    release = skellam(1.0, 0.2, 1)
    assert epsilon_over_rounds([release], [], DELTA).shape == (0,)
    assert epsilon_over_rounds([release], [0, 0], DELTA).tolist() == [0, 0]
    assert epsilon_over_rounds([], [0, 3], DELTA).tolist() == [0, 0]
    assert epsilon_over_rounds([UnprotectedRelease("why", 1)], [0, 1], DELTA).tolist() == [0, math.inf]
    assert epsilon_over_rounds([release], [0, 1], DELTA, [UnprotectedRelease("why", 1)]).min() == math.inf
    paid = epsilon([release], DELTA)
    assert epsilon_over_rounds([UnprotectedRelease("why", 1)], [0, 1], DELTA, [release])[0] == paid


def test_epsilon_over_rounds_refuses_bad_input() -> None:
    release = skellam(1.0, 0.2, 1)
    with pytest.raises(ValueError, match="rounds"):
        epsilon_over_rounds([release], [1, -1], DELTA)
    with pytest.raises(TypeError, match="rounds"):
        epsilon_over_rounds([release], [1.5], DELTA)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="delta"):
        epsilon_over_rounds([release], [], math.nan)
    with pytest.raises(TypeError, match="object"):
        epsilon_over_rounds([object()], [1], DELTA)  # type: ignore[list-item]


def seconds(release: Release, rounds: int = 0) -> float:
    """Least CPU time of three, without cached curves."""
    times = []
    for _ in range(3):
        accountant._curve.cache_clear()
        start = time.process_time()
        if rounds:
            epsilon_over_rounds([release], range(1, rounds + 1), DELTA)
        else:
            epsilon([release], DELTA)
        times.append(time.process_time() - start)
    return min(times)


def test_rounds_cost_no_time() -> None:
    one = seconds(skellam(1.0, 0.2, 1))
    assert seconds(skellam(1.0, 0.2, 1000)) < 10 * one + 0.01
    assert seconds(skellam(1.0, 0.2, 1), 1000) < 50 * one + 0.02
    assert one < 0.2  # half a millisecond on a laptop


def test_integer_noise_needs_no_torch() -> None:
    """Opacus takes seconds to import, which `pina privacy` has not."""
    code = (
        "import sys; from pina_flwr.privacy.calibration import calibrate;"
        "from pina_flwr.privacy.releases import GaussianRelease, SkellamRelease, ZcdpRelease;"
        "known = ZcdpRelease(0.1, 1);"
        "calibrate(lambda z: [SkellamRelease(9e4, 2e3, (2e3 * z) ** 2, 0.2, 100), known], 8.0, 1e-5);"
        "calibrate(lambda z: [GaussianRelease(z, 1.0, 100), known], 8.0, 1e-5);"
        "print(*({'torch', 'opacus', 'dp_accounting'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_a_thousand_rounds_take_under_two_seconds() -> None:
    epsilon([GaussianRelease(1.1, 0.2, 1)], DELTA)  # imports Opacus
    accountant._curve.cache_clear()
    start = time.process_time()
    epsilon([GaussianRelease(1.1, 0.2, 1000), GaussianRelease(2.0, 0.2, 10)], DELTA)
    assert time.process_time() - start < 2
