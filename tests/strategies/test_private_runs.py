"""Private runs of every mechanism: they hold together, nothing else leaves a client, and noise is fresh."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from support import (
    Exchange,
    LocalGrid,
    decoded,
    json_of,
    models_sent,
    node_id,
    rows_of,
    run,
    shapes,
    vector_of,
    with_content,
)

from pina_flwr.client import SKETCHES
from pina_flwr.config import RunConfig
from pina_flwr.messages import EVALUATE, KEYS, REVEAL, TRAIN, Task, pack, request, unpack
from pina_flwr.privacy.admission import offer_of
from pina_flwr.privacy.noise import KEY_BYTES
from pina_flwr.privacy.plan import plan, vector_size
from pina_flwr.privacy.policy import REASONS
from pina_flwr.privacy.sum_mechanism import open_mechanism
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR
from pina_flwr.stage1.starts import sketch_mechanism
from pina_flwr.training.workbench import Workbench

Make = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("bare")
SKETCH = {"stage1": "sketch", "participation_cap": 3}  # so that the few users there are sketch more than once
KINDS: dict[str, dict[str, Any]] = {
    "skellam": {},
    "discrete gaussian": {"mechanism": "discrete-gaussian"},
    "continuous gaussian": {"mechanism": "gaussian"},
    "projection": SKETCH | {"sketch": "projection"},
    "coordinates": SKETCH | {"sketch": "coordinates"},
    "private support": SKETCH | {"sketch": "private-support"},
    "paper's sketch": SKETCH | {"sketch": "paper", "sketch_centre": "none", "sketch_size": 4},
    "removable noise": {"dropout_noise": "removable", "dropout_tolerance": 0.4},
    "colluding": {"colluding_share": 0.2},
    "all users": {"sampling_rate": 1.0},
    "true cohort": {"noise_cohort_size": 0},
    "32 bits": {"bits": 32},
    "fedavg": {"strategy": "fedavg"},
    "random start, no counts": {"strategy": "pina-ri", "normality": "energy"},
    "fednova, local work that differs": {"strategy": "fednova", "local_epochs_least": 1, "local_epochs": 3},
    "ifca, noise of each user": {"strategy": "ifca"},
}


class Leak(AssertionError):
    """A reply holds something that it should not."""


def check_reply(network: LocalGrid, exchange: Exchange) -> str:
    """Check every byte of a training reply; returns what it is.

    What is allowed is taken out, a reply is made of it and of the request alone, and the two are compared.
    """
    content, task = exchange.reply.content, exchange.task
    (name,) = content
    allowed = {VECTOR: _vector, SKETCHES: _sketches, KEYS: _keys, REFUSAL: _refusal}
    if name not in allowed:
        raise Leak(name)
    rebuilt = Message(
        RecordDict({name: allowed[name](network.config, content, task)}), reply_to=exchange.request
    )
    expected, found = message_to_proto(rebuilt), message_to_proto(exchange.reply)
    for message in (expected, found):  # when it was sent, and a hash of what it holds
        message.metadata.ClearField("created_at")
        message.metadata.ClearField("ttl")
        message.metadata.ClearField("message_id")
    if expected.SerializeToString(deterministic=True) != found.SerializeToString(deterministic=True):
        raise Leak(str(content))
    return name


def _vector(config: RunConfig, content: RecordDict, task: Task) -> ArrayRecord:
    """Of the right length, integers under 2^b; floats with the continuous Gaussian."""
    assert task.offer is not None
    z, users = task.offer.noise_multiplier, config.num_users
    mechanism = open_mechanism(config, task.step, z, users, shapes(config))
    (array,) = content.array_records[VECTOR].values()
    numbers = array.numpy()
    if numbers.shape != (mechanism.size,):
        raise Leak(f"shape {numbers.shape}")
    if config.mechanism == "gaussian":
        return ArrayRecord([np.array(numbers, dtype=np.float32)])
    if numbers.max() >= 2**config.bits:
        raise Leak(f"a number of {numbers.max()}")
    return ArrayRecord([np.array(numbers, dtype=np.uint32)])


def _sketches(config: RunConfig, content: RecordDict, task: Task) -> ArrayRecord:
    """One finite row for each user that was asked: its sketch, or its update under noise of its own."""
    rows = unpack(content.array_records[SKETCHES])["rows"]
    sketched = task.step == "sketch"
    width = (
        sketch_mechanism(config, shapes(config).sketch).width
        if sketched
        else vector_size(config, "local-update", shapes(config))
    )
    if rows.shape != (len(task.users), width) or not np.isfinite(rows).all():
        raise Leak(f"sketches of shape {rows.shape}")
    return pack({"rows": np.array(rows, dtype=np.float32)})


def _keys(config: RunConfig, content: RecordDict, task: Task) -> ConfigRecord:
    """One for each component that was added in vain, by all users of the node together."""
    assert task.offer is not None
    keys = content.config_records[KEYS]["keys"]
    wanted = task.offer.cohort - task.offer.survivors - task.vanished
    if task.step != REVEAL or not isinstance(keys, list) or len(keys) != wanted:
        raise Leak("keys")
    assert all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys)
    return ConfigRecord({"keys": keys, "users": [len(task.users)]})  # type: ignore[dict-item]


def _refusal(config: RunConfig, content: RecordDict, task: Task) -> ConfigRecord:
    """One of the fixed phrases."""
    reason = content.config_records[REFUSAL]["reason"]
    if reason not in REASONS:
        raise Leak(str(reason))
    return ConfigRecord({"reason": reason})


def train_exchanges(network: LocalGrid) -> list[Exchange]:
    """All of training, reveal phases too."""
    return [e for e in network.exchanges if e.request.metadata.message_type == TRAIN]


class TestEveryKind:
    """What each run must show besides what `check_reply` looks at."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_runs_and_nothing_else_leaves_a_client(self, config: Make, kind: str) -> None:
        """Every byte of every reply; and without diagnostics nobody is even asked for them."""
        c = config(**{"diagnostics": False, "noise_multiplier": 1.5} | KINDS[kind])
        grid = run(c, 3)
        names = {check_reply(grid, exchange) for exchange in train_exchanges(grid)}
        sketches = {SKETCHES} if c.stage1 == "sketch" or c.local_updates else set()
        keys = {KEYS} if c.dropout_noise == "removable" else set()
        assert names == (set() if c.local_updates else {VECTOR}) | sketches | keys
        assert {e.request.metadata.message_type for e in grid.exchanges} <= {TRAIN, "query.who"}

        rows, summary, privacy = rows_of(c), json_of(c, "summary.json"), json_of(c, "privacy.json")
        assert {row.dropped for row in rows} <= {None, "no user was sampled"}
        assert all(row.dropped is None for row in rows if row.stage == 2)
        assert not any(row.refusals for row in rows)
        assert all(
            row.accuracy is row.loss is row.update_norm_mean is row.cluster_sizes is None for row in rows
        )
        assert all((row.noise_std or 0) > 0 for row in rows if row.survivors)
        assert summary["trained"]
        unprotected = c.sketch == "paper" and c.stage1 == "sketch"
        epsilon, server = (privacy[who]["epsilon"] for who in ("recipient", "server"))
        if unprotected:
            assert epsilon is server is None
            assert "shows which positions it keeps" in privacy["recipient"]["reason"]
        else:
            assert 0 < epsilon <= server < 50
        assert summary["epsilon"]["recipient"] == epsilon
        assert (privacy["sketch"] is None) is (c.stage1 != "sketch")

    def test_with_diagnostics_a_training_reply_holds_no_more(self, config: Make) -> None:
        grid = run(config(), 3)
        assert {check_reply(grid, exchange) for exchange in train_exchanges(grid)} == {VECTOR}

    def test_a_refusal_holds_no_more(self, config: Make, tmp_path: Path) -> None:
        (tmp_path / "policy.toml").write_text("max-epsilon = 8.0\ndelta = 1e-5\nsecure-sums = ['trusted']\n")
        place = {"partition-id": 1, "num-partitions": 7}
        policy = {"policy": str(tmp_path / "policy.toml"), "ledger": str(tmp_path / "ledger")}
        c = config(diagnostics=False, dropout_tolerance=0.4, sampling_rate=1.0, noise_multiplier=1.0)
        grid = run(c, 7, node_configs={1: place | policy})
        assert REFUSAL in {check_reply(grid, exchange) for exchange in train_exchanges(grid)}

    @pytest.mark.parametrize("kind", ["skellam", "all users"])
    def test_they_are_answered_by_nobody_either(self, config: Make, kind: str) -> None:
        """A server that asks all the same is told nothing."""
        c = config(**{"diagnostics": False} | KINDS[kind])
        grid = run(c, 2)
        models = {"models": models_sent(grid, 1)}
        questions = [
            request(Task("evaluate", 1, [user], "loss", models).to_record(), node_id(user), EVALUATE, 1)
            for user in (0, 1)
        ]
        for reply in grid.send_and_receive(questions):
            assert reply.has_error()
            assert "diagnostics = false: a node tells nothing about its users" in reply.error.reason


class TestTheCheck:
    """A check that finds nothing must be able to find something."""

    @pytest.mark.parametrize(
        "leak",
        [
            lambda content: RecordDict(dict(content) | {"m": MetricRecord({"num-examples": 5})}),
            lambda content: RecordDict(dict(content) | {"c": ConfigRecord({"cluster": 1})}),
            lambda content: RecordDict(
                {VECTOR: ArrayRecord({"0": _array(content), "1": _array(content)})}  # type: ignore[dict-item]
            ),
            lambda content: RecordDict({VECTOR: ArrayRecord({"cluster-1": _array(content)})}),
            lambda content: RecordDict({VECTOR: ArrayRecord([_array(content).numpy()[:-1]])}),
            lambda content: RecordDict({VECTOR: ArrayRecord([_array(content).numpy() | np.uint32(2**31)])}),
            lambda content: RecordDict({VECTOR: ArrayRecord([_array(content).numpy().astype(np.int64)])}),
            lambda content: RecordDict({VECTOR: _padded(content)}),
            lambda content: RecordDict({REFUSAL: ConfigRecord({"reason": "I have 5 images"})}),
            lambda content: RecordDict({"metrics": MetricRecord({"loss": 0.5})}),
        ],
        ids=[
            "metrics",
            "a config",
            "two vectors",
            "another name",
            "too short",
            "too large",
            "another type",
            "bytes behind the array",
            "a reason of its own",
            "something else",
        ],
    )
    def test_finds_what_leaks(self, config: Make, leak: Callable[[RecordDict], RecordDict]) -> None:
        grid, exchange = one_exchange(config(strategy="fedavg", noise_multiplier=1.0, output="."))
        check_reply(grid, exchange)
        (changed,) = with_content(leak)(exchange.request, exchange.reply)
        with pytest.raises((Leak, ValueError)):
            check_reply(grid, Exchange(exchange.request, changed, []))


def one_exchange(config: RunConfig) -> tuple[LocalGrid, Exchange]:
    """A node that was asked once."""
    noise = plan(config, 14, shapes(config))
    models = {"models": np.zeros((1, shapes(config).adapter), dtype=np.float32)}
    offer = offer_of(config, noise, "update", 1, 14, "1")
    question = Task("update", 1, [0, 3], "loss", models, offer).to_record()
    grid = LocalGrid(config)
    grid.send_and_receive([request(question, node_id(0), TRAIN, 1)])
    return grid, grid.exchanges[0]


def _array(content: RecordDict) -> Any:
    (array,) = content.array_records[VECTOR].values()
    return array


def _padded(content: RecordDict) -> ArrayRecord:
    """The same vector, with bytes that no reader of arrays looks at."""
    array = _array(content)
    array.data += b"loss = 0.5"
    return ArrayRecord({"0": array})


class TestRandomness:
    """Noise, rounding, keys and cohorts come from the operating system; all else from the seed."""

    CROWD = {"sampling_rate": 1.0, "noise_multiplier": 1.0, "noise_cohort_size": 0}  # noqa: RUF012

    def pair(self, config: Make, tmp_path: Path, **options: Any) -> tuple[LocalGrid, LocalGrid]:
        """Two runs of one configuration."""
        first, second = (run(config(**options, output=str(tmp_path / str(i))), 2) for i in range(2))
        return first, second

    @pytest.mark.parametrize(
        ("mechanism", "strategy", "step"),
        [
            ("skellam", "fedavg", "update"),
            ("skellam", "pina", "mean"),
            ("discrete-gaussian", "fedavg", "update"),
            ("gaussian", "fedavg", "update"),
        ],
    )
    def test_two_runs_with_one_seed_differ_in_noise(
        self, config: Make, tmp_path: Path, mechanism: str, strategy: str, step: str
    ) -> None:
        """Their first sums differ by two independent draws of the noise, and by nothing else."""
        options = self.CROWD | {"mechanism": mechanism, "strategy": strategy}
        first, second = self.pair(config, tmp_path, **options)
        for one, other in zip(first.trained(step, 1), second.trained(step, 1), strict=True):
            assert one.task.users == other.task.users
            assert (vector_of(one.reply) != vector_of(other.reply)).mean() > 0.99
        difference = decoded(first, step, 1) - decoded(second, step, 1)
        sigma = math.sqrt(2 / 0.9)
        assert difference.std() == pytest.approx(sigma, rel=6 / math.sqrt(2 * difference.size))
        assert abs(difference.mean()) < 6 * sigma / math.sqrt(difference.size)

    def test_and_agree_in_everything_else(
        self, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Users, stage-1 updates, first centroids, cohorts, and what is logged that no noise reaches."""
        real, deltas = Workbench.stage1_signals, list[torch.Tensor]()

        def record(bench: Workbench, users: list[int]) -> torch.Tensor:
            deltas.append(real(bench, users))
            return deltas[-1]

        monkeypatch.setattr(Workbench, "stage1_signals", record)
        first, second = self.pair(config, tmp_path, **self.CROWD)
        half = len(deltas) // 2
        assert half > 0
        assert all(torch.equal(a, b) for a, b in zip(deltas[:half], deltas[half:], strict=True))
        for step, rounds in (("mean", [1]), ("lloyd", [2]), ("update", [1, 2])):
            for round_ in rounds:
                asked = [[e.task.users for e in grid.trained(step, round_)] for grid in (first, second)]
                assert asked[0] == asked[1]
        tasks = [grid.trained("lloyd", 2)[0].task for grid in (first, second)]
        np.testing.assert_array_equal(tasks[0].arrays["centroids"], tasks[1].arrays["centroids"])
        assert (tasks[0].arrays["mean"] != tasks[1].arrays["mean"]).all()
        assert tasks[0].offer == tasks[1].offer
        one, other = (rows_of(grid.config) for grid in (first, second))
        same = (
            "cohort",
            "survivors",
            "noise_std",
            "epsilon",
            "bytes_up",
            "bytes_down",
            "left_out",
            "dropped",
        )
        for a, b in zip(one, other, strict=True):
            assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]

    def test_diagnostics_before_any_noise_are_the_same(self, config: Make, tmp_path: Path) -> None:
        """Users train the same first models on the same data in the same order."""
        first, second = self.pair(config, tmp_path, **self.CROWD, strategy="pina-ri")
        np.testing.assert_array_equal(models_sent(first, 1), models_sent(second, 1))
        one, other = (rows_of(grid.config)[0] for grid in (first, second))
        assert one.update_norm_mean == other.update_norm_mean is not None
        assert one.update_norm_max == other.update_norm_max
        assert (models_sent(first, 2) != models_sent(second, 2)).mean() > 0.99

    def test_without_noise_the_same_is_left(self, config: Make, tmp_path: Path) -> None:
        """What a private sum holds besides noise is what the run without privacy sums up."""
        private = run(config(**self.CROWD, strategy="fedavg", output=str(tmp_path / "a")), 2)
        plain = run(
            config(strategy="fedavg", sampling_rate=1.0, epsilon=math.inf, output=str(tmp_path / "b")), 2
        )
        noise = decoded(private, "update", 1) - decoded(plain, "update", 1)
        sigma = 1 / math.sqrt(0.9)
        assert noise.std() == pytest.approx(sigma, rel=6 / math.sqrt(2 * noise.size))
        assert abs(noise.mean()) < 6 * sigma / math.sqrt(noise.size)

    def test_cohorts_are_drawn_afresh(self, config: Make, tmp_path: Path) -> None:
        first, second = self.pair(config, tmp_path, strategy="fedavg", t_tr=6, noise_multiplier=1.0)
        asked = [
            [[e.task.users for e in g.trained("update", t)] for t in range(1, 7)] for g in (first, second)
        ]
        assert asked[0] != asked[1]


class TestReproducibleNoise:
    """For debugging: everything repeats, and the report says that it protects nobody."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"mechanism": "discrete-gaussian"},
            {"mechanism": "gaussian"},
            {"dropout_noise": "removable", "dropout_tolerance": 0.4},
            {"stage1": "sketch"},
            {"stage1": "sketch", "sketch": "private-support", "sampling_rate": 1.0, "participation_cap": 2},
        ],
        ids=str,
    )
    def test_two_runs_are_alike_bit_by_bit(
        self, config: Make, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        runs = [
            run(
                config(
                    reproducible_noise=True, noise_multiplier=1.0, output=str(tmp_path / str(i)), **options
                ),
                2,
            )
            for i in range(2)
        ]
        replies = [[e.reply.content for e in train_exchanges(grid)] for grid in runs]
        assert replies[0] == replies[1]
        folders = [Path(grid.config.output) / "adapters" for grid in runs]
        models = [{p.parent.name: p.read_bytes() for p in f.glob("*/*.safetensors")} for f in folders]
        assert models[0] == models[1]
        assert len(models[0]) == 4
        timed = {"seconds": None}
        rows = [[vars(row) | timed for row in rows_of(grid.config)] for grid in runs]
        assert rows[0] == rows[1]

    def test_noise_differs_by_node_round_and_seed(self, config: Make, tmp_path: Path) -> None:
        """One stream twice would cancel out of a difference of sums."""
        c = config(
            reproducible_noise=True, strategy="fedavg", learning_rate=1e30, local_epochs=3, sampling_rate=1.0
        )
        other = config(
            reproducible_noise=True,
            strategy="fedavg",
            learning_rate=1e30,
            local_epochs=3,
            sampling_rate=1.0,
            seed=2,
            output=str(tmp_path / "other"),
        )
        sent = [vector_of(e.reply) for grid in (run(c, 2), run(other, 2)) for e in grid.trained()]
        assert len({vector.tobytes() for vector in sent}) == len(sent) == 8

    def test_is_marked(self, config: Make) -> None:
        c = config(reproducible_noise=True)
        run(c)
        summary, privacy = json_of(c, "summary.json"), json_of(c, "privacy.json")
        assert summary["epsilon"]["recipient"] is summary["epsilon"]["server"] is None
        for who in ("recipient", "server"):
            assert privacy[who]["epsilon"] is None
            assert "reproducible-noise" in privacy[who]["reason"]
        assert any("reproducible-noise" in caveat for caveat in summary["caveats"])
        assert all(row.epsilon is None for row in rows_of(c))

    def test_is_marked_for_later_runs_too(self, config: Make, tmp_path: Path) -> None:
        """What such a run released stays unprotected, whatever is run next on the same ledger."""
        lasting = {"strategy": "fedavg", "noise_multiplier": 2.0, "ledger": str(tmp_path / "ledger.jsonl")}
        lasting["noise_cohort_size"] = 0
        run(config(**lasting, reproducible_noise=True))
        later = config(**lasting, output=str(tmp_path / "later"))
        run(later)
        assert json_of(later, "summary.json")["epsilon"]["recipient"] is None
