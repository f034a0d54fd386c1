"""Simulation only: what the nodes' diagnostics say together about choices, losses and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from pina_flwr.client import DIAGNOSTICS
from pina_flwr.messages import unpack
from pina_flwr.report.scores import (
    adjusted_rand,
    clustering_accuracy,
    group_accuracy,
    mean_accuracy,
    worst_accuracy,
)


@dataclass(frozen=True)
class Diagnosis:
    """How users fare under the current models; NaN where something can't be said.

    loss: mean training loss of each user's own choice. cluster_accuracy: test accuracy by hidden group, or
    by chosen cluster where groups are unknown. cluster_sizes: users by choice. norms: of the round's
    updates before clipping. left_out: users whose update was not finite, since the last evaluation.
    """

    loss: float
    accuracy: float
    worst_cluster_accuracy: float
    cluster_accuracy: list[float]
    clustering_accuracy: float
    ari: float
    cluster_sizes: list[int]
    norm_mean: float
    norm_max: float
    left_out: int


def diagnose(answers: Sequence[RecordDict], clusters: int, groups_known: bool) -> Diagnosis | None:
    """Put the diagnostics of all nodes together; None if no node gave any."""
    parts = [unpack(a.array_records[DIAGNOSTICS]) for a in answers if DIAGNOSTICS in a.array_records]
    if not parts:
        return None
    choices, losses = _join(parts, "choices"), _join(parts, "losses")
    test_group = _join(parts, "test_group")
    per_group = _per_group(parts, clusters, test_group, choices)
    if groups_known:
        by_cluster, accuracy = per_group, mean_accuracy(per_group)
    else:
        per_user = per_group[test_group]
        by_cluster = np.array([mean_accuracy(per_user[choices == c]) for c in range(clusters)])
        accuracy = mean_accuracy(per_user)
    norms = _join(parts, "norms") if any("norms" in part for part in parts) else np.zeros(0)
    norms = norms[np.isfinite(norms)]
    return Diagnosis(
        loss=float(losses[np.arange(len(choices)), choices].mean()),
        accuracy=accuracy,
        worst_cluster_accuracy=worst_accuracy(by_cluster),
        cluster_accuracy=by_cluster.tolist(),
        clustering_accuracy=clustering_accuracy(test_group, choices) if groups_known else float("nan"),
        ari=adjusted_rand(test_group, choices) if groups_known else float("nan"),
        cluster_sizes=np.bincount(choices, minlength=clusters).tolist(),
        norm_mean=float(norms.mean()) if norms.size else float("nan"),
        norm_max=float(norms.max()) if norms.size else float("nan"),
        left_out=sum(len(part["left_out"]) for part in parts),
    )


def _per_group(
    parts: list[dict[str, np.ndarray]], clusters: int, test_group: np.ndarray, choices: np.ndarray
) -> np.ndarray:
    """Test accuracy of each test group, float64 [G]; nodes hold shares of the test images."""
    count = 1 + max(int(part["groups"].max()) for part in parts if part["groups"].size)
    correct, total = np.zeros((count, clusters), dtype=np.int64), np.zeros(count, dtype=np.int64)
    for part in parts:
        np.add.at(correct, part["groups"], part["correct"])
        np.add.at(total, part["groups"], part["total"])
    return group_accuracy(correct, total, test_group, choices)


def _join(parts: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([part[name] for part in parts if name in part])
