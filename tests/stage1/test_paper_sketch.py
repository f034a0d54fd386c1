import math

import pytest
import torch
from scipy import stats

from pina_flwr.stage1.local_gaussian import LocalGaussian
from pina_flwr.stage1.paper_sketch import PaperSketch, keep_largest

DELTA = [0.5, -3.0, 2.0, -0.1, 4.0, -1.0, 0.0, 1.0]
KEPT = [0.0, -3.0, 2.0, 0.0, 4.0, -1.0, 0.0, 0.0]


def sketch(normalise: bool = False) -> PaperSketch:
    return PaperSketch(8, 4, LocalGaussian(0.5, normalise))


class TestKeepLargest:
    def test_two_largest_and_two_smallest(self) -> None:
        assert keep_largest(torch.tensor([DELTA, [-x for x in DELTA]]), 4).tolist() == [
            KEPT,
            [-x for x in KEPT],
        ]

    def test_only_positive_entries_count_as_positive(self) -> None:
        assert keep_largest(torch.tensor([[1.0, 2.0, 3.0, 0.5]]), 4).tolist() == [[0, 2, 3, 0]]
        assert keep_largest(torch.tensor([[-1.0, 0.0, 0.0, 2.0]]), 4).tolist() == [[-1, 0, 0, 2]]

    def test_all_zero(self) -> None:
        assert not keep_largest(torch.zeros(2, 8), 4).any()

    def test_more_than_there_are(self) -> None:
        assert keep_largest(torch.tensor([[1.0, -2.0]]), 6).tolist() == [[1, -2]]


class TestRelease:
    def test_clipped_to_s_in(self) -> None:
        sketches = sketch().release(torch.tensor([DELTA, [x / 100 for x in DELTA]]), 0.0)
        norm = math.sqrt(30)
        expected = torch.tensor([[0.5 * x / norm for x in KEPT], [x / 100 for x in KEPT]])
        torch.testing.assert_close(sketches, expected, atol=1e-6, rtol=1e-5)

    def test_normalised_to_s_in(self) -> None:
        sketches = sketch(normalise=True).release(torch.tensor([DELTA, [x / 100 for x in DELTA]]), 0.0)
        torch.testing.assert_close(sketches.norm(dim=1), torch.full((2,), 0.5))

    @pytest.mark.parametrize("normalise", [False, True])
    def test_noise_is_z_s_in_on_kept_values_only(self, normalise: bool) -> None:
        deltas, opened = torch.tensor([DELTA]).repeat(20_000, 1), sketch(normalise)
        noisy = opened.release(deltas, 2.0)
        kept = torch.tensor(KEPT) != 0
        assert not noisy[:, ~kept].any()
        noise = (noisy - opened.release(deltas, 0.0))[:, kept].double().numpy()
        energy = (noise**2).sum() / (2.0 * 0.5) ** 2
        assert stats.chi2.ppf(1e-8, noise.size) < energy < stats.chi2.isf(1e-8, noise.size)

    @pytest.mark.parametrize("row", [[0.0] * 8, [math.nan] * 8, [math.inf, -math.inf] * 4])
    @pytest.mark.parametrize("normalise", [False, True])
    def test_nothing_to_keep_gives_nothing(self, row: list[float], normalise: bool) -> None:
        assert not sketch(normalise).release(torch.tensor([row]), 2.0).any()
