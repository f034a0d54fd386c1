import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from scipy import stats
from support import tiny
from torch import Tensor

from pina_flwr import client
from pina_flwr.client import DIAGNOSTICS, SKETCHES, Node, bound_update, choose, evaluate, open_node, train
from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.messages import Task, unpack
from pina_flwr.secure_sum.interface import VECTOR
from pina_flwr.training.workbench import Workbench

USERS = [0, 1, 2, 5, 6]
TINY_P = 1e-8  # how rarely a statistical test may fail by chance


@pytest.fixture(scope="module")
def bench() -> Workbench:
    """One workbench; tests give nodes on it other options."""
    return open_node(tiny(), {"partition-id": 0, "num-partitions": 1}).workbench


@pytest.fixture
def node(bench: Workbench) -> Callable[..., Node]:
    def make(partition: int = 0, partitions: int = 1, **options: object) -> Node:
        config = tiny(**options)
        copy = Workbench(
            config, dataclasses.replace(bench.users, config=config), bench.backbone, bench._activations
        )
        return Node(copy, partition, partitions)

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

    real_train, real_deltas = Workbench.train, Workbench.stage1_deltas
    monkeypatch.setattr(Workbench, "train", train)
    monkeypatch.setattr(Workbench, "stage1_deltas", lambda b, ids: spoil(ids, real_deltas(b, ids)))
    return bad


def models_for(node: Node) -> np.ndarray:
    """Four models that differ."""
    start = node.workbench.backbone.spec.start()
    return (start + 0.05 * torch.randn(4, len(start), generator=torch.Generator().manual_seed(5))).numpy()


def task_for(
    node: Node, step: str, users: list[int] = USERS, cohort: int = 10, round_: int = 1, **more: object
) -> Task:
    size = node.workbench.backbone.sketch.size
    centroids = np.random.default_rng(1).standard_normal((2, 4, size)).astype(np.float32)
    arrays = {
        "mean": {},
        "lloyd": {"centroids": centroids},
        "sketch": {},
        "update": {"models": models_for(node)},
        "evaluate": {"models": models_for(node)},
    }[step]
    return Task(step, round_, users, cohort, **({"choose": "loss", "arrays": arrays} | more))  # type: ignore[arg-type]


def vector(content: RecordDict) -> np.ndarray:
    (array,) = content.array_records[VECTOR].values()
    return array.numpy()


class TestOpenNode:
    @pytest.mark.parametrize(
        "node_config",
        [{}, {"partition-id": 0}, {"num-partitions": 2}, {"partition-id": "a", "num-partitions": 2}],
    )
    def test_needs_its_place(self, node_config: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match="must give partition-id and num-partitions as whole numbers"):
            open_node(tiny(), node_config)

    @pytest.mark.parametrize(("partition", "partitions"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
    def test_a_place_that_is_none(self, partition: int, partitions: int) -> None:
        with pytest.raises(ConfigError, match=f"partition-id = {partition}: must be in 0..{partitions - 1}"):
            open_node(tiny(), {"partition-id": partition, "num-partitions": partitions})

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
        joint = bound_update(RunConfig(strategy="ifca", epsilon=math.inf), self.updates, self.choices, 3)
        assert joint[0].tolist()[2:4] == [3, 4]
        assert not joint[3].any()

    def test_without_privacy_the_others_clip_all_the_same(self) -> None:
        joint = bound_update(RunConfig(normality="none", epsilon=math.inf), self.updates, self.choices, 3)
        assert joint[0].norm() == pytest.approx(1, abs=1e-5)


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
        d, h = host.workbench.backbone.spec.size, host.workbench.backbone.sketch.size
        sizes = {"mean": h, "lloyd": 2 * 4 * h, "update": 4 * d + 4}
        assert (array.dtype, tuple(array.shape)) == ("float32", (sizes[step],))

    def test_sketches_and_nothing_else(self, node: Callable[..., Node]) -> None:
        host = node(stage1="sketch")
        content = train(host, task_for(host, "sketch"), RecordDict())
        assert list(content) == [SKETCHES]
        rows = unpack(content.array_records[SKETCHES])
        width = host.workbench.backbone.sketch.size
        assert {name: (r.shape, r.dtype) for name, r in rows.items()} == {"rows": ((5, width), np.float32)}
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
        host, state = node(diagnostics=diagnostics), RecordDict()
        for step in ("mean", "lloyd", "update"):
            train(host, task_for(host, step), state)
        assert bool(state) is diagnostics

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
            train(node(), Task("steal", 1, [0], 1), RecordDict())

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
    def test_a_cohort_smaller_than_its_users_is_refused(self, node: Callable[..., Node], step: str) -> None:
        """Its share of the noise would be too small."""
        with pytest.raises(ValueError, match="noise share"):
            train(node(), task_for(node(), step, cohort=4), RecordDict())


class TestNoise:
    def noises(self, host: Node, step: str, users: list[int], cohort: int) -> np.ndarray:
        """What a reply holds beyond what the same task gives without noise."""
        quiet = Node(
            Workbench(
                dataclasses.replace(host.config, epsilon=math.inf, noise_multiplier=0.0),
                host.workbench.users,
                host.workbench.backbone,
                host.workbench._activations,
            ),
            host.partition,
            host.partitions,
        )
        task = task_for(host, step, users, cohort)
        loud, silent = (vector(train(n, task, RecordDict())).astype(np.float64) for n in (host, quiet))
        return loud - silent

    @pytest.mark.parametrize("partitions", [1, 3])
    @pytest.mark.parametrize("cohort_size", [0, 100])
    @pytest.mark.parametrize(("step", "s"), [("mean", 1.0), ("lloyd", 1.0), ("update", 0.5)])
    def test_all_shares_make_up_sigma(
        self, node: Callable[..., Node], partitions: int, cohort_size: int, step: str, s: float
    ) -> None:
        """σ = z·S on the sum, times q·|K| / N with a noise cohort of N; over several nodes as over one."""
        z, expected = 20.0, 0.7 * 14
        hosts = [
            node(i, partitions, noise_multiplier=z, clip_norm=0.5, noise_cohort_size=cohort_size)
            for i in range(partitions)
        ]
        cohort = [0, 1, 2, 4, 5, 7, 12, 13]
        total, draws = np.zeros(0), 1 if step == "update" else 15
        for _ in range(draws):
            parts = [
                self.noises(host, step, own, len(cohort))
                for host in hosts
                if (own := [user for user in cohort if user in host.users])
            ]
            total = np.concatenate([total, np.sum(parts, axis=0)])
        sigma = z * s * (expected / cohort_size if cohort_size else 1)
        energy = (total**2).sum() / sigma**2
        assert total.size > 900
        assert stats.chi2.ppf(TINY_P, total.size) < energy < stats.chi2.isf(TINY_P, total.size)

    @pytest.mark.parametrize("step", ["mean", "lloyd", "update", "sketch"])
    def test_never_comes_from_a_seed(self, node: Callable[..., Node], step: str) -> None:
        host, stage1 = node(), "sketch" if step == "sketch" else "dp-kmeans"
        host = node(stage1=stage1)
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
        content = [vector(train(host, task_for(host, step, cohort=5), RecordDict())) for _ in range(16)]
        total = np.concatenate(content).astype(np.float64)
        energy = (total**2).sum() / 2.0**2
        assert stats.chi2.ppf(TINY_P, total.size) < energy < stats.chi2.isf(TINY_P, total.size)

    def test_sketches_of_such_users_are_zero(
        self, node: Callable[..., Node], bad_users: dict[int, float]
    ) -> None:
        bad_users |= {1: math.nan, 5: math.inf}
        host = node(stage1="sketch")
        rows = unpack(train(host, task_for(host, "sketch"), RecordDict()).array_records[SKETCHES])["rows"]
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
        monkeypatch.setattr(Workbench, "stage1_deltas", lambda b, ids: torch.zeros(len(ids), width))
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
        deltas = host.workbench.stage1_deltas(USERS)
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
    assert client.plan(node().config, 14) == node().plan
    assert node(epsilon=math.inf).plan.stage2 == 0
