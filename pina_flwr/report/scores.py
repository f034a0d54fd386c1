"""How well a clustering of the users matches the hidden groups, and how well it serves them.

Clustering accuracy matches clusters to groups one to one (Hungarian method, Kuhn 1955); the adjusted
Rand index is Hubert and Arabie's (1985). Test accuracy is averaged over groups; a user is scored with
the cluster model that it picks (PINA, arXiv 2604.20596, Eq. 6). All functions are pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix

IntArray = NDArray[np.integer[Any]]


def clustering_accuracy(groups: ArrayLike, choices: ArrayLike) -> float:
    """Share of users whose cluster is the one matched to their group, under the best one-to-one matching.

    Args:
        groups: int [n], true group of each user.
        choices: int [n], cluster of each user. There may be more or fewer clusters than groups; users of an
            unmatched cluster or group count as wrong.

    Returns:
        A share in (0, 1]; nan if n = 0.

    Raises:
        ValueError: the arrays differ in length, are not 1-d, or are not integers.
    """
    truth, picked = _labels_of_users(groups, choices)
    if truth.size == 0:
        return float("nan")
    table = contingency_matrix(truth, picked)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / truth.size)


def adjusted_rand(groups: ArrayLike, choices: ArrayLike) -> float:
    """Adjusted Rand index of two labellings, int [n] each: 1 equal, 0 expected of a random one; nan if n = 0.

    Raises:
        ValueError: as `clustering_accuracy`.
    """
    truth, picked = _labels_of_users(groups, choices)
    return float(adjusted_rand_score(truth, picked)) if truth.size else float("nan")


def group_accuracy(
    correct: ArrayLike, total: ArrayLike, groups: ArrayLike, choices: ArrayLike
) -> NDArray[np.float64]:
    """Expected test accuracy of a user of each group when every user uses the cluster model it picks.

    Args:
        correct: int [G, C], test images of group g that cluster model c classifies correctly.
        total: int [G], test images of group g.
        groups: int [n], group of each user, in 0..G-1.
        choices: int [n], cluster that each user picks, in 0..C-1.

    Returns:
        float64 [G], the mean of correct[g, choice] / total[g] over the users of group g; nan for a group
        without users or without test images.

    Raises:
        ValueError: shapes that do not fit, labels that are not integers or out of range.
    """
    hits, images = np.asarray(correct), np.asarray(total)
    if hits.ndim != 2 or images.shape != hits.shape[:1]:
        raise ValueError(f"correct {hits.shape} and total {images.shape}: must be [G, C] and [G]")
    truth, picked = _labels_of_users(groups, choices)
    for name, labels, count in (("groups", truth, hits.shape[0]), ("choices", picked, hits.shape[1])):
        if labels.size and not 0 <= labels.min() <= labels.max() < count:
            raise ValueError(f"{name} from {labels.min()} to {labels.max()}: must be in 0..{count - 1}")
    rate = hits / np.where(images > 0, images, np.nan)[:, None]
    users = np.bincount(truth, minlength=hits.shape[0])
    sums = np.bincount(truth, weights=rate[truth, picked], minlength=hits.shape[0])
    return sums / np.where(users > 0, users, np.nan)


def mean_accuracy(per_group: ArrayLike) -> float:
    """Mean over the groups that have a value, of float [G] with nan where there is none; nan if none has."""
    values = _present(per_group)
    return float(values.mean()) if values.size else float("nan")


def worst_accuracy(per_group: ArrayLike) -> float:
    """Smallest value of float [G] with nan where there is none; nan if no group has one."""
    values = _present(per_group)
    return float(values.min()) if values.size else float("nan")


def _present(per_group: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(per_group, dtype=np.float64)
    return values[~np.isnan(values)]


def _labels_of_users(groups: ArrayLike, choices: ArrayLike) -> tuple[IntArray, IntArray]:
    truth, picked = _labels("groups", groups), _labels("choices", choices)
    if truth.shape != picked.shape:
        raise ValueError(f"groups {truth.shape} and choices {picked.shape}: must have one entry a user each")
    return truth, picked


def _labels(name: str, labels: ArrayLike) -> IntArray:
    array = np.asarray(labels)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} of shape {array.shape} and type {array.dtype}: must be 1-d integers")
    return array
