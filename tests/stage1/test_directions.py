import math

import pytest
import torch

from pina_flwr.stage1.directions import centred, initial_b, random_directions, unit


def test_unit() -> None:
    torch.testing.assert_close(
        unit(torch.tensor([[3.0, 4.0], [0.0, -2.0]])), torch.tensor([[0.6, 0.8], [0.0, -1.0]])
    )


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, math.inf]])
def test_unit_of_what_has_no_direction_is_zero(row: list[float]) -> None:
    assert unit(torch.tensor([row, [0.0, 2.0]])).tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_unit_of_extreme_sizes(size: float) -> None:
    torch.testing.assert_close(unit(torch.tensor([[3 * size, 4 * size]])), torch.tensor([[0.6, 0.8]]))


def test_unit_of_stacks() -> None:
    stacked = unit(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]))
    assert stacked.shape == (2, 1, 2)
    assert stacked[1].tolist() == [[0, 0]]


class TestCentred:
    def test_without_a_mean_nothing_changes(self) -> None:
        deltas = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
        torch.testing.assert_close(centred(deltas, None), deltas)

    def test_takes_off_the_mean_direction_at_the_users_own_length(self) -> None:
        deltas = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
        mean = torch.tensor([0.5, 0.25])
        torch.testing.assert_close(
            centred(deltas, mean), torch.tensor([[3 - 5 * 0.5, 4 - 5 * 0.25], [-2 * 0.5, -2 - 2 * 0.25]])
        )

    def test_private_mean_of_all_centres_the_directions(self) -> None:
        directions = unit(torch.randn(40, 8, generator=torch.Generator().manual_seed(3)) + 1)
        left = unit(directions) - unit(directions).mean(dim=0)
        torch.testing.assert_close(centred(directions, unit(directions).mean(dim=0)), left)
        assert left.mean(dim=0).norm() < 1e-6

    @pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    @pytest.mark.parametrize("mean", [None, torch.tensor([0.5, 0.25])])
    def test_what_has_no_direction_becomes_zero(self, row: list[float], mean: torch.Tensor | None) -> None:
        assert centred(torch.tensor([row]), mean).tolist() == [[0, 0]]

    def test_of_a_huge_update_is_finite(self) -> None:
        assert torch.isfinite(centred(torch.full((1, 4), 1e25), torch.full((4,), 0.1))).all()


class TestInitialB:
    def test_norm_0_is_the_papers_reading(self) -> None:
        centroids = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        assert initial_b(centroids, 0) is centroids

    def test_centred_and_of_equal_norm(self) -> None:
        centroids = torch.tensor([[3.0, 1.0], [1.0, 1.0], [2.0, 7.0]])  # mean (2, 3)
        expected = 0.2 * unit(torch.tensor([[1.0, -2.0], [-1.0, -2.0], [0.0, 4.0]]))
        torch.testing.assert_close(initial_b(centroids, 0.2), expected)

    def test_equal_centroids_give_equal_models(self) -> None:
        assert not initial_b(torch.ones(3, 2), 0.2).any()

    def test_one_cluster(self) -> None:
        assert not initial_b(torch.ones(1, 2), 0.2).any()


def test_random_directions() -> None:
    first = random_directions(1, "restarts", 5, 16)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(5))
    assert torch.equal(first, random_directions(1, "restarts", 5, 16))
    assert not torch.equal(first, random_directions(2, "restarts", 5, 16))
    assert not torch.equal(first, random_directions(1, "random start", 5, 16))
