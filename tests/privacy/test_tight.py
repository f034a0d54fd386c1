import math
import time

import pytest
from scipy.special import log_ndtr, ndtr

from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)
from pina_flwr.privacy.tight import NoTightAccountant, gaussian_counterpart, tight_epsilon

DELTA = 1e-5


def delta_of_gaussian(z: float, spent: float) -> float:
    """Exact δ of the Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    return float(ndtr(0.5 / z - spent * z) - math.exp(spent + log_ndtr(-0.5 / z - spent * z)))


@pytest.mark.parametrize("z", [0.1, 0.3, 1.0, 4.0, 50.0])
def test_is_the_exact_epsilon_of_one_gaussian_release(z: float) -> None:
    found = tight_epsilon([GaussianRelease(z, 1.0, 1)], DELTA)
    assert delta_of_gaussian(z, found) <= DELTA * (1 + 1e-9)
    assert delta_of_gaussian(z, found * 0.998) > DELTA


def test_gaussian_releases_without_sampling_are_one() -> None:
    several = [GaussianRelease(2.0, 1.0, 3), GaussianRelease(1.0, 1.0, 1), GaussianRelease(2.0, 1.0, 1)]
    one = GaussianRelease(1 / math.sqrt(2), 1.0, 1)
    assert tight_epsilon(several, DELTA) == pytest.approx(tight_epsilon([one], DELTA), rel=1e-9)


def test_published_value() -> None:
    """q = 0.01, z = 4, 10,000 rounds: δ at ε = 1 as the accountant of Koskela, Jälkö and Honkela gives it."""
    assert tight_epsilon([GaussianRelease(4.0, 0.01, 10_000)], 4.243484012e-6) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("z", "q", "count", "delta"),
    [(0.8, 0.215, 20, 2.5e-3), (0.8, 0.215, 30, DELTA), (1.0, 0.01, 1000, DELTA), (5.0, 0.215, 1000, DELTA)],
)
def test_is_tighter_than_rdp_by_a_fifth_or_so(z: float, q: float, count: int, delta: float) -> None:
    release = GaussianRelease(z, q, count)
    by_rdp = epsilon([release], delta)
    assert 0.7 * by_rdp < tight_epsilon([release], delta) < by_rdp


def test_stays_an_upper_bound_when_it_is_coarse() -> None:
    """Cells are limited, so the interval grows with ε; one Gaussian release in many rounds shows the cost."""
    for z in (0.01, 0.1, 30.0):
        rounds = tight_epsilon([GaussianRelease(z * math.sqrt(500), 1 - 1e-12, 500)], DELTA)
        exact = tight_epsilon([GaussianRelease(z, 1.0, 1)], DELTA)
        assert exact * (1 - 2e-3) <= rounds <= exact * 1.02


def test_mixed_releases_compose() -> None:
    releases = [GaussianRelease(1.5, 0.215, 8), GaussianRelease(0.9, 0.215, 20), GaussianRelease(4.0, 1.0, 3)]
    joint = tight_epsilon(releases, DELTA)
    assert max(tight_epsilon([r], DELTA) for r in releases) < joint < epsilon(releases, DELTA)
    halves = [GaussianRelease(0.9, 0.215, 10)] * 2
    assert tight_epsilon(halves, DELTA) == tight_epsilon([releases[1]], DELTA)


def test_is_monotone() -> None:
    for falling in (
        [tight_epsilon([GaussianRelease(z, 0.2, 20)], DELTA) for z in (0.5, 1.0, 1.05, 4.0, 100.0)],
        [tight_epsilon([GaussianRelease(1.0, q, 20)], DELTA) for q in (1.0, 0.9, 0.2, 0.01)],
        [tight_epsilon([GaussianRelease(1.0, 0.2, 20)], delta) for delta in (1e-8, 1e-5, 1e-2)],
    ):
        assert falling == sorted(set(falling), reverse=True)


def test_nothing_and_no_protection() -> None:
    none = UnprotectedRelease("never", 0)
    assert tight_epsilon([], DELTA) == 0
    assert tight_epsilon([GaussianRelease(1.0, 0.5, 0), none], DELTA) == 0
    assert tight_epsilon([GaussianRelease(1.0, 0.5, 1), UnprotectedRelease("why", 1)], DELTA) == math.inf


@pytest.mark.parametrize("q", [0.5, 1.0])
def test_extreme_noise_multipliers_stay_on_the_safe_side(q: float) -> None:
    assert tight_epsilon([GaussianRelease(1e-200, q, 1)], DELTA) == math.inf
    assert tight_epsilon([GaussianRelease(1e-7, q, 1)], DELTA) > 1e12
    assert 0 <= tight_epsilon([GaussianRelease(1e200, q, 10)], DELTA) < 1e-6


INTEGER: list[Release] = [
    SkellamRelease(1e4, 100.0, 10_000.0, 0.2, 3),
    DiscreteGaussianRelease(100.0, 10_000.0, 10, 1000, 0.2, 3),
]


@pytest.mark.parametrize("release", [*INTEGER, ZcdpRelease(0.5, 3)])
def test_no_figure_where_no_distribution_is_known(release: Release) -> None:
    with pytest.raises(NoTightAccountant, match=type(release).__name__):
        tight_epsilon([GaussianRelease(1.0, 1.0, 1), release], DELTA)
    assert issubclass(NoTightAccountant, ValueError)


def test_unknown_mechanism_is_refused() -> None:
    for function in (lambda: tight_epsilon([object()], DELTA), lambda: gaussian_counterpart(object())):  # type: ignore[list-item, arg-type]
        with pytest.raises(TypeError, match="object"):
            function()


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        tight_epsilon([], delta)


@pytest.mark.parametrize("release", INTEGER)
def test_gaussian_counterpart(release: Release) -> None:
    assert gaussian_counterpart(release) == GaussianRelease(1.0, 0.2, 3)


def test_gaussian_counterpart_of_the_others() -> None:
    zcdp = gaussian_counterpart(ZcdpRelease(0.125, 3))
    assert zcdp == GaussianRelease(2.0, 1.0, 3)
    assert epsilon([zcdp], DELTA) == pytest.approx(epsilon([ZcdpRelease(0.125, 3)], DELTA))
    for own in (GaussianRelease(1.0, 0.5, 2), UnprotectedRelease("why", 1)):
        assert gaussian_counterpart(own) is own


def test_a_thousand_rounds_cost_little_more_than_thirty() -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        tight_epsilon([GaussianRelease(1.0, 0.2, count)], DELTA)
        return time.process_time() - start

    seconds(1)  # imports dp-accounting
    assert seconds(1000) < 30 * seconds(30) + 0.1
