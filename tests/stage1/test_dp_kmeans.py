import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pina_flwr.config import parse
from pina_flwr.privacy.cohort import shares
from pina_flwr.privacy.noise import OSEntropy
from pina_flwr.privacy.plan import Shapes
from pina_flwr.privacy.sum_mechanism import open_mechanism
from pina_flwr.stage1.directions import random_directions, unit
from pina_flwr.stage1.dp_kmeans import best_restart, contributions, nearest, update


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def groups(users: int, clusters: int, size: int, spread: float) -> tuple[Tensor, Tensor]:
    """Unit vectors about `clusters` orthogonal directions, and whose is whose."""
    truth = torch.arange(users) % clusters
    centres = torch.linalg.qr(torch.randn(size, clusters, generator=rng()))[0].mT
    return unit(centres[truth] + spread * torch.randn(users, size, generator=rng(2)) / math.sqrt(size)), truth


def test_nearest() -> None:
    centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    directions = torch.tensor([[0.6, 0.8], [0.8, 0.6], [-0.9, 0.1], [0.0, 0.0]])
    assert nearest(directions, centroids).tolist() == [1, 0, 2, 0]


class TestContributions:
    def test_by_hand(self) -> None:
        centroids = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
        (row,) = contributions(torch.tensor([[0.6, 0.8]]), centroids)
        a, b = 0.6 / math.sqrt(2), 0.8 / math.sqrt(2)
        torch.testing.assert_close(row, torch.tensor([0, 0, a, b, a, b, 0, 0]), atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("restarts", [1, 3, 4, 7])
    def test_norm_is_at_most_1(self, restarts: int) -> None:
        """Sensitivity of a release: whatever the user's vector, and for every float32 rounding."""
        centroids = unit(torch.randn(restarts, 3, 10, generator=rng()))
        directions = unit(torch.randn(3_000, 10, generator=rng(2)))
        norms = contributions(directions, centroids).double().norm(dim=1)
        assert norms.max() <= 1
        assert norms.min() > 1 - 1e-5

    def test_a_user_without_direction_adds_nothing(self) -> None:
        assert not contributions(torch.zeros(1, 10), torch.ones(2, 3, 10)).any()

    def test_centroids_without_direction(self) -> None:
        """All restarts dropped or all noise: users still add one vector to one slot each."""
        row = contributions(torch.tensor([[0.6, 0.8]]), torch.zeros(1, 3, 2))[0]
        torch.testing.assert_close(row, torch.tensor([0.6, 0.8, 0, 0, 0, 0]), atol=1e-6, rtol=1e-5)


def test_best_restart_has_the_largest_objective() -> None:
    sums = torch.zeros(3, 2, 2)
    sums[0] = torch.tensor([[3.0, 4.0], [0.0, 1.0]])  # 5 + 1
    sums[1] = torch.tensor([[0.0, 3.0], [4.0, 0.0]])  # 3 + 4
    sums[2] = torch.tensor([[6.0, 0.0], [0.0, 0.0]])  # 6 + 0
    assert best_restart(sums) == 1


def test_best_restart_is_the_better_clustering() -> None:
    directions, truth = groups(120, 3, 16, 0.3)
    true = unit(torch.stack([directions[truth == c].sum(dim=0) for c in range(3)]))
    merged = unit(torch.stack([true[0] + true[1], true[2], -true[2]]))
    sums = contributions(directions, torch.stack([merged, true])).sum(dim=0).reshape(2, 3, 16)
    assert best_restart(sums) == 1


def test_update_gives_directions() -> None:
    centroids = update(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
    torch.testing.assert_close(centroids, torch.tensor([[[0.6, 0.8], [0.0, 0.0]]]))


@pytest.mark.parametrize("kind", ["skellam", "discrete-gaussian", "gaussian"])
@pytest.mark.parametrize(("z", "cohort"), [(0.0, 0), (1.0, 0), (2.0, 0), (1.0, 10_000)])
def test_finds_well_separated_directions_under_noise(z: float, cohort: int, kind: str) -> None:
    """Noise of z on the sum over 400 users, seven iterations, four restarts: four groups in 64 dimensions."""
    directions, truth = groups(400, 4, 64, 0.6)
    options = {"mechanism": kind, "noise-cohort-size": cohort, "kmeans-restarts": 4, "dropout-tolerance": 0.0}
    config = parse({"num-users": 400, "sampling-rate": 1.0, "secure-sum": "trusted"} | options)
    assert shares(config, 400).honest == 400
    mechanism = open_mechanism(config, "lloyd", z, 400, Shapes(sketch=64, adapter=64))
    centroids, best = random_directions(1, "restarts", 16, 64).reshape(4, 4, 64), 0
    for iteration in range(7):
        own = contributions(directions, centroids)
        total = mechanism.decode(mechanism.protect(own, 400, iteration, OSEntropy()), iteration)
        sums = torch.from_numpy(total).float().reshape(centroids.shape)
        best, centroids = best_restart(sums), update(sums)
    choices = nearest(directions, centroids[best])
    table = np.zeros((4, 4), dtype=int)
    np.add.at(table, (truth.numpy(), choices.numpy()), 1)
    assert sorted(table.argmax(axis=1)) == [0, 1, 2, 3]
    assert table.max(axis=1).sum() >= 0.99 * len(directions)
