import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import ive

from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

SKELLAM = SkellamRelease(l1=30.0, l2=10.0, variance=100.0, sampling_rate=0.5, count=1)
DISCRETE = DiscreteGaussianRelease(l2=10.0, variance=100.0, clients=4, size=50, sampling_rate=0.5, count=1)
ALL = [GaussianRelease(1.0, 0.5, 1), SKELLAM, DISCRETE, ZcdpRelease(0.5, 1), UnprotectedRelease("why", 1)]
WHOLE = np.array([2.0, 3.0, 8.0, 64.0])


def names(release: Release) -> set[str]:
    return {field.name for field in dataclasses.fields(release)}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("release", ALL)
def test_noise_and_sensitivity_must_be_positive_and_finite(release: Any, value: float) -> None:
    for name in names(release) & {"noise_multiplier", "l1", "l2", "variance", "rho"}:
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(release, **{name: value})


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, math.nan])
@pytest.mark.parametrize("release", ALL[:3])
def test_sampling_rate_must_be_a_positive_probability(release: Any, rate: float) -> None:
    with pytest.raises(ValueError, match="sampling_rate"):
        dataclasses.replace(release, sampling_rate=rate)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
@pytest.mark.parametrize("release", ALL)
def test_counts_must_be_natural_numbers(release: Any, value: object, error: type[Exception]) -> None:
    for name in names(release) & {"count", "clients", "size"}:
        with pytest.raises(error, match=name):
            dataclasses.replace(release, **{name: value})


def test_nobody_adds_noise_to_nothing() -> None:
    for name in ("clients", "size"):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(DISCRETE, **{name: 0})


def test_no_vector_has_an_l1_norm_under_its_l2_norm() -> None:
    with pytest.raises(ValueError, match="l1"):
        dataclasses.replace(SKELLAM, l1=9.9)
    dataclasses.replace(SKELLAM, l1=10.0)


def test_shares_of_discrete_gaussian_noise_have_a_least_variance() -> None:
    with pytest.raises(ValueError, match=r"variance = 0.9: must be at least 0.25 for each of the 4"):
        dataclasses.replace(DISCRETE, variance=0.9)
    dataclasses.replace(DISCRETE, variance=1.0)
    dataclasses.replace(DISCRETE, variance=0.01, clients=1)


@pytest.mark.parametrize("release", ALL)
def test_releases_are_values(release: Release) -> None:
    assert release == dataclasses.replace(release)
    assert len({release, dataclasses.replace(release)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        release.count = 5  # type: ignore[misc]


def test_zcdp_is_never_amplified() -> None:
    assert ZcdpRelease(0.5, 1).sampling_rate == 1
    assert ZcdpRelease(0.5, 1).curve(WHOLE).tolist() == (WHOLE / 2).tolist()


def renyi(laws: tuple[np.ndarray, np.ndarray], alpha: float) -> float:
    p, q = laws
    return float(np.logaddexp.reduce(alpha * np.log(p) + (1 - alpha) * np.log(q))) / (alpha - 1)


@pytest.mark.parametrize("alpha", [2, 3, 6, 12, 30])
@pytest.mark.parametrize(("mu", "shift"), [(0.5, 1), (2.0, 1), (2.0, 3), (10.0, 2), (100.0, 15), (900.0, 20)])
def test_skellam_curve_bounds_the_exact_divergence(mu: float, shift: int, alpha: int) -> None:
    """In one dimension by summation; in several, coordinates with one shift each add up."""
    reach = int(20 + 12 * math.sqrt(mu)) + alpha * shift
    x = np.arange(-reach, reach + 1)
    laws = ive(np.abs(x - shift), mu), ive(np.abs(x), mu)
    held = (laws[0] > 0) & (laws[1] > 0)
    exact = renyi((laws[0][held], laws[1][held]), alpha)
    for size in (1, 7):
        release = SkellamRelease(float(size * shift), shift * math.sqrt(size), mu, 1.0, 1)
        assert size * exact <= release.curve(np.array([float(alpha)]))[0] * (1 + 1e-12)
    if alpha * shift < 0.2 * mu:  # beyond, the tails of Skellam noise are heavier than a Gaussian's
        assert release.curve(np.array([float(alpha)]))[0] < 1.05 * size * exact


def test_skellam_curve_by_hand() -> None:
    """α·l2²/2μ is 2/2; of the excess, (3·100 + 180) / 40000 = 0.012 is under 90 / 200."""
    assert SKELLAM.curve(np.array([2.0])) == pytest.approx([1.012])
    small = SkellamRelease(1.0, 1.0, 0.25, 1.0, 1)  # 4 + min((3 + 6) / 0.25, 3 / 0.5)
    assert small.curve(np.array([2.0])) == pytest.approx([4 + 6])


def test_skellam_curve_tends_to_the_gaussian() -> None:
    excess = []
    for scale in (10.0, 100.0, 1000.0, 1e5):
        release = SkellamRelease(100 * scale, scale, (2 * scale) ** 2, 1.0, 1)
        gaussian = GaussianRelease(2.0, 1.0, 1).curve(WHOLE)
        excess.append(release.curve(WHOLE) / gaussian - 1)
        assert np.all(excess[-1] > 0)
    for more, less in itertools.pairwise(excess):
        assert np.all(less < more / 5)
    assert np.all(excess[-1] < 1e-3)


@pytest.mark.parametrize("order", [1.0, 1.5, 2.5, math.nan])
def test_skellam_curve_refuses_fractional_orders(order: float) -> None:
    with pytest.raises(ValueError, match="whole orders"):
        SKELLAM.curve(np.array([2.0, order]))


def discrete_gaussians(variance: float, clients: int, reach: int) -> np.ndarray:
    """Law of the sum of discrete Gaussians on -reach..reach, computed on thrice that."""
    x = np.arange(-3 * reach, 3 * reach + 1)
    one = np.exp(-(x**2) * clients / variance / 2)
    one = one / one.sum()
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one, mode="same")
    return total[2 * reach : -2 * reach]


@pytest.mark.parametrize("clients", [2, 3, 5])
@pytest.mark.parametrize("share", [0.25, 0.3, 0.5])
def test_sums_of_discrete_gaussians_are_as_near_to_one_as_tau_says(share: float, clients: int) -> None:
    reach = 6
    law = discrete_gaussians(share * clients, clients, reach)
    near = discrete_gaussians(share * clients, 1, reach)
    apart = float(np.abs(np.log(law / near)).max())
    release = DiscreteGaussianRelease(1.0, share * clients, clients, 1, 1.0, 1)
    assert apart <= release.tau / 2
    assert apart > 0.3 * release.tau / 2 or clients > 2  # each further client leaves some slack


@pytest.mark.parametrize("alpha", [1.2, 2.0, 5.0, 12.0])
@pytest.mark.parametrize(
    ("share", "clients", "shift"), [(0.25, 3, 1), (0.25, 5, 2), (0.4, 2, 1), (3.0, 4, 3)]
)
def test_discrete_gaussian_curve_bounds_the_exact_divergence(
    share: float, clients: int, shift: int, alpha: float
) -> None:
    law = discrete_gaussians(share * clients, clients, 8 + int(6 * math.sqrt(share * clients)))
    held = (law[shift:] > 1e-250) & (law[:-shift] > 1e-250)
    exact = renyi((law[:-shift][held], law[shift:][held]), alpha)
    for size in (1, 6):  # the same shift in every coordinate
        release = DiscreteGaussianRelease(shift * math.sqrt(size), share * clients, clients, size, 1.0, 1)
        assert size * exact <= release.curve(np.array([alpha]))[0] * (1 + 1e-12)


def test_discrete_gaussian_curve_by_hand() -> None:
    """One client: α·l2² / 2σ². Two of σ² = 1/4: τ = 10·exp(-π²/4), where the first bound is the smaller."""
    alone = dataclasses.replace(DISCRETE, clients=1)
    assert alone.tau == 0
    assert alone.curve(WHOLE) == pytest.approx(WHOLE / 2)
    two = DiscreteGaussianRelease(1.0, 0.5, 2, 1, 1.0, 1)
    assert two.tau == pytest.approx(10 * math.exp(-(math.pi**2) / 4))
    assert two.curve(WHOLE) == pytest.approx(WHOLE + two.tau)


def test_discrete_gaussian_curve_takes_the_second_bound_if_tau_is_small_in_many_dimensions() -> None:
    release = DiscreteGaussianRelease(100.0, 100.0, 100, 10**8, 1.0, 1)
    assert release.tau * release.size > 0.1
    x, tau = 100.0, release.tau
    second = WHOLE / 2 * (x + 2 * tau * 100 * 100 / 10 + tau**2 * 1e8)
    first = WHOLE / 2 * x + tau * 1e8
    assert release.curve(WHOLE) == pytest.approx(np.minimum(first, second))
    assert np.any(second < first)


def test_discrete_gaussian_curve_tends_to_the_gaussian() -> None:
    release = DiscreteGaussianRelease(2000.0, 1600.0**2, 100, 10**5, 1.0, 1)
    assert release.curve(WHOLE) == pytest.approx(GaussianRelease(0.8, 1.0, 1).curve(WHOLE), rel=1e-12)
