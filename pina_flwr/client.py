"""The node's side: each step of the method on the users it hosts.

Paper, Algorithm 1, TRAIN. A reply to a training message holds the protected vector and nothing else; what a
simulation wants to know besides goes with the evaluation, and only if `diagnostics` is on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import KEYS, REVEAL, Task, pack, unpack
from pina_flwr.node_config import parse_node_config
from pina_flwr.normality import rule_name
from pina_flwr.privacy.admission import admit, check_arrays
from pina_flwr.privacy.clipping import ROUNDING, clip
from pina_flwr.privacy.noise import KEY_BYTES, Entropy, open_entropy
from pina_flwr.privacy.plan import NoisePlan, Shapes, plan
from pina_flwr.privacy.policy import Policy, Refusal, load_policy
from pina_flwr.privacy.sum_mechanism import SumMechanism, component_key, open_mechanism, rotation_seed
from pina_flwr.privacy.user_ledger import FileLedger, StateLedger, UserLedger
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR
from pina_flwr.stage1.directions import centred, unit
from pina_flwr.stage1.dp_kmeans import contributions, nearest
from pina_flwr.stage1.starts import sketch_mechanism
from pina_flwr.training.workbench import Workbench, least, open_workbench

log = logging.getLogger("flwr")
SKETCHES = "sketches"
DIAGNOSTICS = "diagnostics"
REMOVABLE = "removable-noise"  # a node's key of the round
STATE = "since-evaluation"  # what a node remembers for the next evaluation


@dataclass(frozen=True)
class Node:
    """A node: the part of the users that it hosts, and the workbench of the process it runs in.

    run: Flower's id of the run. policy: what its owner allows at most; None in a simulation. ledger: folder
    of its users' ledgers; empty if they are kept for the run only.
    """

    workbench: Workbench
    partition: int
    partitions: int
    run: str
    policy: Policy | None = None
    ledger: str = ""

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.workbench.config

    @property
    def users(self) -> range:
        """The users that this node hosts: every `partitions`-th."""
        return range(self.partition, len(self.workbench.users), self.partitions)

    @property
    def shapes(self) -> Shapes:
        """Lengths of vectors."""
        return self.workbench.backbone.shapes

    @property
    def plan(self) -> NoisePlan:
        """The least noise of each stage, worked out from the configuration and not taken from the server."""
        return plan(self.config, len(self.workbench.users), self.shapes)

    def mechanism(self, step: str, z: float) -> SumMechanism:
        """How vectors of a step are protected."""
        return open_mechanism(self.config, step, z, len(self.workbench.users), self.shapes)

    def entropy(self, task: Task) -> Entropy:
        """Where the noise of a task comes from."""
        return open_entropy(self.config, task.step, task.round, self.partition)

    def user_ledger(self, state: RecordDict) -> UserLedger:
        """What its users have released so far."""
        return FileLedger(self.ledger) if self.ledger else StateLedger(state)


def open_node(config: RunConfig, node_config: Mapping[str, object], run: str) -> Node:
    """The node that a message is for.

    Raises:
        ConfigError: the data, the backbone or the node's configuration is not usable.
    """
    where = parse_node_config(node_config)
    policy = _policy(where.policy) if where.policy else None
    if policy or where.ledger:
        _check_run(config, policy)
    return Node(open_workbench(config), where.partition, where.partitions, run, policy, where.ledger)


def _policy(path: str) -> Policy:
    """The policy; what is wrong with it is for the node's owner alone."""
    try:
        return load_policy(path)
    except ConfigError as mistake:
        log.error("error: %s", mistake)
        raise ConfigError("node-config: a node's policy can't be used; its log says why") from None


def _check_run(config: RunConfig, policy: Policy | None) -> None:
    """Refuse a run whose options would void what the node's owner asks for; they come from the server."""
    rules = [
        (
            not config.diagnostics,
            "diagnostics = true: a node with a policy or a ledger tells nothing about its users",
        ),
        (
            not config.reproducible_noise or policy is None,
            "reproducible-noise = true: a node with a policy keeps its noise secret",
        ),
        (
            policy is None or config.secure_sum in policy.secure_sums,
            f"secure-sum = {config.secure_sum!r}: a node's policy does not accept it",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def train(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Do a step of training for the users of the task and return what leaves the node.

    What users release is checked and charged first; a reply that refuses holds the reason and nothing else.

    Raises:
        ValueError: the task names an unknown step, or users that this node does not host, or one twice.
    """
    strangers = set(task.users) - set(node.users)
    if strangers or not task.users:
        raise ValueError(f"users {sorted(strangers)} are not hosted here" if strangers else "no users named")
    if len(set(task.users)) < len(task.users):
        raise ValueError("a user is named twice: it would contribute more than its bound")
    if task.step == REVEAL:
        return reveal(node, task, state)
    if task.step not in STEPS:
        raise ValueError(f"unknown step {task.step!r}")
    try:
        check_arrays(node, task)
        admit(node, task, node.user_ledger(state))
    except Refusal as refusal:
        return RecordDict({REFUSAL: ConfigRecord({"reason": refusal.reason})})
    return STEPS[task.step](node, task, state)


def private_mean(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1: the sum of unit ΔB over users, noised."""
    deltas = node.workbench.stage1_deltas(task.users)
    _remember(node, task, state, deltas)
    return _protected(node, clip(unit(deltas), 1.0)[0], task, state)


def lloyd(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1: one iteration of DP k-means."""
    _remember(node, task, state, node.workbench.stage1_deltas(task.users))
    centroids = torch.from_numpy(task.arrays["centroids"])
    return _protected(node, contributions(_directions(node, task), centroids), task, state)


def sketch(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 1 with local sketches: every user's, as the run's mechanism protects it, in random order."""
    _remember(node, task, state, node.workbench.stage1_deltas(task.users))
    deltas, draws = _centred(node, task), node.entropy(task)
    _check_one_each(deltas, task)
    mechanism = sketch_mechanism(node.config, deltas.shape[1])
    assert task.offer is not None  # `admit` saw to it
    sketches = mechanism.release(deltas, task.offer.noise_multiplier, draws.generator("sketch"))
    shuffled = sketches.numpy()[draws.generator("shuffle").permutation(len(sketches))]
    return RecordDict({SKETCHES: pack({"rows": shuffled})})


def update(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Stage 2: pick a cluster, train its model, clip, add the noise share; all cluster slots side by side."""
    models = torch.from_numpy(task.arrays["models"])
    given = None if task.choose == "loss" and len(models) > 1 else choose(node, task, models)
    updates, choices = node.workbench.train(task.users, models, given, task.round)
    _remember(node, task, state, updates)
    return _protected(node, bound_update(node.config, updates, choices, len(models)), task, state)


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


def _protected(node: Node, vectors: Tensor, task: Task, state: RecordDict) -> RecordDict:
    """The users' bounded vectors [users, D], added and noised: all that leaves a node in a secure sum."""
    assert task.offer is not None  # `admit` saw to it
    _check_one_each(vectors, task)
    key = _new_key(node, task, state) if node.config.dropout_noise == "removable" else b""
    total = node.mechanism(task.step, task.offer.noise_multiplier).protect(
        vectors, task.offer.cohort, rotation_seed(node.config, task.step, task.round), node.entropy(task), key
    )
    return RecordDict({VECTOR: ArrayRecord([total])})


def _check_one_each(vectors: Tensor, task: Task) -> None:
    """With more vectors than users, no user's bound would hold."""
    if len(vectors) != len(task.users):
        raise ValueError(f"{len(vectors)} vectors of {len(task.users)} users: must be one of each")


def _new_key(node: Node, task: Task, state: RecordDict) -> bytes:
    """A fresh key for the noise that may be removed later, kept until the server asks or the next round."""
    assert task.offer is not None
    key = node.entropy(task).generator("removable").bytes(KEY_BYTES)
    state[REMOVABLE] = ConfigRecord({"key": key, "users": len(task.users), "offer": repr(task.offer)})
    return key


def reveal(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """The keys of noise that was added in vain, now that it is known how many of the cohort vanished.

    The server is trusted to count them right: who is told too many vanished keeps noise, too few, gives it
    away. A node answers once a round, and keeps what `dropout-tolerance` asks for in any case.

    Raises:
        ValueError: nothing to reveal for this round, or not that much.
    """
    kept = state.config_records.get(REMOVABLE)
    if kept is None or task.offer is None or kept["offer"] != repr(task.offer):
        raise ValueError("nothing to reveal for this round")
    most = task.offer.cohort - task.offer.survivors
    if kept["users"] != len(task.users) or not 0 <= task.vanished <= most:
        raise ValueError(f"vanished = {task.vanished}: must be within 0..{most}")
    state.pop(REMOVABLE)
    key = kept["key"]
    assert isinstance(key, bytes)
    keys = [component_key(key, dropped) for dropped in range(task.vanished + 1, most + 1)]
    return RecordDict({KEYS: ConfigRecord({"keys": keys})})


def _centred(node: Node, task: Task) -> Tensor:
    """ΔB of the users, less the private mean where the server sent one: [users, h]."""
    mean = task.arrays.get("mean")
    return centred(node.workbench.stage1_deltas(task.users), None if mean is None else torch.from_numpy(mean))


def _directions(node: Node, task: Task) -> Tensor:
    return unit(_centred(node, task))
