"""The round that all strategies share, over a network that behaves and one that does not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from support import (
    LocalGrid,
    by_round,
    decoded,
    failed,
    json_of,
    lost,
    models_sent,
    node_id,
    refused,
    rows_of,
    run,
    twice,
    vector_of,
    with_content,
    with_vector,
)

from pina_flwr import server
from pina_flwr.client import DIAGNOSTICS, SKETCHES
from pina_flwr.config import RunConfig
from pina_flwr.messages import EVALUATE, Task, pack, request, unpack
from pina_flwr.models.backbone import load_backbone
from pina_flwr.normality import Aggregates, rule
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.secure_sum.interface import VECTOR
from pina_flwr.strategies.clustered import TrainingFailed, sketches_in
from pina_flwr.strategies.sampler import Sampler
from pina_flwr.training.workbench import Workbench

Make = Callable[..., RunConfig]


def final_models(config: RunConfig) -> np.ndarray:
    """What the run left as adapters [C, numbers]."""
    folders = sorted((Path(config.output) / "adapters").iterdir())
    saved = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    return np.stack([np.concatenate([t[n].numpy().ravel() for n in sorted(t)]) for t in saved])


class TestSpread:
    def test_all_test_images_count_when_nodes_outnumber_users(self, config: Make) -> None:
        c = config(strategy="fedavg", epsilon=math.inf, num_users=2, sampling_rate=1.0, test_images=10)
        grid = run(c, 5)
        replies = [e.reply.content.array_records for e in grid.exchanges]
        answers = [unpack(records[DIAGNOSTICS]) for records in replies if DIAGNOSTICS in records]
        assert answers
        rounds = len(rows_of(c))
        assert sum(a["total"].sum() for a in answers) == 10 * c.rotations * rounds

    @pytest.mark.parametrize("stage1", ["dp-kmeans", "sketch"])
    def test_does_not_matter(self, config: Make, tmp_path: Path, stage1: str) -> None:
        models, scores = {}, {}
        for nodes in (1, 2, 7):
            c = config(epsilon=math.inf, stage1=stage1, t_in=3, output=str(tmp_path / str(nodes)))
            run(c, nodes)
            models[nodes] = final_models(c)
            scores[nodes] = [
                (r.accuracy, r.clustering_accuracy, r.cluster_sizes, r.cohort) for r in rows_of(c)
            ]
        for nodes in (2, 7):
            np.testing.assert_allclose(models[nodes], models[1], atol=2e-5)
            assert scores[nodes] == scores[1]
        assert np.ptp(models[1], axis=0).max() > 1e-3  # there is something to compare

    def test_one_message_a_node_and_round(self, config: Make) -> None:
        grid = run(config(epsilon=math.inf), 3)
        for step, round_ in (("mean", 1), ("lloyd", 2), ("update", 1), ("update", 2)):
            asked = [e.request.metadata.dst_node_id for e in grid.trained(step, round_)]
            assert len(asked) == len(set(asked)) <= 3


class TestNoise:
    def test_one_seed_gives_one_result_without_noise_and_never_with_it(
        self, config: Make, tmp_path: Path
    ) -> None:
        def twice_with(z: float) -> tuple[np.ndarray, np.ndarray]:
            options = {"epsilon": math.inf, "noise_multiplier": z, "bits": 32}
            runs = [config(**options, output=str(tmp_path / f"{z}-{i}")) for i in range(2)]
            for c in runs:
                run(c)
            return final_models(runs[0]), final_models(runs[1])

        np.testing.assert_array_equal(*twice_with(0.0))
        first, second = twice_with(1e-3)
        assert (first != second).any(axis=1).all()

    @pytest.mark.parametrize(
        ("tolerance", "noise"), [(0.0, "provision"), (0.3, "provision"), (0.3, "removable")]
    )
    def test_rows_give_its_size(self, config: Make, tolerance: float, noise: str) -> None:
        """Nobody vanishes, so all that is added for the case that they do is in the sum, or removed."""
        c = config(
            noise_multiplier=3.0,
            clip_norm=0.5,
            noise_cohort_size=1_000,
            dropout_tolerance=tolerance,
            dropout_noise=noise,
        )
        run(c)
        extra = 1.0 if noise == "removable" else math.sqrt(1 / (1 - tolerance))
        sigma = np.array([3 / 1000] * 2 + [3 * 0.5 / 1000] * 2)
        assert [row.noise_std for row in rows_of(c)] == pytest.approx((sigma * extra).tolist())


class TestArithmetic:
    @pytest.mark.parametrize("normality", ["count", "paper", "paper-no-zeroing", "energy", "none"])
    def test_models_move_by_the_scaled_mean(self, config: Make, normality: str) -> None:
        """W_i ← W_i + rate·w_i·Δ_i, with Δ the sum over the cohort through the EXPECTED cohort q·|K|."""
        c = config(
            normality=normality,
            epsilon=math.inf,
            stage1="random",
            server_lr=2.0,
            server_lr_no=3.0,
            t_no=1,
            t_tr=3,
        )
        grid = run(c, 2)
        rows = rows_of(c)
        for t, rate in ((1, 3.0), (2, 2.0)):
            before, after = models_sent(grid, t), models_sent(grid, t + 1)
            total = np.sum([vector_of(e.reply).astype(float) for e in grid.trained("update", t)], axis=0)
            mean = total / (0.7 * 14)
            means, extra = mean[: before.size].reshape(before.shape), mean[before.size :]
            shares = extra / 0.1 if normality == "count" else None
            weights = rule(c, t)[0](Aggregates(means, 0.0, shares, 0.0))
            assert rows[t - 1].weights == pytest.approx(weights.tolist())
            np.testing.assert_allclose(after, before + rate * weights[:, None] * means, atol=1e-6)

    def test_shares_are_those_of_the_cohort(self, config: Make) -> None:
        """The noisy count of a cluster through q·|K|: without noise, its users over the expected cohort."""
        c = config(strategy="oracle", epsilon=math.inf, sampling_rate=0.9)
        grid = run(c)
        users = [user for e in grid.trained("update", 1) for user in e.task.users]
        sizes = np.bincount([user % 4 for user in users], minlength=4)
        assert sizes.min() > 0
        assert len(users) != 14
        assert rows_of(c)[0].weights == pytest.approx((0.9 * 14 / sizes).tolist(), rel=1e-4)

    def test_an_empty_cluster_under_eq_8_does_not_stop_the_others(self, config: Make) -> None:
        """Models start as good as alike, so every user picks the first of them."""
        c = config(normality="paper", epsilon=math.inf, strategy="pina-ri", random_init_norm=1e-30, t_no=2)
        grid = run(c)
        assert rows_of(c)[0].weights == [1, 0, 0, 0]
        moved = (models_sent(grid, 2) != models_sent(grid, 1)).any(axis=1)
        assert moved.tolist() == [True, False, False, False]


class TestCohort:
    def test_is_a_poisson_sample(self, config: Make) -> None:
        grid = run(config(strategy="fedavg", epsilon=math.inf, t_tr=40, diagnostics=False, sampling_rate=0.3))
        cohorts = [tuple(e.task.users) for e in grid.trained()]
        assert len(set(cohorts)) > 30
        assert 0.2 < sum(map(len, cohorts)) / (40 * 14) < 0.4
        assert all(e.task.offer.cohort == len(e.task.users) for e in grid.trained())  # type: ignore[union-attr]

    @pytest.mark.parametrize("z", [0.0, 1.0])
    def test_is_a_secret_in_a_private_run(self, config: Make, z: float) -> None:
        """Amplification holds against those who cannot tell who was sampled; anybody may know the seed."""
        c = config(strategy="fedavg", epsilon=math.inf, noise_multiplier=z, t_tr=6, diagnostics=False)
        first, second = ([e.task.users for e in run(c).trained()] for _ in range(2))
        assert (first == second) is not c.private

    @pytest.mark.parametrize("z", [0.0, 1.0])
    def test_if_empty_in_all_rounds_the_run_has_failed_and_models_are_saved(
        self, config: Make, flwr_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, z: float
    ) -> None:
        monkeypatch.setattr(Sampler, "cohort", lambda *_: [])
        c = config(epsilon=math.inf, noise_multiplier=z)
        with pytest.raises(TrainingFailed, match="every round of stage 2 was dropped: no user was sampled"):
            run(c, 2)
        rows = rows_of(c)
        assert [row.dropped for row in rows] == [None if z else "no user was sampled"] * 4
        assert [row.cohort for row in rows] == [0] * 4
        assert ("cohort 0 · DROPPED: no user was sampled" in flwr_log.text) is (z == 0)
        assert not (Path(c.output) / "summary.json").exists()
        assert len(list((Path(c.output) / "adapters").glob("*/adapter_config.json"))) == c.clusters

    @pytest.mark.parametrize("dropout_noise", ["provision", "removable"])
    def test_an_empty_one_gets_the_noise_of_any_other(
        self, config: Make, monkeypatch: pytest.MonkeyPatch, dropout_noise: str
    ) -> None:
        """Recipients who see that a round changed nothing would know that nobody was sampled."""
        full = Sampler.cohort
        monkeypatch.setattr(Sampler, "cohort", lambda self, s, t: [] if t == 1 else full(self, s, t))
        c = config(
            strategy="fedavg",
            noise_cohort_size=0,
            noise_multiplier=1.0,
            sampling_rate=1.0,
            participation_cap=2,
            colluding_share=0.3,
            dropout_noise=dropout_noise,
        )
        grid = run(c)
        first, second = rows_of(c)
        assert first.noise_std == pytest.approx(second.noise_std)
        after = models_sent(grid, 2)
        start = load_backbone(c, 10).spec.start().numpy()
        assert (after - start).std() == pytest.approx(first.noise_std, rel=0.1)

    def test_a_dead_worker_ends_the_run_at_once(self, config: Make) -> None:
        """Flower starts no other, so every later round would be dropped too, and charged."""

        def died(request: Message, reply: Message) -> list[Message]:
            return [Message(Error(0, "ray.exceptions.ActorDiedError: the actor died"), reply_to=request)]

        c = config(t_tr=5, noise_multiplier=1.0, sampling_rate=0.95)
        with pytest.raises(TrainingFailed, match="a worker of the simulation died"):
            run(c, 2, intercept=by_round({4: died}))
        assert [row.dropped is None for row in rows_of(c)] == [True] * 3 + [False]
        assert len(list((Path(c.output) / "adapters").glob("*/adapter_config.json"))) == c.clusters

    def test_if_empty_models_stay_as_they_are(self, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Sampler, "cohort", lambda _, stage, t: [] if t % 3 else [1, 2, 5])
        c = config(strategy="fedavg", epsilon=math.inf, t_tr=12)
        grid = run(c)
        empty = [row.round for row in rows_of(c) if row.dropped]
        asked = [e.task.round for e in grid.trained()]
        assert empty
        assert sorted(empty + asked) == list(range(1, 13))
        models = {row.round: row.accuracy for row in rows_of(c)}
        assert all(models[t] == models[t - 1] for t in empty if t > 1)


class TestUpdatesThatAreNotFinite:
    def test_one_user(
        self, config: Make, flwr_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, bad = Workbench.train, 4

        def train(bench: Workbench, ids: list[int], *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            updates, choices = real(bench, ids, *rest)
            updates[[i for i, user in enumerate(ids) if user == bad], 0] = math.nan
            return updates, choices

        monkeypatch.setattr(Workbench, "train", train)
        c = config(t_tr=6, epsilon=math.inf, sampling_rate=0.5)
        grid = run(c, 2)
        there = [any(bad in e.task.users for e in grid.trained("update", t)) for t in range(1, 7)]
        assert set(there) == {True, False}
        rows = rows_of(c)[2:]
        assert [row.left_out for row in rows] == [int(was) for was in there]
        assert not any(row.dropped for row in rows)
        assert flwr_log.text.count("left out, update not finite: 1 ") == sum(there)
        assert np.isfinite(final_models(c)).all()

    def test_all_users(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        """Training that diverges: nothing is added, so without noise the models stay as they are."""
        c = config(strategy="fedavg", epsilon=math.inf, learning_rate=1e30, local_epochs=3)
        grid = run(c, 2)
        rows = rows_of(c)
        assert all(row.left_out == row.cohort > 1 for row in rows)
        assert f"left out, update not finite: {rows[0].cohort} " in flwr_log.text
        np.testing.assert_array_equal(models_sent(grid, 2), models_sent(grid, 1))

    def test_all_users_with_noise(self, config: Make) -> None:
        """The sum still carries the whole noise."""
        c = config(
            strategy="fedavg", noise_multiplier=5.0, noise_cohort_size=0, learning_rate=1e30, local_epochs=3
        )
        grid = run(c, 3)
        total, row = decoded(grid, "update", 1), rows_of(c)[0]
        assert total.size > 1_000
        assert total.std() == pytest.approx(5.0 / math.sqrt(0.9), rel=6 / math.sqrt(2 * total.size))
        assert row.left_out == row.cohort

    def test_in_stage_1(self, config: Make) -> None:
        c = config(epsilon=math.inf, stage1_learning_rate=1e30, stage1_epochs=3)
        grid = run(c)
        asked = {user for e in grid.trained("mean") + grid.trained("lloyd") for user in e.task.users}
        assert rows_of(c)[1].left_out == len(asked)
        assert not vector_of(grid.trained("lloyd")[0].reply).any()
        assert np.isfinite(final_models(c)).all()

    def test_are_counted_since_the_last_evaluation(self, config: Make) -> None:
        c = config(
            strategy="fedavg", epsilon=math.inf, learning_rate=1e30, local_epochs=3, evaluate_every=3, t_tr=4
        )
        grid = run(c)
        users = [{user for e in grid.trained("update", t) for user in e.task.users} for t in range(1, 5)]
        left_out = [row.left_out for row in rows_of(c)]
        assert left_out == [0, 0, len(users[0] | users[1] | users[2]), len(users[3])]


SURVIVED = "7 of 14 members survived, 13 are needed"
BROKEN = SURVIVED + " (a node sent something else than {size} numbers)"
FAULTS = {
    "lost": (lost, f"{SURVIVED}, the others sent no answer in time"),
    "failed": (failed, f"{SURVIVED} (a node failed: out of memory)"),
    "refused": (refused, f"{SURVIVED} (clients refused: budget spent)"),
    "twice": (twice, "a node answered twice, or was not asked"),
    "too large": (with_vector(lambda v: v | np.uint32(1 << 20)), BROKEN),
    "too long": (with_vector(lambda v: np.append(v, v[:1])), BROKEN),
    "float32": (with_vector(lambda v: v.astype(np.float32)), BROKEN),
    "float64": (with_vector(lambda v: v.astype(np.float64)), BROKEN),
    "signed": (with_vector(lambda v: v.astype(np.int32)), BROKEN),
    "metrics beside it": (
        with_content(lambda content: RecordDict(dict(content) | {"m": MetricRecord({"loss": 0.5})})),
        BROKEN,
    ),
    "a config in its place": (with_content(lambda _: RecordDict({VECTOR: ConfigRecord({"a": 1})})), BROKEN),
}
NAN = with_vector(lambda v: np.where(np.arange(v.size) == 5, np.nan, v).astype(np.float32))


class TestSecureSumFaults:
    """One node in two is half of the cohort: more than may vanish."""

    def test_drop_the_round_and_no_more(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        """One fault a round of stage 2, of one node in two; the last round is whole again."""
        t_tr = len(FAULTS) + 1
        faults = {3 + i: fault for i, (fault, _) in enumerate(FAULTS.values())}
        c = config(t_tr=t_tr, sampling_rate=1.0, noise_multiplier=1.0)
        grid = run(c, 2, intercept=by_round(faults))
        rows = rows_of(c)
        size = vector_of(grid.trained("update", t_tr)[0].reply).size
        reasons = [reason.format(size=size) for _, reason in FAULTS.values()]
        assert [row.dropped for row in rows] == [None, None, *reasons, None]
        for reason in reasons:
            assert f"DROPPED: {reason}" in flwr_log.text
        for t in range(2, t_tr + 1):
            np.testing.assert_array_equal(models_sent(grid, t), models_sent(grid, 1))
        assert not np.allclose(final_models(c)[0], 0)
        epsilons = [row.epsilon for row in rows]
        assert epsilons == sorted(set(epsilons))  # every round is charged, dropped or not
        assert epsilons[-1] == pytest.approx(json_of(c, "summary.json")["epsilon"]["recipient"])
        with Ledger.open(Path(c.output) / "releases.jsonl") as ledger:
            assert [(e.stage, e.round) for e in ledger.entries] == [
                *((1, t) for t in (1, 2)),
                *((2, t) for t in range(1, t_tr + 1)),
            ]
        assert json_of(c, "summary.json")["dropped_rounds"] == len(FAULTS)
        assert all(row.weights is None and row.noise_std is None for row in rows if row.dropped)
        assert rows[-1].weights

    @pytest.mark.parametrize("options", [{"epsilon": math.inf}, {"mechanism": "gaussian"}])
    def test_floats_that_are_not_finite(self, config: Make, options: dict[str, object]) -> None:
        c = config(sampling_rate=1.0, **options)
        grid = run(c, 2, intercept=by_round({3: NAN}))
        size = vector_of(grid.trained("update", 1)[0].reply).size
        assert [row.dropped for row in rows_of(c)] == [None, None, BROKEN.format(size=size), None]

    @pytest.mark.parametrize("strategy", ["pina-ri", "ifca"])
    def test_in_the_very_first_round(self, config: Make, strategy: str) -> None:
        """Random cluster models stay apart: alike, they would all be picked first for ever."""
        c = config(strategy=strategy, epsilon=math.inf, sampling_rate=0.95)
        grid = run(c, 2, intercept=by_round({1: lost}))
        np.testing.assert_array_equal(models_sent(grid, 2), models_sent(grid, 1))
        assert len(np.unique(models_sent(grid, 2), axis=0)) == c.clusters

    @pytest.mark.parametrize("fault", ["lost", "too large"])
    def test_in_stage_1(self, config: Make, fault: str) -> None:
        """Neither the mean nor an iteration counts; the run goes on from what there is."""
        c = config(t_in=3, sampling_rate=1.0, noise_multiplier=1.0)
        grid = run(c, 2, intercept=by_round({1: FAULTS[fault][0], 3: FAULTS[fault][0]}))
        rows = rows_of(c)
        assert [row.dropped is None for row in rows] == [False, True, False, True, True]
        assert "mean" not in grid.trained("lloyd", 2)[0].task.arrays
        first, last = models_sent(grid, 1), grid.trained("lloyd", 3)[0].task.arrays["centroids"]
        assert np.isfinite(first).all()
        assert np.linalg.norm(last, axis=2) == pytest.approx(1, abs=1e-5)

    def test_every_round(self, config: Make) -> None:
        """Then nothing was trained, which is no success."""
        c = config(epsilon=math.inf)
        grid = LocalGrid(c, 2, intercept=by_round(dict.fromkeys(range(1, 5), failed), nodes=[0, 1]))
        with pytest.raises(
            TrainingFailed,
            match=r"every round of stage 2 was dropped: 0 of .* \(a node failed: out of memory\)",
        ):
            server.run(grid, c, "1")
        assert all(row.dropped for row in rows_of(c))
        np.testing.assert_array_equal(models_sent(grid, 2), models_sent(grid, 1))

    def test_a_node_outside_the_cohort_is_not_missed(self, config: Make) -> None:
        c = config(num_users=3, sampling_rate=0.4, t_tr=8, epsilon=math.inf)
        grid = run(c, 3)
        assert {len(grid.trained("update", t)) for t in range(1, 9)} >= {1, 2}
        assert {row.dropped for row in rows_of(c)} <= {None, "no user was sampled"}


class TestSketchFaults:
    @pytest.mark.parametrize(
        "fault",
        [
            lost,
            failed,
            with_content(lambda _: RecordDict()),
            with_content(lambda _: RecordDict({SKETCHES: ConfigRecord({"rows": 1})})),
            with_content(lambda _: RecordDict({SKETCHES: pack({"rows": np.full((2, 9), 0.5, np.float32)})})),
        ],
    )
    def test_the_others_are_used(self, config: Make, fault: object) -> None:
        c = config(stage1="sketch", t_in=3, sampling_rate=0.95, noise_multiplier=1.0, participation_cap=3)
        run(c, 2, intercept=by_round(dict.fromkeys(range(2, 4), fault)))
        assert [row.dropped for row in rows_of(c)] == [None] * 5
        assert np.isfinite(final_models(c)).all()

    def test_only_finite_rows_of_the_right_size_count(self) -> None:
        question = Message(RecordDict(), 7, "train")

        def holds(record: ArrayRecord | ConfigRecord, name: str = SKETCHES) -> np.ndarray | None:
            return sketches_in(Message(RecordDict({name: record}), reply_to=question), 3)

        good = np.ones((2, 3), dtype=np.float32)
        np.testing.assert_array_equal(holds(pack({"rows": good})), good)
        assert holds(pack({"rows": good}), "other") is None
        assert holds(pack({"other": good})) is None
        assert holds(pack({"rows": good[0]})) is None
        assert holds(pack({"rows": good[:, :2]})) is None
        assert holds(pack({"rows": good.astype(np.float64)})) is None
        assert holds(pack({"rows": good * np.float32(np.nan)})) is None

    @pytest.mark.parametrize("count", [0, 15])
    def test_no_node_sends_more_than_one_a_user(self, config: Make, count: int) -> None:
        """Nor none: k-means on the server would be that node's alone, or nobody's."""
        c = config(stage1="sketch", sketch_centre="none", t_in=1, sampling_rate=1.0, epsilon=math.inf)

        def change(content: RecordDict) -> RecordDict:
            width = unpack(content.array_records[SKETCHES])["rows"].shape[1]
            return RecordDict({SKETCHES: pack({"rows": np.ones((count, width), np.float32)})})

        run(c, intercept=by_round({1: with_content(change)}))
        assert rows_of(c)[0].dropped == "no sketch arrived"


class TestDiagnostics:
    def test_off_nothing_is_asked_and_the_run_finishes(self, config: Make) -> None:
        c = config(diagnostics=False)
        grid = run(c, 2)
        assert not [e for e in grid.exchanges if e.request.metadata.message_type == EVALUATE]
        assert all(list(e.reply.content) == [VECTOR] for e in grid.trained("mean") + grid.trained())
        summary = json_of(c, "summary.json")
        assert [
            summary[key] for key in ("accuracy", "worst_cluster_accuracy", "clustering_accuracy", "ari")
        ] == [None] * 4
        assert all(row.accuracy is row.loss is row.cluster_sizes is None for row in rows_of(c))
        assert (Path(c.output) / "metrics.png").read_bytes().startswith(b"\x89PNG")

    def test_off_a_node_refuses_to_answer_them(self, config: Make) -> None:
        c = config(diagnostics=False)
        question = request(Task("evaluate", 1, [0], "loss").to_record(), node_id(0), EVALUATE, 1)
        (reply,) = LocalGrid(c).send_and_receive([question])
        assert reply.has_error()
        assert "diagnostics = false: a node tells nothing about its users" in reply.error.reason

    def test_a_node_that_does_not_answer_them_stops_nothing(self, config: Make) -> None:
        def silent(request: Message, reply: Message) -> list[Message]:
            about = request.metadata
            return [] if about.message_type == EVALUATE and about.dst_node_id == node_id(0) else [reply]

        c = config()
        run(c, 2, intercept=silent)
        assert [sum(row.cluster_sizes or []) for row in rows_of(c)] == [0, 7, 7, 7]
        assert rows_of(c)[-1].accuracy is not None

    def test_if_no_node_answers_nothing_is_known(self, config: Make) -> None:
        def silent(request: Message, reply: Message) -> list[Message]:
            return [] if request.metadata.message_type == EVALUATE else [reply]

        c = config()
        run(c, 2, intercept=silent)
        assert json_of(c, "summary.json")["accuracy"] is None

    @pytest.mark.parametrize(("every", "measured"), [(1, [2, 3, 4, 5, 6, 7]), (3, [2, 5, 7]), (99, [2, 7])])
    def test_as_often_as_asked_and_after_each_stage(
        self, config: Make, every: int, measured: list[int]
    ) -> None:
        c = config(evaluate_every=every, t_tr=5, epsilon=math.inf)
        run(c)
        assert [row.round for row in rows_of(c) if row.accuracy is not None] == measured

    def test_they_change_no_model(self, config: Make, tmp_path: Path) -> None:
        pair = [
            config(epsilon=math.inf, diagnostics=on, output=str(tmp_path / str(on))) for on in (True, False)
        ]
        for c in pair:
            run(c)
        np.testing.assert_array_equal(final_models(pair[0]), final_models(pair[1]))


class TestSelfAssignment:
    def test_by_centroid_first_then_by_loss(self, config: Make) -> None:
        grid = run(config(self_assign_rounds=1, epsilon=math.inf))
        first, second = (grid.trained("update", t)[0].task for t in (1, 2))
        assert first.choose == "nearest"
        assert set(first.arrays) == {"models", "centroids", "mean"}
        assert second.choose == "loss"
        assert set(second.arrays) == {"models"}

    @pytest.mark.parametrize(
        "options", [{"stage1": "random"}, {"strategy": "pina-ri"}, {"self_assign_rounds": 0}]
    )
    def test_needs_centroids(self, config: Make, options: dict[str, object]) -> None:
        grid = run(config(epsilon=math.inf, **options))
        assert {e.task.choose for e in grid.trained()} == {"loss"}

    def test_users_are_evaluated_with_what_they_take(self, config: Make) -> None:
        grid = run(config(self_assign_rounds=1, epsilon=math.inf))
        asked = [e.task for e in grid.exchanges if e.request.metadata.message_type == EVALUATE]
        assert [task.choose for task in asked] == [
            "nearest",
            "nearest",
            "loss",
        ]  # stage 1, then rounds 1 and 2
        assert ["centroids" in task.arrays for task in asked] == [True, True, False]

    def test_with_features_models_start_alike(self, config: Make) -> None:
        grid = run(config(epsilon=math.inf, stage1_signal="features"))
        task = grid.trained("update", 1)[0].task
        assert task.choose == "nearest"
        assert np.ptp(task.arrays["models"], axis=0).max() == 0

    def test_centroid_i_becomes_model_i(self, config: Make) -> None:
        """The B of cluster model i is the centred centroid i at the norm asked for."""
        grid = run(config(epsilon=math.inf, centroid_norm=0.2))
        task = grid.trained("update", 1)[0].task
        models, centroids = task.arrays["models"], task.arrays["centroids"]
        moved = models - models.mean(axis=0)
        b = centroids - centroids.mean(axis=0)
        b = 0.2 * b / np.linalg.norm(b, axis=1, keepdims=True)
        expected = b - b.mean(axis=0)
        np.testing.assert_allclose(np.linalg.norm(moved, axis=1), np.linalg.norm(expected, axis=1), rtol=1e-4)
        np.testing.assert_allclose(moved @ moved.T, expected @ expected.T, atol=1e-6)


def test_the_grid_is_looked_at_only_for_discovery(config: Make) -> None:
    """A run asks Flower for its nodes at the start; who is asked later follows from that."""
    assert run(config(epsilon=math.inf, t_tr=4), 2).looks == 2
