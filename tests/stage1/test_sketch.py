import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from pina_flwr.stage1.sketch import cluster_sketches, keep_largest, local_sketches, sketch_clip_norm

DELTA = [0.5, -3.0, 2.0, -0.1, 4.0, -1.0, 0.0, 1.0]
KEPT = [0.0, -3.0, 2.0, 0.0, 4.0, -1.0, 0.0, 0.0]


def test_eq_5() -> None:
    """The paper's ViT-Small with n = 4 and h = 384."""
    assert sketch_clip_norm(1.0, 4, 384) == pytest.approx(0.1020621)
    assert sketch_clip_norm(3.0, 4, 64) == pytest.approx(0.75)


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


class TestLocalSketches:
    def test_clipped_to_s_in(self) -> None:
        sketches = local_sketches(
            torch.tensor([DELTA, [x / 100 for x in DELTA]]), 4, 0.5, 0.0, normalise=False
        )
        norm = math.sqrt(30)
        expected = torch.tensor([[0.5 * x / norm for x in KEPT], [x / 100 for x in KEPT]])
        torch.testing.assert_close(sketches, expected, atol=1e-6, rtol=1e-5)

    def test_normalised_to_s_in(self) -> None:
        sketches = local_sketches(
            torch.tensor([DELTA, [x / 100 for x in DELTA]]), 4, 0.5, 0.0, normalise=True
        )
        torch.testing.assert_close(sketches.norm(dim=1), torch.full((2,), 0.5))

    @pytest.mark.parametrize("normalise", [False, True])
    def test_never_over_s_in(self, normalise: bool) -> None:
        deltas = 5 * torch.randn(2_000, 16, generator=torch.Generator().manual_seed(1))
        norms = local_sketches(deltas, 4, 0.3, 0.0, normalise).double().norm(dim=1)
        assert norms.max() <= 0.3
        assert norms.min() > 0.3 * (1 - 1e-5)

    @pytest.mark.parametrize("normalise", [False, True])
    def test_noise_is_z_s_in_on_kept_values_only(self, normalise: bool) -> None:
        deltas = torch.tensor([DELTA]).repeat(20_000, 1)
        noisy = local_sketches(deltas, 4, 0.5, 2.0, normalise)
        kept = torch.tensor(KEPT) != 0
        assert not noisy[:, ~kept].any()
        noise = (noisy - local_sketches(deltas, 4, 0.5, 0.0, normalise))[:, kept].double().numpy()
        energy = (noise**2).sum() / (2.0 * 0.5) ** 2
        assert stats.chi2.ppf(1e-8, noise.size) < energy < stats.chi2.isf(1e-8, noise.size)

    @pytest.mark.parametrize("row", [[0.0] * 8, [math.nan] * 8, [math.inf, -math.inf] * 4])
    @pytest.mark.parametrize("normalise", [False, True])
    def test_nothing_to_keep_gives_nothing(self, row: list[float], normalise: bool) -> None:
        assert not local_sketches(torch.tensor([row]), 4, 0.5, 2.0, normalise).any()


class TestClusterSketches:
    groups = np.repeat(np.eye(3, 8, dtype=np.float32), 20, axis=0)

    def test_finds_the_groups(self) -> None:
        rng = np.random.default_rng(1)
        noisy = self.groups + 0.05 * rng.standard_normal(self.groups.shape).astype(np.float32)
        centroids = cluster_sketches(rng.permutation(noisy), 3, seed=1)
        assert centroids.dtype == np.float32
        np.testing.assert_allclose(centroids[np.argmax(centroids[:, :3], axis=0)], np.eye(3, 8), atol=0.1)

    def test_same_seed_same_centroids(self) -> None:
        rows = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
        np.testing.assert_array_equal(
            cluster_sketches(rows, 4, 2**40 + 1), cluster_sketches(rows, 4, 2**40 + 1)
        )

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([], [[0, 0]] * 4),
            ([[0, 0]] * 9, [[0, 0]] * 4),
            ([[1, 2]], [[1, 2]] * 4),
            ([[1, 2], [0, 3]], [[0, 3], [1, 2]] * 2),
            ([[1, 2], [0, 3], [0, 0]], [[0, 3], [1, 2]] * 2),
            ([[1, 2]] * 30 + [[0, 3]] * 30 + [[0, 0]] * 30, [[0, 3], [1, 2]] * 2),
            ([[1, 2], [0, 3], [4, 0]] * 5, [[0, 3], [1, 2], [4, 0], [0, 3]]),
            ([[1, 2], [0, 3], [4, 0], [5, 5]] * 5, [[0, 3], [1, 2], [4, 0], [5, 5]]),
        ],
        ids=[
            "none",
            "all zero",
            "one",
            "two",
            "two and a zero",
            "duplicates",
            "three",
            "as many as clusters",
        ],
    )
    def test_few_distinct_sketches(self, rows: list[list[float]], expected: list[list[float]]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            centroids = cluster_sketches(np.array(rows, dtype=np.float32).reshape(-1, 2), 4, seed=1)
        assert centroids.dtype == np.float32
        np.testing.assert_array_equal(centroids, expected)

    def test_zero_sketches_do_not_pull_a_centroid(self) -> None:
        rows = np.concatenate([self.groups, np.zeros((500, 8), dtype=np.float32)])
        assert np.linalg.norm(cluster_sketches(rows, 2, seed=1), axis=1).min() > 0.5
