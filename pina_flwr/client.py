"""The node's side: each step of the method on the users it hosts.

Paper, Algorithm 1, TRAIN. A reply to a training message holds the protected vector and nothing else; what a
simulation wants to know besides goes with the evaluation, and only if `diagnostics` is on. With SecAgg+ each
user's vector is protected by itself, and leaves only under the masks of that layer (`contribute`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from pina_flwr.config import RunConfig
from pina_flwr.host import load_keys, open_host
from pina_flwr.messages import KEYS, REVEAL, Task, pack, unpack
from pina_flwr.normality import rule_name
from pina_flwr.privacy.admission import admit, check_arrays
from pina_flwr.privacy.clipping import ROUNDING, clip
from pina_flwr.privacy.noise import KEY_BYTES, Entropy, open_entropy
from pina_flwr.privacy.plan import NoisePlan, Shapes, plan
from pina_flwr.privacy.policy import Policy, Refusal
from pina_flwr.privacy.sum_mechanism import SumMechanism, component_key, open_mechanism, rotation_seed
from pina_flwr.privacy.user_ledger import FileLedger, StateLedger, UserLedger
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR
from pina_flwr.secure_sum.members import Declined, survivors_of
from pina_flwr.secure_sum.registry import Identity
from pina_flwr.secure_sum.session import Session, Terms
from pina_flwr.stage1.directions import centred, directions, unit
from pina_flwr.stage1.dp_kmeans import contributions, nearest
from pina_flwr.stage1.local_gaussian import LocalGaussian
from pina_flwr.stage1.starts import sketch_mechanism
from pina_flwr.training.workbench import Workbench, least, open_workbench

log = logging.getLogger("flwr")
Item = TypeVar("Item", int, bytes)
SKETCHES = "sketches"
DIAGNOSTICS = "diagnostics"
REMOVABLE = "removable-noise"  # a node's keys of the round
STATE = "since-evaluation"  # what a node remembers for the next evaluation


@dataclass(frozen=True)
class Node:
    """A node: the part of the users that it hosts, and the workbench of the process it runs in.

    run: Flower's id of the run. policy: what its owner allows at most; None in a simulation. ledger: folder
    of its users' ledgers; empty if they are kept for the run only. identity: keys that sign, for signed sums.
    """

    workbench: Workbench
    partition: int
    partitions: int
    run: str
    policy: Policy | None = None
    ledger: str = ""
    identity: Identity | None = None

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
    host = open_host(config, node_config, run)
    bench, where = open_workbench(config), host.where
    node = Node(bench, where.partition, where.partitions, run, host.policy, where.ledger)
    return replace(node, identity=load_keys(where, node.users)) if where.key_registry else node


def train(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """Do a step of training for the users of the task and return what leaves the node.

    What users release is checked and charged first; a reply that refuses holds the reason and nothing else.

    Raises:
        ValueError: the task names an unknown step, or users that this node does not host, or one twice.
    """
    _check_users(node, task)
    if task.step == REVEAL:
        return reveal(node, task, state)
    try:
        if task.step in ROWS:
            _admit(node, task, state)
            return RecordDict({SKETCHES: pack({"rows": ROWS[task.step](node, task, state)})})
        if node.config.secure_sum != "trusted":  # a vector that leaves without masks is nobody's to ask for
            raise Refusal("parameters differ from the run's")
        vectors = _vectors(node, task, state)
    except Refusal as refusal:
        return RecordDict({REFUSAL: ConfigRecord({"reason": refusal.reason})})
    keys = _new_keys(node, task, state, 1)
    return RecordDict({VECTOR: ArrayRecord([_protected(node, vectors, task, node.entropy(task), keys[0])])})


def contribute(
    node: Node, request: RecordDict, members: Sequence[int], terms: Terms, state: RecordDict
) -> NDArray[np.uint32]:
    """Do a step of training for users in SecAgg+ and return their protected vectors, each by itself.

    Args:
        node: that hosts them.
        request: the server's task.
        members: those of the task's users that take part.
        terms: of the secure sum.
        state: what the node remembers.

    Returns:
        uint32 [members, size], below 2^b.

    Raises:
        Declined: nothing of the users may be used.
        KeyError, TypeError, ValueError: the request is no task for these users.
    """
    task = Task.from_record(request)
    if not set(members) <= set(task.users):
        raise ValueError("users of the secure sum: must be among those of the task")
    task = replace(task, users=list(members))
    _check_users(node, task)
    try:
        _check_terms(node, task, terms)
        vectors = _vectors(node, task, state)
    except Refusal as refusal:
        raise Declined(refusal.reason) from None
    keys = _new_keys(node, task, state, len(members), terms.session.round)
    draws = [open_entropy(node.config, task.step, task.round, f"user {user}") for user in members]
    rows = zip(vectors.split(1), draws, keys, strict=True)
    return np.stack([_protected(node, row, task, entropy, key) for row, entropy, key in rows])


def _check_users(node: Node, task: Task) -> None:
    strangers = set(task.users) - set(node.users)
    if strangers or not task.users:
        raise ValueError(f"users {sorted(strangers)} are not hosted here" if strangers else "no users named")
    if len(set(task.users)) < len(task.users):
        raise ValueError("a user is named twice: it would contribute more than its bound")


def _check_terms(node: Node, task: Task, terms: Terms) -> None:
    """Refuse a secure sum that is not the run's, or that so few may survive that the noise is not enough."""
    offer, same = task.offer, False
    if task.step in VECTORS and offer is not None:
        mechanism = node.mechanism(task.step, offer.noise_multiplier)
        same = (terms.size, terms.bits) == (mechanism.size, mechanism.bits)
    if not same or offer is None or terms.members > offer.cohort:
        raise Refusal("parameters differ from the run's")
    if terms.fewest < offer.survivors:
        raise Refusal("too few survivors allowed")


def _admit(node: Node, task: Task, state: RecordDict) -> None:
    check_arrays(node, task)
    admit(node, task, node.user_ledger(state))


def _vectors(node: Node, task: Task, state: RecordDict) -> Tensor:
    """The users' bounded vectors [users, D] of a step, once all is checked and charged."""
    if task.step not in VECTORS:
        raise ValueError(f"unknown step {task.step!r}")
    _admit(node, task, state)
    vectors = VECTORS[task.step](node, task, state)
    _check_one_each(vectors, task)
    return vectors


def private_mean(node: Node, task: Task, state: RecordDict) -> Tensor:
    """Stage 1: the unit signal of each user, for their mean."""
    deltas = node.workbench.stage1_signals(task.users)
    _remember(node, task, state, deltas)
    return clip(unit(deltas), 1.0)[0]


def lloyd(node: Node, task: Task, state: RecordDict) -> Tensor:
    """Stage 1: what each user adds to one iteration of DP k-means."""
    _remember(node, task, state, node.workbench.stage1_signals(task.users))
    centroids = torch.from_numpy(task.arrays["centroids"])
    return contributions(_directions(node, task), centroids)


def sketch(node: Node, task: Task, state: RecordDict) -> np.ndarray:
    """Stage 1 with local sketches: every user's, as the run's mechanism protects it, in random order."""
    _remember(node, task, state, node.workbench.stage1_signals(task.users))
    deltas, draws = _centred(node, task), node.entropy(task)
    _check_one_each(deltas, task)
    mechanism = sketch_mechanism(node.config, deltas.shape[1])
    assert task.offer is not None  # `admit` saw to it
    sketches = mechanism.release(deltas, task.offer.noise_multiplier, draws.generator("sketch"))
    return _shuffled(sketches, draws)


def update(node: Node, task: Task, state: RecordDict) -> Tensor:
    """Stage 2: each user picks a cluster, trains its model and clips; all cluster slots side by side."""
    models = torch.from_numpy(task.arrays["models"])
    given = None if task.choose == "loss" and len(models) > 1 else choose(node, task, models)
    updates, choices = node.workbench.train(task.users, models, given, task.round)
    _remember(node, task, state, updates)
    return bound_update(node.config, updates, choices, len(models))


def local_update(node: Node, task: Task, state: RecordDict) -> np.ndarray:
    """Stage 2 under local DP: every user's bounded vector with noise N(0, (z·S)²) on each of its numbers.

    A row hides the user's update and its cluster; rows are in random order. Float32 [users, D].
    """
    vectors, draws = update(node, task, state), node.entropy(task)
    _check_one_each(vectors, task)
    assert task.offer is not None  # `admit` saw to it
    mechanism = LocalGaussian(node.config.clip_norm, normalise=False)
    noisy = mechanism.release(vectors, task.offer.noise_multiplier, draws.generator("update"))
    return _shuffled(noisy.float(), draws)


def raw_update(node: Node, task: Task, state: RecordDict) -> np.ndarray:
    """Stage 2 in the clear: every user's update as it is, float32 [users, d]; one not finite stays out."""
    models = torch.from_numpy(task.arrays["models"])
    updates, _ = node.workbench.train(task.users, models, choose(node, task, models), task.round)
    _remember(node, task, state, updates)
    rows: np.ndarray = updates[torch.isfinite(updates).all(dim=1)].numpy()
    return rows


def _shuffled(rows: Tensor, draws: Entropy) -> np.ndarray:
    order = draws.generator("shuffle").permutation(len(rows))
    shuffled: np.ndarray = rows.numpy()[order]
    return shuffled


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
    privacy clips nothing, unless SecAgg+ adds its vectors, which must be bounded for that.
    """
    counted = rule_name(config) == "count"
    share = config.count_share if counted else 0.0
    free = config.traits.local_noise and not config.private and config.secure_sum == "trusted"
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


VECTORS: dict[str, Callable[[Node, Task, RecordDict], Tensor]] = {
    "mean": private_mean,
    "lloyd": lloyd,
    "update": update,
}
"""Steps whose vectors go through the secure sum: each makes bounded vectors [users, D]."""


ROWS: dict[str, Callable[[Node, Task, RecordDict], np.ndarray]] = {
    "sketch": sketch,
    "local-update": local_update,
    "raw-update": raw_update,
}
"""Steps in which every user answers for itself: each makes rows, float32 [users, D]."""


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


def _protected(node: Node, vectors: Tensor, task: Task, entropy: Entropy, key: bytes) -> np.ndarray:
    """Bounded vectors [users, D], added and noised."""
    assert task.offer is not None  # `admit` saw to it
    mechanism, seed = (
        node.mechanism(task.step, task.offer.noise_multiplier),
        rotation_seed(node.config, task.step, task.round),
    )
    return mechanism.protect(vectors, task.offer.cohort, seed, entropy, key)


def _check_one_each(vectors: Tensor, task: Task) -> None:
    """With more vectors than users, no user's bound would hold."""
    if len(vectors) != len(task.users):
        raise ValueError(f"{len(vectors)} vectors of {len(task.users)} users: must be one of each")


def _new_keys(node: Node, task: Task, state: RecordDict, count: int, round_: int = 0) -> list[bytes]:
    """Fresh keys for the noise that may be removed later, kept until the server asks or the next round.

    One key for all users together, or one for each. round_: of the secure sum, if the layer has rounds.
    """
    if node.config.dropout_noise != "removable":
        return [b""] * count
    assert task.offer is not None
    draws = node.entropy(task).generator("removable")
    keys = [draws.bytes(KEY_BYTES) for _ in range(count)]
    kept: dict[str, ConfigRecordValues] = {"keys": keys, "users": list(task.users), "sum": round_}
    state[REMOVABLE] = ConfigRecord(kept | {"offer": repr(task.offer)})
    return keys


def reveal(node: Node, task: Task, state: RecordDict) -> RecordDict:
    """The keys of noise that was added in vain, now that it is known how many of the cohort vanished.

    A trusted sum's server is trusted to count them right: who is told too many vanished keeps noise, too few,
    gives it away. With SecAgg+ the count must be that with which the sum was unmasked. A node answers once a
    round, and keeps what `dropout-tolerance` asks for in any case.

    Raises:
        ValueError: nothing to reveal for this round, or not that much.
    """
    kept = state.config_records.get(REMOVABLE)
    if kept is None or task.offer is None or kept["offer"] != repr(task.offer):
        raise ValueError("nothing to reveal for this round")
    users, keys, round_ = _listed(kept, "users", int), _listed(kept, "keys", bytes), kept["sum"]
    assert isinstance(round_, int)
    _check_vanished(node, task, state, round_)
    asked = set(task.users)
    if not (asked <= set(users) if round_ else asked == set(users)):
        raise ValueError("users: must be those that took part")
    state.pop(REMOVABLE)
    own = [keys[users.index(user)] for user in task.users] if round_ else keys
    most = task.offer.cohort - task.offer.survivors
    dropped = range(task.vanished + 1, most + 1)
    revealed = [component_key(key, k) for key in own for k in dropped]
    groups = [1] * len(task.users) if round_ else [len(users)]
    return RecordDict({KEYS: ConfigRecord({"keys": revealed, "users": groups})})


def _listed(record: ConfigRecord, name: str, kind: type[Item]) -> list[Item]:
    values = record[name]
    assert isinstance(values, list)
    return [value for value in values if isinstance(value, kind)]


def _check_vanished(node: Node, task: Task, state: RecordDict, round_: int) -> None:
    """Raise if the number of those who vanished is out of bounds, or not that of the unmasked sum."""
    assert task.offer is not None
    most = task.offer.cohort - task.offer.survivors
    if not 0 <= task.vanished <= most:
        raise ValueError(f"vanished = {task.vanished}: must be within 0..{most}")
    if round_:
        counted = survivors_of(state, Session(node.run, round_))
        if counted is None or task.offer.cohort - counted[1] != task.vanished:
            raise ValueError(f"vanished = {task.vanished}: is not what the sum was unmasked with")


def _centred(node: Node, task: Task) -> Tensor:
    """Signals of the users, less the private mean where the server sent one: [users, h]."""
    mean = task.arrays.get("mean")
    return centred(
        node.workbench.stage1_signals(task.users), None if mean is None else torch.from_numpy(mean)
    )


def _directions(node: Node, task: Task) -> Tensor:
    return directions(node.workbench.stage1_signals(task.users), task.arrays.get("mean"))
