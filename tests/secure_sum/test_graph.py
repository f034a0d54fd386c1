from itertools import combinations

import numpy as np
import pytest

from pina_flwr.secure_sum import graph
from pina_flwr.secure_sum.graph import check_degree, draw

SIZES = [(2, 1), (3, 2), (4, 2), (5, 4), (6, 4), (7, 2), (10, 9), (16, 14), (17, 6), (60, 20)]


def adjacency(rows: np.ndarray) -> np.ndarray:
    matrix = np.zeros((len(rows), len(rows)), dtype=bool)
    matrix[np.arange(len(rows))[:, None], rows] = True
    return matrix


@pytest.mark.parametrize(("count", "neighbours"), SIZES)
def test_is_regular_symmetric_and_sorted_without_loops(count: int, neighbours: int) -> None:
    rows = draw(count, neighbours)
    assert rows.dtype == np.int64
    assert rows.shape == (count, neighbours)
    assert (np.diff(rows, axis=1) > 0).all()
    matrix = adjacency(rows)
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()


@pytest.mark.parametrize(("count", "neighbours"), SIZES)
def test_is_the_circulant_graph_on_some_order(count: int, neighbours: int) -> None:
    seen = np.sort(np.linalg.eigvalsh(adjacency(draw(count, neighbours)).astype(float)))
    distances = np.arange(1, count) if neighbours == count - 1 else np.arange(1, neighbours // 2 + 1)
    both = 1 if neighbours == count - 1 else 2
    angles = 2 * np.pi * np.outer(np.arange(count), distances) / count
    np.testing.assert_allclose(seen, np.sort(both * np.cos(angles).sum(axis=1)), atol=1e-9)


def test_row_of_a_member_holds_the_nearest_on_the_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Order:
        def shuffle(self, order: list[int]) -> None:
            order[:] = [3, 0, 5, 1, 4, 2]

    monkeypatch.setattr(graph, "SystemRandom", Order)
    expected = [[3, 5], [4, 5], [3, 4], [0, 2], [1, 2], [0, 1]]
    assert draw(6, 2).tolist() == expected


def test_edges_are_equally_likely() -> None:
    count, neighbours, draws = 9, 4, 4000
    total = np.sum([adjacency(draw(count, neighbours)) for _ in range(draws)], axis=0)
    rate = neighbours / (count - 1)
    deviation = (draws * rate * (1 - rate)) ** 0.5
    for i, j in combinations(range(count), 2):
        assert abs(total[i, j] - draws * rate) < 6 * deviation


def test_graphs_differ() -> None:
    assert len({draw(20, 6).tobytes() for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("count", "neighbours"), [(0, 0), (1, 0), (2, 0), (2, 2), (6, 3), (6, 0), (6, -2), (6, 6), (6, 7), (7, 5)]
)
def test_refuses_a_degree_that_does_not_exist(count: int, neighbours: int) -> None:
    for refuses in (draw, check_degree):
        with pytest.raises(ValueError, match=r"^(members|neighbours) = -?\d+: must be .*$"):
            refuses(count, neighbours)


def test_refuses_no_number() -> None:
    with pytest.raises(ValueError, match="neighbours = nan"):
        check_degree(6, float("nan"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="members = nan"):
        check_degree(float("nan"), 2)  # type: ignore[arg-type]
