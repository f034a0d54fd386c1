"""Scores against brute force and against values worked out by hand."""

import itertools
import math

import numpy as np
import pytest

from pina_flwr.report.scores import (
    adjusted_rand,
    clustering_accuracy,
    group_accuracy,
    mean_accuracy,
    worst_accuracy,
)


def brute_force_accuracy(groups, choices, labels):
    """Best share of agreement over every renaming of the clusters, one to one."""
    best = 0
    for names in itertools.permutations(range(labels)):
        best = max(best, sum(names[c] == g for g, c in zip(groups, choices, strict=True)))
    return best / len(groups)


@pytest.mark.parametrize(("n_groups", "n_clusters"), [(1, 1), (2, 2), (4, 4), (3, 5), (5, 2), (1, 4), (4, 1)])
def test_hungarian_matching_equals_brute_force(n_groups, n_clusters):
    rng = np.random.default_rng(n_groups * 10 + n_clusters)
    for n in (1, 2, 7, 30):
        for _ in range(10):
            groups, choices = rng.integers(n_groups, size=n), rng.integers(n_clusters, size=n)
            expected = brute_force_accuracy(groups, choices, max(n_groups, n_clusters))
            assert clustering_accuracy(groups, choices) == pytest.approx(expected)


def test_clustering_accuracy_ignores_names_of_clusters():
    rng = np.random.default_rng(0)
    groups, choices = rng.integers(4, size=50), rng.integers(4, size=50)
    value = clustering_accuracy(groups, choices)
    for names in itertools.permutations(range(4)):
        assert clustering_accuracy(groups, np.array(names)[choices]) == value
        assert clustering_accuracy(np.array(names)[groups], choices) == value
    assert clustering_accuracy(groups, (groups + 1) % 4) == 1


def test_one_cluster_for_all_gets_the_largest_group_only():
    assert clustering_accuracy([0, 0, 0, 1, 1, 2], [3] * 6) == 0.5


def test_adjusted_rand():
    groups = np.repeat(np.arange(4), 25)
    assert adjusted_rand(groups, 3 - groups) == 1
    assert adjusted_rand(groups, np.zeros(100, dtype=int)) == 0
    # Pairs together in both: 2; by group 6, by cluster 7, of 15: (2 - 2.8) / (6.5 - 2.8).
    assert adjusted_rand([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]) == pytest.approx((4 - 2.8) / (6.5 - 2.8))


def test_no_users_have_no_score():
    assert math.isnan(clustering_accuracy([], []))
    assert math.isnan(adjusted_rand([], []))
    assert np.isnan(group_accuracy([[1, 2]], [4], [], [])).all()


def test_group_accuracy_is_the_mean_over_users():
    correct, total = [[8, 2], [1, 9], [5, 5], [0, 0]], [10, 10, 10, 0]
    groups, choices = [0, 0, 0, 1, 3], [0, 0, 1, 1, 0]
    values = group_accuracy(correct, total, groups, choices)
    np.testing.assert_allclose(values, [(0.8 + 0.8 + 0.2) / 3, 0.9, np.nan, np.nan])
    assert mean_accuracy(values) == pytest.approx((0.6 + 0.9) / 2)
    assert worst_accuracy(values) == pytest.approx(0.6)


def test_group_accuracy_equals_a_loop_over_users():
    rng = np.random.default_rng(3)
    total = rng.integers(5, 20, size=4)
    correct = rng.integers(0, total[:, None] + 1, size=(4, 3))
    groups, choices = rng.integers(4, size=40), rng.integers(3, size=40)
    for g, value in enumerate(group_accuracy(correct, total, groups, choices)):
        rates = [correct[g, c] / total[g] for u, c in zip(groups, choices, strict=True) if u == g]
        assert value == pytest.approx(np.mean(rates))


def test_no_group_with_a_value():
    assert math.isnan(mean_accuracy([math.nan]))
    assert math.isnan(worst_accuracy([]))


@pytest.mark.parametrize(
    ("groups", "choices", "message"),
    [
        ([0, 1], [0], "one entry a user"),
        ([0.5, 1.0], [0, 1], "1-d integers"),
        ([[0], [1]], [[0], [1]], "1-d integers"),
        ([0, 2], [0, 1], "must be in 0..1"),
        ([0, 1], [0, -1], "must be in 0..2"),
    ],
)
def test_bad_labels_are_refused(groups, choices, message):
    with pytest.raises(ValueError, match=message):
        group_accuracy([[1, 1, 1], [1, 1, 1]], [2, 2], groups, choices)


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="must be"):
        group_accuracy([[1, 1]], [2, 2], [0], [0])
