"""The app over SecAgg+: whole runs, losses in every phase, what clients refuse, charge and send."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp import Grid
from numpy.typing import DTypeLike
from support import (
    Exchange,
    Intercept,
    LocalGrid,
    failed,
    json_of,
    lost,
    node_id,
    rows_of,
    run,
    shapes,
    tiny,
    twice,
    with_content,
)

from pina_flwr import client, server
from pina_flwr.client import REMOVABLE, VECTORS
from pina_flwr.config import ConfigError, RunConfig, to_dict
from pina_flwr.messages import CONFIG, KEYS, OFFER, REVEAL, TRAIN, WHO, Task, request
from pina_flwr.privacy import policy
from pina_flwr.privacy.admission import offer_of
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.noise import KEY_BYTES, Entropy, open_entropy
from pina_flwr.privacy.plan import plan
from pina_flwr.privacy.policy import Offer
from pina_flwr.privacy.sum_mechanism import IntegerSum, open_mechanism
from pina_flwr.privacy.user_ledger import StateLedger
from pina_flwr.secure_sum import participant
from pina_flwr.secure_sum.interface import REFUSAL, SumResult, SumRound
from pina_flwr.secure_sum.memory import TABLES, HasUnmasked, recall
from pina_flwr.secure_sum.packing import packed_size
from pina_flwr.secure_sum.registry import new_key_file
from pina_flwr.secure_sum.secagg_plus import SecAggPlus
from pina_flwr.secure_sum.session import Rules, Session, Terms
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    ARRAYS,
    HEADER,
    KEY,
    MASK,
    PHASES,
    PUBLIC,
    SEALED,
    SHARE,
    SIGNATURE,
    UNMASK,
    Header,
    pack,
    size_of,
)
from pina_flwr.strategies.clustered import TrainingFailed

Make = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("bare")
UNSIGNED = (ADVERTISE, SHARE, MASK, UNMASK)
NODES = 12  # of one user each, all of whom are asked: four of them may vanish, five may not
CROWD = {
    "num_users": NODES,
    "sampling_rate": 1.0,
    "strategy": "fedavg",
    "normality": "none",
    "noise_multiplier": 2.0,
    "noise_cohort_size": 0,
    "dropout_tolerance": 0.34,
    "diagnostics": False,
    "secure_sum": "secagg+",
}
NOT_THE_RUNS = "parameters differ from the run's"


# What a run shows -----------------------------------------------------------------------------------------


def header_of(message: Message) -> Header | None:
    """Of a message of the layer."""
    return Header.from_record(message.content) if HEADER in message.content else None


def phase_of(message: Message) -> str:
    """The phase of a request of the layer; of others nothing."""
    header = header_of(message)
    return header.phase if header else ""


def members_of(message: Message) -> Sequence[int]:
    """Those that a message of the layer is about."""
    header = header_of(message)
    assert header is not None
    return header.members


def exchanges_in(grid: LocalGrid, phase: str, round_: int | None = None) -> list[Exchange]:
    """Those of one phase, of one round (of both stages) or of all."""
    found = [e for e in grid.exchanges if phase_of(e.request) == phase]
    return [e for e in found if round_ in (None, int(e.request.metadata.group_id))]


def asked(grid: LocalGrid, step: str, round_: int) -> Task:
    """What the first node was asked to do in a round of a stage, whichever secure sum there was."""
    tasks = [e.task for e in grid.exchanges if CONFIG in e.request.content and OFFER in e.request.content]
    return next(task for task in tasks if (task.step, task.round) == (step, round_))


def taken(grid: LocalGrid, user: int, stage: int = 2) -> int:
    """How many rounds of a stage a user's own ledger has."""
    contexts = grid.contexts.values()
    host = next(c for c in contexts if user % grid.nodes == c.node_config["partition-id"])
    return StateLedger(host.state).taken(user, "1", stage)


def charged(config: RunConfig) -> list[tuple[int, int]]:
    """The rounds in the server's ledger."""
    with Ledger.open(Path(config.output) / "releases.jsonl") as ledger:
        return [(entry.stage, entry.round) for entry in ledger.entries]


Places = Mapping[tuple[int, str], Sequence[int]]
"""Partitions by round and phase; in a trusted sum the phase is nothing."""


def at(places: Places, fault: Intercept = lost) -> Intercept:
    """A fault in replies of these."""

    def intercept(message: Message, reply: Message) -> list[Message]:
        key = int(message.metadata.group_id or 0), phase_of(message)
        hit = {node_id(partition) for partition in places.get(key, ())}
        return fault(message, reply) if message.metadata.dst_node_id in hit else [reply]

    return intercept


def everybody(about: SumRound) -> list[int]:
    """All who were asked."""
    return [member for own in about.members.values() for member in own]


@dataclass
class Sums:
    """What went into each sum, and what came out.

    given: vectors by round and user. results: of all sums.
    """

    given: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    results: list[tuple[SumRound, SumResult]] = field(default_factory=list)

    def check(self, gone: Mapping[int, Iterable[int]] = {}) -> None:
        """Each total is to the bit that of the vectors of those who are not gone, by round."""
        assert self.results
        for about, result in self.results:
            there = set(everybody(about)) - set(gone.get(about.session.round, ()))
            assert result.total is not None, result.reason
            vectors = [self.given[about.session.round][user].astype(np.int64) for user in there]
            np.testing.assert_array_equal(result.total, np.sum(vectors, axis=0) % (1 << about.bits))
            assert result.survivors == len(there)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Listens on both sides."""
    found, contribute, add = Sums(), client.contribute, SecAggPlus.run

    def listen(
        node: client.Node, content: RecordDict, members: Sequence[int], terms: Terms, state: RecordDict
    ) -> np.ndarray:
        vectors = contribute(node, content, members, terms, state)
        given = found.given.setdefault(terms.session.round, {})
        assert not set(members) & set(given)  # nobody's vector is made twice
        given |= dict(zip(members, vectors, strict=True))
        return vectors

    def record(
        layer: SecAggPlus, grid: Grid, requests: Sequence[Message], about: SumRound, timeout: float
    ) -> SumResult:
        result = add(layer, grid, requests, about, timeout)
        found.results.append((about, result))
        return result

    monkeypatch.setattr(client, "contribute", listen)
    monkeypatch.setattr(SecAggPlus, "run", record)
    return found


class TestWholeRuns:
    @pytest.mark.parametrize("nodes", [1, 2, 14])
    def test_every_round_is_summed_to_the_bit(self, config: Make, sums: Sums, nodes: int) -> None:
        """All of PINA: the mean, k-means and cluster models; with one user a node as with all on one."""
        c = config(secure_sum="secagg+", diagnostics=False, noise_multiplier=1.0)
        grid = run(c, nodes)
        sums.check()
        rows = rows_of(c)
        assert len(sums.results) == len(rows) == 4
        for row, (about, _) in zip(rows, sums.results, strict=True):
            assert (row.dropped, row.survivors, row.lost, row.ignored) == (None, row.cohort, None, 0)
            assert (row.noise_std or 0) > 0
            for phase in UNSIGNED:
                spoken_to = [members_of(e.request) for e in exchanges_in(grid, phase, row.round)]
                members = [member for some in spoken_to for member in some]
                assert Counter(members) == Counter(everybody(about))
            everything = [e for phase in UNSIGNED for e in exchanges_in(grid, phase, row.round)]
            assert row.bytes_up == sum(size_of(e.reply.content) for e in everything)
            assert row.bytes_down == sum(size_of(e.request.content) for e in everything)
        kinds = {e.request.metadata.message_type for e in grid.exchanges}
        assert kinds == {WHO} | {f"train.secagg_{phase}" for phase in UNSIGNED}
        assert json_of(c, "summary.json")["trained"]

    def test_users_are_charged_what_they_took_part_in(self, config: Make, sums: Sums) -> None:
        c = config(secure_sum="secagg+", noise_multiplier=1.0)
        grid = run(c, 2)
        for stage, rounds in ((1, (1, 2)), (2, (3, 4))):
            took = Counter(user for round_ in rounds for user in sums.given[round_])
            assert {user: taken(grid, user, stage) for user in range(14)} == {u: took[u] for u in range(14)}
        assert charged(c) == [(1, 1), (1, 2), (2, 1), (2, 2)]

    def test_the_guarantee_is_that_of_a_trusted_sum(self, config: Make, tmp_path: Path) -> None:
        found = []
        for name in ("trusted", "secagg+"):
            c = config(strategy="fedavg", secure_sum=name, diagnostics=False, output=str(tmp_path / name))
            run(c, 2)
            privacy, rows = json_of(c, "privacy.json"), rows_of(c)
            figures = [privacy[who]["epsilon"] for who in ("recipient", "server")]
            found.append((figures, [row.epsilon for row in rows], [row.round for row in rows]))
        assert found[0] == found[1]

    def test_local_sketches_need_no_secure_sum(self, config: Make, sums: Sums) -> None:
        options = {"stage1": "sketch", "participation_cap": 3, "diagnostics": False, "noise_multiplier": 1.0}
        c = config(secure_sum="secagg+", **options)
        grid = run(c, 2)
        sums.check()
        assert [about.session.round for about, _ in sums.results] == [1, 3, 4]  # private mean, then stage 2
        assert {e.task.step for e in grid.exchanges if e.request.metadata.message_type == TRAIN} == {"sketch"}
        assert [row.dropped for row in rows_of(c)] == [None] * 4

    def test_what_a_node_remembers_is_small_and_holds_no_secret_at_the_end(self, config: Make) -> None:
        c, sizes = config(**CROWD), list[int]()

        def weigh(message: Message, reply: Message) -> list[Message]:
            if phase_of(message):
                state = grid.contexts[message.metadata.dst_node_id].state
                sizes.append(size_of(RecordDict({TABLES: state.array_records[TABLES]})))
            return [reply]

        grid = LocalGrid(c, NODES, weigh)
        server.run(grid, c, "1")
        assert max(sizes) < 8_000
        for context in grid.contexts.values():
            assert recall(context.state) == HasUnmasked(Session("1", 2), NODES, NODES)
            assert set(context.state.array_records[TABLES]) == {"members"}
            assert REMOVABLE not in context.state


# The same as with a trusted sum -----------------------------------------------------------------------------


class TestSameAsTrusted:
    """`trusted` is the ideal that SecAgg+ has to come up to."""

    @pytest.fixture(autouse=True)
    def _draws_of_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node with one user draws for it what the user would draw by itself."""

        def draws(config: RunConfig, step: str, round_: int, who: object) -> Entropy:
            return open_entropy(config, step, round_, str(who).removeprefix("user "))

        monkeypatch.setattr(client, "open_entropy", draws)

    def pair(self, config: Make, tmp_path: Path, **options: Any) -> list[LocalGrid]:
        """Runs of one configuration with either sum; one user's vector is lost in round 1."""
        grids = []
        for name in ("trusted", "secagg+"):
            usual = CROWD | {"reproducible_noise": True, "output": str(tmp_path / name), "secure_sum": name}
            fault = at({(1, MASK): [4], (1, ""): [4]})
            grids.append(run(config(**usual | options), NODES, intercept=fault))
        return grids

    @pytest.mark.parametrize(
        "options",
        [
            {"strategy": "pina", "normality": "count"},
            {"mechanism": "discrete-gaussian", "bits": 24},
            {"dropout_noise": "removable"},
        ],
        ids=["pina", "discrete gaussian", "removable"],
    )
    def test_models_are_equal_to_the_bit(self, config: Make, tmp_path: Path, options: dict[str, Any]) -> None:
        """Noise and all, with a user lost in one round."""
        grids = self.pair(config, tmp_path, **options)
        for step, round_ in [("update", 2), *([("lloyd", 2)] if "strategy" in options else [])]:
            one, other = (asked(grid, step, round_).arrays for grid in grids)
            assert set(one) == set(other)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
        first, second = (rows_of(grid.config) for grid in grids)
        assert [row.survivors for row in second] == [11, *[12] * (len(second) - 1)]
        same = ("cohort", "survivors", "noise_std", "epsilon", "dropped", "refusals", "weights")
        for a, b in zip(first, second, strict=True):
            assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]

    def test_how_many_users_a_node_has_matters_not(self, config: Make, tmp_path: Path) -> None:
        """Each draws its own noise; what is left is the rounding of training in larger batches."""
        models = []
        for nodes in (NODES, 3, 1):
            grid = run(config(**CROWD, reproducible_noise=True, output=str(tmp_path / str(nodes))), nodes)
            models.append(asked(grid, "update", 2).arrays["models"])
        step = self.step(grid.config)
        assert np.abs(models[0]).max() > 100 * step
        for other in models[1:]:
            np.testing.assert_allclose(models[0], other, rtol=0, atol=3 * step / NODES)

    def test_without_noise_models_differ_by_the_rounding(self, config: Make, tmp_path: Path) -> None:
        """A trusted sum adds floats then. Rounding is off by half a step at most in the mean square."""
        options = CROWD | {"noise_multiplier": 0.0, "epsilon": math.inf, "dropout_tolerance": 0.0}
        grids = []
        for name in ("trusted", "secagg+"):
            c = config(**options | {"secure_sum": name, "output": str(tmp_path / name)})
            grids.append(run(c, 2))
        models = [asked(grid, "update", 2).arrays["models"].ravel() for grid in grids]
        error = (models[1] - models[0]).std() * NODES
        step = self.step(grids[1].config)
        assert 0.1 * step * math.sqrt(NODES) < error < 0.5 * step * math.sqrt(NODES) * 1.1
        assert error < 0.01 * models[0].std() * NODES

    def step(self, config: RunConfig) -> float:
        """1/γ, what one integer is worth."""
        mechanism = open_mechanism(config, "update", config.noise_multiplier, NODES, shapes(config))
        assert isinstance(mechanism, IntegerSum)
        return 1 / mechanism.encoding.scale


# Users that are lost --------------------------------------------------------------------------------------


def std_of(survivors: int) -> float:
    """σ on the mean of CROWD, with the noise that is there in case four vanish."""
    return 2.0 / NODES * math.sqrt(survivors / NODES / 0.66)


MALFORMED = with_content(lambda _: RecordDict())
CUT = with_content(lambda content: RecordDict({HEADER: content.config_records[HEADER]}))
ADDED = with_content(lambda content: RecordDict(dict(content) | {"m": MetricRecord({"loss": 0.1})}))


def of_another_session(message: Message, reply: Message) -> list[Message]:
    """An answer that says it is of the round before, so that none has come."""
    header = header_of(message)
    assert header is not None
    past = replace(header, session=Session("0", 1)).to_record()
    return [Message(RecordDict({**reply.content, HEADER: past}), reply_to=message)]


FAULTS = {
    "silent": (lost, failed, MALFORMED),
    "wrong": (CUT, ADDED, of_another_session),
}


class TestLost:
    @pytest.mark.parametrize("kind", FAULTS)
    def test_within_what_may_vanish(
        self, config: Make, sums: Sums, kind: str, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        """Three users are lost in another phase each round; the rounds count, with what the others gave."""
        places = {(t, phase): [t, t + 3, t + 6] for t, phase in enumerate(UNSIGNED, 1)}

        by_user = [
            at({place: [users[i]] for place, users in places.items()}, fault)
            for i, fault in enumerate(FAULTS[kind])
        ]

        def intercept(message: Message, reply: Message) -> list[Message]:
            """Of the three users each has another fault."""
            arrived = [fault(message, reply) for fault in by_user]
            return next((found for found in arrived if found != [reply]), [reply])

        c = config(**CROWD, t_tr=5)
        grid = run(c, NODES, intercept=intercept)
        sums.check({t: [t, t + 3, t + 6] for t in (1, 2, 3)})
        rows = rows_of(c)
        assert [row.dropped for row in rows] == [None] * 5
        assert [row.survivors for row in rows] == [9, 9, 9, 12, 12]
        assert [row.lost for row in rows] == [{phase: 3} for phase in UNSIGNED] + [None]
        assert [row.ignored for row in rows] == [1 if kind == "wrong" else 0] * 4 + [0]
        assert [row.noise_std for row in rows] == pytest.approx([std_of(n) for n in (9, 9, 9, 12, 12)])
        for phase in (ADVERTISE, SHARE, MASK):
            assert f" · 3 vanished (3 in {phase}) · " in flwr_log.text
        # Charged are the rounds in which a user was asked for its vector, whether it arrived or not.
        out_of = Counter(user for t in (1, 2) for user in places[t, UNSIGNED[t - 1]])
        assert [taken(grid, user) for user in range(NODES)] == [5 - out_of[user] for user in range(NODES)]
        assert charged(c) == [(2, t) for t in range(1, 6)]

    def test_in_all_phases_of_one_round(self, config: Make, sums: Sums) -> None:
        places = {(1, ADVERTISE): [0], (1, SHARE): [5], (1, MASK): [7], (1, UNMASK): [2]}
        c = config(**CROWD)
        run(c, NODES, intercept=at(places))
        sums.check({1: [0, 5, 7]})
        row = rows_of(c)[0]
        assert row.lost == dict.fromkeys(UNSIGNED, 1)
        assert (row.dropped, row.survivors) == (None, 9)
        assert row.noise_std == pytest.approx(std_of(9))
        lines = (Path(c.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told = [(line["lost"], line["ignored"]) for line in map(json.loads, lines)]
        assert told == [(dict.fromkeys(UNSIGNED, 1), 0), (None, 0)]

    def test_more_than_may_vanish(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        """The rounds are dropped and paid for: by the server all, by users those they sent a vector in."""
        places = {(t, phase): list(range(5)) for t, phase in enumerate((ADVERTISE, SHARE, MASK), 1)}
        places[4, UNMASK] = list(range(7))  # a threshold of 6 is over half of 11 neighbours
        c = config(**CROWD, t_tr=5)
        grid = run(c, NODES, intercept=at(places))
        rows = rows_of(c)
        few = "7 of 12 members were left, 8 are needed"
        silent = "5 of 12 nodes did not answer"
        assert [row.dropped for row in rows[:3]] == [
            f"{few} ({silent} advertise within 225 s)",  # an eighth of round-timeout
            f"{few} ({silent} share within 225 s)",
            f"{few} ({silent} mask within 1125 s)",
        ]
        assert rows[3].dropped == (
            "too few members were left to unmask the sum (7 of 12 nodes did not answer unmask within 225 s)"
        )
        assert rows[4].dropped is None
        assert [row.survivors for row in rows] == [0, 0, 7, 12, 12]
        assert [row.lost for row in rows] == [{p: 5} for p in (ADVERTISE, SHARE, MASK)] + [{UNMASK: 7}, None]
        assert flwr_log.text.count(f"DROPPED: {few}") >= 3
        assert not exchanges_in(grid, SHARE, 1)
        assert not exchanges_in(grid, MASK, 2)
        assert not exchanges_in(grid, UNMASK, 3)  # nothing of it is unmasked
        first = asked(grid, "update", 3).arrays["models"]
        np.testing.assert_array_equal(asked(grid, "update", 5).arrays["models"], first)
        assert [taken(grid, user) for user in range(NODES)] == [3] * NODES
        assert charged(c) == [(2, t) for t in range(1, 6)]
        assert json_of(c, "summary.json")["dropped_rounds"] == 4

    def test_late_double_and_forged_messages_are_ignored_and_counted(self, config: Make, sums: Sums) -> None:
        old: dict[str, Message] = {}

        def intercept(message: Message, reply: Message) -> list[Message]:
            """Of node 3: doubles in round 1, in round 2 what it sent in round 1 or in the phase before."""
            phase, round_ = phase_of(message), message.metadata.group_id
            if not phase or message.metadata.dst_node_id != node_id(3):
                return [reply]
            if round_ == "1":
                old[phase] = reply
                return twice(message, reply)
            late = old[SHARE if phase == MASK else phase]
            return [Message(late.content, reply_to=message), reply]

        c = config(**CROWD)
        run(c, NODES, intercept=intercept)
        sums.check()
        assert [(row.survivors, row.ignored, row.lost) for row in rows_of(c)] == [(12, 4, None)] * 2

    def test_the_reason_says_what_went_wrong(self, config: Make) -> None:
        """Of nodes that failed or whose answers make no sense, as far as these say why."""
        failing, odd = at({(1, MASK): [0, 1, 2]}, failed), at({(1, MASK): [3, 4]}, CUT)

        def intercept(message: Message, reply: Message) -> list[Message]:
            found = failing(message, reply)
            return odd(message, reply) if found == [reply] else found

        c = config(**CROWD)
        run(c, NODES, intercept=intercept)
        why = "a node failed: out of memory; a node's reply to mask makes no sense"
        assert rows_of(c)[0].dropped == f"7 of 12 members were left, 8 are needed ({why})"

    @pytest.mark.parametrize("phase", [ADVERTISE, MASK])
    def test_a_worker_that_died_ends_the_run(self, config: Make, phase: str) -> None:
        def died(message: Message, reply: Message) -> list[Message]:
            return [Message(Error(0, "ray.exceptions.ActorDiedError: the actor died"), reply_to=message)]

        c = config(**CROWD)
        grid = LocalGrid(c, NODES, intercept=at({(1, phase): range(NODES)}, died))
        with pytest.raises(TrainingFailed, match="a worker of the simulation died"):
            server.run(grid, c, "1")
        assert len(rows_of(c)) == 1

    def test_every_round_is_no_success(self, config: Make) -> None:
        c = config(**CROWD)
        places = {(t, SHARE): range(9) for t in (1, 2)}
        grid = LocalGrid(c, NODES, intercept=at(places))
        with pytest.raises(TrainingFailed, match="every round of stage 2 was dropped: 3 of 12 members"):
            server.run(grid, c, "1")


class TestSomeOfANode:
    """Members of one node can be lost one by one."""

    def flipped(self, message: Message, reply: Message) -> list[Message]:
        """What user 4 of node 1 sealed for one of its neighbours is altered on the way."""
        header = header_of(reply)
        assert header is not None
        sealed = reply.content.array_records[ARRAYS]["sealed"].numpy().copy()
        sealed[list(header.members).index(4), 0, 20] ^= 1
        changed = RecordDict({HEADER: reply.content.config_records[HEADER], ARRAYS: pack({"sealed": sealed})})
        return [Message(changed, reply_to=message)]

    @pytest.mark.parametrize("dropout_noise", ["provision", "removable"])
    def test_who_can_not_trust_its_shares_stays_out_alone(
        self, config: Make, sums: Sums, dropout_noise: str
    ) -> None:
        c = config(**CROWD, dropout_noise=dropout_noise)
        grid = run(c, 3, intercept=at({(1, SHARE): [1]}, self.flipped))
        (out,) = set(range(NODES)) - set(sums.given[1])
        assert out != 4
        sums.check({1: [out]})
        row = rows_of(c)[0]
        assert (row.dropped, row.survivors, row.lost) == (None, 11, {MASK: 1})
        assert row.refusals == {"shares altered": 1}
        assert row.noise_std == pytest.approx(std_of(11) if dropout_noise == "provision" else 2.0 / NODES)
        assert [taken(grid, user) for user in range(NODES)] == [1 if u == out else 2 for u in range(NODES)]


# Clients that refuse --------------------------------------------------------------------------------------


def by_hand(
    users: int = NODES,
    intercept: Intercept | None = None,
    node_configs: Mapping[int, dict[str, Any]] = {},
    **options: Any,
) -> LocalGrid:
    """Nodes of one user each, to be asked without the app's server."""
    config = tiny(**CROWD | {"diagnostics": True, "num_users": users} | options)
    return LocalGrid(config, users, intercept, node_configs)


def offer_for(grid: LocalGrid, step: str = "update", round_: int = 1, cohort: int = 0) -> Offer:
    users = grid.config.num_users
    noise = plan(grid.config, users, shapes(grid.config))
    return offer_of(grid.config, noise, step, round_, cohort or users, "1")


def task_for(grid: LocalGrid, user: int, step: str = "update", round_: int = 1) -> Task:
    """An honest server's."""
    c, of = grid.config, shapes(grid.config)
    arrays: dict[str, dict[str, np.ndarray]] = {
        "update": {"models": np.zeros((c.slots, of.adapter), np.float32)},
        "mean": {},
        "lloyd": {"centroids": np.zeros((c.kmeans_restarts, c.clusters, of.sketch), np.float32)},
    }
    return Task(step, round_, [user], "loss", arrays[step], offer_for(grid, step, round_))


def ask(
    grid: LocalGrid, round_: int = 1, rules: Rules | None = None, task: Mapping[str, Any] = {}, **about: Any
) -> SumResult:
    """A round of stage 2 as the server would do it, but for changes to its rules, the tasks and the sum."""
    users, offer = grid.config.num_users, offer_for(grid)
    mechanism = open_mechanism(grid.config, "update", offer.noise_multiplier, users, shapes(grid.config))
    members = {node_id(user): [user] for user in range(users)}
    session, size, bits = Session("1", round_), mechanism.size, mechanism.bits
    asked = replace(SumRound(session, size, bits, members, offer.survivors, policy.REASONS), **about)
    requests = [
        request(replace(task_for(grid, user, round_=round_), **task).to_record(), node, TRAIN, round_)
        for node, (user,) in asked.members.items()
    ]
    return SecAggPlus(rules or grid.config.secagg).run(grid, requests, asked, 60.0)


class TestRefused:
    """Whatever a server states that is not the run's, no vector is made and nobody is charged."""

    FEW = 6  # of whom four must survive

    def check(self, grid: LocalGrid, result: SumResult, reason: str, phase: str) -> None:
        assert result.total is None
        assert "0 of 6 members were left, " in result.reason
        assert result.reason.endswith(f" are needed (clients refused: {reason})")
        assert result.refusals == {reason: self.FEW}
        assert result.lost == {phase: self.FEW}
        for exchange in exchanges_in(grid, phase):
            assert not exchange.reply.content.array_records[ARRAYS]
        self.check_uncharged(grid)

    def check_uncharged(self, grid: LocalGrid, stage: int = 2) -> None:
        assert [taken(grid, user, stage) for user in range(self.FEW)] == [0] * self.FEW

    def test_as_the_server_would_nobody_refuses(self) -> None:
        """What the others change is all that is wrong with them."""
        grid = by_hand(self.FEW)
        result = ask(grid)
        assert (result.reason, result.survivors, result.refusals, result.lost) == ("", self.FEW, {}, {})
        assert [taken(grid, user) for user in range(self.FEW)] == [1] * self.FEW

    @pytest.mark.parametrize(
        ("about", "task", "reason"),
        [
            ({"size": 8192}, {}, NOT_THE_RUNS),
            ({"size": 1}, {}, NOT_THE_RUNS),
            ({"bits": 21}, {}, NOT_THE_RUNS),
            ({"bits": 8}, {}, NOT_THE_RUNS),
            ({"fewest": 3}, {}, "too few survivors allowed"),
            ({"fewest": 2}, {}, "too few survivors allowed"),
            ({"fewest": 4}, {"cohort": 5}, NOT_THE_RUNS),  # more members than the offer has: noise for fewer
            ({}, {"noise_multiplier": 1.9}, NOT_THE_RUNS),
            ({}, {"survivors": 5}, "too few survivors allowed"),
            ({}, {"survivors": 3}, NOT_THE_RUNS),
            ({"fewest": 3}, {"survivors": 3}, NOT_THE_RUNS),
            ({}, {"colluders": 1}, NOT_THE_RUNS),
            ({}, {"clip_norm": 2.0}, NOT_THE_RUNS),
            ({}, {"run": "2"}, NOT_THE_RUNS),
            ({}, {"round": 2}, NOT_THE_RUNS),
        ],
        ids=str,
    )
    def test_other_numbers_than_the_offers(
        self, about: dict[str, Any], task: dict[str, Any], reason: str
    ) -> None:
        """All else is as the server would say it; an offer for another cohort is right in itself."""
        grid = by_hand(self.FEW)
        honest = offer_for(grid, cohort=task.get("cohort", self.FEW))
        self.check(grid, ask(grid, task={"offer": replace(honest, **task)}, **about), reason, MASK)

    def test_a_task_of_no_step_with_a_vector(self) -> None:
        """A sketch, an evaluation, or nothing at all."""
        grid = by_hand(self.FEW, dropout_noise="removable")
        for round_, step in enumerate(("sketch", "evaluate", REVEAL, ""), 1):
            result = ask(grid, round_, task={"step": step, "round": 1, "offer": offer_for(grid)})
            assert result.refusals == {NOT_THE_RUNS: self.FEW}
        self.check_uncharged(grid)

    @pytest.mark.parametrize(
        "rules",
        [
            Rules(0.34, neighbours=4),
            Rules(0.34, neighbours=2),
            Rules(0.0, 0.34),
            Rules(neighbours=4, threshold=4),
        ],
        ids=str,
    )
    def test_other_rules(self, rules: Rules) -> None:
        """Another k or t than the run's options give."""
        grid = by_hand(self.FEW)
        assert rules.parameters(self.FEW) != grid.config.secagg.parameters(self.FEW)
        self.check(grid, ask(grid, rules=rules), "terms differ from the rules", SHARE)

    def test_users_that_are_not_the_tasks(self) -> None:
        """A node does for others what its task does not name."""
        grid = by_hand(self.FEW)
        for round_, users in enumerate(([], [0], [3]), 1):
            task = {"users": users, "round": 1, "offer": offer_for(grid)}
            result = ask(grid, round_, task=task, members={node_id(2): [2], node_id(4): [4]}, fewest=2)
            assert result.total is None
            assert (result.lost, result.refusals) == ({MASK: 2}, {})
        for exchange in exchanges_in(grid, MASK):
            assert "users of the secure sum: must be among those of the task" in (
                exchange.reply.error.reason or ""
            )
        self.check_uncharged(grid)

    def test_a_round_that_is_over(self) -> None:
        grid = by_hand(self.FEW, t_tr=3)
        assert ask(grid, 2).total is not None
        for round_ in (2, 1):
            result = ask(grid, round_)
            assert result.refusals == {"stale round": self.FEW}
            assert result.lost == {ADVERTISE: self.FEW}
        # A new round of the sum for an old one of the training: the ledger knows better.
        result = ask(grid, 3, task={"offer": offer_for(grid, round_=2), "round": 2})
        assert result.refusals == {"stale round": self.FEW}
        assert result.lost == {MASK: self.FEW}
        assert [taken(grid, user) for user in range(self.FEW)] == [1] * self.FEW

    @pytest.mark.parametrize("step", VECTORS)
    def test_a_plain_message_for_a_vector(self, step: str) -> None:
        """It would leave without a mask."""
        grid = by_hand(self.FEW, strategy="pina", t_in=3)
        tasks = {node_id(user): task_for(grid, user, step) for user in range(self.FEW)}
        messages = [request(task.to_record(), node, TRAIN, 1) for node, task in tasks.items()]
        replies = grid.send_and_receive(messages)
        assert len(replies) == self.FEW
        for reply in replies:
            assert list(reply.content) == [REFUSAL]
            assert dict(reply.content.config_records[REFUSAL]) == {"reason": NOT_THE_RUNS}
        for stage in (1, 2):
            self.check_uncharged(grid, stage)
        for context in grid.contexts.values():
            assert not context.state


def place(node: int, **more: object) -> dict[str, Any]:
    """The node-config of a partition."""
    options = {key.replace("_", "-"): str(value) for key, value in more.items()}
    return {"partition-id": node, "num-partitions": NODES, **options}


class TestPolicy:
    def configs(self, folder: Path, nodes: Iterable[int], limits: str) -> dict[int, dict[str, Any]]:
        path = folder / "policy.toml"
        path.write_text(f"max-epsilon = 1e6\ndelta = 1e-5\n{limits}\n")
        return {node: place(node, policy=path, ledger=folder / f"ledger-{node}") for node in nodes}

    def entries(self, folder: Path, user: int) -> list[tuple[int, int]]:
        with Ledger.open(folder / f"ledger-{user}" / f"user-{user}.jsonl") as ledger:
            return [(entry.stage, entry.round) for entry in ledger.entries]

    def test_a_refusal_is_a_reason_and_counts(
        self, config: Make, sums: Sums, tmp_path: Path, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        strict = self.configs(tmp_path, [4], "min-cohort = 1000")
        content = {5: place(5, ledger=tmp_path / "ledger-5")}
        c = config(**CROWD)
        grid = run(c, NODES, node_configs=strict | content)
        sums.check({1: [4], 2: [4]})
        reason = "cohort outside the policy"
        for row in rows_of(c):
            assert (row.dropped, row.survivors, row.refusals) == (None, 11, {reason: 1})
            assert row.lost == {MASK: 1}
            assert row.noise_std == pytest.approx(std_of(11))
        assert flwr_log.text.count(f" · refused: {reason} (1) · 1 vanished (1 in mask) · ") == 2
        for e in exchanges_in(grid, MASK):
            if e.request.metadata.dst_node_id == node_id(4):
                session = Session("1", int(e.request.metadata.group_id))
                assert header_of(e.reply) == Header(session, MASK, [], {}, [reason])
                assert not e.reply.content.array_records[ARRAYS]
        assert self.entries(tmp_path, 4) == []
        assert self.entries(tmp_path, 5) == [(2, 1), (2, 2)]

    def test_a_budget_that_ends_during_the_run(self, config: Make, tmp_path: Path) -> None:
        c, strict = config(**CROWD), range(3, 8)
        grid = run(c, NODES, node_configs=self.configs(tmp_path, strict, "max-rounds = 1"))
        reason = "7 of 12 members were left, 8 are needed (clients refused: too many rounds)"
        assert [row.dropped for row in rows_of(c)] == [None, reason]
        assert all(self.entries(tmp_path, user) == [(2, 1)] for user in strict)
        assert taken(grid, 0) == 2

    @pytest.mark.parametrize("phase", [MASK, UNMASK])
    def test_a_node_with_a_ledger_answers_once_even_if_its_state_is_set_back(
        self, tmp_path: Path, phase: str
    ) -> None:
        """As where it died before Flower had saved its state. One without a ledger can't know."""
        before, states = {MASK: SHARE, UNMASK: MASK}[phase], dict[int, RecordDict]()

        def save(message: Message, reply: Message) -> list[Message]:
            if phase_of(message) == before:
                node = message.metadata.dst_node_id
                states[node] = RecordDict(dict(grid.contexts[node].state))
            return [reply]

        lasting = {0: place(0, ledger=tmp_path / "ledger-0") | {"num-partitions": 6}}
        grid = by_hand(6, save, diagnostics=False, node_configs=lasting)
        assert ask(grid).total is not None
        again = {e.request.metadata.dst_node_id: e.request for e in exchanges_in(grid, phase, 1)}
        for user, answers in ((0, False), (1, True)):
            grid.contexts[node_id(user)].state = states[node_id(user)]
            (reply,) = grid.send_and_receive([again[node_id(user)]])
            assert bool(members_of(reply)) is answers
            assert bool(reply.content.array_records[ARRAYS]) is answers
            header = header_of(reply)
            assert header is not None
            assert list(header.refused) == ([] if answers else ["stale round"])
        assert self.entries(tmp_path, 0) == [(2, 1)]

    def test_nodes_may_share_a_folder(self, config: Make, sums: Sums, tmp_path: Path) -> None:
        shared = {i: place(i, ledger=tmp_path / "ledger") for i in range(NODES)}
        c = config(**CROWD | {"diagnostics": False})
        run(c, NODES, node_configs=shared)
        assert [row.dropped for row in rows_of(c)] == [None] * len(rows_of(c))
        sums.check({})

    def test_of_which_sum_it_is_asks_the_policy_too(self, config: Make, tmp_path: Path) -> None:
        """By default it accepts SecAgg+ alone."""
        only = self.configs(tmp_path, [0], "secure-sums = ['trusted']")
        with pytest.raises(ConfigError, match=r"secure-sum = 'secagg\+': a node's policy does not accept it"):
            run(config(**CROWD), NODES, node_configs=only)
        usual = self.configs(tmp_path, [0], "")
        c = config(**CROWD | {"secure_sum": "trusted"})
        with pytest.raises(ConfigError, match="secure-sum = 'trusted': a node's policy does not accept it"):
            run(c, NODES, node_configs=usual)


# Noise added in vain --------------------------------------------------------------------------------------


class TestRemovable:
    CROWD = CROWD | {"dropout_noise": "removable"}

    @pytest.mark.parametrize(
        ("phase", "vanished"), [(MASK, 0), (MASK, 3), (MASK, 4), (SHARE, 2), (ADVERTISE, 1)], ids=str
    )
    def test_what_is_left_is_what_epsilon_needs(
        self, config: Make, sums: Sums, phase: str, vanished: int
    ) -> None:
        c = config(**self.CROWD, t_tr=1)
        grid = run(c, NODES, intercept=at({(1, phase): range(vanished)}))
        sums.check({1: range(vanished)})
        row = rows_of(c)[0]
        assert (row.survivors, row.dropped) == (NODES - vanished, None)
        assert row.noise_std == pytest.approx(2.0 / NODES)
        questions = grid.trained(REVEAL)
        in_vain = range(vanished, NODES) if vanished < 4 else []
        assert sorted(e.task.users[0] for e in questions) == list(in_vain)
        for e in questions:
            assert (e.task.vanished, list(e.reply.content)) == (vanished, [KEYS])
            record = e.reply.content.config_records[KEYS]
            assert (record["users"], len(record["keys"])) == ([1], 4 - vanished)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("reached", "phase"), [(False, UNMASK), (True, UNMASK), (True, REVEAL)])
    def test_who_does_not_reveal_keeps_its_noise_in_the_sum(
        self, config: Make, monkeypatch: pytest.MonkeyPatch, reached: bool, phase: str
    ) -> None:
        """Who was not told who survived has no count to check, and tells nothing."""

        def hit(message: Message) -> bool:
            last = REVEAL if message.metadata.message_type == TRAIN else phase_of(message)
            return last == phase and message.metadata.dst_node_id in (node_id(2), node_id(9))

        def answer(message: Message) -> Message:
            return failed(message, message)[0] if hit(message) and not reached else real(message)

        c = config(**self.CROWD, t_tr=1)
        grid = LocalGrid(c, NODES, lambda message, reply: [] if hit(message) else [reply])
        real = grid._answer
        monkeypatch.setattr(grid, "_answer", answer)
        server.run(grid, c, "1")
        row = rows_of(c)[0]
        assert (row.dropped, row.survivors) == (None, NODES)
        kept = (
            0 if reached and phase == UNMASK else 2
        )  # who was told reveals, whether the server heard or not
        excess = (NODES - kept) / NODES + kept / 8
        assert row.noise_std == pytest.approx(2.0 / NODES * math.sqrt(excess))
        assert sum(e.reply.has_error() for e in grid.trained(REVEAL)) == (0 if reached else 2)

    def test_only_what_a_survivor_reveals_is_taken_away_and_once(self, config: Make) -> None:
        """A second answer, and one of a node whose vector is not in the sum, are ignored and counted."""

        def intercept(message: Message, reply: Message) -> list[Message]:
            about = message.metadata
            if phase_of(message) == MASK and about.dst_node_id == node_id(0):
                return []
            if about.message_type == TRAIN and about.dst_node_id == node_id(5):
                forged = request(RecordDict(), node_id(0), TRAIN, 1)
                return [Message(reply.content, reply_to=forged), reply, reply]
            return [reply]

        c = config(**self.CROWD, t_tr=1)
        run(c, NODES, intercept=intercept)
        row = rows_of(c)[0]
        assert (row.dropped, row.survivors, row.ignored) == (None, 11, 2)
        assert row.noise_std == pytest.approx(2.0 / NODES)

    def reveal(self, grid: LocalGrid, user: int, round_: int = 1, **changes: Any) -> Message:
        task = Task(REVEAL, round_, [user], offer=offer_for(grid, round_=round_))
        content = replace(task, **changes).to_record()
        return grid.send_and_receive([request(content, node_id(user), TRAIN, round_)])[0]

    def check_refused(self, reply: Message, why: str) -> None:
        assert reply.has_error()
        assert why in (reply.error.reason or "")

    def test_only_with_the_count_of_the_sum_and_once(self) -> None:
        """Told that fewer vanished, survivors would give away noise that the sum needs."""
        grid = by_hand(intercept=at({(1, MASK): [0, 1]}), dropout_noise="removable")
        assert ask(grid).survivors == 10
        for vanished in (0, 1, 3, 4):
            why = f"vanished = {vanished}: is not what the sum was unmasked with"
            self.check_refused(self.reveal(grid, 5, vanished=vanished), why)
        for vanished in (-1, 5):
            why = f"vanished = {vanished}: must be within 0..4"
            self.check_refused(self.reveal(grid, 5, vanished=vanished), why)
        self.check_refused(self.reveal(grid, 5, vanished=2, users=[5, 5]), "named twice")
        assert len(self.keys(self.reveal(grid, 5, vanished=2))) == 2
        self.check_refused(self.reveal(grid, 5, vanished=2), "nothing to reveal for this round")
        other = offer_for(grid, round_=2)
        self.check_refused(self.reveal(grid, 6, vanished=2, offer=other), "nothing to reveal")
        self.check_refused(self.reveal(grid, 6, vanished=2, offer=None), "nothing to reveal")
        assert len(self.keys(self.reveal(grid, 6, vanished=2))) == 2

    def keys(self, reply: Message) -> list[bytes]:
        keys = reply.content.config_records[KEYS]["keys"]
        assert isinstance(keys, list)
        assert all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
        return keys  # type: ignore[return-value]

    def test_not_before_the_sum_is_unmasked(self) -> None:
        """Nor ever, if it is given up; the next round's noise can be removed again."""
        grid = by_hand(intercept=at({(1, MASK): range(5)}), dropout_noise="removable")
        assert ask(grid).total is None
        for vanished in range(5):
            why = f"vanished = {vanished}: is not what the sum was unmasked with"
            self.check_refused(self.reveal(grid, 6, vanished=vanished), why)
        assert ask(grid, 2).survivors == NODES
        self.check_refused(self.reveal(grid, 6, 1), "nothing to reveal")
        assert len(self.keys(self.reveal(grid, 6, 2))) == 4

    def test_not_of_a_sum_before_the_last(self) -> None:
        """What a node knows of who survived is gone with the next sum that it joins."""
        grid = by_hand(dropout_noise="removable")
        assert ask(grid).survivors == NODES
        grid.intercept = lost
        assert ask(grid, 2).lost == {ADVERTISE: NODES}
        grid.intercept = None
        self.check_refused(self.reveal(grid, 3), "vanished = 0: is not what the sum was unmasked with")

    def test_a_node_of_many_users_reveals_for_those_that_survived(self) -> None:
        """One key each, in the order that was asked for; who is not asked about keeps its noise."""
        grid = LocalGrid(tiny(**self.CROWD | {"diagnostics": True}), 1)
        offer, users = offer_for(grid), list(range(NODES))
        task = replace(task_for(grid, 0), users=users)
        mechanism = open_mechanism(grid.config, "update", 2.0, NODES, shapes(grid.config))
        about = SumRound(Session("1", 1), mechanism.size, mechanism.bits, {node_id(0): users}, 8)
        requests = [request(task.to_record(), node_id(0), TRAIN, 1)]
        assert SecAggPlus(grid.config.secagg).run(grid, requests, about, 60.0).survivors == NODES
        for wrong in ([0, 12], [12]):
            self.check_refused(self.ask_about(grid, offer, wrong), "are not hosted here")
        own = grid.contexts[node_id(0)].state.config_records[REMOVABLE]["keys"]
        assert len(set(own)) == NODES  # type: ignore[arg-type]
        reply = self.ask_about(grid, offer, [7, 2, 9])
        assert reply.content.config_records[KEYS]["users"] == [1, 1, 1]
        expected = [client.component_key(own[user], k) for user in (7, 2, 9) for k in range(1, 5)]  # type: ignore
        assert self.keys(reply) == expected
        self.check_refused(self.ask_about(grid, offer, [3]), "nothing to reveal")  # a node answers once

    def ask_about(self, grid: LocalGrid, offer: Offer, users: list[int]) -> Message:
        content = Task(REVEAL, 1, users, offer=offer).to_record()
        return grid.send_and_receive([request(content, node_id(0), TRAIN, 1)])[0]


# Signed sums ----------------------------------------------------------------------------------------------


@dataclass
class Keys:
    """A registry of all users, and folders of private keys for each node."""

    folder: Path

    @property
    def registry(self) -> Path:
        return self.folder / "registry.toml"

    def make(self, users: int = NODES) -> None:
        lines = [new_key_file(self.folder / str(user), user) for user in range(users)]
        self.registry.write_text("[keys]\n" + "\n".join(lines) + "\n")

    def configs(self) -> dict[int, dict[str, Any]]:
        nodes = range(NODES)
        return {i: place(i, key_registry=self.registry, signing_keys=self.folder / str(i)) for i in nodes}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    found = Keys(tmp_path / "keys")
    found.make()
    return found


class TestSigned:
    CROWD = CROWD | {"secagg_signed": True}

    def test_runs_through_five_phases(self, config: Make, sums: Sums, keys: Keys) -> None:
        """Users may be lost in each; who did not sign does not help to unmask, and is in the sum."""
        places = {(1, SHARE): [0], (1, MASK): [5], (1, AGREE): [7], (1, UNMASK): [2]}
        c = config(**self.CROWD)
        intercept = at(places)
        grid = run(c, NODES, intercept=intercept, node_configs=keys.configs())
        sums.check({1: [0, 5]})
        rows = rows_of(c)
        assert [(row.dropped, row.survivors) for row in rows] == [(None, 10), (None, 12)]
        assert [row.lost for row in rows] == [dict.fromkeys(PHASES[1:], 1), None]
        assert [len(exchanges_in(grid, phase, 1)) for phase in PHASES] == [12, 12, 11, 10, 9]
        assert not any(row.refusals for row in rows)

    def test_too_few_signatures(self, config: Make, keys: Keys) -> None:
        """Over half must sign one list of survivors; nothing is unmasked else."""
        places = {(1, AGREE): range(6)}
        c = config(**self.CROWD)
        grid = run(c, NODES, intercept=at(places), node_configs=keys.configs())
        few = "6 of 12 members were left, 7 are needed (6 of 12 nodes did not answer agree within 225 s)"
        assert [row.dropped for row in rows_of(c)] == [few, None]
        assert not exchanges_in(grid, UNMASK, 1)

    @pytest.mark.parametrize("kind", ["foreign", "unregistered", "no file", "no registry", "password"])
    def test_a_node_whose_keys_are_wrong_says_so_to_its_owner_alone(
        self, config: Make, keys: Keys, flwr_log: pytest.LogCaptureFixture, kind: str
    ) -> None:
        own = keys.folder / "3" / "member-3.pem"
        if kind == "foreign":
            own.write_bytes((keys.folder / "4" / "member-4.pem").read_bytes())
        elif kind == "unregistered":
            lines = keys.registry.read_text().splitlines()
            keys.registry.with_name("short.toml").write_text("\n".join(lines[:4] + lines[5:]))
        elif kind == "no file":
            own.unlink()
        elif kind == "password":
            key = Ed25519PrivateKey.generate()
            locked = serialization.BestAvailableEncryption(b"secret")
            form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
            own.write_bytes(key.private_bytes(*form))
        configs = keys.configs()
        if kind == "unregistered":
            configs[3]["key-registry"] = str(keys.registry.with_name("short.toml"))
        elif kind == "no registry":
            configs[3]["key-registry"] = str(keys.folder / "nowhere.toml")
        grid = LocalGrid(config(**self.CROWD), NODES, node_configs=configs)
        with pytest.raises(ConfigError) as raised:
            server.run(grid, grid.config, "1")
        assert str(raised.value).endswith("node-config: a node's keys can't be used; its log says why")
        assert "\n" not in str(raised.value)
        assert str(keys.folder) in flwr_log.text
        assert str(keys.folder) not in str(raised.value)
        assert {e.request.metadata.message_type for e in grid.exchanges} == {WHO}

    @pytest.mark.parametrize("signed", [True, False])
    def test_keys_and_the_option_go_together(self, config: Make, keys: Keys, signed: bool) -> None:
        """One node without keys in a signed run, or one with keys in another."""
        configs = keys.configs()
        configs = {i: c for i, c in configs.items() if (i != 3) is signed}
        grid = LocalGrid(config(**CROWD, secagg_signed=signed), NODES, node_configs=configs)
        with pytest.raises(ConfigError) as raised:
            server.run(grid, grid.config, "1")
        expected = f"secagg-signed = {str(signed).lower()}: node-config must have key-registry"
        assert expected in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_a_key_that_nobody_registered_is_noticed_by_the_others(self, config: Make, keys: Keys) -> None:
        """Node 3's registry has a key of user 3 that the others' has not: they refuse to go on with it."""
        other = Keys(keys.folder.with_name("other"))
        other.make()
        theirs, mine = keys.registry.read_text().splitlines(), other.registry.read_text().splitlines()
        registry = keys.folder / "with-another-3.toml"
        registry.write_text("\n".join([*theirs[:4], mine[4], *theirs[5:]]))
        configs = keys.configs()
        configs[3] = place(3, key_registry=registry, signing_keys=other.folder / "3")
        grid = LocalGrid(config(**self.CROWD), NODES, node_configs=configs)
        with pytest.raises(TrainingFailed, match="clients refused: signature wrong"):
            server.run(grid, grid.config, "1")
        assert not exchanges_in(grid, MASK)
        assert [taken(grid, user) for user in range(NODES)] == [0] * NODES


# Options that don't go with it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"mechanism": "gaussian"}, "mechanism = 'gaussian': is not of integers"),
        ({"secagg_neighbours": 5}, "secagg-neighbours = 5: must be even"),
        ({"secagg_neighbours": -2}, "secagg-neighbours = -2: must be at least 0"),
        ({"secagg_threshold": 4}, "secagg-threshold = 4: must be 0 (derived) unless neighbours are given"),
        ({"secagg_neighbours": 6, "secagg_threshold": 3}, "secagg-threshold = 3: must be above half"),
        ({"secagg_neighbours": 6, "secagg_threshold": 7}, "secagg-threshold = 7: must be above half"),
        ({"secagg_neighbours": 6, "secagg_signed": True}, "secagg-neighbours = 6: signed sums have all"),
        ({"dropout_tolerance": 0.5}, "dropout-tolerance = 0.5, colluding-share = 0.0: twice the first"),
        ({"secure_sum": "secagg"}, "secure-sum = 'secagg': must be one of secagg+, trusted"),
        (
            {
                "dropout_tolerance": 0.0,
                "colluding_share": 0.9,
                "sampling_rate": 0.25,
                "noise_multiplier": 0.0,
                "epsilon": math.inf,
            },
            "secure-sum = 'secagg+': dropout = 0.0, corrupted = 0.9: of 3 members 2 may be corrupted",
        ),
        ({"sampling_rate": 0.25}, "sampling-rate = 0.25: of 12 users, one alone is sampled in some round"),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line_before_anybody_is_asked_to_train(
    config: Make, flwr_log: pytest.LogCaptureFixture, options: dict[str, Any], start: str
) -> None:
    grid = LocalGrid(config(**CROWD), NODES)
    changed = {name.replace("_", "-"): value for name, value in options.items()}
    with pytest.raises(ConfigError) as raised:
        server.main(grid, to_dict(grid.config) | changed, 1)
    message = str(raised.value)
    assert message.startswith(start)
    assert len(message.splitlines()) == 1
    assert f"error: {message}" in flwr_log.text
    assert {e.request.metadata.message_type for e in grid.exchanges} <= {WHO}


# What leaves a node ---------------------------------------------------------------------------------------


class Leak(AssertionError):
    """A reply holds something that it should not."""


def allowed_arrays(phase: str, members: int, terms: Terms | None, signed: bool) -> dict[str, tuple[Any, Any]]:
    """Type and shape by name of the arrays in a reply that speaks for so many members."""
    signatures = {"signatures": (np.uint8, (members, SIGNATURE))}
    if phase == ADVERTISE:
        return {"public": (np.uint8, (members, PUBLIC))} | (signatures if signed else {})
    if phase == AGREE:
        return signatures
    assert terms is not None
    k = terms.neighbours
    others: dict[str, dict[str, tuple[Any, Any]]] = {
        SHARE: {"sealed": (np.uint8, (members, k, SEALED))},
        MASK: {"masked": (np.uint8, (members, packed_size(terms.size, terms.bits)))},
        UNMASK: {"shares": (np.uint8, (members, k, KEY))},
    }
    return others[phase]


def terms_of(grid: LocalGrid, round_: int) -> Terms | None:
    """What the server stated in a round."""
    found = exchanges_in(grid, SHARE, round_)
    header = header_of(found[0].request) if found else None
    return Terms(header.session, **header.terms) if header else None


def check_reply(grid: LocalGrid, exchange: Exchange) -> str:
    """Check every byte of a reply of the layer: one is made anew of what is allowed, and compared."""
    asked_for, said = header_of(exchange.request), header_of(exchange.reply)
    if asked_for is None or said is None or set(exchange.reply.content) != {HEADER, ARRAYS}:
        raise Leak(str(set(exchange.reply.content)))
    refused = [reason for reason in said.refused if reason in {*participant.REASONS, *policy.REASONS}]
    members = [member for member in asked_for.members if member in said.members]
    if len(members) + len(refused) != len(asked_for.members):
        raise Leak(f"{said.members}, {said.refused}")
    header = Header(asked_for.session, asked_for.phase, members, {}, refused).to_record()
    given = exchange.reply.content.array_records[ARRAYS]
    wanted = allowed_arrays(
        asked_for.phase, len(members), terms_of(grid, asked_for.session.round), grid.config.secagg_signed
    )
    wanted = wanted if members else {}
    if set(given) != set(wanted):
        raise Leak(str(set(given)))
    arrays = {name: anew(given[name].numpy(), *kind) for name, kind in wanted.items()}
    rebuilt = Message(RecordDict({HEADER: header, ARRAYS: pack(arrays)}), reply_to=exchange.request)
    expected, found = message_to_proto(rebuilt), message_to_proto(exchange.reply)
    for message in (expected, found):  # when it was sent, and a hash of what it holds
        for part in ("created_at", "ttl", "message_id"):
            message.metadata.ClearField(part)
    if expected.SerializeToString(deterministic=True) != found.SerializeToString(deterministic=True):
        raise Leak(str(exchange.reply.content))
    return asked_for.phase


def anew(array: np.ndarray, dtype: DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    if array.dtype != dtype or array.shape != shape:
        raise Leak(f"{array.dtype} {array.shape}, not {dtype} {shape}")
    return np.array(array, dtype)


class TestNothingElseLeaves:
    @pytest.mark.parametrize("kind", ["pina", "removable", "signed", "refusals"])
    def test_in_a_whole_run(self, config: Make, keys: Keys, tmp_path: Path, kind: str) -> None:
        """Of training; `who` tells which users a node has, and without diagnostics there is nothing else."""
        options: dict[str, dict[str, Any]] = {
            "pina": {"strategy": "pina", "normality": "count"},
            "removable": {"dropout_noise": "removable"},
            "signed": {"secagg_signed": True},
            "refusals": {},
        }
        configs = {"signed": keys.configs(), "refusals": self.strict(tmp_path)}.get(kind, {})
        flip = at({(1, SHARE): [4]}, TestSomeOfANode().flipped) if kind == "refusals" else None
        nodes = NODES if configs else 3
        grid = run(config(**CROWD | options[kind]), nodes, intercept=flip, node_configs=configs)
        phases = [check_reply(grid, e) for e in grid.exchanges if HEADER in e.request.content]
        assert set(phases) == set(PHASES if kind == "signed" else UNSIGNED)
        others = [e for e in grid.exchanges if HEADER not in e.request.content]
        for e in others:
            self.check_other(e)
        kinds = {e.request.metadata.message_type for e in others}
        assert kinds == {WHO} | ({TRAIN} if kind == "removable" else set())
        if kind == "refusals":
            assert rows_of(grid.config)[0].refusals == {"cohort outside the policy": 1, "shares altered": 1}

    def strict(self, folder: Path) -> dict[int, dict[str, Any]]:
        (folder / "p.toml").write_text("max-epsilon = 1e6\ndelta = 1e-5\nmin-cohort = 1000\n")
        return {7: place(7, policy=folder / "p.toml", ledger=folder / "ledger")}

    def check_other(self, exchange: Exchange) -> None:
        """Keys of one user's noise, or which users there are."""
        ((name, record),) = exchange.reply.content.items()
        if exchange.request.metadata.message_type == WHO:
            assert (name, set(record)) == (CONFIG, {"users", "partitions", "classes"})
        else:
            assert (name, set(record)) == (KEYS, {"keys", "users"})

    def test_with_diagnostics_no_more(self, config: Make) -> None:
        grid = run(config(**CROWD | {"diagnostics": True}), 2)
        found = {check_reply(grid, e) for e in grid.exchanges if HEADER in e.request.content}
        assert found == set(UNSIGNED)

    def test_without_them_an_error_says_its_kind_alone(
        self, config: Make, monkeypatch: pytest.MonkeyPatch, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        """Its text may hold numbers from users' data."""

        def fail(node: client.Node, task: Task, state: RecordDict) -> Any:
            raise ArithmeticError("a pixel of 17.25")

        monkeypatch.setitem(VECTORS, "update", fail)
        grid = LocalGrid(config(**CROWD), NODES)
        with pytest.raises(TrainingFailed):
            server.run(grid, grid.config, "1")
        errors = [e.reply.error.reason or "" for e in exchanges_in(grid, MASK)]
        assert len(errors) == 2 * NODES
        assert all("training failed (ArithmeticError)" in error and "17.25" not in error for error in errors)
        assert "17.25" in flwr_log.text


LEAKS: dict[str, Callable[[RecordDict], RecordDict]] = {
    "metrics": lambda content: RecordDict(dict(content) | {"m": MetricRecord({"num-examples": 5})}),
    "a config": lambda content: RecordDict(dict(content) | {"c": ConfigRecord({"cluster": 1})}),
    "more in the header": lambda content: _with_header(content, {"loss": 0.5}),
    "a reason of its own": lambda content: _with_header(content, {"refused": ["I have 5 images"]}),
    "terms": lambda content: _with_header(content, {"terms": ["loss"], "values": [3]}),
    "another array": lambda content: _with_arrays(content, {"loss": np.zeros(1)}),
    "another type": lambda content: _with_arrays(content, {"masked": np.zeros((1, 10_240), np.int8)}),
    "longer": lambda content: _with_arrays(content, {"masked": np.zeros((1, 10_241), np.uint8)}),
    "bytes behind the array": lambda content: _padded(content),
    "an array less": lambda content: RecordDict(dict(content) | {ARRAYS: ArrayRecord()}),
}


def _with_header(content: RecordDict, more: Mapping[str, Any]) -> RecordDict:
    header = ConfigRecord({**content.config_records[HEADER], **more})
    return RecordDict({HEADER: header, ARRAYS: content.array_records[ARRAYS]})


def _with_arrays(content: RecordDict, more: Mapping[str, np.ndarray]) -> RecordDict:
    arrays = {name: array.numpy() for name, array in content.array_records[ARRAYS].items()}
    return RecordDict({HEADER: content.config_records[HEADER], ARRAYS: pack({**arrays, **more})})


def _padded(content: RecordDict) -> RecordDict:
    """The same, with bytes that no reader of arrays looks at."""
    was = content.array_records[ARRAYS]["masked"]
    array = Array(was.dtype, was.shape, was.stype, was.data + b"loss = 0.5")
    return RecordDict({HEADER: content.config_records[HEADER], ARRAYS: ArrayRecord({"masked": array})})


def test_the_check_finds_what_leaks() -> None:
    """A check that finds nothing must be able to find something."""
    grid = by_hand()
    assert ask(grid).total is not None
    exchange = exchanges_in(grid, MASK)[0]
    assert check_reply(grid, exchange) == MASK
    for leak in LEAKS:
        (changed,) = with_content(LEAKS[leak])(exchange.request, exchange.reply)
        with pytest.raises((Leak, ValueError)):
            print(leak, check_reply(grid, Exchange(exchange.request, changed, [])))
