"""The round that every strategy shares: sample, ask, secure sum, rescale each cluster's aggregate, apply.

PINA (arXiv 2604.20596), Algorithm 1. FedAvg is the case of one cluster; IFCA (Ghosh et al. 2020), the
oracle and PINA + RI differ in how models start, how a user finds its cluster, and how aggregates are
scaled.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from pina_flwr.client import SKETCHES
from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import EVALUATE, REVEAL, TRAIN, Task, pack, request, unpack
from pina_flwr.models.adapter import with_centroid
from pina_flwr.models.backbone import Backbone
from pina_flwr.normality import Aggregates, rule, rule_name
from pina_flwr.privacy.admission import offer_of
from pina_flwr.privacy.cohort import shares
from pina_flwr.privacy.ledger import Entry, Ledger
from pina_flwr.privacy.noise import KEY_BYTES, open_entropy
from pina_flwr.privacy.plan import (
    SECURE_SUMS,
    NoisePlan,
    charged,
    clip_norm_of,
    training_step,
    vector_size,
)
from pina_flwr.privacy.policy import REASONS, Offer
from pina_flwr.privacy.sum_mechanism import IntegerSum, SumMechanism, open_mechanism, rotation_seed
from pina_flwr.secure_sum.interface import SecureSum, SumResult, SumRound, Survivors
from pina_flwr.secure_sum.session import Session
from pina_flwr.secure_sum.trusted import refusal_in
from pina_flwr.secure_sum.wire import bytes_of
from pina_flwr.stage1.starts import FirstModels, Question, Start, open_start, sketch_mechanism
from pina_flwr.strategies.diagnosis import Diagnosis, diagnose
from pina_flwr.strategies.hosts import Hosts
from pina_flwr.strategies.removal import remove_excess
from pina_flwr.strategies.sampler import Sampler
from pina_flwr.strategies.server_optimizer import ServerOptimizer
from pina_flwr.traits import Traits


@dataclass(frozen=True)
class Outcome:
    """What a round did.

    stage: 1 or 2. cohort: users sampled. weights: factor w_i on each aggregate. noise_std: σ a coordinate
    on the mean. dropped: why the round was dropped, or empty. survivors: users in the secure sum. refusals:
    reasons that clients gave, and for how many users. lost: users that vanished, by phase of the secure sum.
    ignored: messages that were late, double or not asked for. diagnosis: simulation only.
    """

    stage: int
    round: int
    cohort: int
    seconds: float = 0.0
    weights: tuple[float, ...] = ()
    noise_std: float | None = None
    dropped: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    survivors: int | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    ignored: int = 0
    diagnosis: Diagnosis | None = None


Listener = Callable[[Outcome], None]
NOBODY = "no user was sampled"
WORKER_DIED = "ActorDied"  # in Ray's words: a simulation worker was killed, and Flower starts no other


class TrainingFailed(RuntimeError):
    """Training can't go on, or came to nothing. `models` are the cluster models so far."""

    def __init__(self, reason: str, models: ArrayRecord):
        super().__init__(reason)
        self.models = models


class ClusteredTraining(Strategy):
    """Stage 1, then T_tr rounds of clustered training under user-level DP.

    Args:
        config: the run's configuration.
        backbone: for the adapters' shapes and shared start.
        hosts: where users are.
        plan: noise of each stage.
        secure_sum: how protected vectors are added; None if users send theirs in the clear.
        ledger: told of every release before it happens.
        run: Flower's id of the run.
        listen: told of every round.
    """

    def __init__(
        self,
        config: RunConfig,
        backbone: Backbone,
        hosts: Hosts,
        plan: NoisePlan,
        secure_sum: SecureSum | None,
        ledger: Ledger,
        run: str,
        listen: Listener,
    ):
        self.config, self.backbone, self.hosts = config, backbone, hosts
        self.plan, self.secure_sum, self.listen = plan, secure_sum, listen
        self.ledger, self.run = ledger, run
        self.clusters = config.slots
        self.start_of_models: Start = open_start(config, backbone.shapes.sketch, backbone.sketch.size)
        self.first: FirstModels | None = None
        self.expected_cohort = config.sampling_rate * len(hosts)
        self.sampler = Sampler(config, len(hosts))
        self.optimizer = ServerOptimizer(config, self.clusters, backbone.spec.size)
        self._cohort: dict[int, list[int]] = {}
        self._question: Question | None = None
        self._sum: SumResult | None = None
        self._outcome = Outcome(stage=0, round=0, cohort=0)

    # What strategies differ in ----------------------------------------------------------------------------

    traits: ClassVar[Traits] = Traits()  # what clients have to know of it as well

    def choose(self, round_: int) -> str:
        """How users find their cluster in stage-2 round `round_`: "loss", "nearest" or "group"."""
        return "loss"

    def combine(self, rows: np.ndarray) -> np.ndarray | None:
        """What the round's aggregates are, from vectors that users sent one by one [n, D]: float64 [D].

        Their sum over the expected cohort, as of a secure sum. None drops the round, its reason noted.
        """
        z, bound = self.plan.of_step(self._step_name), clip_norm_of(self.config, self._step_name)
        self._note(noise_std=z * bound * math.sqrt(len(rows)) / self.expected_cohort)
        total: np.ndarray = rows.sum(axis=0, dtype=np.float64)
        return total / self.expected_cohort

    def weights(self, round_: int, aggregates: Aggregates) -> np.ndarray:
        """Factor w_i on each cluster's aggregate in stage-2 round `round_`, float64 [C]; 0 leaves it out."""
        return rule(self.config, round_)[0](aggregates)

    # The run ----------------------------------------------------------------------------------------------

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 3600,
    ) -> Result:
        """Run all rounds of both stages; `Result.arrays` holds the cluster models [C, d] under "models".

        Raises:
            TrainingFailed: no round of stage 2 counted, or a worker of the simulation died.
        """
        models = initial_arrays or self._models_before_round_1()
        result, applied = Result(), 0
        for t in range(1, (num_rounds or self.rounds) + 1):
            began = time.monotonic()
            try:
                requests = list(self.configure_train(t, models, ConfigRecord(), grid))
            except ConfigError as problem:
                raise TrainingFailed(str(problem), models) from None
            replies = self._collect(grid, requests, timeout)
            arrays, _ = self.aggregate_train(t, replies)
            models = arrays if arrays is not None else models
            if self._worth_evaluating(t):
                questions = list(self.configure_evaluate(t, models, ConfigRecord(), grid))
                self.aggregate_evaluate(t, grid.send_and_receive(questions, timeout=timeout))
            self._note(seconds=time.monotonic() - began)
            self.listen(self._outcome)
            trained = self._outcome.cohort > 0 and not self._outcome.dropped
            applied += self._outcome.stage == 2 and trained
            if WORKER_DIED in self._outcome.dropped:
                raise TrainingFailed("a worker of the simulation died, for want of memory perhaps", models)
        if not applied:
            reason = self._outcome.dropped or NOBODY
            raise TrainingFailed(f"every round of stage 2 was dropped: {reason}", models)
        result.arrays = models
        return result

    @property
    def rounds(self) -> int:
        """All rounds, T_in + T_tr."""
        return self.start_of_models.rounds + self.config.t_tr

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the cohort and ask each of its nodes; stage 1 comes first (Algorithm 1, lines 4-10)."""
        stage, t = self._stage(server_round)
        cohort = self.sampler.cohort(stage, server_round)
        self._outcome = Outcome(stage=stage, round=server_round, cohort=len(cohort))
        self._question = self.start_of_models.ask(t) if stage == 1 else self._ask_for_updates(t, arrays)
        choose = self.choose(t) if stage == 2 else ""
        self._charge(stage, t)
        task = Task(self._question.step, t, [], choose, self._question.arrays, self._offer(t, len(cohort)))
        self._cohort = self.hosts.by_node(cohort)
        requests = self._to_nodes(task, self._cohort, TRAIN, server_round)
        return requests

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The round's sum, divided by the expected cohort, goes into stage 1 or onto the cluster models.

        replies: of a step without a secure sum, which has its own replies and has added them up already.
        Returns no arrays when the round is dropped.
        """
        stage, t = self._stage(server_round)
        answer = self._answer(list(replies))
        if stage == 1:
            if answer is not None:
                self.start_of_models.receive(t, answer)
            return (self._first_models() if t == self.start_of_models.rounds else None), None
        if answer is None:
            return None, None
        assert self._question is not None  # set by configure_train
        models = self._question.arrays["models"]
        return pack({"models": self._step(t, models, answer)}), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every node how its users fare with the clusters that they take now (simulation only)."""
        stage, t = self._stage(server_round)
        found = self._first().arrays
        choose = self.choose(t) if stage == 2 else "nearest" if found else "loss"
        named = unpack(arrays) | (found if choose == "nearest" else {})
        everyone = self.hosts.by_node(range(len(self.hosts)))
        return self._to_nodes(Task("evaluate", t, [], choose, named), everyone, EVALUATE, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Put the nodes' answers together; nothing of it enters training."""
        good = [r.content for r in replies if not r.has_error()]
        self._note(diagnosis=diagnose(good, self.clusters, groups_known=not self.config.user_column))
        return None

    def summary(self) -> None:
        """Nothing: the run's configuration and table are printed elsewhere."""

    # Steps ------------------------------------------------------------------------------------------------

    def _offer(self, t: int, cohort: int) -> Offer:
        """What the cohort is told about how its vectors are protected."""
        assert self._question is not None  # set by configure_train
        return offer_of(self.config, self.plan, self._question.step, t, max(cohort, 1), self.run)

    def _charge(self, stage: int, t: int) -> None:
        """Enter what the round releases in the ledger, before anyone is asked.

        Raises:
            ConfigError: it can't be written.
        """
        if not self.config.private and not self.config.ledger:
            return
        assert self._question is not None  # set by configure_train
        z, q = self.plan.of_step(self._question.step), self.config.sampling_rate
        shapes = self.backbone.shapes
        for release in charged(self.config, self._question.step, z, len(self.hosts), shapes, q):
            self.ledger.append(Entry(self.run, stage, t, release))

    def _stage(self, server_round: int) -> tuple[int, int]:
        """The stage of a round, and its number within the stage."""
        stage1 = self.start_of_models.rounds
        return (1, server_round) if server_round <= stage1 else (2, server_round - stage1)

    def _ask_for_updates(self, t: int, arrays: ArrayRecord) -> Question:
        named = {"models": unpack(arrays)["models"]}
        if self.choose(t) == "nearest":
            named |= self._first().arrays
        return Question(training_step(self.config), named)

    def _to_nodes(
        self, task: Task, members: Mapping[int, Sequence[int]], kind: str, round_: int
    ) -> list[Message]:
        """One message a node, with all of its users."""
        return [
            request(replace(task, users=own).to_record(), node, kind, round_) for node, own in members.items()
        ]

    def _collect(self, grid: Grid, requests: list[Message], timeout: float) -> list[Message]:
        """Replies of a step without a secure sum; a secure sum leaves its result in `_sum`."""
        self._sum = None
        if not requests:
            return []
        if self._step_name not in SECURE_SUMS:
            replies = list(grid.send_and_receive(requests, timeout=timeout))
            self._note(bytes_up=bytes_of(replies), bytes_down=bytes_of(requests))
            return replies
        assert self.secure_sum is not None  # the run's configuration refuses such a step without
        result = self.secure_sum.run(grid, requests, self._sum_round(), timeout)
        self._note(
            bytes_up=result.bytes_up,
            bytes_down=result.bytes_down,
            survivors=result.survivors,
            refusals=result.refusals,
            lost=result.lost,
            ignored=result.ignored,
        )
        self._sum = result
        return []

    @property
    def _step_name(self) -> str:
        assert self._question is not None  # set by configure_train
        return self._question.step

    def _sum_round(self) -> SumRound:
        mechanism = self._mechanism()
        return SumRound(
            Session(self.run, self._outcome.round),
            mechanism.size,
            mechanism.bits,
            self._cohort,
            fewest=shares(self.config, self._outcome.cohort).survivors,
            reasons=REASONS,
            reveal=self._ask_to_reveal if self._removable(mechanism) else None,
        )

    def _removable(self, mechanism: SumMechanism) -> bool:
        return self.config.dropout_noise == "removable" and mechanism.bits > 0

    def _ask_to_reveal(self, survivors: Survivors, vanished: int) -> list[Message]:
        """Ask nodes for the keys of the noise that was added in vain."""
        cohort = self._outcome.cohort
        if vanished >= cohort - shares(self.config, cohort).survivors:
            return []
        _, t = self._stage(self._outcome.round)
        task = Task(REVEAL, t, [], offer=self._offer(t, cohort), vanished=vanished)
        return self._to_nodes(task, survivors, TRAIN, self._outcome.round)

    def _answer(self, replies: list[Message]) -> np.ndarray | None:
        """The round's update or stage-1 result [D], or sketches; None, its reason noted, drops the round."""
        protected = self._step_name in SECURE_SUMS
        if not self._cohort and not (self.config.private and protected):
            self._note(dropped=NOBODY)
            return None
        if not protected:
            rows = self._rows(replies)
            return rows if rows is None or self._step_name == "sketch" else self.combine(rows)
        if not self._cohort:
            return self._noise_alone()
        assert self._sum is not None  # set by _collect
        if self._sum.total is None:
            self._note(dropped=self._sum.reason)
            return None
        return self._mean(self._sum)

    def _noise_alone(self) -> np.ndarray:
        """A round in which nobody was sampled: without noise it would tell that it was."""
        assert self._question is not None  # set by configure_train
        step, (_, t) = self._question.step, self._stage(self._outcome.round)
        mechanism = self._mechanism()
        nobody = torch.zeros(1, vector_size(self.config, step, self.backbone.shapes))
        seed, entropy = rotation_seed(self.config, step, t), open_entropy(self.config, step, t, "nobody")
        key = entropy.generator("removable").bytes(KEY_BYTES)
        total = mechanism.protect(nobody, 1, seed, entropy, key)
        self._note(noise_std=mechanism.budget.mean_std(1, 1, 1))
        return mechanism.decode(total, seed) / self.expected_cohort

    def _mean(self, result: SumResult) -> np.ndarray:
        """The sum's result, decoded and divided by the expected cohort, float64 [D]."""
        assert self._question is not None  # set by configure_train
        assert result.total is not None  # else the round was dropped
        mechanism, (_, t) = self._mechanism(), self._stage(self._outcome.round)
        total, kept = result.total, result.survivors
        if self._removable(mechanism):
            assert isinstance(mechanism, IntegerSum)
            total, kept = remove_excess(mechanism, self._sum_round(), result)
        self._note(noise_std=mechanism.budget.mean_std(self._outcome.cohort, result.survivors, kept))
        seed = rotation_seed(self.config, self._question.step, t)
        return mechanism.decode(total, seed) / self.expected_cohort

    def _rows(self, replies: list[Message]) -> np.ndarray | None:
        """Users' own vectors, which don't depend on each other: those that arrived well-formed are used."""
        sketches = self._step_name == "sketch"
        width = (
            sketch_mechanism(self.config, self.backbone.shapes.sketch).width
            if sketches
            else vector_size(self.config, self._step_name, self.backbone.shapes)
        )
        most = {node: len(users) for node, users in self._cohort.items()}
        found = [(most.pop(r.metadata.src_node_id, 0), sketches_in(r, width)) for r in replies]
        rows = [part for users, part in found if part is not None and 0 < len(part) <= users]
        refused = Counter(reason for r in replies if (reason := refusal_in(r, REASONS)) is not None)
        self._note(refusals=dict(refused))
        if not rows:
            reasons = "".join(f"; clients refused: {reason}" for reason in refused)
            self._note(dropped=f"no {'sketch' if sketches else 'update'} arrived{reasons}")
            return None
        found_rows = np.concatenate(rows)
        self._note(survivors=None if sketches else len(found_rows))
        return found_rows

    def _first_models(self) -> ArrayRecord:
        """Cluster models from what stage 1 found."""
        spec, last, found = self.backbone.spec, self.backbone.blocks[-1], self._first().b
        if found is None or f"{last.index}.v.B" not in spec.trainable:
            return self._shared_models()
        return pack({"models": torch.stack([with_centroid(spec, last, b) for b in found]).numpy()})

    def _models_before_round_1(self) -> ArrayRecord:
        return self._shared_models() if self.start_of_models.rounds else self._first_models()

    def _shared_models(self) -> ArrayRecord:
        """All models at the start that all users share."""
        return pack({"models": self.backbone.spec.start().expand(self.clusters, -1).numpy()})

    def _first(self) -> FirstModels:
        if self.first is None:
            self.first = self.start_of_models.models()
        return self.first

    def _step(self, t: int, models: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """Rescale each cluster's aggregate and move its model by it, float32 [C, d]."""
        aggregates = self._aggregates(mean)
        weights = self.weights(t, aggregates)
        self._note(weights=tuple(weights.tolist()))
        return self.optimizer.step(models, aggregates.means, weights, rule(self.config, t)[1])

    def _aggregates(self, mean: np.ndarray) -> Aggregates:
        size, std = self.clusters * self.backbone.spec.size, self._outcome.noise_std or 0.0
        means = mean[:size].reshape(self.clusters, -1)
        if rule_name(self.config) != "count":
            return Aggregates(means, std)
        unit_count = self.config.count_share * self.config.clip_norm
        return Aggregates(means, std, mean[size:] / unit_count, std / unit_count)

    def _mechanism(self) -> SumMechanism:
        assert self._question is not None  # set by configure_train
        step, users = self._question.step, len(self.hosts)
        return open_mechanism(self.config, step, self.plan.of_step(step), users, self.backbone.shapes)

    def _worth_evaluating(self, server_round: int) -> bool:
        stage, t = self._stage(server_round)
        if not self.config.diagnostics:
            return False
        if stage == 1:
            return t == self.start_of_models.rounds
        return t % self.config.evaluate_every == 0 or t == self.config.t_tr

    def _note(self, **facts: object) -> None:
        self._outcome = replace(self._outcome, **facts)  # type: ignore[arg-type]


def sketches_in(reply: Message, width: int) -> np.ndarray | None:
    """The finite sketches [n, width] that a reply holds, or None if it holds anything else."""
    if reply.has_error() or set(reply.content) != {SKETCHES}:
        return None
    try:
        rows = unpack(reply.content.array_records[SKETCHES])["rows"]
    except Exception:  # bytes that are not numpy's format make it raise many kinds
        return None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.shape[1:] != (width,):
        return None
    return rows if np.isfinite(rows).all() else None


def models_of(arrays: ArrayRecord) -> Tensor:
    """The cluster models [C, d] that a record of a run holds."""
    return torch.from_numpy(unpack(arrays)["models"])
