"""Every algorithm runs through the ServerApp and leaves all it should."""

import io
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from peft import PeftModel
from PIL import Image as Picture
from support import json_of, models_sent, rows_of, run
from transformers import AutoModelForImageClassification

from pina_flwr.config import STRATEGIES, RunConfig, parse, to_dict
from pina_flwr.privacy.accountant import epsilon as spent
from pina_flwr.privacy.guarantee import OWN_STEPS
from pina_flwr.privacy.releases import GaussianRelease
from pina_flwr.strategies import STRATEGIES as CLASSES
from pina_flwr.traits import TRAITS

Make = Callable[..., RunConfig]
INF = math.inf
PAPER = {
    "stage1": "sketch",
    "sketch": "paper",
    "sketch_size": 4,
    "sketch_centre": "none",
    "centroid_norm": 0.0,
    "stage1_rank": 1,
    "self_assign_rounds": 0,
    "normality": "paper",
    "t_no": 1,
    "server_lr_no": 4.0,
    "server_lr": 16.0,
}
ALL: dict[str, dict[str, Any]] = {
    "pina": {},
    "pina, sketches": {
        "stage1": "sketch",
        "participation_cap": 2,
        "sketch_target": "uniform",
        "sketch_scale": "normalise",
    },
    "pina, features": {"stage1_signal": "features"},
    "pina, sketches of features": {"stage1_signal": "features", "stage1": "sketch", "sketch_size": 16},
    "pina as in the paper": PAPER,
    "pina, random start": {"stage1": "random"},
    "pina-ri": {"strategy": "pina-ri", "normality": "energy"},
    "fedavg": {"strategy": "fedavg"},
    "fedprox": {"strategy": "fedprox", "mu": 0.5},
    "fednova": {"strategy": "fednova", "local_epochs": 2, "local_epochs_least": 1, "batch_size": 2},
    "ifca": {"strategy": "ifca", "epsilon": INF},
    "oracle": {"strategy": "oracle"},
    **{
        name: {"strategy": name, "epsilon": INF, "secure_sum": "none"}
        for name, traits in TRAITS.items()
        if traits.in_the_clear
    },
}
KEYS = {
    "strategy",
    "accuracy",
    "worst_cluster_accuracy",
    "clustering_accuracy",
    "ari",
    "rounds",
    "seconds",
    "epsilon",
    "delta",
    "noise_cohort_size",
    "cohort",
    "users",
}


def load_adapter(config: RunConfig, cluster: int) -> PeftModel:
    folder = Path(config.output)
    base = AutoModelForImageClassification.from_pretrained(
        folder / "backbone", num_labels=10, ignore_mismatched_sizes=True
    )
    return PeftModel.from_pretrained(base, folder / "adapters" / f"cluster-{cluster}").eval()


def test_all_are_there() -> None:
    assert set(CLASSES) == set(STRATEGIES)
    assert {name: cls.traits for name, cls in CLASSES.items()} == TRAITS


@pytest.mark.parametrize("name", ALL)
def test_runs_and_leaves_everything(config: Make, name: str) -> None:
    options = {"noise_multiplier": 0.0 if ALL[name].get("epsilon") == INF else 1.0} | ALL[name]
    c = config(**options)
    run(c, 2)
    folder, clusters = Path(c.output), c.slots
    stage1 = 2 if c.strategy == "pina" and c.stage1 != "random" else 0

    rows = rows_of(c)
    assert [(row.round, row.rounds, row.stage) for row in rows] == [
        (t, stage1 + 2, 1 if t <= stage1 else 2) for t in range(1, stage1 + 3)
    ]
    # A user gives one sketch: by chance nobody who has not yet given one may be left for the second round.
    assert {row.dropped for row in rows if row.cohort} == {None}
    assert all(row.cohort for row in rows if row.round == 1 or row.stage == 2)
    last = rows[-1]
    assert last.accuracy is not None
    assert last.loss is not None
    assert last.update_norm_mean is not None
    assert last.bytes_up is not None
    assert 0 <= last.worst_cluster_accuracy <= last.accuracy <= 1  # type: ignore[operator]
    assert len(last.weights or []) == clusters
    assert sum(last.cluster_sizes or []) == 14

    summary = json_of(c, "summary.json")
    assert summary.keys() >= KEYS
    assert summary["epsilon"].keys() == {"recipient", "server", "sketch"}
    assert (summary["strategy"], summary["rounds"], summary["users"]) == (c.strategy, stage1 + 2, 14)
    assert summary["clusters"] == clusters
    assert summary["cohort"] == pytest.approx(0.7 * 14)
    assert summary["accuracy"] == last.accuracy

    assert json_of(c, "privacy.json")["delta"] == (summary["delta"] or None)
    assert tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")) == to_dict(c)
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(f.name for f in (folder / "adapters").iterdir()) == [
        f"cluster-{i}" for i in range(clusters)
    ]
    for cluster in {0, clusters - 1}:
        scores = load_adapter(c, cluster)(pixel_values=torch.zeros(2, 1, 8, 8)).logits
        assert scores.shape == (2, 10)
        assert torch.isfinite(scores).all()


class TestEpsilon:
    def epsilons(self, config: Make, **options: Any) -> dict[str, Any]:
        c = config(**options)
        run(c)
        return json_of(c, "summary.json")

    def test_is_the_budget(self, config: Make) -> None:
        summary = self.epsilons(config, epsilon=8.0)
        assert 7.9 < summary["epsilon"]["recipient"] <= 8
        assert summary["epsilon"]["recipient"] < summary["epsilon"]["server"] < INF
        assert summary["epsilon"]["sketch"] == 0  # no sketch of a single user leaves
        assert summary["delta"] == pytest.approx(14**-1.1)

    @pytest.mark.parametrize("sketch", ["projection", "coordinates", "private-support"])
    def test_of_a_sketch_that_hides_its_positions(self, config: Make, sketch: str) -> None:
        """The whole is the budget; a single sketch is part of it, and nobody amplifies it."""
        summary = self.epsilons(config, epsilon=8.0, stage1="sketch", sketch=sketch)
        assert 7.9 < summary["epsilon"]["recipient"] <= 8
        assert 0 < summary["epsilon"]["sketch"] < 8
        assert summary["epsilon"]["recipient"] < summary["epsilon"]["server"] < INF
        assert summary["epsilon_as_paper_counts"] is None

    @pytest.mark.parametrize("options", [{"stage1": "sketch", "sketch": "paper"}, PAPER])
    def test_of_the_papers_sketch_is_not_finite_strictly(self, config: Make, options: dict[str, Any]) -> None:
        summary = self.epsilons(config, epsilon=8.0, **options)
        assert summary["epsilon"] == {"recipient": None, "server": None, "sketch": None}
        assert 7.9 < summary["epsilon_as_paper_counts"]["recipient"] <= 8
        assert summary["epsilon_as_paper_counts"]["sketch"] < 8

    @pytest.mark.parametrize("strategy", ["pina", "ifca"])
    def test_without_noise_is_none(self, config: Make, strategy: str) -> None:
        summary = self.epsilons(config, strategy=strategy, epsilon=INF)
        assert summary["epsilon"]["recipient"] is summary["epsilon"]["server"] is None
        assert summary["noise_cohort_size"] == 0

    @pytest.mark.parametrize(("mechanism", "more"), [("gaussian", 0.0), ("skellam", 0.1)])
    def test_grows_by_the_round_up_to_the_whole(self, config: Make, mechanism: str, more: float) -> None:
        """Rounded integers in 20 bits cost a little more than the continuous mechanism."""
        c = config(noise_multiplier=1.0, mechanism=mechanism)
        run(c)
        rows, delta = [row.epsilon for row in rows_of(c)], json_of(c, "summary.json")["delta"]
        assert rows == sorted(set(rows))
        continuous = [spent([GaussianRelease(1.0, 0.7, n)], delta) for n in (1, 2, 3, 4)]
        assert rows == pytest.approx(continuous, rel=more or 1e-6)
        if more:
            assert all(row > lower for row, lower in zip(rows, continuous, strict=True))  # type: ignore[operator]


def test_fedavg_trains_one_model_and_asks_for_no_choice(config: Make) -> None:
    c = config(strategy="fedavg", epsilon=INF)
    grid = run(c)
    assert models_sent(grid, 1).shape[0] == 1
    assert rows_of(c)[-1].weights == [1]
    assert rows_of(c)[-1].cluster_sizes == [14]


def test_the_oracle_knows_the_groups(config: Make) -> None:
    c = config(strategy="oracle", epsilon=INF)
    grid = run(c)
    assert {e.task.choose for e in grid.trained()} == {"group"}
    assert all(row.clustering_accuracy == row.ari == 1 for row in rows_of(c))
    np.testing.assert_array_equal(np.ptp(models_sent(grid, 1), axis=0), 0)  # all start alike


@pytest.mark.usefixtures("bare")
class TestBaselinesUnderSecAgg:
    """FedProx and FedNova, users doing one to three epochs in batches of two."""

    def outcome(self, config: Make, strategy: str, **options: Any) -> tuple[list[float | None], RunConfig]:
        usual = {"local_epochs": 3, "local_epochs_least": 1, "batch_size": 2, "mu": 4.0, "clip_norm": 100.0}
        c = config(strategy=strategy, **usual | {"secure_sum": "secagg+", "sampling_rate": 1.0} | options)
        run(c, 2)
        return [row.loss for row in rows_of(c)], c

    def test_without_noise_they_train_as_with_a_trusted_sum(self, config: Make) -> None:
        losses = {}
        for strategy in ("fedavg", "fedprox", "fednova"):
            losses[strategy] = self.outcome(config, strategy, epsilon=INF)[0]
            trusted = self.outcome(config, strategy, epsilon=INF, secure_sum="trusted")[0]
            assert losses[strategy] == pytest.approx(trusted, rel=1e-3)
        for strategy in ("fedprox", "fednova"):
            assert losses[strategy] != pytest.approx(losses["fedavg"], rel=3e-3)

    def test_their_guarantee_is_fedavgs(self, config: Make) -> None:
        found = {}
        for strategy in ("fedavg", "fedprox", "fednova"):
            _, c = self.outcome(config, strategy, epsilon=2.0, diagnostics=False)
            found[strategy] = json_of(c, "privacy.json")
        own = [OWN_STEPS, *found["fedavg"]["assumptions"]]
        assert sorted(found["fednova"].pop("assumptions")) == sorted(own)
        assert found["fedprox"].pop("assumptions") == found["fedavg"].pop("assumptions")
        assert found["fedprox"] == found["fednova"] == found["fedavg"]
        assert 1.9 < found["fednova"]["recipient"]["epsilon"] <= 2


def test_ifca_is_not_clipped(config: Make) -> None:
    small, smaller = (config(strategy="ifca", epsilon=INF, clip_norm=s) for s in (1e-3, 1e-6))
    moved = []
    for c in (small, smaller):
        grid = run(c)
        moved.append(models_sent(grid, 2) - models_sent(grid, 1))
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-3, atol=1e-6)
    assert np.linalg.norm(moved[0], axis=1).max() > 0.1


@pytest.mark.parametrize("signal", ["update", "features"])
def test_groups_are_found_without_noise(config: Make, signal: str) -> None:
    """A small but whole case: PINA finds the rotations and beats FedAvg."""
    size = {
        "num_users": 48,
        "images_per_user": 20,
        "test_images": 60,
        "sampling_rate": 0.5,
        "stage1_epochs": 10,
    }
    pina = config(
        **size, epsilon=INF, t_in=6, t_tr=8, self_assign_rounds=4, local_epochs=5, stage1_signal=signal
    )
    run(pina)
    fedavg = config(
        **size, epsilon=INF, strategy="fedavg", t_tr=8, local_epochs=5, output=pina.output + "-fedavg"
    )
    run(fedavg)
    ours, theirs = json_of(pina, "summary.json"), json_of(fedavg, "summary.json")
    assert ours["clustering_accuracy"] >= 0.9
    assert ours["accuracy"] > theirs["accuracy"] + 0.1


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set of FEMNIST's schema: seven writers, one of them with a single image."""
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("femnist")
    counts = [9, 1, 6, 7, 12, 5, 8]
    rows: dict[str, list[Any]] = {"image": [], "writer_id": [], "hsf_id": [], "character": []}
    for writer, count in enumerate(counts):
        for character in rng.integers(62, size=count):
            png = io.BytesIO()
            Picture.fromarray(rng.integers(256, size=(28, 28), dtype=np.uint8)).save(png, "PNG")
            rows["image"].append({"bytes": png.getvalue(), "path": None})
            rows["writer_id"].append(f"f{writer:04}_{writer}")
            rows["hsf_id"].append(writer % 3)
            rows["character"].append(int(character))
    features = Features(
        {
            "image": Image(),
            "writer_id": Value("string"),
            "hsf_id": Value("int64"),
            "character": ClassLabel(names=[f"c{i}" for i in range(62)]),
        }
    )
    order = rng.permutation(sum(counts)).tolist()
    Dataset.from_dict(rows, features).select(order).to_parquet(folder / "train.parquet")
    return folder


NATURAL = {"user_column": "writer_id", "rotations": 1, "clusters": 2, "num_users": 0, "images_per_user": 0}


class TestNaturalSplit:
    def natural(self, config: Make, writers: Path, **more: Any) -> RunConfig:
        return config(**NATURAL | {"dataset": str(writers)} | more)

    @pytest.mark.parametrize("nodes", [1, 3])
    def test_runs(self, config: Make, writers: Path, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
        c = self.natural(config, writers, noise_multiplier=1.0, noise_cohort_size=0)
        run(c, nodes)
        summary, last = json_of(c, "summary.json"), rows_of(c)[-1]
        assert (summary["users"], summary["groups"], summary["clusters"]) == (7, None, 2)
        assert summary["clustering_accuracy"] is summary["ari"] is None
        assert 0 <= summary["accuracy"] <= 1
        assert sum(last.cluster_sizes or []) == 7
        assert len(last.cluster_accuracy or []) == 2
        assert "groups unknown" in capsys.readouterr().out
        assert len(list((Path(c.output) / "adapters").iterdir())) == 2

    def test_the_spread_over_nodes_changes_no_score(
        self, config: Make, writers: Path, tmp_path: Path
    ) -> None:
        runs = [self.natural(config, writers, epsilon=INF, output=str(tmp_path / str(n))) for n in (1, 3)]
        for c, nodes in zip(runs, (1, 3), strict=True):
            run(c, nodes)
        one, three = ([(r.accuracy, r.cluster_sizes, r.cohort) for r in rows_of(c)] for c in runs)
        assert one == three


@pytest.mark.parametrize("epsilon", [8.0, INF])
def test_a_stored_configuration_can_be_run_again(config: Make, epsilon: float) -> None:
    c = config(strategy="fedavg", epsilon=epsilon)
    run(c)
    assert parse(tomllib.loads((Path(c.output) / "config.toml").read_text(encoding="utf-8"))) == c
