"""A client against servers that ask for too much: what is refused, why, and that nothing is used before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from support import run, tiny
from torch import Tensor

from pina_flwr.client import Node, open_node, train
from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import Task
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.admission import admit, offer_of
from pina_flwr.privacy.cohort import largest_cohort, participation_cap, shares
from pina_flwr.privacy.plan import NoisePlan, Shapes, release_of
from pina_flwr.privacy.policy import REASONS, Policy, Refusal
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)
from pina_flwr.privacy.user_ledger import FileLedger, StateLedger
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR
from pina_flwr.training.workbench import Workbench

RUN, OTHER_RUN = "1", "2"
USERS, SHAPES = [0, 1, 2], Shapes(16, 40)
LENIENT = Policy(1e6, 1e-5, min_noise_multiplier=1e-3, min_cohort=1, min_survivors=1)
DIFFER = "parameters differ from the run's"
Make = Callable[..., RunConfig]


class Bench:
    """A workbench without data or backbone that notes whose data a step uses."""

    def __init__(self, config: RunConfig):
        self.config, self.users = config, range(config.num_users)
        self.backbone = SimpleNamespace(shapes=SHAPES)
        self.used: list[int] = []

    def stage1_signals(self, ids: Sequence[int]) -> Tensor:
        self.used += ids
        return torch.ones(len(ids), SHAPES.sketch)


def node_of(policy: Policy | None = None, ledger: str = "", run: str = RUN, **options: Any) -> Node:
    usual = {"noise_cohort_size": 0, "diagnostics": False, "t_in": 6, "t_tr": 6}
    bench = cast(Workbench, Bench(tiny(**usual | options)))
    return Node(bench, 0, 1, run, policy, ledger)


def task_of(
    node: Node,
    step: str = "mean",
    round_: int = 1,
    users: Sequence[int] = USERS,
    cohort: int = 10,
    **offer: Any,
) -> Task:
    """What an honest server would ask, but for these changes to the offer."""
    honest = offer_of(node.config, node.plan, step, round_, cohort, node.run)
    return Task(step, round_, list(users), offer=replace(honest, **offer))


def reason_of(node: Node, task: Task, state: RecordDict | None = None) -> str:
    """Why the task is refused; empty if it is not."""
    try:
        admit(node, task, node.user_ledger(RecordDict() if state is None else state))
    except Refusal as refusal:
        return refusal.reason
    return ""


# An honest server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, LENIENT])
@pytest.mark.parametrize(
    ("mechanism", "kind"), [("skellam", SkellamRelease), ("discrete-gaussian", DiscreteGaussianRelease)]
)
def test_a_whole_run_is_let_through_and_charged(mechanism: str, kind: type, policy: Policy | None) -> None:
    node, state = node_of(policy, mechanism=mechanism, participation_cap=6), RecordDict()
    steps = [("mean", 1), *(("lloyd", t) for t in range(2, 7)), *(("update", t) for t in range(1, 7))]
    for step, round_ in steps:
        assert reason_of(node, task_of(node, step, round_), state) == ""
    ledger = StateLedger(state)
    for user in USERS:
        spent = ledger.spent(user)
        # The private mean and k-means are short here, and encoded alike.
        assert [release.count for release in spent] == [1 + 5, 6]
        assert all(isinstance(release, kind) for release in spent)
        assert {getattr(release, "sampling_rate", None) for release in spent} == {
            1.0
        }  # none against a server
        assert [ledger.taken(user, RUN, stage) for stage in (1, 2)] == [6, 6]
    assert ledger.spent(3) == []


def test_what_is_charged_is_what_the_server_learns() -> None:
    node, state = node_of(), RecordDict()
    assert reason_of(node, task_of(node, "update"), state) == ""
    expected = release_of(node.config, "update", node.plan.stage2, 14, SHAPES, 1.0)
    assert StateLedger(state).spent(0) == expected


@pytest.mark.parametrize("kind", ["projection", "coordinates", "private-support"])
def test_local_sketches(kind: str) -> None:
    node, state = node_of(LENIENT, stage1="sketch", sketch=kind, sketch_centre="none"), RecordDict()
    task = task_of(node, "sketch")
    assert task.offer is not None
    assert task.offer.mechanism == "zcdp"
    assert reason_of(node, task, state) == ""
    assert StateLedger(state).spent(0) == [ZcdpRelease(1 / (2 * node.plan.stage1**2), 1)]
    assert reason_of(node, task_of(node, "sketch", 2), state) == "too many rounds"  # one is all it sends


def test_local_updates() -> None:
    """A user's own releases: 1/(2z²)-zCDP each, never more than the cap, and never with less noise."""
    node, state = node_of(LENIENT, strategy="ifca", participation_cap=2), RecordDict()
    z = node.plan.stage2
    task = task_of(node, "local-update")
    assert task.offer is not None
    assert (task.offer.mechanism, task.offer.stage, task.offer.clip_norm) == (
        "zcdp",
        2,
        node.config.clip_norm,
    )
    less = task_of(node, "local-update", noise_multiplier=z * 0.99)
    assert reason_of(node, less, state) == DIFFER
    for round_ in (1, 2):
        assert reason_of(node, task_of(node, "local-update", round_), state) == ""
    assert StateLedger(state).spent(0) == [ZcdpRelease(1 / (2 * z * z), 2)]
    assert reason_of(node, task_of(node, "local-update", 3), state) == "too many rounds"
    crowd = node_of(LENIENT, strategy="ifca", noise_cohort_size=10_000)
    assert reason_of(crowd, task_of(crowd, "local-update")) == ""  # there is no cohort's noise to simulate


@pytest.mark.parametrize("step", ["local-update", "raw-update", "sketch"])
def test_without_privacy_too_a_vector_leaves_as_the_run_says(step: str) -> None:
    for strategy in ("pina", "fedavg", "ifca"):
        node = node_of(strategy=strategy, epsilon=math.inf, secure_sum="secagg+")
        assert reason_of(node, task_of(node, "update")) == ""
        assert reason_of(node, task_of(node, step)) == DIFFER


def test_in_the_clear_is_for_those_without_a_policy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "krum", "epsilon": math.inf, "secure_sum": "none"}
    simulated = node_of(**options)
    assert reason_of(simulated, task_of(simulated, "raw-update")) == ""
    assert reason_of(simulated, task_of(simulated, "update")) == DIFFER
    careful = node_of(LENIENT, **options)
    assert reason_of(careful, task_of(careful, "raw-update")) == "noise under the policy"
    kept = node_of(None, str(tmp_path), **options)
    assert reason_of(kept, task_of(kept, "raw-update")) == ""
    (release,) = FileLedger(str(tmp_path)).spent(0)
    assert isinstance(release, UnprotectedRelease)
    assert release.reason.startswith("No secure sum, no central DP")


def test_sketches_of_the_paper_are_for_those_without_a_policy() -> None:
    options: dict[str, Any] = {"stage1": "sketch", "sketch": "paper", "sketch_centre": "none"}
    simulated, state = node_of(**options), RecordDict()
    assert reason_of(simulated, task_of(simulated, "sketch"), state) == ""
    assert isinstance(StateLedger(state).spent(0)[0], UnprotectedRelease)
    careful = node_of(LENIENT, **options)
    assert reason_of(careful, task_of(careful, "sketch")) == "mechanism not accepted"


def test_floats_are_for_those_whose_policy_says_so() -> None:
    node = node_of(LENIENT, mechanism="gaussian")
    assert reason_of(node, task_of(node)) == "mechanism not accepted"
    willing = node_of(replace(LENIENT, mechanisms=("gaussian",)), mechanism="gaussian")
    state = RecordDict()
    assert reason_of(willing, task_of(willing), state) == ""
    assert StateLedger(state).spent(0) == [GaussianRelease(willing.plan.stage1, 1.0, 1)]


def test_more_noise_is_welcome_and_charged_as_such() -> None:
    """A server that counts earlier runs adds more than a client's own plan says."""
    node, state = node_of(), RecordDict()
    assert reason_of(node, task_of(node, "update", noise_multiplier=2 * node.plan.stage2), state) == ""
    assert StateLedger(state).spent(0) == release_of(
        node.config, "update", 2 * node.plan.stage2, 14, SHAPES, 1.0
    )


def test_a_run_without_privacy_is_nobodys_budget() -> None:
    """Simulation only: a node with a policy takes no part."""
    node, state = node_of(epsilon=math.inf), RecordDict()
    for _ in range(2):
        assert reason_of(node, task_of(node), state) == ""
    assert not state
    careful = node_of(LENIENT, epsilon=math.inf)
    assert reason_of(careful, task_of(careful)) == "noise under the policy"


# What is refused, with a policy and without -----------------------------------------------------------


@pytest.fixture(params=[None, LENIENT], ids=["simulation", "policy"])
def policy(request: pytest.FixtureRequest) -> Policy | None:
    return cast("Policy | None", request.param)


CHANGES: dict[str, dict[str, Any]] = {
    "no noise": {"noise_multiplier": 0.0},
    "less noise": {"noise_multiplier": 0.5},
    "another mechanism": {"mechanism": "discrete-gaussian"},
    "floats": {"mechanism": "gaussian"},
    "a local mechanism": {"mechanism": "zcdp"},
    "no such mechanism": {"mechanism": "none"},
    "fewer bits": {"bits": 19},
    "more bits": {"bits": 21},
    "no bits": {"bits": 0},
    "a larger clip norm": {"clip_norm": 1.1},
    "a smaller clip norm": {"clip_norm": 0.9},
    "a smaller q": {"sampling_rate": 0.69},
    "a larger q": {"sampling_rate": 0.71},
    "fewer survivors": {"survivors": 8},
    "more survivors": {"survivors": 10},
    "colluders": {"colluders": 1},
    "another run": {"run": OTHER_RUN},
    "another stage": {"stage": 1},
    "another round": {"round": 2},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_the_runs_own_plan_is_refused(policy: Policy | None, change: str) -> None:
    node, state = node_of(policy, noise_multiplier=1.0, epsilon=math.inf), RecordDict()
    task = task_of(node, "update", 1, cohort=10)
    assert task.offer is not None
    assert (task.offer.survivors, task.offer.colluders, task.offer.bits) == (9, 0, 20)
    assert reason_of(node, task_of(node, "update", 1, cohort=10, **CHANGES[change]), state) == DIFFER
    assert not state


def test_fewer_colluders_than_the_run_allows_for_are_refused(policy: Policy | None) -> None:
    node = node_of(policy, colluding_share=0.3)
    assert shares(node.config, 10).colluders == 3
    for colluders, reason in ((3, ""), (2, DIFFER), (4, DIFFER)):
        assert reason_of(node, task_of(node, colluders=colluders)) == reason


@pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
def test_a_little_less_noise_is_refused(policy: Policy | None, step: str) -> None:
    """Plans may differ in the last digits between machines, and not more."""
    node = node_of(policy)
    z = node.plan.of_step(step)
    for factor, reason in ((1 - 1e-9, ""), (1 - 1e-4, DIFFER), (0.0, DIFFER)):
        assert reason_of(node, task_of(node, step, noise_multiplier=factor * z)) == reason


def test_without_an_offer_nothing_is_done(policy: Policy | None) -> None:
    for target in (8.0, math.inf):
        node = node_of(policy, epsilon=target)
        assert reason_of(node, replace(task_of(node), offer=None)) == DIFFER


def test_the_stages_noise_is_not_the_other_stages(policy: Policy | None) -> None:
    node = node_of(policy, stage1_budget=0.9)
    assert node.plan.stage1 < node.plan.stage2
    assert reason_of(node, task_of(node, "update", noise_multiplier=node.plan.stage1)) == DIFFER


def test_a_cohort_larger_than_chance_allows_is_refused(policy: Policy | None) -> None:
    """Every user adds its share of the noise: a server that claims more of them gets less."""
    node = node_of(policy, num_users=400, sampling_rate=0.1)
    largest = largest_cohort(400, 0.1)
    assert 60 < largest < 100
    for cohort, reason in (
        (largest, ""),
        (largest + 1, "cohort outside the policy"),
        (400, "cohort outside the policy"),
    ):
        assert reason_of(node, task_of(node, cohort=cohort)) == reason


def test_more_users_than_the_cohort_are_refused(policy: Policy | None) -> None:
    node = node_of(policy)
    assert reason_of(node, task_of(node, users=[0, 1, 2], cohort=3)) == ""
    assert reason_of(node, task_of(node, users=[0, 1, 2, 3], cohort=3)) == DIFFER


def test_a_step_the_run_has_not_is_refused(policy: Policy | None) -> None:
    """The guarantee names no sketch, so none may leave; nor is any noise planned for what is not planned."""
    for step, options in (
        ("sketch", {"stage1": "dp-kmeans"}),
        ("lloyd", {"stage1": "sketch"}),
        ("mean", {"sketch_centre": "none"}),
        ("mean", {"strategy": "fedavg", "noise_multiplier": 1.0, "epsilon": math.inf}),
        ("local-update", {}),
        ("raw-update", {}),
        ("update", {"strategy": "ifca"}),
    ):
        node = node_of(policy, **options)
        assert reason_of(node, task_of(node, step)) in (DIFFER, "too many rounds"), (step, options)


@pytest.mark.parametrize(("step", "last"), [("lloyd", 6), ("update", 6)])
def test_rounds_after_the_last_are_refused(policy: Policy | None, step: str, last: int) -> None:
    """ε towards recipients is that of the rounds planned."""
    node = node_of(policy)
    assert reason_of(node, task_of(node, step, last)) == ""
    assert reason_of(node, task_of(node, step, last + 1)) in (DIFFER, "too many rounds")


class TestReplays:
    @pytest.mark.parametrize("place", [("mean", 1), ("lloyd", 2), ("lloyd", 3), ("update", 1)])
    def test_a_round_that_was_answered_or_is_over(
        self, policy: Policy | None, place: tuple[str, int]
    ) -> None:
        """Of this stage or of the one before; also for a user that was asked with others."""
        node, state = node_of(policy), RecordDict()
        assert reason_of(node, task_of(node, "update", 1, users=[1]), state) == ""
        before = StateLedger(state).spent(1)
        for users in ([1], [0, 1], [2, 1, 0]):
            assert reason_of(node, task_of(node, *place, users=users), state) == "stale round"
        assert StateLedger(state).spent(0) == []
        assert StateLedger(state).spent(1) == before
        assert reason_of(node, task_of(node, "update", 2, users=[0, 1]), state) == ""

    def test_of_another_run_under_this_ones_name(self, policy: Policy | None) -> None:
        other = node_of(policy, run=OTHER_RUN)
        node, state = node_of(policy), RecordDict()
        assert reason_of(node, task_of(other), state) == DIFFER
        assert not state

    def test_with_more_noise_or_another_cohort(self, policy: Policy | None) -> None:
        node, state = node_of(policy), RecordDict()
        assert reason_of(node, task_of(node), state) == ""
        assert reason_of(node, task_of(node, noise_multiplier=100.0), state) == "stale round"
        assert reason_of(node, task_of(node, cohort=14), state) == "stale round"


@pytest.mark.parametrize("cap", [1, 3, 0])
def test_a_user_that_is_sampled_every_time_stops_at_the_cap(policy: Policy | None, cap: int) -> None:
    node, state = node_of(policy, participation_cap=cap, sampling_rate=0.2, t_in=20, t_tr=20), RecordDict()
    for stage, step in ((1, "lloyd"), (2, "update")):
        allowed = participation_cap(node.config, stage)
        assert allowed < 20
        reasons = [reason_of(node, task_of(node, step, t, users=[5], cohort=8), state) for t in range(1, 21)]
        assert reasons == [""] * allowed + ["too many rounds"] * (20 - allowed)
        assert reason_of(node, task_of(node, step, 20, users=[4, 5], cohort=8), state) == "too many rounds"
        assert StateLedger(state).taken(4, RUN, stage) == 0  # nobody is charged for a refusal
        assert StateLedger(state).taken(5, RUN, stage) == allowed


# A policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"min_noise_multiplier": 50.0}, "noise under the policy"),
        ({"mechanisms": ("zcdp",)}, "mechanism not accepted"),
        ({"min_clip_norm": 1.5}, "clip norm outside the policy"),
        ({"max_clip_norm": 0.5}, "clip norm outside the policy"),
        ({"min_cohort": 11}, "cohort outside the policy"),
        ({"max_cohort": 9}, "cohort outside the policy"),
        ({"min_survivors": 10}, "too few survivors allowed"),
        ({"min_survivor_share": 0.95}, "too few survivors allowed"),
        ({"min_colluder_share": 0.1}, "too few colluders allowed for"),
        ({"max_sampling_rate": 0.5}, "sampling rate outside the policy"),
        ({"max_epsilon": 0.1}, "budget spent"),
    ],
    ids=str,
)
def test_the_owner_has_the_last_word(limits: dict[str, Any], reason: str) -> None:
    """Offers that are the run's own plan, and are not what the owner of the node allows."""
    node, state = node_of(replace(LENIENT, **limits)), RecordDict()
    assert reason in REASONS
    assert reason_of(node, task_of(node, "update"), state) == reason
    assert not state


def test_noise_of_a_simulated_cohort_is_refused_by_a_policy_only(policy: Policy | None) -> None:
    """It is less than what ε needs in a deployment, however high z is."""
    node = node_of(policy, noise_cohort_size=10_000)
    assert reason_of(node, task_of(node)) == ("noise under the policy" if policy else "")


def test_the_budget_lasts_over_runs(tmp_path: Path) -> None:
    """Each run of its own is within the policy; the folder counts them all, and the last is refused whole."""
    limits = replace(LENIENT, max_epsilon=6.0)
    admitted, replies = 0, []
    for number in range(30):
        node = node_of(limits, str(tmp_path), run=f"run-{number}", noise_multiplier=2.0, epsilon=math.inf)
        replies.append(train(node, task_of(node), RecordDict()))
        if set(replies[-1]) == {REFUSAL}:
            break
        admitted += 1
    assert 3 < admitted < 30
    assert dict(replies[-1].config_records[REFUSAL]) == {"reason": "budget spent"}
    with FileLedger(tmp_path) as ledger:
        assert ledger.rounds(0) == admitted
        (spent,) = ledger.spent(0)
        assert ledger.spent(9) == []
    one_more = replace(spent, count=spent.count + 1)
    assert epsilon([spent], limits.delta) <= 6.0 < epsilon([one_more], limits.delta)
    fresh = node_of(limits, str(tmp_path), run="run-30", noise_multiplier=2.0, epsilon=math.inf)
    assert set(train(fresh, task_of(fresh, users=[0, 9]), RecordDict())) == {
        REFUSAL
    }  # 9 has budget, 0 has not
    assert set(train(fresh, task_of(fresh, users=[9]), RecordDict())) == {VECTOR}


def test_rounds_are_counted_over_runs(tmp_path: Path) -> None:
    limits = replace(LENIENT, max_rounds=2)
    reasons = []
    for number in range(4):
        node = node_of(limits, str(tmp_path), run=f"run-{number}")
        reasons.append(reason_of(node, task_of(node)))
    assert reasons == ["", "", "too many rounds", "too many rounds"]


class TestOpenNode:
    """What a node with a policy refuses before any message."""

    def open(self, tmp_path: Path, *, ledger: bool = True, **options: Any) -> Node:
        path = tmp_path / "policy.toml"
        path.write_text("max-epsilon = 3.0\ndelta = 1e-5\nsecure-sums = ['trusted']\n")
        place = {"partition-id": 0, "num-partitions": 1, "policy": str(path)}
        folder = {"ledger": str(tmp_path / "ledgers")} if ledger else {}
        return open_node(tiny(**{"diagnostics": False} | options), place | folder, RUN)

    def test_reads_it(self, tmp_path: Path) -> None:
        node = self.open(tmp_path)
        assert node.policy == Policy(3.0, 1e-5, secure_sums=("trusted",))
        assert isinstance(node.user_ledger(RecordDict()), FileLedger)

    def test_refuses_to_tell_about_users(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="diagnostics = true"):
            self.open(tmp_path, diagnostics=True)

    def test_refuses_noise_that_can_be_drawn_again(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="reproducible-noise = true"):
            self.open(tmp_path, reproducible_noise=True)

    def test_refuses_to_count_nowhere(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="ledger"):
            self.open(tmp_path, ledger=False)


# What leaves a node that refuses ----------------------------------------------------------------------


REFUSED: dict[str, dict[str, Any]] = {
    "no noise": {"noise_multiplier": 0.0},
    "another run": {"run": OTHER_RUN},
    "too many": {"cohort": 15, "survivors": 14},
    "fewer survivors": {"survivors": 2},
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("dropout_noise", ["provision", "removable"])
@pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
def test_a_refusal_uses_no_data_and_says_its_reason_only(change: str, dropout_noise: str, step: str) -> None:
    node, state = node_of(LENIENT, dropout_noise=dropout_noise), RecordDict()
    reply = train(node, task_of(node, step, **REFUSED[change]), state)
    assert set(reply) == {REFUSAL}
    record = reply.config_records[REFUSAL]
    assert isinstance(record, ConfigRecord)
    assert set(record) == {"reason"}
    assert record["reason"] in REASONS
    assert cast(Bench, node.workbench).used == []
    assert not state  # neither charged nor a key kept


def test_what_is_admitted_is_charged_before_data_is_used(tmp_path: Path) -> None:
    """A node that dies while it trains has still counted the round."""
    node = node_of(LENIENT, str(tmp_path))

    def dies(ids: Sequence[int]) -> Tensor:
        raise MemoryError

    node.workbench.stage1_signals = dies  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        train(node, task_of(node), RecordDict())
    with FileLedger(tmp_path) as ledger:
        assert [ledger.rounds(user) for user in USERS] == [1, 1, 1]
    assert reason_of(node, task_of(node)) == "stale round"


def test_what_is_admitted_is_done() -> None:
    node, state = node_of(LENIENT), RecordDict()
    reply = train(node, task_of(node), state)
    assert set(reply) == {VECTOR}
    assert cast(Bench, node.workbench).used == USERS
    assert set(train(node, task_of(node), state)) == {REFUSAL}
    assert cast(Bench, node.workbench).used == USERS


def test_noise_is_that_of_the_offer() -> None:
    """More noise than planned: decoded with the offer's mechanism, it has the offer's σ."""
    node = node_of(noise_multiplier=1.0, epsilon=math.inf)
    z = 500.0
    task = task_of(node, noise_multiplier=z)
    (sent,) = train(node, task, RecordDict()).array_records[VECTOR].values()
    mechanism = node.mechanism("mean", z)
    noise = mechanism.decode(sent.numpy(), (node.config.seed, "rotation", "mean", 1))
    share = z * math.sqrt(3 / (10 * 0.9))
    assert 0.2 * share < noise.std() < 3 * share  # 16 draws


def test_plans_do_not_come_from_the_server() -> None:
    node = node_of()
    assert node.plan == NoisePlan(node.plan.stage1, node.plan.stage2, 14**-1.1)
    assert 0 < node.plan.stage2 != node_of(epsilon=2.0).plan.stage2


def test_a_server_that_sends_its_requests_again(config: Make) -> None:
    """Through real messages and the app: every request of a private run, replayed after it."""
    c = config(strategy="fedavg", diagnostics=False)
    grid = run(c, 2)
    requests = [e.request for e in grid.trained()]
    assert requests
    replies = grid.send_and_receive(requests)
    assert {tuple(reply.content) for reply in replies} == {(REFUSAL,)}
    reasons = {str(reply.content.config_records[REFUSAL]["reason"]) for reply in replies}
    assert reasons <= {"stale round", "too many rounds"}  # the second of whoever was in all rounds
