"""IFCA under local DP, through the ServerApp: what each user sends, what is made of it, what is charged."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from support import LocalGrid, by_round, json_of, lost, rows_of, run, shapes, with_content
from torch import Tensor

from pina_flwr import client, server
from pina_flwr.client import SKETCHES
from pina_flwr.config import RunConfig
from pina_flwr.messages import Task, pack, unpack
from pina_flwr.normality import Aggregates, by_count
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.cohort import participation_cap
from pina_flwr.privacy.releases import ZcdpRelease
from pina_flwr.strategies.clustered import TrainingFailed

Make = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("bare")
IFCA: dict[str, Any] = {"strategy": "ifca", "secure_sum": "secagg+", "diagnostics": False}
SMALL = 1e-12  # a learning rate with which users send nothing but noise and their counts


def sent_by(message: Message) -> np.ndarray:
    return unpack(message.content.array_records[SKETCHES])["rows"]


def rows_sent(network: LocalGrid, round_: int) -> np.ndarray:
    return np.concatenate([sent_by(e.reply) for e in network.trained("local-update", round_)])


def test_every_number_of_a_user_carries_its_own_noise(config: Make) -> None:
    c = config(**IFCA, noise_multiplier=3.0, clip_norm=0.5, learning_rate=SMALL, sampling_rate=0.9, t_tr=3)
    network = run(c, 2)
    rows = np.concatenate([rows_sent(network, t) for t in (1, 2, 3)])
    size = 4 * shapes(c).adapter
    assert (rows.dtype, rows.shape[1]) == (np.float32, size + 4)
    noise, counts = rows[:, :size].astype(np.float64), rows[:, size:].astype(np.float64)
    assert noise.var() == pytest.approx((3.0 * 0.5) ** 2, rel=0.02)
    assert noise.var(axis=1) == pytest.approx((3.0 * 0.5) ** 2, rel=0.15)
    assert counts.std() == pytest.approx(3.0 * 0.5, rel=0.35)
    correlations = np.corrcoef(noise) - np.eye(len(noise))
    assert abs(correlations).max() < 6 / math.sqrt(size)  # no two share theirs
    assert not network.trained("update")


def test_the_sum_is_the_servers_to_make(config: Make) -> None:
    c = config(**IFCA, noise_multiplier=0.05, sampling_rate=0.9)
    network = run(c, 3)
    rows, size, z = rows_sent(network, 1), 4 * shapes(c).adapter, 0.05
    mean = rows.astype(np.float64).sum(axis=0) / (0.9 * 14)
    std = z * math.sqrt(len(rows)) / (0.9 * 14)
    found = Aggregates(mean[:size].reshape(4, -1), std, mean[size:] / 0.1, std / 0.1)
    factors = by_count(found)
    before, after = (network.trained("local-update", t)[0].task.arrays["models"] for t in (1, 2))
    np.testing.assert_allclose(after, before + factors[:, None] * found.means, rtol=1e-5, atol=1e-6)
    first = rows_of(c)[0]
    assert first.noise_std == pytest.approx(std)
    assert first.survivors == first.cohort == len(rows)
    assert first.weights == pytest.approx(factors)
    assert (mean[size:] / 0.1).sum() == pytest.approx(len(rows) / (0.9 * 14), abs=5 * 2 * std / 0.1)


def test_epsilon_against_the_accountant(config: Make) -> None:
    c = config(**IFCA, epsilon=4.0, t_tr=4, sampling_rate=0.5, noise_cohort_size=10_000)
    run(c)
    summary, cap = json_of(c, "summary.json"), participation_cap(c, 2)
    z = summary["noise_multiplier"]["stage2"]
    whole = epsilon([ZcdpRelease(1 / (2 * z * z), cap)], summary["delta"])
    assert summary["epsilon"] == {"recipient": whole, "server": whole, "sketch": 0}
    assert 0.99 * 4 < whole <= 4
    assert summary["noise_cohort_size"] == 0
    assert "nothing is amplified" in summary["caveats"][0]
    spent = [row.epsilon for row in rows_of(c)]
    assert spent == [
        pytest.approx(epsilon([ZcdpRelease(1 / (2 * z * z), min(n, cap))], summary["delta"]))
        for n in (1, 2, 3, 4)
    ]


def test_the_noise_of_central_dp_has_its_true_epsilon(config: Make) -> None:
    """z as for central DP: the noise of each user is then too little for the ε of the others."""
    central = config(strategy="fedavg", epsilon=2.0, diagnostics=False, t_tr=1, secure_sum="trusted")
    run(central)
    z = json_of(central, "summary.json")["noise_multiplier"]["stage2"]
    c = config(**IFCA | {"t_tr": 8, "noise_multiplier": z})
    run(c)
    found = json_of(c, "summary.json")
    assert found["noise_multiplier"]["stage2"] == z
    assert 2 < found["epsilon"]["recipient"] < math.inf


def test_who_vanishes_costs_no_round(config: Make) -> None:
    c = config(**IFCA, noise_multiplier=1.0, sampling_rate=0.9, dropout_tolerance=0.0)
    network = run(c, 3, intercept=by_round({1: lost}))
    arrived = [sent_by(m) for e in network.trained("local-update", 1) for m in e.arrived]
    first = rows_of(c)[0]
    assert first.dropped is None
    assert first.survivors == sum(map(len, arrived)) < first.cohort


@pytest.mark.parametrize("what", ["more rows", "not finite", "longer", "doubles"])
def test_nonsense_of_a_node_is_left_out(config: Make, what: str) -> None:
    def spoil(content: RecordDict) -> RecordDict:
        rows = unpack(content.array_records[SKETCHES])["rows"]
        changed = {
            "more rows": np.concatenate([rows, rows]),
            "not finite": rows * np.float32(np.nan),
            "longer": np.pad(rows, ((0, 0), (0, 1))),
            "doubles": rows.astype(np.float64),
        }[what]
        return RecordDict({SKETCHES: pack({"rows": changed})})

    c = config(**IFCA, noise_multiplier=1.0, sampling_rate=1.0)
    run(c, intercept=by_round({1: with_content(spoil)}))
    first, second = rows_of(c)
    assert first.dropped == "no update arrived"
    assert second.dropped is None


def test_without_privacy_under_secagg_it_is_clipped_and_masked(config: Make) -> None:
    c = config(
        **IFCA | {"diagnostics": True}, epsilon=math.inf, sampling_rate=1.0, clip_norm=1e-3, num_users=6
    )
    network = run(c)
    assert not network.trained("local-update")
    moved = [row.noise_std for row in rows_of(c)]
    assert moved == [0, 0]
    assert json_of(c, "summary.json")["epsilon"]["recipient"] is None


def test_a_user_releases_one_vector(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two the bound would be twice what its noise is for."""
    honest = client.update

    def twice(node: client.Node, task: Task, state: RecordDict) -> Tensor:
        return torch.cat([honest(node, task, state)] * 2)

    monkeypatch.setattr(client, "update", twice)
    c = config(strategy="ifca", noise_multiplier=1.0)
    grid = LocalGrid(c)
    with pytest.raises(TrainingFailed, match="every round of stage 2 was dropped: no update arrived"):
        server.run(grid, c, "1")
    asked = grid.trained("local-update")
    assert asked
    assert all(exchange.reply.has_error() for exchange in asked)
