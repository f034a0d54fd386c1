"""The privacy audit's run: every user is a canary, and everything behind its local training is the product.

In each round of stage 2 a canary tosses a secret coin. On heads its local training comes out as ten times the
clip norm along a coordinate of its own, on tails as NaN, with which a user counts as absent. From there on
all is as in any run: offers, admission, clipping, the count beside the update, encoding, noise shares of
several nodes, the sum mod 2^b, removal of noise, decoding. The auditor is the server at its strongest: the
fewest users survive that may, and it knows the vectors of as many as may collude. It scores a canary by what
the decoded sum holds of it, and `privacy/audit.py` tells what ε that refutes (Steinke et al. 2023, Andrew et
al. 2024).

The claim is that of one round towards the server, for a cohort of all canaries. Out of reach are stage 1,
amplification by sampling, real protocols for the secure sum, and what several rounds betray together: noise
that is used twice looks right in each of them. So is a bound on rounding that is too small, since rounding
moves no canary's mean and blurs its score.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from pina_flwr import client
from pina_flwr.config import ConfigError, RunConfig, parse, to_dict
from pina_flwr.data.tables import Tables
from pina_flwr.data.users import Users
from pina_flwr.messages import Task, pack
from pina_flwr.models.adapter import AdapterSpec
from pina_flwr.models.backbone import Backbone
from pina_flwr.normality import rule_name
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.audit import AuditResult, Coins, audit
from pina_flwr.privacy.cohort import Shares, shares
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.noise import secret_generator
from pina_flwr.privacy.plan import Shapes, plan, release_of, shapes_of
from pina_flwr.report.privacy_table import HIDDEN_SIZES, VIT_SMALL
from pina_flwr.secure_sum.interface import SumResult, SumRound
from pina_flwr.secure_sum.local_grid import as_task
from pina_flwr.secure_sum.trusted import TrustedSum, protected_vector
from pina_flwr.strategies.clustered import ClusteredTraining, Outcome
from pina_flwr.strategies.hosts import Hosts
from pina_flwr.training.activations import Activations
from pina_flwr.training.workbench import Workbench

NODES = 10  # whole nodes vanish or collude: in steps of 10 % of users
OVER = 10.0  # norm of a canary's update, over S
FEWEST = 100  # canary-rounds, below which an audit says nothing
RUN = "audit"


def audit_run(
    config: RunConfig, canaries: int, rounds: int, delta: float, confidence: float = 0.95
) -> AuditResult:
    """Audit the secure sum of stage 2 with that many canaries in each of that many rounds.

    Args:
        config: the run whose mechanism is audited. Its data and backbone are not loaded.
        canaries: users of a round.
        rounds: each with fresh coins and noise; the more canaries in all, the tighter the result.
        delta: δ of the claim.
        confidence: of both lower limits.

    Raises:
        ConfigError: no such audit is possible.
        RuntimeError: clients or server refused a round, so nothing was audited.
    """
    return Audit.of(config, canaries, rounds).run(delta, confidence)


@dataclass(frozen=True)
class Audit:
    """An audit, ready to run.

    config: of the canaries' run, with z as its noise multiplier; see `of`.
    """

    config: RunConfig

    @classmethod
    def of(cls, config: RunConfig, canaries: int, rounds: int) -> Audit:
        """The canaries' run that has the mechanism of another one; arguments are those of `audit_run`.

        z is that of the run, calibrated if need be. All users join all rounds, of stage 2 alone, and noise is
        that of this cohort. Vectors are just long enough that each canary has a coordinate of its own.

        Raises:
            ConfigError: there is no claim, or these are too few canaries.
        """
        _check_claim(config)
        for name, value, least in (("canaries", canaries, 2), ("rounds", rounds, 1)):
            if value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")
        changed = {
            "num-users": canaries,
            "sampling-rate": 1.0,
            "noise-cohort-size": 0,
            "noise-multiplier": config.noise_multiplier or _calibrated(config),
            "epsilon": math.inf,
            "stage1": "random",
            "t-no": 0,
            "t-tr": rounds,
            "participation-cap": 0,
            "user-column": "",
            "images-per-user": 1,
            "diagnostics": False,
            "secure-sum": "trusted",
            "secagg-signed": False,
        }
        found = cls(parse(to_dict(config) | changed))
        scored = int(found.scored.sum()) * rounds
        if scored < FEWEST:
            raise ConfigError(
                f"canaries = {canaries}, rounds = {rounds}: leave {scored} to score when some vanish or "
                f"collude; must leave {FEWEST} or more"
            )
        plan(found.config, canaries, found.shapes)  # refuses what can't work
        return found

    def run(self, delta: float, confidence: float = 0.95) -> AuditResult:
        """Run all rounds and judge the claim; arguments and errors are those of `audit_run`."""
        if not 0 < delta < 1:
            raise ConfigError(f"delta = {delta}: must be above 0 and under 1")
        claimed, shape = self.claimed(delta), (self.config.t_tr, self.config.num_users)
        if not math.isfinite(claimed):
            z = self.config.noise_multiplier
            raise ConfigError(f"noise-multiplier = {z:g}: no finite ε is claimed at delta = {delta:g}")
        coins = secret_generator().integers(2, size=shape, dtype=np.int8).astype(bool)
        scores = np.stack([self._scores(total) for total in self._sums(coins)])
        seen = self.scored
        return audit(scores[:, seen].flatten(), coins[:, seen].flatten(), claimed, delta, confidence)

    def claimed(self, delta: float) -> float:
        """ε of one round towards the server, as accounted for by the product."""
        c = self.config
        return epsilon(release_of(c, "update", c.noise_multiplier, c.num_users, self.shapes, 1.0), delta)

    @property
    def shapes(self) -> Shapes:
        """Lengths of vectors."""
        return Shapes(sketch=1, adapter=-(-self.config.num_users // self.config.slots))

    @property
    def split(self) -> Shares:
        """How many users survive and collude."""
        return shares(self.config, self.config.num_users)

    @property
    def partitions(self) -> int:
        """Nodes."""
        return min(NODES, self.config.num_users)

    @cached_property
    def fleeting(self) -> tuple[int, ...]:
        """Partitions that may vanish, with which the fewest survive or a few more."""
        return self._with_users(range(self.partitions), self.split.cohort - self.split.survivors)

    @cached_property
    def colluding(self) -> tuple[int, ...]:
        """Partitions whose vectors the server knows; they never vanish."""
        others = [p for p in range(self.partitions) if p not in self.fleeting]
        return self._with_users(others, self.split.colluders)

    @property
    def absent(self) -> tuple[int, ...]:
        """Partitions that vanish.

        Noise that survivors add in vain only hides users better, so all vanish that may. Where it is removed,
        one stays: then some is in vain, and to remove more than that would do most harm.
        """
        return self.fleeting[:-1] if self.config.dropout_noise == "removable" else self.fleeting

    @property
    def scored(self) -> Coins:
        """Canaries in the sums whom the server does not know anyway, bool [users]."""
        out = [*self.absent, *self.colluding]
        return ~np.isin(np.arange(self.config.num_users) % self.partitions, out)

    def users_of(self, partitions: Iterable[int]) -> int:
        """How many users these partitions have together."""
        return sum(len(range(p, self.config.num_users, self.partitions)) for p in partitions)

    def _with_users(self, candidates: Iterable[int], most: int) -> tuple[int, ...]:
        """Partitions that together have as many users as fit, first come, first served."""
        found: list[int] = []
        for p in candidates:
            if self.users_of([*found, p]) <= most:
                found.append(p)
        return tuple(found)

    def _sums(self, coins: Coins) -> list[np.ndarray]:
        """What the server decodes in each round, float64 [size]."""
        c, shapes = self.config, self.shapes
        bench = CanaryBench(c, shapes, coins)
        users = {user: _node_id(user % self.partitions) for user in range(c.num_users)}
        noise = plan(c, c.num_users, shapes)
        with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.jsonl") as ledger:
            known = frozenset(map(_node_id, self.colluding))
            training = CanaryTraining(
                c, bench.backbone, Hosts(users, 2), noise, KnownVectors(known), ledger, RUN, _refuse_dropped
            )
            models = np.zeros((c.slots, shapes.adapter), np.float32)
            network = CanaryNetwork(bench, self.partitions, self.absent)
            with as_task():
                training.start(cast(Grid, network), pack({"models": models}))
        return training.sums

    def _scores(self, total: np.ndarray) -> np.ndarray:
        """What a sum holds of each canary, along the part of its contribution that no other canary touches.

        That is its coordinate. If it has a slot to itself it is the slot's count, too.
        """
        users, slots, size = np.arange(self.config.num_users), self.config.slots, self.shapes.adapter
        slot, own = users % slots, users // slots
        scores: np.ndarray = total[slot * size + own]
        if rule_name(self.config) == "count" and len(users) <= slots:
            share = self.config.count_share
            scores = math.sqrt(1 - share**2) * scores + share * total[slots * size + slot]
        return scores


class CanaryBench(Workbench):
    """Stands in for the users' data and training."""

    def __init__(self, config: RunConfig, shapes: Shapes, coins: Coins):
        """coins: [rounds, users]."""
        users = Users(config, cast(Tables, None), [np.zeros(0, int)] * config.num_users, None)
        super().__init__(config, users, cast(Backbone, _Model(shapes)), cast(Activations, None))
        self._coins = coins

    def train(
        self, ids: Sequence[int], models: Tensor, choices: Tensor | None, round_: int
    ) -> tuple[Tensor, Tensor]:
        """Updates [users, d] by the round's coins; canary i takes slot i mod C and coordinate ⌊i / C⌋."""
        canaries = torch.tensor(ids)
        updates = torch.zeros(len(ids), models.shape[1])
        updates[torch.arange(len(ids)), canaries // len(models)] = OVER * self.config.clip_norm
        updates[torch.from_numpy(~self._coins[round_ - 1])[canaries]] = torch.nan
        return updates, canaries % len(models)


class CanaryTraining(ClusteredTraining):
    """Keeps what the server decodes, and leaves the models alone. sums: float64 [size], by round."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sums: list[np.ndarray] = []

    def _step(self, t: int, models: np.ndarray, mean: np.ndarray) -> np.ndarray:
        self.sums.append(mean * self.expected_cohort)
        return models


class CanaryNetwork:
    """Nodes of one process, of which some never answer. absent: their partitions."""

    def __init__(self, bench: Workbench, partitions: int, absent: Collection[int]):
        self._absent = set(map(_node_id, absent))
        self._nodes = {_node_id(p): client.Node(bench, p, partitions, RUN) for p in range(partitions)}
        self._states = {node: RecordDict() for node in self._nodes}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """As Flower's `Grid`, but for a node that fails: its exception comes through."""
        replies = []
        for message in messages:
            task, place = Task.from_record(message.content), message.metadata.dst_node_id
            if place not in self._absent:
                content = client.train(self._nodes[place], task, self._states[place])
                replies.append(Message(content, reply_to=message))
        return replies


class KnownVectors(TrustedSum):
    """The sum as a server sees it that knows the vectors of some nodes, and the noise in them."""

    def __init__(self, known: frozenset[int]):
        self._known = known

    def run(self, grid: Grid, requests: Sequence[Message], about: SumRound, timeout: float) -> SumResult:
        """See `SecureSum.run`; what is known of a node's noise is not removed twice."""
        result = super().run(grid, requests, about, timeout)
        revealed = tuple(r for r in result.revealed if r.metadata.src_node_id not in self._known)
        return replace(result, revealed=revealed)

    def add(self, about: SumRound, replies: Iterable[Message]) -> SumResult:
        """See `TrustedSum.add`."""
        replies = list(replies)
        result = super().add(about, replies)
        if result.total is None:
            return result
        total = result.total.copy()
        for reply in replies:
            vector = protected_vector(reply, about.size, about.bits)
            if reply.metadata.src_node_id in self._known and vector is not None:
                total -= vector
        return replace(result, total=total % (1 << about.bits) if about.bits else total)


class _Model:
    """What is needed of a backbone: the lengths of vectors."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.spec = AdapterSpec({"canary": torch.zeros(shapes.adapter)}, ("canary",), 1.0)
        self.sketch = AdapterSpec({"canary": torch.zeros(shapes.sketch)}, ("canary",), 1.0)


def _check_claim(config: RunConfig) -> None:
    """Refuse a run without a finite ε, which nothing could refute."""
    if not config.private:
        raise ConfigError("epsilon = inf: no noise is added, so there is no claim to audit; set epsilon")
    if config.local_updates:
        raise ConfigError(
            f"strategy = {config.strategy!r}: users send by themselves; sums are what is audited"
        )
    if config.reproducible_noise:
        raise ConfigError("reproducible-noise = true: protects nobody, so there is no claim to audit")


def _calibrated(config: RunConfig) -> float:
    """z of stage 2 in the run itself, whose encoding it depends on a little: with a head for ten classes."""
    if config.num_users == 0:
        raise ConfigError("num-users = 0: must be given here, since no data set is loaded; e.g. 3500")
    shapes = shapes_of(config, HIDDEN_SIZES.get(config.backbone, VIT_SMALL), 10)
    return plan(config, config.num_users, shapes).stage2


def _node_id(partition: int) -> int:
    return partition + 1


def _refuse_dropped(outcome: Outcome) -> None:
    if outcome.dropped:
        raise RuntimeError(f"round {outcome.round} was dropped: {outcome.dropped}")
