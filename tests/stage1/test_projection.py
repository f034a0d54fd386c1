import math

import numpy as np
import pytest
import torch
from scipy import stats

from pina_flwr.stage1.local_gaussian import LocalGaussian
from pina_flwr.stage1.projection import LinearSketch, random_coordinates, random_subspace

H = 24
BASES = [random_subspace, random_coordinates]


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("size", [1, 5, H])
class TestBasis:
    def test_rows_are_orthonormal(self, basis, size):
        rows = basis(3, size, H)
        assert rows.shape == (size, H)
        torch.testing.assert_close(rows @ rows.mT, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)

    def test_lift_of_a_projection_is_a_projection(self, basis, size):
        sketch = LinearSketch(basis(3, size, H), LocalGaussian(1e6, False))
        onto = sketch.lift(sketch.release(torch.eye(H), 0.0).double())
        torch.testing.assert_close(onto @ onto, onto, atol=1e-6, rtol=0)
        torch.testing.assert_close(onto, onto.mT, atol=1e-6, rtol=0)
        assert onto.trace().item() == pytest.approx(size, abs=1e-5)

    def test_inner_products_with_lifted_points_are_those_of_sketches(self, basis, size):
        sketch = LinearSketch(basis(3, size, H), LocalGaussian(1e6, False))
        deltas, points = torch.randn(4, H), torch.randn(3, size)
        torch.testing.assert_close(
            deltas @ sketch.lift(points).mT, sketch.release(deltas, 0.0) @ points.mT, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("basis", BASES)
def test_basis_is_that_of_the_seed(basis) -> None:
    first = basis(3, 5, H).clone()
    basis.cache_clear()
    torch.testing.assert_close(basis(3, 5, H), first, atol=1e-12, rtol=0)
    assert not torch.allclose(basis(4, 5, H), first, atol=1e-3)


def test_coordinates_are_distinct_entries_of_the_update() -> None:
    sketch = LinearSketch(random_coordinates(3, 5, H), LocalGaussian(1e6, False))
    entries = sketch.release(torch.arange(H).float()[None], 0.0)[0]
    assert len(set(entries.tolist())) == 5
    assert set(entries.tolist()) <= set(range(H))


def test_no_direction_is_preferred() -> None:
    """Over seeds a unit vector keeps n/h of its energy, of either sign alike."""
    seeds = range(400)
    e = torch.zeros(1, 8)
    e[0, 0] = 1
    kept = torch.cat([e.double() @ random_subspace.__wrapped__(seed, 2, 8).mT for seed in seeds])
    energy = kept.square().sum(dim=1).mean().item()
    assert energy == pytest.approx(2 / 8, abs=6 * 0.2 / math.sqrt(len(seeds)))
    assert abs((kept[:, 0] > 0).double().mean().item() - 0.5) < 6 * 0.5 / math.sqrt(len(seeds))


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("normalise", [False, True])
def test_noise_is_z_s_in_on_every_number(basis, normalise: bool) -> None:
    sketch = LinearSketch(basis(3, 5, H), LocalGaussian(0.5, normalise))
    deltas = torch.randn(1, H).expand(20_000, -1)
    noise = (sketch.release(deltas, 2.0) - sketch.release(deltas, 0.0)).double().numpy()
    energy = (noise**2).sum() / (2.0 * 0.5) ** 2
    assert stats.chi2.ppf(1e-8, noise.size) < energy < stats.chi2.isf(1e-8, noise.size)
    correlation = np.corrcoef(noise.T)[np.triu_indices(5, 1)]
    assert abs(correlation).max() < 6 / math.sqrt(len(noise))


@pytest.mark.parametrize("basis", BASES)
def test_norm_is_bounded_after_projecting(basis) -> None:
    """An update that lies in the subspace keeps all of its norm, and is clipped all the same."""
    rows = basis(3, 5, H)
    sketch = LinearSketch(rows, LocalGaussian(0.5, False))
    norms = sketch.release(7 * rows, 0.0).double().norm(dim=1)
    assert norms.max() <= 0.5
    assert norms.min() > 0.5 * (1 - 1e-5)


@pytest.mark.parametrize("basis", BASES)
def test_what_a_sketch_tells_stays_under_rho(basis) -> None:
    """(E_x T - E_0 T)² / Var_0 T ≤ e^(2ρ) - 1 for every statistic T (D_2 ≤ 2ρ; Hammersley 1950).

    The worst user lies in the subspace, and T is the number in its direction. Half the noise is caught.
    """
    rows, users, z = basis(3, 5, H), 40_000, 3.0
    sketch = LinearSketch(rows, LocalGaussian(0.5, True))
    limit = math.exp(2 * (sketch.rho(z) or 0)) - 1

    def separation(noise_multiplier: float) -> float:
        with_x = sketch.release(rows[:1].expand(users, -1), noise_multiplier)[:, 0].double()
        without = sketch.release(torch.zeros(users, H), noise_multiplier)[:, 0].double()
        shift = (with_x.mean() - without.mean()).abs() / without.std()
        return max(shift.item() - 6 * math.sqrt(2 / users), 0.0) ** 2

    assert separation(z) <= limit
    assert separation(z / 2) > limit
