"""Users that vanish, fail or refuse: a round counts as long as the noise is sized for it, and not beyond."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from support import (
    Intercept,
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
    with_content,
    with_vector,
)

from pina_flwr import server
from pina_flwr.config import RunConfig
from pina_flwr.messages import REVEAL, TRAIN, Task
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.secure_sum.interface import REFUSAL
from pina_flwr.strategies.clustered import TrainingFailed

Make = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("bare")
NODES = 12  # of one user each, all of whom are asked: one of them may vanish, two may not
CROWD = {
    "num_users": NODES,
    "sampling_rate": 1.0,
    "strategy": "fedavg",
    "normality": "none",
    "noise_multiplier": 2.0,
    "noise_cohort_size": 0,
}
FAULTS = {
    "lost": lost,
    "failed": failed,
    "refused": refused,
    "malformed": with_vector(lambda v: v[1:]),
    "empty": with_content(lambda _: RecordDict()),
}


def both(*faults: dict[int, Intercept], nodes: list[list[int]]) -> Intercept:
    """Several faults by round, each of its own nodes."""
    parts = [by_round(fault, hit) for fault, hit in zip(faults, nodes, strict=True)]

    def intercept(request: Message, reply: Message) -> list[Message]:
        arrived = [part(request, reply) for part in parts]
        return next((found for found in arrived if found != [reply]), [reply])

    return intercept


class TestWithinTolerance:
    def test_the_round_counts(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        """Every kind of fault, one a round, of one node; the sum is that of the others."""
        c = config(**CROWD, t_tr=len(FAULTS) + 1)
        run(c, NODES, intercept=by_round(dict(enumerate(FAULTS.values(), 1)), nodes=[5]))
        rows = rows_of(c)
        assert [row.dropped for row in rows] == [None] * len(rows)
        assert [row.cohort for row in rows] == [NODES] * len(rows)
        assert [row.survivors for row in rows] == [NODES - 1] * len(FAULTS) + [NODES]
        assert flwr_log.text.count(" · 1 vanished · ") == len(FAULTS)
        assert json_of(c, "summary.json")["dropped_rounds"] == 0
        refusals = {"budget spent": 1}
        assert [row.refusals for row in rows] == [
            refusals if name == "refused" else None for name in [*FAULTS, ""]
        ]
        sigma = 2.0 / NODES / math.sqrt(0.9)
        expected = [sigma * math.sqrt((row.survivors or 0) / NODES) for row in rows]
        assert [row.noise_std for row in rows] == pytest.approx(expected)
        assert min(expected) > 2.0 / NODES  # never less than ε needs

    @pytest.mark.parametrize("fault", ["lost", "refused"])
    def test_models_move_by_the_sum_of_the_others(self, config: Make, fault: str) -> None:
        """Through the expected cohort, a public number, and not through how many answered."""
        c = config(**CROWD)
        grid = run(c, NODES, intercept=by_round({1: FAULTS[fault]}, nodes=[5]))
        exchanges = grid.trained("update", 1)
        assert sum(e.arrived == [e.reply] for e in exchanges) == NODES - 1
        for exchange in exchanges:  # what else arrives is no vector
            exchange.arrived = [reply for reply in exchange.arrived if reply == exchange.reply]
        moved = (models_sent(grid, 2) - models_sent(grid, 1)).ravel()
        np.testing.assert_allclose(moved, decoded(grid, "update", 1) / NODES, atol=1e-6)

    @pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian", "gaussian"])
    def test_the_noise_that_is_left_is_whole(self, config: Make, mechanism: str) -> None:
        """No update is finite, so models move by noise alone: at least z·S, and as much as the row says."""
        c = config(**CROWD, mechanism=mechanism, learning_rate=1e30, local_epochs=3)
        grid = run(c, NODES, intercept=by_round({1: lost}, nodes=[5]))
        moved = (models_sent(grid, 2) - models_sent(grid, 1)).ravel()
        row = rows_of(c)[0]
        assert row.left_out == NODES
        assert moved.std() == pytest.approx(row.noise_std, rel=6 / math.sqrt(2 * moved.size))
        assert row.noise_std >= 2.0 / NODES  # type: ignore[operator]

    def test_stage_1_goes_on_too(self, config: Make) -> None:
        c = config(**CROWD | {"strategy": "pina"})
        run(c, NODES, intercept=by_round({1: lost, 2: failed}, nodes=[3]))
        assert [(row.dropped, row.survivors) for row in rows_of(c)[:2]] == [(None, NODES - 1)] * 2


class TestBeyondTolerance:
    def test_the_round_is_dropped_and_charged(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        c = config(**CROWD, t_tr=3)
        faults = both({2: lost}, {2: refused}, nodes=[[5], [7]])
        grid = run(c, NODES, intercept=faults)
        reason = "10 of 12 members survived, 11 are needed (clients refused: budget spent)"
        rows = rows_of(c)
        assert [row.dropped for row in rows] == [None, reason, None]
        assert rows[1].survivors == 10
        assert rows[1].refusals == {"budget spent": 1}
        assert f"cohort 12 · DROPPED: {reason}" in flwr_log.text
        np.testing.assert_array_equal(models_sent(grid, 3), models_sent(grid, 2))
        epsilons = [row.epsilon for row in rows]
        assert epsilons == sorted(set(epsilons))  # type: ignore[type-var]
        assert epsilons[-1] == pytest.approx(json_of(c, "summary.json")["epsilon"]["recipient"])
        with Ledger.open(Path(c.output) / "releases.jsonl") as ledger:
            assert [(e.stage, e.round) for e in ledger.entries] == [(2, 1), (2, 2), (2, 3)]

    def test_with_no_tolerance_one_is_too_many(self, config: Make) -> None:
        c = config(**CROWD, dropout_tolerance=0.0)
        run(c, NODES, intercept=by_round({1: lost}, nodes=[5]))
        reason = "11 of 12 members survived, 12 are needed, the others sent no answer in time"
        assert [row.dropped for row in rows_of(c)] == [reason, None]

    def test_with_more_tolerance_more_may_vanish(self, config: Make) -> None:
        c = config(**CROWD, dropout_tolerance=0.5)
        run(c, NODES, intercept=by_round({1: lost, 2: lost}, nodes=[0, 2, 3, 5, 8, 11]))
        assert [(row.dropped, row.survivors) for row in rows_of(c)] == [(None, 6)] * 2

    def test_two_answers_of_one_node(self, config: Make) -> None:
        """Which of them counts can't be told; the node's user is not put into the sum twice."""
        c = config(**CROWD)
        grid = run(c, NODES, intercept=by_round({1: twice}, nodes=[5]))
        assert [row.dropped for row in rows_of(c)] == ["a node answered twice, or was not asked", None]
        np.testing.assert_array_equal(models_sent(grid, 2), models_sent(grid, 1))


class TestRefusal:
    """A node with a policy of its own, asked by a run that is outside it."""

    def policies(self, folder: Path, nodes: list[int], limits: str) -> dict[int, dict[str, Any]]:
        """Node configurations of these partitions, with a policy each."""
        path = folder / "policy.toml"
        budget = "max-epsilon = 1e6\ndelta = 1e-5\nsecure-sums = ['trusted']"
        path.write_text(f"{budget}\n{limits}\n")
        return {
            node: {
                "partition-id": node,
                "num-partitions": NODES,
                "policy": str(path),
                "ledger": str(folder / f"ledger-{node}"),
            }
            for node in nodes
        }

    def test_its_reason_is_all_that_the_server_learns(
        self, config: Make, tmp_path: Path, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        c = config(**CROWD, diagnostics=False)
        grid = run(c, NODES, node_configs=self.policies(tmp_path, [4], "min-cohort = 1000"))
        reason = "cohort outside the policy"
        for row in rows_of(c):
            assert (row.dropped, row.survivors, row.refusals) == (None, NODES - 1, {reason: 1})
        assert flwr_log.text.count(f" · refused: {reason} (1) · 1 vanished · ") == 2
        for exchange in grid.trained():
            refuses = exchange.request.metadata.dst_node_id == node_id(4)
            assert (REFUSAL in exchange.reply.content) is refuses
            if refuses:
                assert list(exchange.reply.content) == [REFUSAL]
                assert dict(exchange.reply.content.config_records[REFUSAL]) == {"reason": reason}

    def test_a_node_that_is_content_takes_part(self, config: Make, tmp_path: Path) -> None:
        c = config(**CROWD, diagnostics=False)
        run(c, NODES, node_configs=self.policies(tmp_path, [4], ""))
        assert [(row.survivors, row.refusals) for row in rows_of(c)] == [(NODES, None)] * 2
        with Ledger.open(tmp_path / "ledger-4" / "user-4.jsonl") as ledger:
            assert [(e.run, e.stage, e.round) for e in ledger.entries] == [("1", 2, 1), ("1", 2, 2)]
            assert {e.release.sampling_rate for e in ledger.entries} == {1.0}  # type: ignore[union-attr]

    def test_if_all_refuse_nothing_is_trained(self, config: Make, tmp_path: Path) -> None:
        c = config(**CROWD, diagnostics=False)
        configs = self.policies(tmp_path, list(range(NODES)), "max-rounds = 1")
        grid = LocalGrid(c, NODES, node_configs=configs)
        server.run(grid, c, "1")
        reason = "0 of 12 members survived, 11 are needed (clients refused: too many rounds)"
        assert [row.dropped for row in rows_of(c)] == [None, reason]
        again = LocalGrid(c, NODES, node_configs=configs)
        with pytest.raises(
            TrainingFailed, match="every round of stage 2 was dropped: 0 of 12 members survived"
        ):
            server.run(again, c, "1")


class TestRemovableNoise:
    """XNoise: what survivors added for the case that more vanish is taken away again."""

    CROWD = CROWD | {"dropout_noise": "removable", "dropout_tolerance": 0.34, "learning_rate": 1e30}

    def moved(self, config: Make, intercept: Intercept | None) -> tuple[LocalGrid, float, RunConfig]:
        """A run whose models move by noise alone, and by how much a coordinate in its first round."""
        c = config(**self.CROWD, local_epochs=3)
        grid = run(c, NODES, intercept=intercept)
        moved = (models_sent(grid, 2) - models_sent(grid, 1)).ravel()
        row = rows_of(c)[0]
        assert (row.dropped, row.left_out) == (None, NODES)
        assert moved.std() == pytest.approx(row.noise_std, rel=6 / math.sqrt(2 * moved.size))
        return grid, row.noise_std or 0.0, c

    @pytest.mark.parametrize("vanished", [0, 1, 3])
    def test_what_is_left_is_what_epsilon_needs(self, config: Make, vanished: int) -> None:
        grid, std, _ = self.moved(config, by_round({1: lost}, nodes=list(range(vanished))))
        assert std == pytest.approx(2.0 / NODES)
        asked = grid.trained(REVEAL, 1)
        assert len(asked) == NODES - vanished
        assert {e.task.vanished for e in asked} == {vanished}

    def test_if_as_many_vanish_as_may_nobody_is_asked(self, config: Make) -> None:
        grid, std, _ = self.moved(config, by_round({1: lost}, nodes=[0, 1, 2, 3]))
        assert std == pytest.approx(2.0 / NODES)
        assert not grid.trained(REVEAL, 1)

    @pytest.mark.parametrize("fault", [lost, failed, refused], ids=["lost", "failed", "refused"])
    def test_who_does_not_reveal_keeps_its_noise_in_the_sum(self, config: Make, fault: Intercept) -> None:
        """Which is more than is needed, but no reason to drop the round."""

        def intercept(request: Message, reply: Message) -> list[Message]:
            about = request.metadata
            revealing = about.message_type == TRAIN and Task.from_record(request.content).step == REVEAL
            silent = revealing and about.dst_node_id in (node_id(2), node_id(9))
            return fault(request, reply) if silent else [reply]

        _, std, c = self.moved(config, intercept)
        assert std == pytest.approx(2.0 / NODES * math.sqrt((10 / 12) + (2 / 8)))
        assert [row.survivors for row in rows_of(c)] == [NODES] * 2
