import itertools
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from numpy.typing import NDArray
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.special import ive

from pina_flwr.privacy.releases import Curve, DiscreteGaussianRelease, GaussianRelease, SkellamRelease
from pina_flwr.privacy.sampling import poisson

ORDERS = np.array([2, 3, 4, 5, 8, 16, 32, 64, 100, 256, 1024], dtype=np.float64)
Law = NDArray[np.float64]


def skellam_law(mu: float, reach: int) -> Law:
    """Probabilities of -reach..reach under Skellam noise of variance μ."""
    return ive(np.abs(np.arange(-reach, reach + 1)), mu)


def discrete_gaussian_law(variance: float, clients: int, reach: int) -> Law:
    x = np.arange(-reach, reach + 1)
    one = np.exp(-(x**2) * clients / variance / 2)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one, mode="same")
    return total / total.sum()


def renyi(p: Law, q: Law, alpha: float) -> float:
    """D_α(p ‖ q), from the probabilities both hold above 0."""
    held = (p > 0) & (q > 0)
    logs = alpha * np.log(p[held]) + (1 - alpha) * np.log(q[held])
    return float(np.logaddexp.reduce(logs)) / (alpha - 1)


def both_ways(law: Law, shift: int, q: float, alpha: float) -> tuple[float, float]:
    """D_α of the sampled sum against the sum without the user, and the other way round."""
    without = law[shift:]
    sampled = (1 - q) * without + q * law[: len(law) - shift]
    return renyi(sampled, without, alpha), renyi(without, sampled, alpha)


@pytest.mark.parametrize("alpha", [2, 3, 5, 9])
@pytest.mark.parametrize("q", [0.01, 0.215, 0.7, 0.97])
@pytest.mark.parametrize(("mu", "shift"), [(4.0, 1), (4.0, 3), (30.0, 4), (400.0, 25)])
def test_bounds_the_sampled_skellam_sum_both_ways(mu: float, shift: int, q: float, alpha: int) -> None:
    law = skellam_law(mu, int(30 + 9 * math.sqrt(mu) + alpha * shift))
    removed, added = both_ways(law, shift, q, alpha)
    release = SkellamRelease(float(shift), float(shift), mu, q, 1)
    bound = poisson(release.curve, q, np.array([float(alpha)]))[0]
    assert added <= removed * (1 + 1e-9)
    assert removed <= bound
    if alpha * shift < 0.2 * mu:  # beyond, the tails of Skellam noise are heavier than a Gaussian's
        assert bound <= 1.05 * removed


@pytest.mark.parametrize("alpha", [2, 4, 8])
@pytest.mark.parametrize(("variance", "clients", "shift"), [(1.0, 1, 2), (1.5, 5, 1), (25.0, 5, 6)])
def test_bounds_the_sampled_discrete_gaussian_sum_both_ways(
    variance: float, clients: int, shift: int, alpha: int
) -> None:
    law = discrete_gaussian_law(variance, clients, int(12 * math.sqrt(variance)) + 8)
    release = DiscreteGaussianRelease(float(shift), variance, clients, 1, 0.3, 1)
    bound = poisson(release.curve, 0.3, np.array([float(alpha)]))[0]
    assert max(both_ways(law, shift, 0.3, alpha)) <= bound


@pytest.mark.parametrize("alpha", [1.1, 1.7, 2.0, 3.4, 12.5])
@pytest.mark.parametrize("q", [1e-3, 0.3, 0.9])
def test_addition_costs_no_more_than_removal_at_real_orders(q: float, alpha: float) -> None:
    """Part (3) of the proof, for a symmetric law far from a Gaussian."""
    x = np.abs(np.arange(-40, 41))
    law = np.exp(-0.3 * x) * (1 + (x % 3 == 0))
    removed, added = both_ways(law / law.sum(), 2, q, alpha)
    assert added <= removed * (1 + 1e-12)


def test_without_symmetry_addition_may_cost_more() -> None:
    without, sampled = np.array([0.5, 0.5]), np.array([0.75, 0.25])  # P = (1/2, 1/2), Q = (1, 0), q = 1/2
    assert renyi(without, sampled, 2) > 1.2 * renyi(sampled, without, 2)


@pytest.mark.parametrize(
    ("z", "q"), [(0.8, 0.215), (1.0, 0.01), (5.0, 0.9), (30.0, 0.3), (0.3, 1e-6), (2, 0.5)]
)
def test_agrees_with_opacus_for_the_gaussian_mechanism(z: float, q: float) -> None:
    theirs = np.array(compute_rdp(q=q, noise_multiplier=z, steps=1, orders=ORDERS.tolist()))
    ours = poisson(GaussianRelease(z, q, 1).curve, q, ORDERS)
    assert ours == pytest.approx(np.minimum(theirs, ORDERS / 2 / z**2), rel=1e-8, abs=2e-15)


def test_published_values_of_the_sampled_gaussian_mechanism() -> None:
    """From the tests of TensorFlow Privacy, whose series is that of Mironov, Talwar and Zhang (2019)."""
    assert 10 * poisson(GaussianRelease(2.0, 0.1, 1).curve, 0.1, np.array([5.0])) == pytest.approx(
        0.07737, abs=1e-5
    )
    fifty = 50 * poisson(GaussianRelease(2.5, 0.01, 1).curve, 0.01, np.array([5.0, 50.0, 100.0]))
    assert fifty == pytest.approx([2.1808e-3, 2.3846e-2, 167.42], rel=1e-4)


def exact(curve: Curve, q: float, alpha: int) -> Decimal:
    """The sum in 60 digits, for a curve at 2, 3, .. as given."""
    getcontext().prec, getcontext().Emax = 60, 10**9
    rate = Decimal(q)
    total = (1 - rate) ** alpha + alpha * rate * (1 - rate) ** (alpha - 1)
    for order in range(2, alpha + 1):
        weight = math.comb(alpha, order) * rate**order * (1 - rate) ** (alpha - order)
        total += weight * ((order - 1) * Decimal(float(curve[order - 2]))).exp()
    return total.ln() / (alpha - 1)


@pytest.mark.parametrize("q", [1e-7, 0.215, 1 - 1e-9])
@pytest.mark.parametrize("z", [0.1, 1.0, 40.0, 1e4])
def test_is_rounded_up_and_by_little(z: float, q: float) -> None:
    curve = GaussianRelease(z, q, 1).curve
    orders = np.array([2, 7, 64, 400], dtype=np.float64)
    plain = curve(np.arange(2, 401, dtype=np.float64))
    for order, found in zip(orders, poisson(curve, q, orders), strict=True):
        true = exact(plain, q, int(order))
        assert Decimal(float(found)) >= min(true, Decimal(float(plain[int(order) - 2])))
        assert float(found) <= float(true) * (1 + 1e-9)


def test_sampling_never_hurts_and_helps_more_at_small_rates() -> None:
    curve = SkellamRelease(100.0, 10.0, 100.0, 1.0, 1).curve
    rates = [1e-6, 1e-3, 0.1, 0.5, 0.999]
    curves = [poisson(curve, q, ORDERS) for q in rates] + [curve(ORDERS)]
    for less, more in itertools.pairwise(curves):
        assert np.all(less <= more)
    assert curves[0][0] == pytest.approx(1e-12 * math.expm1(curve(ORDERS)[0]), rel=1e-5)


def test_orders_may_come_in_any_order() -> None:
    curve = GaussianRelease(1.0, 0.2, 1).curve
    assert poisson(curve, 0.2, ORDERS[::-1]).tolist() == poisson(curve, 0.2, ORDERS)[::-1].tolist()
    assert poisson(curve, 0.2, np.zeros(0)).shape == (0,)


def test_infinite_curves_stay_infinite_and_nan_is_refused() -> None:
    assert np.all(poisson(lambda orders: np.full_like(orders, np.inf), 0.5, ORDERS) == np.inf)
    assert np.all(poisson(np.zeros_like, 0.5, ORDERS) == 0)
    mixed = poisson(lambda orders: np.where(orders < 50, 1.0, np.inf), 0.5, ORDERS)
    assert np.all(mixed[:7] <= 1)
    assert np.all(mixed[7:] == np.inf)
    with pytest.raises(ValueError, match="NaN"):
        poisson(lambda orders: np.where(orders == 7, np.nan, 1.0), 0.5, ORDERS)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan])
def test_rate_is_strictly_between_0_and_1(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        poisson(np.zeros_like, rate, ORDERS)


@pytest.mark.parametrize("order", [1.0, 2.5, math.nan])
def test_orders_are_whole_and_at_least_2(order: float) -> None:
    with pytest.raises(ValueError, match="whole orders"):
        poisson(np.zeros_like, 0.5, np.array([order]))
