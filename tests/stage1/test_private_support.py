import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit, logit, logsumexp

from pina_flwr.stage1.local_gaussian import LocalGaussian, gaussian_rho
from pina_flwr.stage1.private_support import (
    SUPPORT_SHARE,
    PrivateSupport,
    steepest_slope,
    support_rho,
    variance_proxy,
)

ALPHAS = [1.001, 1.1, 1.5, 2, 3, 4, 8, 16, 64, 256]
SHAPES = [(3, 1), (4, 2), (4, 3), (8, 1), (9, 4)]


def directions(h: int) -> list[np.ndarray]:
    """Unit vectors: one entry, two, all alike, and random ones with both signs."""
    two = np.zeros(h)
    two[:2] = [-math.sqrt(0.5), math.sqrt(0.5)]
    drawn = np.random.default_rng(h).standard_normal((4, h))
    return [np.eye(h)[0], two, np.full(h, h**-0.5), *(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))]


def supports(u: np.ndarray, slope: float, threshold: float) -> np.ndarray:
    """Log-probabilities of all 2^h supports: an exponential mechanism on {drop, keep} at each position."""
    scores = slope * abs(u) + threshold
    each = np.stack([-np.logaddexp(0, scores), scores - np.logaddexp(0, scores)])
    return np.array([each[list(kept), range(len(u))].sum() for kept in product((0, 1), repeat=len(u))])


def renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    return float(logsumexp(alpha * p + (1 - alpha) * q)) / (alpha - 1)


def opened(h: int, n: int, bound: float = 0.5) -> PrivateSupport:
    return PrivateSupport(h, n, LocalGaussian(bound, True))


class TestSupportIsPrivate:
    @pytest.mark.parametrize(("h", "n"), SHAPES)
    @pytest.mark.parametrize("rho", [0.001, 0.02, 0.1, 0.5, 2.0])
    def test_exact_renyi_divergences(self, h: int, n: int, rho: float) -> None:
        """Over all supports, all directions and both orders: at most αρ, and not far from it at the worst."""
        threshold = logit(n / h)
        slope = steepest_slope(rho, threshold)
        zero = supports(np.zeros(h), slope, threshold)
        assert logsumexp(zero) == pytest.approx(0, abs=1e-12)
        used = [
            max(renyi(p, zero, alpha), renyi(zero, p, alpha)) / (alpha * rho)
            for p in (supports(u, slope, threshold) for u in directions(h))
            for alpha in ALPHAS
        ]
        assert 0.75 < max(used) <= 1 + 1e-9

    @pytest.mark.parametrize("threshold", [-8.0, -4.0, -1.0, 0.0, 2.0])
    @pytest.mark.parametrize("slope", [1e-3, 0.5, 3.0, 20.0])
    def test_one_large_entry(self, threshold: float, slope: float) -> None:
        """As above with h = 1 position that matters, for thresholds of any h."""
        p, q = (supports(np.array([x]), slope, threshold) for x in (1.0, 0.0))
        orders = [1.001, *np.geomspace(1.01, 1e4, 200)]
        assert (
            max(max(renyi(p, q, a), renyi(q, p, a)) / a for a in orders)
            <= support_rho(slope, threshold) + 1e-12
        )

    @pytest.mark.parametrize("u", directions(5))
    def test_log_ratio_ranges_over_no_more_than_the_slope_times_the_l1_norm(self, u: np.ndarray) -> None:
        loss = supports(u, 1.7, logit(2 / 5)) - supports(np.zeros(5), 1.7, logit(2 / 5))
        assert np.ptp(loss) == pytest.approx(1.7 * abs(u).sum())

    def test_a_slope_a_little_steeper_would_not_hold(self) -> None:
        threshold, rho = logit(2 / 4), 0.02
        p, q = (
            supports(u, 1.05 * steepest_slope(rho, threshold), threshold) for u in (np.eye(4)[0], np.zeros(4))
        )
        assert max(renyi(p, q, alpha) / alpha for alpha in ALPHAS) > rho

    @pytest.mark.parametrize(("h", "n"), [*SHAPES, (64, 4), (1536, 16)])
    @pytest.mark.parametrize("rho", [2.5e-13, 1e-3, 1.0, 2.5e11])
    def test_the_steepest_slope_spends_rho(self, h: int, n: int, rho: float) -> None:
        slope = steepest_slope(rho, logit(n / h))
        assert rho * (1 - 1e-8) < support_rho(slope, logit(n / h)) <= rho
        assert slope >= math.sqrt(8 * rho) * (1 - 1e-8)  # never worse than by bounded range

    def test_variance_proxy(self) -> None:
        """The inequality of Kearns and Saul, with equality at t = -2a, and its value at p = 1/2."""
        for a in (-6.0, -2.0, -0.1, 0.3, 5.0):
            t = np.linspace(-30, 30, 1001)
            centred = np.logaddexp(math.log(expit(-a)), math.log(expit(a)) + t) - expit(a) * t
            assert (centred <= variance_proxy(a) * t**2 / 2 + 1e-12).all()
            at = np.logaddexp(math.log(expit(-a)), math.log(expit(a)) - 2 * a) + 2 * a * expit(a)
            assert at == pytest.approx(2 * variance_proxy(a) * a**2)
        assert variance_proxy(0.0) == 0.25
        assert variance_proxy(1e-5) == pytest.approx(0.25)


class TestSupportAsDrawn:
    @pytest.mark.parametrize("u", [[0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.1, -0.2, 0.2], [-5.0, 1.0, 0.0]])
    def test_frequencies_of_all_supports(self, u: list[float]) -> None:
        users, z = 40_000, 1.5
        sketch = opened(3, 1)
        rows = torch.tensor([u], dtype=torch.float64).expand(users, -1)
        keep = sketch.support(rows, z, np.random.default_rng(5)).numpy()
        counts = np.bincount(keep @ [4, 2, 1], minlength=8)
        slope = steepest_slope(SUPPORT_SHARE / (2 * z * z), logit(1 / 3))
        expected = np.exp(supports(np.array(u) / (np.linalg.norm(u) or 1), slope, logit(1 / 3)))
        assert stats.chisquare(counts, users * expected).pvalue > 1e-6

    def test_n_are_kept_of_a_zero_vector(self) -> None:
        kept = (
            opened(64, 4).support(torch.zeros(20_000, 64).double(), 1.0, np.random.default_rng(5)).sum(dim=1)
        )
        assert kept.double().mean().item() == pytest.approx(4, abs=6 * 2 / math.sqrt(20_000))

    def test_large_entries_of_either_sign_are_kept_more_often(self) -> None:
        x = torch.tensor([[0.0, 1.0, -1.0, 0.2]]).double().expand(5_000, -1)
        often = opened(4, 1).support(x, 0.2, np.random.default_rng(5)).double().mean(dim=0)
        assert min(often[1], often[2]) > 0.9
        assert often[0] < often[3] < 0.8

    def test_without_noise_the_n_largest(self) -> None:
        kept = opened(4, 2).release(torch.tensor([[0.1, -4.0, 3.0, 0.0]]), 0.0)
        torch.testing.assert_close(kept, torch.tensor([[0, -0.4, 0.3, 0]]), atol=1e-5, rtol=0)


class TestValues:
    @pytest.mark.parametrize("z", [0.5, 2.0])
    @pytest.mark.parametrize("x", [[0.0] * 6, [1.0, -2.0, 0.0, 0.5, 0.0, 3.0]])
    def test_every_kept_position_is_noised_alike(self, z: float, x: list[float]) -> None:
        users, sketch, rng = 20_000, opened(6, 2), np.random.default_rng
        rows = torch.tensor([x]).expand(users, -1)
        released, keep = sketch.release(rows, z, rng(5)), sketch.support(rows.double(), z, rng(5))
        assert torch.equal(released != 0, keep)
        noise = (released - sketch.values.bring(torch.where(keep, rows, 0)))[keep].double().numpy()
        std = z / math.sqrt(1 - SUPPORT_SHARE) * 0.5
        energy = (noise**2).sum() / std**2
        assert stats.chi2.ppf(1e-8, noise.size) < energy < stats.chi2.isf(1e-8, noise.size)

    def test_norm_is_bounded_on_the_support(self) -> None:
        """Brought to the bound after choosing: what is dropped takes nothing of what is kept."""
        kept = opened(6, 1).release(torch.tensor([[5.0, 4.0, 0, 0, 0, 0]]), 0.0)
        torch.testing.assert_close(kept, torch.tensor([[0.5, 0, 0, 0, 0, 0]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 4, 11])
@pytest.mark.parametrize("z", [0.1, 1.0, 7.0])
def test_support_and_values_add_up_to_rho(size: int, z: float) -> None:
    sketch = opened(12, size)
    of_support = support_rho(steepest_slope(SUPPORT_SHARE / (2 * z * z), sketch.threshold), sketch.threshold)
    of_values = gaussian_rho(z / math.sqrt(1 - SUPPORT_SHARE))
    assert of_values is not None
    assert of_support + of_values == pytest.approx(sketch.rho(z))
    assert sketch.rho(z) == pytest.approx(1 / (2 * z * z))


def test_what_a_sketch_tells_stays_under_rho() -> None:
    """The mean privacy loss of samples under x is a KL divergence, at most ρ. Half the noise is caught."""
    users, z, bound, h, n = 40_000, 2.0, 0.5, 4, 2
    sketch, x = opened(h, n, bound), torch.eye(4)[:1]
    limit = sketch.rho(z)
    assert limit is not None

    def mean_loss(true_z: float) -> float:
        """Of the sketches as released, with the densities of a mechanism at `true_z`."""
        slope = steepest_slope(SUPPORT_SHARE / (2 * true_z**2), sketch.threshold)
        std = true_z * bound / math.sqrt(1 - SUPPORT_SHARE)
        value = sketch.release(x.expand(users, -1), true_z)[:, 0].double().numpy()
        kept = stats.norm.logpdf(value, bound, std) - stats.norm.logpdf(value, 0, std)
        with_x, without = expit(sketch.threshold + slope), expit(sketch.threshold)
        kept, dropped = kept + math.log(with_x / without), math.log((1 - with_x) / (1 - without))
        loss = np.where(value != 0, kept, dropped)
        return float(loss.mean() - 6 * loss.std() / math.sqrt(users))

    assert mean_loss(z) <= limit
    assert mean_loss(z / 2) > limit


@pytest.mark.parametrize("size", [0, 12, 13])
def test_size_that_does_not_fit(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size = {size}: must be within 1\.\.11"):
        opened(12, size)
