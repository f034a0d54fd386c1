import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from pina_flwr.config import SKETCHES, ConfigError
from pina_flwr.stage1.sketch import SketchMechanism, cluster_sketches, open_sketch, sketch_clip_norm

H, N, BOUND = 12, 4, 0.5


def mechanism(kind: str, normalise: bool = False, seed: int = 1, size: int = N) -> SketchMechanism:
    return open_sketch(kind, H, size, BOUND, normalise, seed)


def random_deltas(users: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(users, H, generator=torch.Generator().manual_seed(1))


def test_eq_5() -> None:
    """The paper's ViT-Small with n = 4 and h = 384."""
    assert sketch_clip_norm(1.0, 4, 384) == pytest.approx(0.1020621)
    assert sketch_clip_norm(3.0, 4, 64) == pytest.approx(0.75)


class TestOpenSketch:
    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="unknown kind of sketch 'secret'"):
            mechanism("secret")

    @pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
    @pytest.mark.parametrize("kind", SKETCHES)
    def test_bound_that_cannot_be(self, kind: str, bound: float) -> None:
        with pytest.raises(ValueError, match="bound"):
            open_sketch(kind, H, N, bound, False, 1)

    @pytest.mark.parametrize(
        ("kind", "size", "most"),
        [("projection", 13, 12), ("coordinates", 13, 12), ("private-support", 12, 11)],
    )
    def test_size_that_does_not_fit(self, kind: str, size: int, most: int) -> None:
        with pytest.raises(
            ConfigError, match=rf"^sketch-size = {size}: must be 1\.\.{most} with sketch = '{kind}'"
        ):
            mechanism(kind, size=size)
        assert mechanism(kind, size=most).width in (most, H)

    def test_paper_takes_any_size(self) -> None:
        assert mechanism("paper", size=20).width == H


@pytest.mark.parametrize("kind", SKETCHES)
class TestEverySketch:
    def test_shape_and_dtype(self, kind: str) -> None:
        opened = mechanism(kind)
        sketches = opened.release(random_deltas(5), 1.0)
        assert sketches.shape == (5, opened.width)
        assert sketches.dtype == torch.float32
        assert opened.release(random_deltas(0), 1.0).shape == (0, opened.width)
        assert opened.lift(sketches).shape == (5, H)
        assert opened.lift(sketches).dtype == torch.float32

    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
    def test_norm_without_noise(self, kind: str, scale: float, normalise: bool) -> None:
        norms = mechanism(kind, normalise).release(random_deltas(500, scale), 0.0).double().norm(dim=1)
        assert norms.max() <= BOUND
        if normalise or scale > 1:
            assert norms.min() > BOUND * (1 - 1e-5)

    def test_noise_differs_between_calls(self, kind: str) -> None:
        opened, deltas = mechanism(kind), random_deltas(3)
        assert not torch.equal(opened.release(deltas, 1.0), opened.release(deltas, 1.0))

    def test_all_randomness_is_that_of_the_generator(self, kind: str) -> None:
        opened, deltas = mechanism(kind), random_deltas(3)
        first, second = (opened.release(deltas, 1.0, np.random.default_rng(7)) for _ in range(2))
        assert torch.equal(first, second)

    def test_public_part_is_that_of_the_seed(self, kind: str) -> None:
        deltas = random_deltas(3)
        same, again, other = (mechanism(kind, seed=seed).release(deltas, 0.0) for seed in (1, 1, 2))
        assert torch.equal(same, again)
        assert torch.equal(same, other) == (kind in ("paper", "private-support"))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_update_not_finite_counts_as_zero(self, kind: str, bad: float) -> None:
        spoilt, without = random_deltas(3), random_deltas(3)
        spoilt[1, 2], without[1] = bad, 0
        opened = mechanism(kind)
        released = [opened.release(x, 0.7, np.random.default_rng(7)) for x in (spoilt, without)]
        assert torch.equal(*released)
        assert released[0].isfinite().all()

    def test_memory_layout_and_dtype_do_not_matter(self, kind: str) -> None:
        opened, deltas = mechanism(kind), torch.arange(3 * H).reshape(3, H)
        expected = opened.release(deltas.float(), 1.0, np.random.default_rng(7))
        for given in (deltas, deltas.double(), deltas.float().T.contiguous().T):
            assert torch.equal(opened.release(given, 1.0, np.random.default_rng(7)), expected)

    @pytest.mark.parametrize("shape", [(3, H - 1), (3, H + 1), (H,), (3, 1, H)])
    def test_other_shapes_are_refused(self, kind: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="must be"):
            mechanism(kind).release(torch.zeros(shape), 1.0)

    @pytest.mark.parametrize("z", [-1.0, math.nan, math.inf, 1e-7])
    def test_noise_multiplier_that_cannot_be(self, kind: str, z: float) -> None:
        with pytest.raises(ValueError, match="noise_multiplier"):
            mechanism(kind).release(random_deltas(3), z)
        with pytest.raises(ValueError, match="noise_multiplier"):
            mechanism(kind).rho(z)

    @pytest.mark.parametrize("z", [1e-6, 0.3, 1.0, 4.0, 1e6])
    @pytest.mark.parametrize("size", [2, 8])
    def test_rho(self, kind: str, z: float, size: int) -> None:
        rho = mechanism(kind, size=size).rho(z)
        assert rho == (None if kind == "paper" else pytest.approx(1 / (2 * z * z), rel=1e-12))

    def test_no_noise_has_no_rho(self, kind: str) -> None:
        assert mechanism(kind).rho(0.0) is None


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
