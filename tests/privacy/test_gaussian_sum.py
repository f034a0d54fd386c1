import math

import numpy as np
import pytest
import torch
from scipy import stats

from pina_flwr.privacy.gaussian_sum import GaussianSum, clip

TINY_P = 1e-8  # how rarely a statistical test may fail by chance


def within(sample: np.ndarray, std: float) -> bool:
    """Whether the variance of a normal sample is std², by the two-sided χ² test."""
    energy = (sample.astype(np.float64) ** 2).sum() / std**2
    low, high = stats.chi2.ppf([TINY_P / 2, 1 - TINY_P / 2], sample.size)
    return bool(low < energy < high)


def test_sigma_is_z_times_s() -> None:
    mechanism = GaussianSum(clip_norm=0.5, noise_multiplier=3.0, expected_cohort=40.0)
    assert mechanism.sum_std == pytest.approx(1.5)
    assert mechanism.mean_std == pytest.approx(1.5 / 40)


def test_noise_of_a_larger_cohort() -> None:
    """The noise on the mean is z·S / N, whatever the true cohort."""
    mechanism = GaussianSum(clip_norm=0.5, noise_multiplier=3.0, expected_cohort=40.0, noise_cohort=10_000)
    assert mechanism.mean_std == pytest.approx(1.5 / 10_000)
    assert mechanism.sum_std == pytest.approx(1.5 * 40 / 10_000)


def test_noise_of_a_cohort_of_the_true_size_is_the_true_noise() -> None:
    plain, of_same = (GaussianSum(0.5, 3.0, 40.0, size) for size in (0, 40))
    assert plain.sum_std == pytest.approx(of_same.sum_std)


@pytest.mark.parametrize("spread", [[7], [1] * 7, [4, 2, 1]])
@pytest.mark.parametrize("noise_cohort", [0, 500])
def test_shares_make_up_the_noise_exactly(spread: list[int], noise_cohort: int) -> None:
    mechanism = GaussianSum(0.7, 1.3, 9.8, noise_cohort)
    total = sum(mechanism.share(users, sum(spread), 60_000).astype(np.float64) for users in spread)
    assert within(total, mechanism.sum_std)
    assert not within(total, 1.05 * mechanism.sum_std)  # the test would see 5%
    assert not within(total, 0.95 * mechanism.sum_std)


def test_a_share_is_in_proportion_to_its_users() -> None:
    mechanism = GaussianSum(1.0, 2.0, 10.0)
    assert within(mechanism.share(3, 12, 60_000), 2.0 * math.sqrt(3 / 12))


def test_no_share_repeats() -> None:
    mechanism = GaussianSum(1.0, 2.0, 10.0)
    assert not np.array_equal(mechanism.share(3, 12, 9), mechanism.share(3, 12, 9))


def test_without_noise_there_is_none() -> None:
    share = GaussianSum(1.0, 0.0, 10.0).share(1, 1, 5)
    assert share.shape == (5,)
    assert not share.any()


@pytest.mark.parametrize(("users", "cohort"), [(0, 5), (-1, 5), (6, 5), (0, 0), (1, 0)])
def test_a_share_that_cannot_be_is_refused(users: int, cohort: int) -> None:
    with pytest.raises(ValueError, match="noise share"):
        GaussianSum(1.0, 1.0, 5.0).share(users, cohort, 3)


@pytest.mark.parametrize("z", [math.nan, math.inf, -1.0])
def test_a_noise_multiplier_that_cannot_be_is_refused(z: float) -> None:
    with pytest.raises(ValueError, match="std"):
        GaussianSum(1.0, z, 5.0).share(1, 1, 3)


class TestClip:
    def test_eq_7(self) -> None:
        clipped, left_out = clip(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 1.0)
        torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
        assert torch.equal(clipped[1:], torch.tensor([[0.3, 0.4], [0.0, 0.0]]))  # not touched
        assert not left_out.any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_rows_that_are_not_finite_become_zero(self, bad: float) -> None:
        clipped, left_out = clip(torch.tensor([[3.0, bad], [0.3, 0.4], [bad, bad]]), 1.0)
        assert clipped.tolist() == [[0.0, 0.0], torch.tensor([0.3, 0.4]).tolist(), [0.0, 0.0]]
        assert left_out.tolist() == [True, False, True]

    def test_never_over_the_bound(self) -> None:
        """Also where float32 rounds up: the norm is taken of the float32 numbers that leave."""
        rng = torch.Generator().manual_seed(1)
        for size in (1, 3, 1_000):
            for scale in (1e-3, 1.0, 1e15):
                vectors = scale * torch.randn(300, size, generator=rng)
                for bound in (0.1, 1.0, 3.0):
                    norms = clip(vectors, bound)[0].double().norm(dim=1)
                    assert norms.max() <= bound
        assert norms.min() > bound * (1 - 1e-5)  # and as long as it may be

    @pytest.mark.parametrize("size", [1e25, 1e-25, 1e-44])
    def test_extreme_sizes(self, size: float) -> None:
        """Squares of these leave the range of float32."""
        clipped, left_out = clip(torch.full((1, 4), size), 1.0)
        assert not left_out.any()
        torch.testing.assert_close(clipped, torch.full((1, 4), min(size, 0.5)))

    def test_without_bound(self) -> None:
        vectors = torch.tensor([[3e4, -4e4], [0.0, 0.0], [math.nan, 0.0]])
        clipped, left_out = clip(vectors, math.inf)
        assert torch.equal(clipped[:2], vectors[:2])
        assert not clipped[2].any()
        assert left_out.tolist() == [False, False, True]

    def test_nobody(self) -> None:
        clipped, left_out = clip(torch.zeros(0, 3), 1.0)
        assert clipped.shape == (0, 3)
        assert left_out.shape == (0,)
