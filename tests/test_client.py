import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from scipy import stats
from support import tiny
from torch import Tensor

from pina_flwr import client
from pina_flwr.client import (
    DIAGNOSTICS,
    REMOVABLE,
    SKETCHES,
    STATE,
    Node,
    bound_update,
    choose,
    evaluate,
    open_node,
    train,
)
from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import KEYS, REVEAL, Task, unpack
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.admission import offer_of
from pina_flwr.privacy.policy import Policy
from pina_flwr.privacy.releases import SkellamRelease, ZcdpRelease
from pina_flwr.privacy.sum_mechanism import component_key, rotation_seed
from pina_flwr.privacy.user_ledger import FileLedger, StateLedger
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR
from pina_flwr.training.workbench import Workbench

USERS = [0, 1, 2, 5, 6]
TINY_P = 1e-8  # how rarely a statistical test may fail by chance
RUN = "7"  # Flower's id of the run


@pytest.fixture(scope="module")
def bench() -> Workbench:
    """One workbench; tests give nodes on it other options."""
    return open_node(tiny(), {"partition-id": 0, "num-partitions": 1}, RUN).workbench


@pytest.fixture
def node(bench: Workbench) -> Callable[..., Node]:
    def make(
        partition: int = 0,
        partitions: int = 1,
        policy: Policy | None = None,
        ledger: str = "",
        **options: object,
    ) -> Node:
        config = tiny(**options)
        copy = Workbench(
            config, dataclasses.replace(bench.users, config=config), bench.backbone, bench._activations
        )
        return Node(copy, partition, partitions, RUN, policy, ledger)

    return make


@pytest.fixture
def bad_users(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Users whose training ends in this number: add to it."""
    bad: dict[int, float] = {}

    def spoil(ids: list[int], rows: Tensor) -> Tensor:
        rows = rows.clone()
        for i, user in enumerate(ids):
            rows[i, 3] = bad.get(user, rows[i, 3])
        return rows

    def train(bench: Workbench, ids: list[int], *rest: Any) -> tuple[Tensor, Tensor]:
        updates, choices = real_train(bench, ids, *rest)
        return spoil(ids, updates), choices

    real_train, real_deltas = Workbench.train, Workbench.stage1_signals
    monkeypatch.setattr(Workbench, "train", train)
    monkeypatch.setattr(Workbench, "stage1_signals", lambda b, ids: spoil(ids, real_deltas(b, ids)))
    return bad


def models_for(node: Node) -> np.ndarray:
    """Four models that differ."""
    start = node.workbench.backbone.spec.start()
    return (start + 0.05 * torch.randn(4, len(start), generator=torch.Generator().manual_seed(5))).numpy()


def task_for(
    node: Node, step: str, users: list[int] = USERS, cohort: int = 10, round_: int = 1, **more: object
) -> Task:
    size = node.workbench.backbone.sketch.size
    shape = (node.config.kmeans_restarts, 4, size)
    centroids = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    arrays = {
        "mean": {},
        "lloyd": {"centroids": centroids},
        "sketch": {},
        "update": {"models": models_for(node)},
        "evaluate": {"models": models_for(node)},
    }[step]
    offer = None if step == "evaluate" else offer_of(node.config, node.plan, step, round_, cohort, RUN)
    return Task(step, round_, users, **({"choose": "loss", "arrays": arrays, "offer": offer} | more))  # type: ignore[arg-type]


def vector(content: RecordDict) -> np.ndarray:
    (array,) = content.array_records[VECTOR].values()
    return array.numpy()


def decoded(node: Node, task: Task, contents: list[RecordDict]) -> np.ndarray:
    """The sum of protected vectors in the users' own units, float64 [D], as the server decodes it."""
    assert task.offer is not None
    mechanism = node.mechanism(task.step, task.offer.noise_multiplier)
    total = np.sum([vector(content).astype(np.float64) for content in contents], axis=0)
    if mechanism.bits:
        total = total.astype(np.int64) % (1 << mechanism.bits)
    return mechanism.decode(total, rotation_seed(node.config, task.step, task.round))


def refusal(content: RecordDict) -> str:
    """The reason of a reply that refuses, which holds nothing else."""
    assert list(content) == [REFUSAL]
    assert list(content.config_records[REFUSAL]) == ["reason"]
    return str(content.config_records[REFUSAL]["reason"])


class TestOpenNode:
    @pytest.mark.parametrize(
        "node_config",
        [{}, {"partition-id": 0}, {"num-partitions": 2}, {"partition-id": "a", "num-partitions": 2}],
    )
    def test_needs_its_place(self, node_config: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match="must give partition-id and num-partitions as whole numbers"):
            open_node(tiny(), node_config, RUN)

    @pytest.mark.parametrize(("partition", "partitions"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
    def test_a_place_that_is_none(self, partition: int, partitions: int) -> None:
        with pytest.raises(ConfigError, match=f"partition-id = {partition}: must be in 0..{partitions - 1}"):
            open_node(tiny(), {"partition-id": partition, "num-partitions": partitions}, RUN)

    @pytest.mark.parametrize(
        ("options", "node_config", "message"),
        [
            ({}, {"policy": "p.toml"}, "policy without ledger"),
            (
                {},
                {"policy": "none.toml", "ledger": "l"},
                "node-config: a node's policy can't be used; its log says why",
            ),
            ({"diagnostics": True}, {"policy": "p.toml", "ledger": "l"}, "diagnostics = true: "),
            ({"reproducible_noise": True}, {"policy": "p.toml", "ledger": "l"}, "reproducible-noise = true"),
        ],
        ids=str,
    )
    def test_a_policy_needs_a_ledger_and_no_simulation(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: dict[str, Any],
        node_config: dict[str, str],
        message: str,
    ) -> None:
        """The run's configuration comes from the server's side; none of it may disarm a policy."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "p.toml").write_text("max-epsilon = 8.0\ndelta = 1e-5\nsecure-sums = ['trusted']\n")
        config = tiny(**{"diagnostics": False} | options)
        with pytest.raises(ConfigError, match=message) as raised:
            open_node(config, {"partition-id": 0, "num-partitions": 1} | node_config, RUN)
        assert len(str(raised.value).splitlines()) == 1

    def test_what_is_wrong_with_a_policy_is_for_its_owner(
        self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "policy.toml"
        path.write_text("max-epsilon = 3.0\ndelta = 1e-6\nmin-noise-multiplier = -4.25\n")
        place = {"partition-id": 0, "num-partitions": 1, "policy": str(path), "ledger": str(tmp_path / "l")}
        with pytest.raises(ConfigError) as raised:
            open_node(tiny(diagnostics=False), place, RUN)
        assert "4.25" not in str(raised.value)
        assert "policy.toml" not in str(raised.value)
        assert "min-noise-multiplier = -4.25" in flwr_log.text

    def test_a_ledger_that_lasts_takes_no_diagnostics(self, tmp_path: Path) -> None:
        """They are released without noise, and no entry says so."""
        place = {"partition-id": 0, "num-partitions": 1, "ledger": str(tmp_path / "l")}
        with pytest.raises(ConfigError, match="diagnostics = true"):
            open_node(tiny(), place, RUN)
        assert open_node(tiny(diagnostics=False), place, RUN).ledger

    def test_a_policy_takes_no_ideal_sum_for_a_real_one(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.toml"
        path.write_text("max-epsilon = 3.0\ndelta = 1e-6\n")
        place = {"partition-id": 0, "num-partitions": 1, "policy": str(path), "ledger": str(tmp_path / "l")}
        with pytest.raises(ConfigError, match="secure-sum = 'trusted': a node's policy does not accept it"):
            open_node(tiny(diagnostics=False), place, RUN)
        clear = tiny(strategy="krum", epsilon=math.inf, secure_sum="none", diagnostics=False)
        with pytest.raises(ConfigError, match="secure-sum = 'none': a node's policy does not accept it"):
            open_node(clear, place, RUN)

    def test_a_policy_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.toml"
        path.write_text("max-epsilon = 3.0\ndelta = 1e-6\nsecure-sums = ['trusted']\nmin-cohort = 20\n")
        place = {"partition-id": 0, "num-partitions": 1}
        host = open_node(
            tiny(diagnostics=False), place | {"policy": str(path), "ledger": str(tmp_path / "l")}, RUN
        )
        assert host.policy == Policy(max_epsilon=3.0, delta=1e-6, min_cohort=20, secure_sums=("trusted",))
        assert isinstance(host.user_ledger(RecordDict()), FileLedger)
        assert isinstance(open_node(tiny(), place, RUN).user_ledger(RecordDict()), StateLedger)

    @pytest.mark.parametrize("partitions", [1, 2, 7, 20])
    def test_nodes_share_the_users_out(self, node: Callable[..., Node], partitions: int) -> None:
        hosted = [user for i in range(partitions) for user in node(i, partitions).users]
        assert sorted(hosted) == list(range(14))


class TestBoundUpdate:
    """Users' joint vectors: clipped update in the chosen slot, one-hot count beside it."""

    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [math.nan, 1.0]])
    choices = torch.tensor([1, 0, 2, 1])

    def test_slots_without_count(self) -> None:
        joint = bound_update(RunConfig(normality="paper"), self.updates, self.choices, 3)
        expected = [[0, 0, 0.6, 0.8, 0, 0], [0.3, 0.4, 0, 0, 0, 0], [0] * 6, [0] * 6]
        torch.testing.assert_close(joint, torch.tensor(expected), atol=1e-5, rtol=0)

    def test_slots_with_count(self) -> None:
        """κ = 0.6: the update has 0.8 of S = 2, the count 0.6 of it; whoever is left out is not counted."""
        config = RunConfig(count_share=0.6, clip_norm=2.0)
        joint = bound_update(config, self.updates, self.choices, 3)
        expected = [
            [0, 0, 0.96, 1.28, 0, 0, 0, 1.2, 0],
            [0.3, 0.4, 0, 0, 0, 0, 1.2, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 1.2],
            [0] * 9,
        ]
        torch.testing.assert_close(joint, torch.tensor(expected), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("share", [1e-3, 0.1, 0.5, 0.9, 0.999])
    @pytest.mark.parametrize("normality", ["count", "paper", "energy", "none"])
    def test_joint_norm_is_at_most_s(self, share: float, normality: str) -> None:
        """The sensitivity of the release, for every float32 rounding, size of update and choice."""
        rng = torch.Generator().manual_seed(1)
        for s in (0.03, 1.0, 7.0):
            sizes = 10 ** torch.empty(1_500, 1).uniform_(-6, 12, generator=rng)
            updates = sizes * torch.randn(1_500, 20, generator=rng)
            config = RunConfig(normality=normality, count_share=share, clip_norm=s)
            joint = bound_update(config, updates, torch.randint(4, (1_500,), generator=rng), 4)
            assert joint.double().norm(dim=1).max() <= s

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_if_all_are_left_out_nothing_is_sent(self, bad: float) -> None:
        assert not bound_update(
            RunConfig(), torch.full((3, 2), bad), torch.zeros(3, dtype=torch.long), 4
        ).any()

    def test_ifca_clips_nothing_but_leaves_out(self) -> None:
        literal = RunConfig(strategy="ifca", epsilon=math.inf, secure_sum="trusted")
        joint = bound_update(literal, self.updates, self.choices, 3)
        assert joint[0].tolist()[2:4] == [3, 4]
        assert not joint[3].any()

    @pytest.mark.parametrize("options", [{"epsilon": math.inf}, {"epsilon": 8.0, "secure_sum": "trusted"}])
    def test_ifca_clips_for_secagg_and_for_privacy(self, options: dict[str, Any]) -> None:
        joint = bound_update(RunConfig(strategy="ifca", **options), self.updates, self.choices, 3)
        assert joint[0].norm() == pytest.approx(1, abs=1e-5)
        assert joint[0, -3:].tolist() == pytest.approx([0, 0.1, 0], abs=1e-6)

    def test_without_privacy_the_others_clip_all_the_same(self) -> None:
        joint = bound_update(RunConfig(normality="none", epsilon=math.inf), self.updates, self.choices, 3)
        assert joint[0].norm() == pytest.approx(1, abs=1e-5)


def width_of(host: Node, step: str) -> int:
    """Numbers of a user's vector in the secure sum of a step."""
    d, h = host.workbench.backbone.spec.size, host.workbench.backbone.sketch.size
    return {"mean": h, "lloyd": host.config.kmeans_restarts * 4 * h, "update": 4 * d + 4}[step]


def power_of_two(width: int) -> int:
    """The length to which a vector is padded for its rotation; short ones more, to cost fewer bits."""
    return max(4096, 1 << (width - 1).bit_length())


class TestReplies:
    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    @pytest.mark.parametrize("diagnostics", [True, False])
    def test_hold_the_protected_vector_and_nothing_else(
        self, node: Callable[..., Node], step: str, diagnostics: bool
    ) -> None:
        host = node(diagnostics=diagnostics)
        content = train(host, task_for(host, step), RecordDict())
        assert list(content) == [VECTOR]
        assert list(content.array_records) == [VECTOR]
        (array,) = content.array_records[VECTOR].values()
        assert (array.dtype, tuple(array.shape)) == ("uint32", (power_of_two(width_of(host, step)),))
        assert array.numpy().max() < 2**host.config.bits

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    @pytest.mark.parametrize("options", [{"epsilon": math.inf}, {"mechanism": "gaussian"}])
    def test_are_floats_without_noise_or_with_the_continuous_gaussian(
        self, node: Callable[..., Node], step: str, options: dict[str, object]
    ) -> None:
        host = node(**options)
        sent = vector(train(host, task_for(host, step), RecordDict()))
        assert (sent.dtype, sent.shape) == (np.float32, (width_of(host, step),))

    @pytest.mark.parametrize("bits", [20, 24, 32])
    def test_integers_are_spread_over_their_bits(self, node: Callable[..., Node], bits: int) -> None:
        """Negative sums wrap to the upper half; nothing is ever out of range."""
        host = node(bits=bits, noise_multiplier=50.0, noise_cohort_size=0)
        sent = vector(train(host, task_for(host, "update"), RecordDict())).astype(np.int64)
        assert sent.max() < 2**bits
        assert ((sent > 2 ** (bits - 1)).mean()) == pytest.approx(0.5, abs=0.1)

    @pytest.mark.parametrize(
        ("sketch", "width"), [("projection", 4), ("coordinates", 4), ("private-support", 0), ("paper", 0)]
    )
    def test_sketches_and_nothing_else(self, node: Callable[..., Node], sketch: str, width: int) -> None:
        host = node(stage1="sketch", sketch=sketch, sketch_size=4)
        content = train(host, task_for(host, "sketch"), RecordDict())
        assert list(content) == [SKETCHES]
        rows = unpack(content.array_records[SKETCHES])
        width = width or host.workbench.backbone.sketch.size
        assert {name: (r.shape, r.dtype) for name, r in rows.items()} == {"rows": ((5, width), np.float32)}
        if sketch == "paper":
            assert ((rows["rows"] != 0).sum(axis=1) <= 4).all()

    def test_the_order_of_sketches_tells_nothing(self, node: Callable[..., Node]) -> None:
        host = node(stage1="sketch", epsilon=math.inf)
        orders = {
            unpack(train(host, task_for(host, "sketch"), RecordDict()).array_records[SKETCHES])[
                "rows"
            ].tobytes()
            for _ in range(20)
        }
        assert len(orders) > 1

    @pytest.mark.parametrize("diagnostics", [True, False])
    def test_a_node_remembers_only_for_diagnostics(
        self, node: Callable[..., Node], diagnostics: bool
    ) -> None:
        """Of what it sent; what its users released is another matter."""
        host, state = node(diagnostics=diagnostics), RecordDict()
        for step, round_ in (("mean", 1), ("lloyd", 2), ("update", 1)):
            assert VECTOR in train(host, task_for(host, step, round_=round_), state)
        assert (STATE in state) is diagnostics

    def test_without_noise_or_diagnostics_a_node_remembers_nothing(self, node: Callable[..., Node]) -> None:
        host, state = node(diagnostics=False, epsilon=math.inf), RecordDict()
        for step, round_ in (("mean", 1), ("lloyd", 2), ("update", 1)):
            train(host, task_for(host, step, round_=round_), state)
        assert not state

    @pytest.mark.parametrize(
        ("users", "reason"),
        [([], "no users named"), ([0, 1], r"users \[1\] are not hosted here"), ([0, 99], "not hosted here")],
    )
    def test_users_of_others_are_refused(
        self, node: Callable[..., Node], users: list[int], reason: str
    ) -> None:
        host = node(0, 2)
        with pytest.raises(ValueError, match=reason):
            train(host, task_for(host, "mean", users), RecordDict())

    def test_a_user_named_twice_is_refused(self, node: Callable[..., Node]) -> None:
        with pytest.raises(ValueError, match="named twice"):
            train(node(), task_for(node(), "mean", [0, 2, 0]), RecordDict())

    def test_an_unknown_step_is_refused(self, node: Callable[..., Node]) -> None:
        with pytest.raises(ValueError, match="unknown step 'steal'"):
            train(node(), Task("steal", 1, [0]), RecordDict())

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    def test_a_cohort_smaller_than_its_users_is_refused(self, node: Callable[..., Node], step: str) -> None:
        """Its share of the noise would be too small."""
        private, plain = node(), node(epsilon=math.inf)
        reply = train(private, task_for(private, step, cohort=4), RecordDict())
        assert refusal(reply) == "parameters differ from the run's"
        with pytest.raises(ValueError, match="noise share"):
            train(plain, task_for(plain, step, cohort=4), RecordDict())


class TestAdmission:
    """What an untrusted server may ask; a refusal says one of a few phrases and nothing else."""

    def ask(self, host: Node, state: RecordDict | None = None, **changes: Any) -> str:
        """What the node says to an update task whose offer is changed like this; "" if it takes part."""
        task = task_for(host, "update")
        task = dataclasses.replace(task, offer=dataclasses.replace(task.offer, **changes))
        reply = train(host, task, RecordDict() if state is None else state)
        return "" if VECTOR in reply else refusal(reply)

    @pytest.mark.parametrize(
        "change",
        [
            {"mechanism": "gaussian"},
            {"clip_norm": 2.0},
            {"clip_norm": 0.5},
            {"survivors": 10},
            {"survivors": 8},
            {"colluders": 1},
            {"bits": 32},
            {"bits": 0},
            {"sampling_rate": 1.0},
            {"run": "8"},
            {"stage": 1},
            {"round": 2},
        ],
        ids=str,
    )
    def test_other_parameters_than_the_runs(self, node: Callable[..., Node], change: dict[str, Any]) -> None:
        assert self.ask(node(), **change) == "parameters differ from the run's"

    def test_no_noise_too_little_and_more_than_enough(self, node: Callable[..., Node]) -> None:
        host, z = node(), node().plan.stage2
        differ = "parameters differ from the run's"
        offered = {0.0: differ, 0.5 * z: differ, z * (1 - 1e-3): differ, z: "", 2 * z: ""}
        assert {z: self.ask(host, noise_multiplier=z) for z in offered} == offered

    def test_more_noise_than_planned_is_added(self, node: Callable[..., Node]) -> None:
        host = node(noise_multiplier=1.0, noise_cohort_size=0)
        task = task_for(host, "update", cohort=5)
        task = dataclasses.replace(task, offer=dataclasses.replace(task.offer, noise_multiplier=8.0))
        total = decoded(host, task, [train(host, task, RecordDict())])
        assert total.std() == pytest.approx(8.0, rel=0.2)

    @pytest.mark.parametrize(("cohort", "survivors"), [(15, 14), (10**6, 9 * 10**5)])
    def test_a_cohort_larger_than_there_can_be(
        self, node: Callable[..., Node], cohort: int, survivors: int
    ) -> None:
        """The larger the cohort, the smaller each share of the noise."""
        assert self.ask(node(), cohort=cohort, survivors=survivors) == "cohort outside the policy"

    @pytest.mark.parametrize("step", ["mean", "lloyd", "sketch", "update"])
    @pytest.mark.parametrize("options", [{}, {"epsilon": math.inf}])
    def test_a_task_without_an_offer(
        self, node: Callable[..., Node], step: str, options: dict[str, Any]
    ) -> None:
        host, state = node(stage1="sketch" if step == "sketch" else "dp-kmeans", **options), RecordDict()
        reply = train(host, task_for(host, step, offer=None), state)
        assert refusal(reply) == "parameters differ from the run's"
        assert not state

    def test_an_offer_of_another_step(self, node: Callable[..., Node]) -> None:
        host = node(noise_multiplier=1.0, clip_norm=2.0)
        task = dataclasses.replace(task_for(host, "mean"), offer=task_for(host, "update").offer)
        assert refusal(train(host, task, RecordDict())) == "parameters differ from the run's"

    @pytest.mark.parametrize("step", ["mean", "lloyd", "sketch", "update"])
    def test_a_round_that_is_replayed(self, node: Callable[..., Node], step: str) -> None:
        """Two sums of one round would tell what its noise hides."""
        stage1 = "sketch" if step == "sketch" else "dp-kmeans"
        host, state = node(stage1=stage1, participation_cap=2), RecordDict()
        task = task_for(host, step)
        assert REFUSAL not in train(host, task, state)
        assert refusal(train(host, task, state)) == "stale round"
        assert StateLedger(state).rounds(USERS[0]) == 1

    def test_a_round_before_the_last_and_a_stage_before_the_last(self, node: Callable[..., Node]) -> None:
        host, state = node(t_in=4, t_tr=5), RecordDict()
        assert VECTOR in train(host, task_for(host, "update", round_=3), state)
        for step, round_ in (("update", 2), ("mean", 1), ("lloyd", 4)):
            assert refusal(train(host, task_for(host, step, round_=round_), state)) == "stale round"
        assert VECTOR in train(host, task_for(host, "update", round_=4), state)

    def test_if_one_user_was_there_nobody_takes_part(self, node: Callable[..., Node]) -> None:
        host, state = node(), RecordDict()
        train(host, task_for(host, "update", [3]), state)
        assert refusal(train(host, task_for(host, "update", [2, 3, 4]), state)) == "stale round"
        assert [StateLedger(state).rounds(user) for user in (2, 3, 4)] == [0, 1, 0]
        assert VECTOR in train(host, task_for(host, "update", [2, 4]), state)

    @pytest.mark.parametrize(("options", "cap"), [({"participation_cap": 2}, 2), ({}, 9), ({"t_tr": 2}, 2)])
    def test_one_user_every_time(self, node: Callable[..., Node], options: dict[str, Any], cap: int) -> None:
        """Of 20 rounds at q = 0.15, a user is in 9 at most but for 1 case in 1,000."""
        host, state = node(**{"t_tr": 20, "sampling_rate": 0.15} | options), RecordDict()
        task = task_for(host, "update", [0], cohort=3)
        reply = RecordDict()
        for round_ in range(1, cap + 2):
            offer = dataclasses.replace(task.offer, round=round_)
            reply = train(host, dataclasses.replace(task, round=round_, offer=offer), state)
            assert (VECTOR in reply) is (round_ <= cap)
        assert refusal(reply) == "too many rounds"
        assert StateLedger(state).taken(0, RUN, 2) == cap

    @pytest.mark.parametrize(("step", "round_"), [("mean", 3), ("lloyd", 3), ("update", 4), ("update", 0)])
    def test_a_round_that_is_not_planned(self, node: Callable[..., Node], step: str, round_: int) -> None:
        host = node(t_in=2, t_tr=3)
        task = task_for(host, step)
        assert task.offer is not None
        offer = task.offer if round_ == 0 else dataclasses.replace(task.offer, round=round_)
        asked = dataclasses.replace(task, round=round_, offer=offer)
        assert refusal(train(host, asked, RecordDict())) == "too many rounds"

    @pytest.mark.parametrize(
        ("step", "options"),
        [
            ("sketch", {}),
            ("lloyd", {"stage1": "sketch"}),
            ("mean", {"sketch_centre": "none"}),
            ("mean", {"stage1": "random"}),
            ("lloyd", {"strategy": "fedavg"}),
        ],
    )
    def test_a_step_that_is_none_of_the_runs(
        self, node: Callable[..., Node], step: str, options: dict[str, Any]
    ) -> None:
        """A sketch in place of a sum would show what is meant to be hidden among others."""
        host = node(noise_multiplier=2.0, **options)
        offered = dataclasses.replace(
            task_for(node(noise_multiplier=2.0), "mean").offer, noise_multiplier=2.0
        )
        mechanism = "zcdp" if step == "sketch" else "skellam"
        asked = task_for(host, step, offer=dataclasses.replace(offered, mechanism=mechanism))
        assert refusal(train(host, asked, RecordDict())) == "parameters differ from the run's"

    @pytest.mark.parametrize("z", [1e9, 1e30, 1e300])
    def test_noise_that_no_integer_holds(self, node: Callable[..., Node], z: float) -> None:
        assert self.ask(node(), noise_multiplier=z) == "parameters differ from the run's"

    def test_rounds_are_counted_by_stage(self, node: Callable[..., Node]) -> None:
        host, state = node(participation_cap=1), RecordDict()
        assert VECTOR in train(host, task_for(host, "mean"), state)
        assert refusal(train(host, task_for(host, "lloyd", round_=2), state)) == "too many rounds"
        assert VECTOR in train(host, task_for(host, "update"), state)

    def test_nothing_is_computed_for_a_round_that_is_refused(
        self, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*_: Any) -> Any:
            raise AssertionError("users' data was used")

        for name in ("train", "losses", "stage1_signals"):
            monkeypatch.setattr(Workbench, name, never)
        assert self.ask(node(), noise_multiplier=0.0) == "parameters differ from the run's"

    def test_a_round_that_then_fails_is_charged_all_the_same(
        self, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who could make a node fail after training would otherwise look twice."""
        monkeypatch.setattr(Workbench, "train", lambda *_: 1 / 0)
        host, state = node(), RecordDict()
        with pytest.raises(ZeroDivisionError):
            train(host, task_for(host, "update"), state)
        assert self.ask(host, state) == "stale round"

    def test_what_is_charged_is_what_the_server_sees(self, node: Callable[..., Node]) -> None:
        """Integers with their own sensitivities and noise, and nothing amplified."""
        host, state = node(stage1="sketch"), RecordDict()
        train(host, task_for(host, "sketch", round_=1), state)
        train(host, task_for(host, "update", round_=1), state)
        sketch, update = StateLedger(state).spent(USERS[0])
        assert sketch == ZcdpRelease(1 / (2 * host.plan.stage1**2), 1)
        assert isinstance(update, SkellamRelease)
        assert (update.sampling_rate, update.count) == (1.0, 1)
        assert math.sqrt(update.variance) / update.l2 == pytest.approx(host.plan.stage2, rel=0.1)

    def test_positions_of_the_papers_sketch_are_charged_as_unprotected(
        self, node: Callable[..., Node]
    ) -> None:
        host, state = node(stage1="sketch", sketch="paper"), RecordDict()
        train(host, task_for(host, "sketch"), state)
        (release,) = StateLedger(state).spent(USERS[0])
        assert type(release).__name__ == "UnprotectedRelease"

    def test_without_noise_nothing_is_checked_or_charged(self, node: Callable[..., Node]) -> None:
        host, state = node(epsilon=math.inf, diagnostics=False), RecordDict()
        task = task_for(host, "update")
        for _ in range(3):
            assert VECTOR in train(host, task, state)
        assert not state


class TestArrays:
    """What a server sends with a round: another shape could make one user count as many."""

    @pytest.mark.parametrize(
        ("step", "arrays"),
        [
            ("lloyd", {"mean": np.zeros((14, 256), np.float32)}),
            ("lloyd", {"mean": np.zeros((256, 1), np.float32)}),
            ("lloyd", {"mean": np.full(256, np.nan, np.float32)}),
            ("lloyd", {"mean": np.zeros(256)}),
            ("lloyd", {"centroids": np.zeros((16, 4, 255), np.float32)}),
            ("lloyd", {"centroids": np.zeros((4, 256), np.float32)}),
            ("lloyd", {"other": np.zeros(3, np.float32)}),
            ("mean", {"mean": np.zeros(256, np.float32)}),
            ("update", {"models": np.zeros((5, 1674), np.float32)}),
            ("update", {"models": np.full((4, 1674), np.inf, np.float32)}),
        ],
    )
    def test_that_are_not_the_plans_are_refused_uncharged(
        self, node: Callable[..., Node], step: str, arrays: dict[str, np.ndarray]
    ) -> None:
        host, state = node(), RecordDict()
        task = task_for(host, step)
        reply = train(host, replace(task, arrays={**task.arrays, **arrays}), state)
        assert refusal(reply) == "parameters differ from the run's"
        assert not state

    def test_that_are_missing_are_refused_uncharged(self, node: Callable[..., Node]) -> None:
        host, state = node(), RecordDict()
        for step in ("lloyd", "update"):
            assert refusal(train(host, replace(task_for(host, step), arrays={}), state))
        assert not state

    @pytest.mark.parametrize("choose", ["group", "zzz", ""])
    def test_a_way_to_choose_that_is_not_the_strategys(self, node: Callable[..., Node], choose: str) -> None:
        host, state = node(), RecordDict()
        task = task_for(host, "update", choose=choose)
        assert refusal(train(host, task, state)) == "parameters differ from the run's"
        assert not state

    @pytest.mark.parametrize("step", ["mean", "sketch"])
    def test_more_vectors_than_users_never_leave(
        self, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        host = node(stage1="sketch" if step == "sketch" else "dp-kmeans", diagnostics=False)
        real = Workbench.stage1_signals
        monkeypatch.setattr(Workbench, "stage1_signals", lambda self, ids: real(self, ids).repeat(2, 1))
        with pytest.raises(ValueError, match="10 vectors of 5 users"):
            train(host, task_for(host, step), RecordDict())

    def test_one_sketch_leaves_for_each_user(self, node: Callable[..., Node]) -> None:
        host = node(stage1="sketch")
        mean = {"mean": np.zeros((5000, 256), np.float32)}
        reply = train(host, replace(task_for(host, "sketch", round_=2), arrays=mean), RecordDict())
        assert refusal(reply) == "parameters differ from the run's"


class TestPolicy:
    """The owner of a node sets limits, whatever the run's configuration and the server say."""

    EASY = Policy(max_epsilon=1e6, delta=1e-5, min_noise_multiplier=0.1)
    REAL = {"noise_cohort_size": 0, "diagnostics": False}  # noqa: RUF012

    def ask(self, host: Node, step: str = "update", **more: Any) -> str:
        reply = train(host, task_for(host, step, **more), RecordDict())
        return "" if REFUSAL not in reply else refusal(reply)

    def test_what_is_within_it(self, node: Callable[..., Node], tmp_path: Path) -> None:
        host = node(policy=self.EASY, ledger=str(tmp_path), noise_multiplier=2.0, **self.REAL)
        assert [self.ask(host, "mean"), self.ask(host, "lloyd", round_=2), self.ask(host)] == ["", "", ""]
        with FileLedger(tmp_path) as ledger:
            assert [ledger.rounds(user) for user in range(14)] == [3 if u in USERS else 0 for u in range(14)]

    @pytest.mark.parametrize(
        ("policy", "options", "reason"),
        [
            ({}, {"epsilon": math.inf, "noise_multiplier": 0.0}, "noise under the policy"),
            ({"min_noise_multiplier": 3.0}, {}, "noise under the policy"),
            ({}, {"noise_cohort_size": 10_000}, "noise under the policy"),
            ({}, {"mechanism": "gaussian"}, "mechanism not accepted"),
            ({"mechanisms": ("discrete-gaussian",)}, {}, "mechanism not accepted"),
            ({"min_cohort": 11}, {}, "cohort outside the policy"),
            ({"max_cohort": 9, "min_cohort": 1}, {}, "cohort outside the policy"),
            ({"min_survivors": 10}, {}, "too few survivors allowed"),
            ({}, {"dropout_tolerance": 0.6}, "too few survivors allowed"),
            ({"min_colluder_share": 0.2}, {}, "too few colluders allowed for"),
            ({"min_clip_norm": 2.0}, {}, "clip norm outside the policy"),
            ({"max_clip_norm": 0.5}, {}, "clip norm outside the policy"),
            ({"max_sampling_rate": 0.5}, {}, "sampling rate outside the policy"),
            ({"max_epsilon": 0.1}, {}, "budget spent"),
        ],
        ids=str,
    )
    def test_what_is_outside(
        self,
        node: Callable[..., Node],
        tmp_path: Path,
        policy: dict[str, Any],
        options: dict[str, Any],
        reason: str,
    ) -> None:
        limits = dataclasses.replace(self.EASY, **policy)
        run = self.REAL | {"noise_multiplier": 2.0} | options
        assert self.ask(node(policy=limits, ledger=str(tmp_path), **run)) == reason
        with FileLedger(tmp_path) as ledger:
            assert ledger.rounds(USERS[0]) == 0

    def test_the_papers_sketch_has_no_finite_epsilon(self, node: Callable[..., Node], tmp_path: Path) -> None:
        options = self.REAL | {"noise_multiplier": 2.0, "stage1": "sketch"}
        kinds = {
            sketch: self.ask(node(policy=self.EASY, ledger=str(tmp_path), sketch=sketch, **options), "sketch")
            for sketch in ("paper", "projection")
        }
        assert kinds == {"paper": "mechanism not accepted", "projection": ""}

    def test_the_budget_is_that_of_all_runs(self, node: Callable[..., Node], tmp_path: Path) -> None:
        """A new run, and a node that starts anew with an empty state, find what was spent before."""
        host = node(noise_multiplier=2.0, **self.REAL)
        one = epsilon([SkellamRelease(*self.release(host, tmp_path / "probe"))], 1e-5)
        limits = dataclasses.replace(self.EASY, max_epsilon=1.5 * one)
        host = dataclasses.replace(host, policy=limits, ledger=str(tmp_path / "ledgers"))
        asked = []
        for run in ("1", "2", "3"):
            host = dataclasses.replace(host, run=run)
            task = task_for(host, "update")
            reply = train(
                host, dataclasses.replace(task, offer=dataclasses.replace(task.offer, run=run)), RecordDict()
            )
            asked.append("" if VECTOR in reply else refusal(reply))
        assert asked == ["", "", "budget spent"] or asked == ["", "budget spent", "budget spent"]

    def release(self, host: Node, folder: Path) -> tuple[float, float, float, float, int]:
        state = RecordDict()
        train(host, task_for(host, "update"), state)
        (found,) = StateLedger(state).spent(USERS[0])
        assert isinstance(found, SkellamRelease)
        return found.l1, found.l2, found.variance, found.sampling_rate, found.count

    def test_rounds_are_limited_over_runs(self, node: Callable[..., Node], tmp_path: Path) -> None:
        limits = dataclasses.replace(self.EASY, max_rounds=2)
        host = node(policy=limits, ledger=str(tmp_path), noise_multiplier=2.0, t_in=3, **self.REAL)
        assert self.ask(host, "mean") == self.ask(host, "lloyd", round_=2) == ""
        assert self.ask(host, "update") == "too many rounds"


class TestReveal:
    """Noise added in vain may be taken away once, by those who took part, and no more than was in vain."""

    OPTIONS = {"dropout_noise": "removable", "dropout_tolerance": 0.3, "noise_cohort_size": 0}  # noqa: RUF012

    @pytest.fixture
    def asked(self, node: Callable[..., Node]) -> tuple[Node, Task, RecordDict]:
        """A node after a round in which 3 of 10 may vanish."""
        host, state = node(noise_multiplier=2.0, **self.OPTIONS), RecordDict()
        task = task_for(host, "update")
        assert list(train(host, task, state)) == [VECTOR]
        return host, Task(REVEAL, 1, USERS, offer=task.offer), state

    @pytest.mark.parametrize("vanished", [0, 1, 2, 3])
    def test_keys_of_components_beyond_those_who_vanished(
        self, asked: tuple[Node, Task, RecordDict], vanished: int
    ) -> None:
        host, task, state = asked
        (key,) = state.config_records[REMOVABLE]["keys"]  # type: ignore[misc, str-unpack]
        assert isinstance(key, bytes)
        reply = train(host, dataclasses.replace(task, vanished=vanished), state)
        assert list(reply) == [KEYS]
        expected = [component_key(key, k) for k in range(vanished + 1, 4)]
        assert dict(reply.config_records[KEYS]) == {"keys": expected, "users": [len(USERS)]}
        assert key not in expected

    def test_once(self, asked: tuple[Node, Task, RecordDict]) -> None:
        host, task, state = asked
        train(host, task, state)
        with pytest.raises(ValueError, match="nothing to reveal"):
            train(host, task, state)

    @pytest.mark.parametrize("vanished", [-1, 4, 100])
    def test_more_than_may_vanish(self, asked: tuple[Node, Task, RecordDict], vanished: int) -> None:
        host, task, state = asked
        with pytest.raises(ValueError, match=rf"vanished = {vanished}: must be within 0\.\.3"):
            train(host, dataclasses.replace(task, vanished=vanished), state)

    @pytest.mark.parametrize(
        "change", [{"round": 2}, {"stage": 1}, {"run": "8"}, {"survivors": 1}, {"cohort": 14}], ids=str
    )
    def test_of_another_round(self, asked: tuple[Node, Task, RecordDict], change: dict[str, Any]) -> None:
        host, task, state = asked
        with pytest.raises(ValueError, match="nothing to reveal"):
            train(host, dataclasses.replace(task, offer=dataclasses.replace(task.offer, **change)), state)

    def test_without_a_round_before(self, node: Callable[..., Node]) -> None:
        host = node(noise_multiplier=2.0, **self.OPTIONS)
        for offer in (None, task_for(host, "update").offer):
            with pytest.raises(ValueError, match="nothing to reveal"):
                train(host, Task(REVEAL, 1, USERS, offer=offer), RecordDict())

    @pytest.mark.parametrize("users", [USERS[:2], [*USERS, 7], [7]], ids=str)
    def test_for_other_users_than_took_part(
        self, asked: tuple[Node, Task, RecordDict], users: list[int]
    ) -> None:
        """Their noise is drawn together, so it can only be revealed together."""
        host, task, state = asked
        before = dict(state.config_records[REMOVABLE])
        with pytest.raises(ValueError, match="users: must be those that took part"):
            train(host, dataclasses.replace(task, users=users), state)
        assert dict(state.config_records[REMOVABLE]) == before
        assert list(train(host, task, state)) == [KEYS]

    def test_keys_are_fresh_in_each_round(self, node: Callable[..., Node]) -> None:
        host, keys = node(noise_multiplier=2.0, **self.OPTIONS), set()
        for _ in range(3):
            state = RecordDict()
            train(host, task_for(host, "update"), state)
            keys |= set(state.config_records[REMOVABLE]["keys"])  # type: ignore[arg-type]
        assert len(keys) == 3

    def test_with_provisioned_noise_there_is_no_key(self, node: Callable[..., Node]) -> None:
        host, state = node(noise_multiplier=2.0), RecordDict()
        train(host, task_for(host, "update"), state)
        assert REMOVABLE not in state


class TestNoise:
    def noise(self, hosts: list[Node], step: str, cohort: list[int]) -> np.ndarray:
        """What the decoded sum over a cohort holds beyond the same sum without noise."""
        shared = hosts[0].workbench
        plain = dataclasses.replace(shared.config, epsilon=math.inf, noise_multiplier=0.0)
        bench = Workbench(plain, shared.users, shared.backbone, shared._activations)
        quiet = [dataclasses.replace(host, workbench=bench) for host in hosts]
        sums = []
        for nodes in (hosts, quiet):
            asked = {
                i: task_for(n, step, own, len(cohort))
                for i, n in enumerate(nodes)
                if (own := [user for user in cohort if user in n.users])
            }
            contents = [train(nodes[i], task, RecordDict()) for i, task in asked.items()]
            sums.append(decoded(nodes[0], next(iter(asked.values())), contents))
        return sums[0] - sums[1]

    @pytest.mark.parametrize("partitions", [1, 3])
    @pytest.mark.parametrize("cohort_size", [0, 100])
    @pytest.mark.parametrize(("step", "s"), [("mean", 1.0), ("lloyd", 1.0), ("update", 0.5)])
    def test_all_shares_make_up_sigma(
        self, node: Callable[..., Node], partitions: int, cohort_size: int, step: str, s: float
    ) -> None:
        """σ = z·S on the sum, times q·|K| / N with a noise cohort of N; over several nodes as over one.

        More by 1 / √0.9, as a tenth of a cohort of whatever size may vanish.
        """
        z, expected = 20.0, 0.7 * 14
        hosts = [
            node(i, partitions, noise_multiplier=z, clip_norm=0.5, noise_cohort_size=cohort_size)
            for i in range(partitions)
        ]
        sigma = z * s * (expected / cohort_size if cohort_size else 1) / math.sqrt(0.9)
        self.check(hosts, step, [0, 1, 2, 4, 5, 7, 12, 13], sigma, draws=1 if step == "update" else 15)

    @pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian", "gaussian"])
    @pytest.mark.parametrize("step", ["mean", "update"])
    @pytest.mark.parametrize(
        ("options", "honest"),
        [({}, 9), ({"colluding_share": 0.2}, 7), ({"dropout_tolerance": 0.3, "colluding_share": 0.1}, 6)],
    )
    def test_is_whole_without_those_who_may_vanish_and_those_who_may_collude(
        self,
        node: Callable[..., Node],
        mechanism: str,
        step: str,
        options: dict[str, object],
        honest: int,
    ) -> None:
        """Of a cohort of 10, so many users' noise makes up σ; all of them add more."""
        host = node(noise_multiplier=4.0, noise_cohort_size=0, mechanism=mechanism, **options)
        self.check([host], step, list(range(10)), 4 * math.sqrt(10 / honest), 4 if step == "mean" else 1)

    @pytest.mark.parametrize("partitions", [1, 3])
    def test_removable_parts_add_up_to_the_same(self, node: Callable[..., Node], partitions: int) -> None:
        options = {"noise_multiplier": 4.0, "noise_cohort_size": 0, "dropout_tolerance": 0.3}
        hosts = [node(i, partitions, dropout_noise="removable", **options) for i in range(partitions)]
        self.check(hosts, "update", list(range(10)), 4 * math.sqrt(10 / 7), draws=1)

    def check(self, hosts: list[Node], step: str, cohort: list[int], sigma: float, draws: int) -> None:
        noise = np.concatenate([self.noise(hosts, step, cohort) for _ in range(draws)])
        energy = (noise**2).sum() / sigma**2
        assert noise.size > 900
        assert stats.chi2.ppf(TINY_P, noise.size) < energy < stats.chi2.isf(TINY_P, noise.size)

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update", "sketch"])
    def test_never_comes_from_a_seed(self, node: Callable[..., Node], step: str) -> None:
        host = node(stage1="sketch" if step == "sketch" else "dp-kmeans", diagnostics=False)
        seen = set()
        for _ in range(3):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            content = train(host, task_for(host, step), RecordDict())
            (record,) = content.array_records.values()
            seen |= {array.data for array in record.values()}
        assert len(seen) == 3

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    def test_without_noise_replies_repeat(self, node: Callable[..., Node], step: str) -> None:
        host = node(epsilon=math.inf)
        first, second = (vector(train(host, task_for(host, step), RecordDict())) for _ in range(2))
        np.testing.assert_array_equal(first, second)

    def test_sums_are_those_of_the_bounded_updates(self, node: Callable[..., Node]) -> None:
        host = node(epsilon=math.inf)
        task = task_for(host, "update")
        models = torch.from_numpy(task.arrays["models"])
        choices = choose(host, task, models)
        updates, _ = host.workbench.train(USERS, models, choices, 1)
        expected = bound_update(host.config, updates, choices, 4).sum(dim=0)
        np.testing.assert_allclose(vector(train(host, task, RecordDict())), expected, atol=1e-6)


class TestUpdatesThatAreNotFinite:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    def test_only_that_user_is_left_out(
        self, node: Callable[..., Node], bad_users: dict[int, float], bad: float, step: str
    ) -> None:
        host = node(epsilon=math.inf)
        without = vector(train(host, task_for(host, step, [0, 2, 6]), RecordDict()))
        bad_users |= {1: bad, 5: -bad}
        spoilt = vector(train(host, task_for(host, step), RecordDict()))
        np.testing.assert_allclose(spoilt, without, atol=1e-6)

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    def test_if_all_are_left_out_the_noise_is_whole(
        self, node: Callable[..., Node], bad_users: dict[int, float], step: str
    ) -> None:
        bad_users |= dict.fromkeys(range(14), math.nan)
        host = node(noise_multiplier=2.0, noise_cohort_size=0)
        task = task_for(host, step, cohort=5)
        total = np.concatenate([decoded(host, task, [train(host, task, RecordDict())]) for _ in range(16)])
        energy = (total**2).sum() * 0.9 / 2.0**2
        assert stats.chi2.ppf(TINY_P, total.size) < energy < stats.chi2.isf(TINY_P, total.size)

    def test_sketches_of_such_users_are_zero(
        self, node: Callable[..., Node], bad_users: dict[int, float]
    ) -> None:
        """The paper's sketch shows who they are; others add noise to zero as they would to anything."""
        bad_users |= {1: math.nan, 5: math.inf}
        host = node(stage1="sketch", sketch="paper")
        rows = unpack(train(host, task_for(host, "sketch"), RecordDict()).array_records[SKETCHES])["rows"]
        assert sorted(rows.any(axis=1)) == [False, False, True, True, True]
        quiet = node(stage1="sketch", epsilon=math.inf)
        rows = unpack(train(quiet, task_for(quiet, "sketch"), RecordDict()).array_records[SKETCHES])["rows"]
        assert sorted(rows.any(axis=1)) == [False, False, True, True, True]

    def test_they_are_reported_at_the_next_evaluation(
        self, node: Callable[..., Node], bad_users: dict[int, float]
    ) -> None:
        host, state = node(), RecordDict()
        bad_users |= {1: math.nan}
        train(host, task_for(host, "update", round_=1), state)
        bad_users |= {2: math.inf}
        train(host, task_for(host, "update", [0, 1, 2], round_=2), state)
        answer = unpack(
            evaluate(host, task_for(host, "evaluate", round_=2), state).array_records[DIAGNOSTICS]
        )
        assert answer["left_out"].tolist() == [1, 2]
        assert answer["norms"].shape == (3,)
        assert np.isfinite(answer["norms"]).tolist() == [True, False, False]
        again = unpack(evaluate(host, task_for(host, "evaluate", round_=2), state).array_records[DIAGNOSTICS])
        assert again["left_out"].size == 0
        assert "norms" not in again

    def test_norms_of_an_earlier_round_are_not_reported(self, node: Callable[..., Node]) -> None:
        host, state = node(), RecordDict()
        train(host, task_for(host, "update", round_=1), state)
        answer = unpack(
            evaluate(host, task_for(host, "evaluate", round_=3), state).array_records[DIAGNOSTICS]
        )
        assert "norms" not in answer

    def test_zero_updates_train_on(self, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
        size, width = (node().workbench.backbone.spec.size, node().workbench.backbone.sketch.size)
        still = torch.zeros(len(USERS), size), torch.tensor([0, 1, 2, 3, 0])
        monkeypatch.setattr(Workbench, "train", lambda *_: still)
        monkeypatch.setattr(Workbench, "stage1_signals", lambda b, ids: torch.zeros(len(ids), width))
        host, state = node(epsilon=math.inf), RecordDict()
        assert not vector(train(host, task_for(host, "mean"), state)).any()
        assert not vector(train(host, task_for(host, "lloyd"), state)).any()
        sent = vector(train(host, task_for(host, "update"), state))
        assert not sent[:-4].any()
        assert sent[-4:].sum() == pytest.approx(5 * 0.1, abs=1e-5)  # they are counted all the same
        answer = unpack(evaluate(host, task_for(host, "evaluate"), state).array_records[DIAGNOSTICS])
        assert answer["left_out"].size == 0


class TestChoose:
    def test_by_loss(self, node: Callable[..., Node]) -> None:
        host = node()
        models = torch.from_numpy(models_for(host))
        choices = choose(host, task_for(host, "update"), models)
        assert torch.equal(choices, host.workbench.losses(USERS, models).argmin(dim=1))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_model_that_broke_is_never_chosen(self, node: Callable[..., Node], bad: float) -> None:
        host = node()
        models = torch.from_numpy(models_for(host))
        models[[0, 2]] = bad
        assert set(choose(host, task_for(host, "update"), models).tolist()) <= {1, 3}

    def test_if_all_broke_users_choose_the_first(self, node: Callable[..., Node]) -> None:
        host = node()
        assert not choose(
            host, task_for(host, "update"), torch.full((4, host.workbench.backbone.spec.size), math.nan)
        ).any()

    def test_nearest(self, node: Callable[..., Node]) -> None:
        host = node()
        deltas = host.workbench.stage1_signals(USERS)
        centroids = deltas[[3, 0]] / deltas[[3, 0]].norm(dim=1, keepdim=True)
        task = task_for(host, "update", choose="nearest", arrays={"centroids": centroids.numpy()})
        choices = choose(host, task, torch.zeros(2, 3))
        assert choices[0] == 1
        assert choices[3] == 0

    def test_group(self, node: Callable[..., Node]) -> None:
        host = node()
        task = task_for(host, "update", choose="group")
        assert choose(host, task, torch.zeros(4, 3)).tolist() == [user % 4 for user in USERS]

    def test_one_model_leaves_no_choice(self, node: Callable[..., Node]) -> None:
        assert not choose(node(), task_for(node(), "update", choose="loss"), torch.zeros(1, 3)).any()

    def test_unknown(self, node: Callable[..., Node]) -> None:
        with pytest.raises(ValueError, match="unknown way to choose a cluster 'dice'"):
            choose(node(), task_for(node(), "update", choose="dice"), torch.zeros(2, 3))


class TestEvaluate:
    def test_refused_without_diagnostics(self, node: Callable[..., Node]) -> None:
        host = node(diagnostics=False)
        with pytest.raises(ValueError, match="diagnostics = false"):
            evaluate(host, task_for(host, "evaluate"), RecordDict())

    def test_answers(self, node: Callable[..., Node]) -> None:
        host = node()
        answer = unpack(evaluate(host, task_for(host, "evaluate"), RecordDict()).array_records[DIAGNOSTICS])
        assert answer["users"].tolist() == USERS
        assert answer["test_group"].tolist() == [user % 4 for user in USERS]
        assert answer["losses"].shape == (5, 4)
        assert answer["choices"].tolist() == answer["losses"].argmin(axis=1).tolist()
        assert answer["groups"].tolist() == [0, 1, 2, 3]
        assert answer["total"].tolist() == [8] * 4
        assert (answer["correct"] <= 8).all()

    def test_nodes_share_the_test_images_out(self, node: Callable[..., Node]) -> None:
        def answers(partitions: int) -> list[dict[str, np.ndarray]]:
            hosts = [node(i, partitions) for i in range(partitions)]
            contents = [evaluate(h, task_for(h, "evaluate", list(h.users)), RecordDict()) for h in hosts]
            return [unpack(content.array_records[DIAGNOSTICS]) for content in contents]

        (whole,), parts = answers(1), answers(3)
        for name in ("correct", "total"):
            np.testing.assert_array_equal(np.sum([part[name] for part in parts], axis=0), whole[name])


def test_the_plan_is_the_nodes_own(node: Callable[..., Node]) -> None:
    """Noise comes from the configuration and the users there are, not from anything in a message."""
    assert node().plan.stage2 > 0
    assert client.plan(node().config, 14, node().shapes) == node().plan
    assert node(epsilon=math.inf).plan.stage2 == 0
