"""The node's side: each step of the method on the users it hosts.

Paper, Algorithm 1, TRAIN. A reply to a training message holds the protected vector and nothing else; what a
simulation wants to know besides goes with the evaluation, and only if `diagnostics` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import Task, pack, unpack
from pina_flwr.normality import rule_name
from pina_flwr.privacy.gaussian_sum import ROUNDING, GaussianSum, clip
from pina_flwr.privacy.guarantee import NoisePlan, plan
from pina_flwr.privacy.noise import secret_generator
from pina_flwr.secure_sum.interface import VECTOR
from pina_flwr.stage1.directions import centred, unit
from pina_flwr.stage1.dp_kmeans import contributions, nearest
from pina_flwr.stage1.sketch import local_sketches, sketch_clip_norm
from pina_flwr.training.workbench import Workbench, least, open_workbench

SKETCHES = "sketches"
DIAGNOSTICS = "diagnostics"
STATE = "since-evaluation"  # what a node remembers for the next evaluation


@dataclass(frozen=True)
class Node:
    """A node: the part of the users that it hosts, and the workbench of the process it runs in."""

    workbench: Workbench
    partition: int
    partitions: int

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.workbench.config

    @property
    def users(self) -> range:
        """The users that this node hosts: every `partitions`-th."""
        return range(self.partition, len(self.workbench.users), self.partitions)

    @property
    def plan(self) -> NoisePlan:
        """Noise of each stage, worked out from the configuration and not taken from the server."""
        return plan(self.config, len(self.workbench.users))

    def stage1_sum(self) -> GaussianSum:
        """The mechanism of stage 1's secure sums: unit vectors, so S = 1."""
        return GaussianSum(1.0, self.plan.stage1, self._expected_cohort(), self.config.noise_cohort_size)

    def stage2_sum(self) -> GaussianSum:
        """The mechanism of stage 2's secure sums."""
        return GaussianSum(
            self.config.clip_norm, self.plan.stage2, self._expected_cohort(), self.config.noise_cohort_size
        )

    def _expected_cohort(self) -> float:
        return self.config.sampling_rate * len(self.workbench.users)


def open_node(config: RunConfig, node_config: Mapping[str, object]) -> Node:
    """The node that a message is for.

    Raises:
        ConfigError: the data, the backbone or the node's configuration is not usable.
    """
    try:
        partition, partitions = int(str(node_config["partition-id"])), int(str(node_config["num-partitions"]))
    except (KeyError, ValueError):
        raise ConfigError("node-config: must give partition-id and num-partitions as whole numbers") from None
    if not 0 <= partition < partitions:
        raise ConfigError(f"node-config: partition-id = {partition}: must be in 0..{partitions - 1}")
    return Node(open_workbench(config), partition, partitions)


def train(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Do a step of training for the users of the task and return what leaves the node.

    Raises:
        ValueError: the task names an unknown step, or users that this node does not host, or one twice.
    """
    strangers = set(task.users) - set(node.users)
    if strangers or not task.users:
        raise ValueError(f"users {sorted(strangers)} are not hosted here" if strangers else "no users named")
    if len(set(task.users)) < len(task.users):
        raise ValueError("a user is named twice: it would contribute more than its bound")
    if task.step not in STEPS:
        raise ValueError(f"unknown step {task.step!r}")
    return STEPS[task.step](node, task, state)


def private_mean(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1: the sum of unit ΔB over users, noised."""
    deltas = node.workbench.stage1_deltas(task.users)
    _remember(node, task, state, deltas)
    return _protected(node.stage1_sum(), clip(unit(deltas), 1.0)[0], task)


def lloyd(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1: one iteration of DP k-means."""
    _remember(node, task, state, node.workbench.stage1_deltas(task.users))
    centroids = torch.from_numpy(task.arrays["centroids"])
    return _protected(node.stage1_sum(), contributions(_directions(node, task), centroids), task)


def sketch(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1 as in the paper: every user's sketch under local DP, in random order."""
    _remember(node, task, state, node.workbench.stage1_deltas(task.users))
    c, deltas = node.config, _centred(node, task)
    bound = sketch_clip_norm(c.clip_norm, c.sketch_size, deltas.shape[1])
    sketches = local_sketches(deltas, c.sketch_size, bound, node.plan.stage1, c.sketch_scale == "normalise")
    shuffled = sketches.numpy()[secret_generator().permutation(len(sketches))]
    return RecordDict({SKETCHES: pack({"rows": shuffled})})


def update(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 2: pick a cluster, train its model, clip, add the noise share; all cluster slots side by side."""
    models = torch.from_numpy(task.arrays["models"])
    given = None if task.choose == "loss" and len(models) > 1 else choose(node, task, models)
    updates, choices = node.workbench.train(task.users, models, given, task.round)
    _remember(node, task, state, updates)
    return _protected(node.stage2_sum(), bound_update(node.config, updates, choices, len(models)), task)


def choose(node: Node, task: Task, models: Tensor) -> Tensor:
    """The cluster each user takes [users]: by loss (Eq. 6), nearest centroid, or its true group (oracle)."""
    if len(models) == 1:
        return torch.zeros(len(task.users), dtype=torch.long)
    if task.choose == "nearest":
        return nearest(_directions(node, task), torch.from_numpy(task.arrays["centroids"]))
    if task.choose == "group":
        groups = node.workbench.users.groups
        assert groups is not None  # the oracle is refused without groups
        return torch.from_numpy(groups[list(task.users)]).long()
    if task.choose == "loss":
        return least(node.workbench.losses(task.users, models))
    raise ValueError(f"unknown way to choose a cluster {task.choose!r}")


def bound_update(config: RunConfig, updates: Tensor, choices: Tensor, clusters: int) -> Tensor:
    """Clipped updates in the slots chosen [users, C·d], with a one-hot count beside them [.. + C] if used.

    The joint vector of a user has l2 norm at most S: with a count share κ, the update is clipped to S·√(1 -
    κ²) and the one-hot entry is S·κ. A user whose update is not finite contributes zeros. IFCA without
    privacy clips nothing.
    """
    counted = rule_name(config) == "count"
    share = config.count_share if counted else 0.0
    free = config.strategy == "ifca"
    bound = float("inf") if free else config.clip_norm * (1 - share**2) ** 0.5
    clipped, left_out = clip(updates, bound)
    present = (~left_out).float()
    users = torch.arange(len(updates))
    slots = torch.zeros(len(updates), clusters, updates.shape[1])
    slots[users, choices] = clipped
    if not counted:
        return slots.flatten(1)
    counts = torch.zeros(len(updates), clusters)
    counts[users, choices] = share * config.clip_norm * (1 - ROUNDING) * present
    return torch.cat([slots.flatten(1), counts], dim=1)


def evaluate(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Simulation only: choices and losses of this node's users, right answers on its share of test images.

    Raises:
        ValueError: diagnostics are off; then nothing of this may leave a node.
    """
    if not node.config.diagnostics:
        raise ValueError("diagnostics = false: a node tells nothing about its users")
    models = torch.from_numpy(task.arrays["models"])
    bench, natural = node.workbench, node.workbench.users.own_test_rows is not None
    groups = list(task.users) if natural else list(range(bench.users.test_groups))
    # Only nodes with users are asked: those share the test images.
    part, parts = (0, 1) if natural else (node.partition, min(node.partitions, len(bench.users)))
    correct, total = bench.test_correct(models, groups, part, parts)
    losses = bench.losses(task.users, models)
    answer = {
        "users": np.array(task.users, dtype=np.int64),
        "test_group": np.array([bench.users.test_group_of(user) for user in task.users], dtype=np.int64),
        "choices": least(losses).numpy() if task.choose == "loss" else choose(node, task, models).numpy(),
        "losses": losses.numpy(),
        "groups": np.array(groups, dtype=np.int64),
        "correct": correct.numpy(),
        "total": total.numpy(),
    }
    noticed = _noticed(state)
    if noticed["round"].item() == task.round:
        answer["norms"] = noticed["norms"]
    answer["left_out"] = noticed["left_out"]
    state.pop(STATE, None)
    return RecordDict({DIAGNOSTICS: pack(answer)})


STEPS: dict[str, Callable[[Node, Task, RecordDict], RecordDict]] = {
    "mean": private_mean,
    "lloyd": lloyd,
    "sketch": sketch,
    "update": update,
}


def _remember(node: Node, task: Task, state: RecordDict, updates: Tensor) -> None:
    """Simulation only: keep for the next evaluation these norms and whose updates were not finite."""
    if not node.config.diagnostics:
        return
    norms = torch.linalg.vector_norm(updates.double(), dim=1).numpy()
    left_out = np.array(task.users, dtype=np.int64)[~np.isfinite(norms)]
    left_out = np.union1d(_noticed(state)["left_out"], left_out)
    state[STATE] = pack({"round": np.array(task.round), "norms": norms, "left_out": left_out})


def _noticed(state: RecordDict) -> dict[str, np.ndarray]:
    nothing = {"round": np.array(0), "norms": np.zeros(0), "left_out": np.zeros(0, dtype=np.int64)}
    return unpack(state.array_records[STATE]) if STATE in state.array_records else nothing


def _protected(mechanism: GaussianSum, vectors: Tensor, task: Task) -> RecordDict:
    """The users' bounded vectors [users, D], added and noised: all that leaves a node in a secure sum."""
    total = vectors.sum(dim=0).numpy() + mechanism.share(len(task.users), task.cohort, vectors.shape[1])
    return RecordDict({VECTOR: ArrayRecord([total.astype(np.float32)])})


def _centred(node: Node, task: Task) -> Tensor:
    """ΔB of the users, less the private mean where the server sent one: [users, h]."""
    mean = task.arrays.get("mean")
    return centred(node.workbench.stage1_deltas(task.users), None if mean is None else torch.from_numpy(mean))


def _directions(node: Node, task: Task) -> Tensor:
    return unit(_centred(node, task))
