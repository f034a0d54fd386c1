import math

import pytest
import torch

from pina_flwr.privacy.clipping import clip


def test_eq_7() -> None:
    clipped, left_out = clip(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 1.0)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert torch.equal(clipped[1:], torch.tensor([[0.3, 0.4], [0.0, 0.0]]))  # not touched
    assert not left_out.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_become_zero(bad: float) -> None:
    clipped, left_out = clip(torch.tensor([[3.0, bad], [0.3, 0.4], [bad, bad]]), 1.0)
    assert clipped.tolist() == [[0.0, 0.0], torch.tensor([0.3, 0.4]).tolist(), [0.0, 0.0]]
    assert left_out.tolist() == [True, False, True]


def test_never_over_the_bound() -> None:
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
def test_extreme_sizes(size: float) -> None:
    """Squares of these leave the range of float32."""
    clipped, left_out = clip(torch.full((1, 4), size), 1.0)
    assert not left_out.any()
    torch.testing.assert_close(clipped, torch.full((1, 4), min(size, 0.5)))


def test_views_and_transposed_vectors() -> None:
    """Memory order does not matter, and what comes in is left as it was."""
    wide = 5 * torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    for vectors in (wide.T, wide[:, ::2], wide[::2]):
        before = vectors.clone()
        assert torch.equal(clip(vectors, 1.0)[0], clip(before.contiguous(), 1.0)[0])
        assert torch.equal(vectors, before)


def test_without_bound() -> None:
    vectors = torch.tensor([[3e4, -4e4], [0.0, 0.0], [math.nan, 0.0]])
    clipped, left_out = clip(vectors, math.inf)
    assert torch.equal(clipped[:2], vectors[:2])
    assert not clipped[2].any()
    assert left_out.tolist() == [False, False, True]


def test_nobody() -> None:
    clipped, left_out = clip(torch.zeros(0, 3), 1.0)
    assert clipped.shape == (0, 3)
    assert left_out.shape == (0,)


@pytest.mark.parametrize("bound", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("size", [1e30, 1e37, 3e38])
def test_huge_vectors_come_under_the_bound_too(bound: float, size: float) -> None:
    """Their factor would be subnormal in float32, and so imprecise."""
    vectors = torch.full((3, 100_000), size)
    clipped, left_out = clip(vectors, bound)
    norms = torch.linalg.vector_norm(clipped.double(), dim=1)
    assert not left_out.any()
    assert (norms <= bound).all()
    assert (norms >= bound * (1 - 1e-5)).all()
