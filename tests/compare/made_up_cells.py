"""Matrices, cells and runs that nobody ran, for tests of `pina compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pina_flwr.compare.cells import State, Status
from pina_flwr.compare.comparison import read_all
from pina_flwr.compare.grid import Cell
from pina_flwr.compare.made_with import MadeWith
from pina_flwr.compare.results import CellResult, Comparison, Run
from pina_flwr.config import RunConfig, to_dict
from pina_flwr.report.metrics_log import MetricsLog, RoundRow
from pina_flwr.report.summary import Epsilons, NoiseMultipliers, Summary, write_summary
from pina_flwr.runner import RunResult

DEFAULTS = to_dict(RunConfig())
OK = RunResult("finished:completed", "", False, 1.0)
MATRIX = """
seeds = [1, 2]
epsilons = [2, 8.0]

[[row]]
name = "FedAvg"
strategy = "fedavg"

[[row]]
name = "PINA"
"""
VERSIONS = MadeWith(
    app="pina-flwr 0.1.0",
    commit="abc",
    code="123456789abc",
    python="3.11.1",
    torch="2.9.0",
    flwr="1.42.0",
    numpy="2.0.0",
    machine="Linux x86_64",
    cpus=2,
    gpus=0,
)


def comparison_of(folder: Path, text: str = MATRIX, extra: Mapping[str, Any] | None = None) -> Comparison:
    """The comparison of a matrix file with this text, its results in `folder`/out."""
    path = folder / "matrix.toml"
    path.write_text(text, encoding="utf-8")
    (comparison,) = read_all([path], DEFAULTS, extra or {}, folder / "out", folder)
    return comparison


def summary_of(cell: Cell, **changes: Any) -> Summary:
    """A summary as a run of the cell could have left."""
    values: dict[str, Any] = {
        "strategy": cell.config.strategy,
        "accuracy": 0.5,
        "worst_cluster_accuracy": 0.4,
        "clustering_accuracy": 0.9,
        "ari": 0.8,
        "rounds": 4,
        "seconds": 60.0,
        "epsilon": Epsilons(recipient=cell.epsilon, server=10 * cell.epsilon, sketch=0.0),
        "delta": 0.001,
        "noise_cohort_size": 10_000,
        "cohort": 50.0,
        "users": 200,
        "seed": cell.seed,
        "dataset": cell.config.dataset,
        "backbone": cell.config.backbone,
        "clusters": cell.config.slots,
        "groups": 4,
        "noise_multiplier": NoiseMultipliers(stage1=1.0, stage2=1.0),
        "caveats": ["The noise is that of a cohort of 10,000 users."],
    }
    return Summary(**(values | changes))


def rounds_of(
    clustering: Sequence[float | None], accuracy: Sequence[float | None] | None = None, stage1: int = 0
) -> list[RoundRow]:
    """Rounds with these scores; the first `stage1` of them are of stage 1."""
    return [
        RoundRow(
            round=number,
            rounds=len(clustering),
            stage=1 if number <= stage1 else 2,
            clustering_accuracy=value,
            accuracy=None if accuracy is None else accuracy[number - 1],
        )
        for number, value in enumerate(clustering, start=1)
    ]


def leave(folder: Path, summary: Summary | None, rounds: Sequence[RoundRow]) -> None:
    """Write what a run leaves; without a summary, one that was cut short."""
    log = MetricsLog(folder)
    for row in rounds:
        log.append(row)
    if summary is not None:
        write_summary(folder, summary)


def done(cell: Cell, clustering: Sequence[float | None] = (), stage1: int = 0, **changes: Any) -> CellResult:
    """The cell as if it had run: clustering accuracies by round, accuracy rising to that of its summary."""
    versions = changes.pop("versions", VERSIONS)
    summary = summary_of(cell, rounds=len(clustering), **changes)
    last = summary.accuracy
    accuracy = [None if last is None else last * n / len(clustering) for n in range(1, len(clustering) + 1)]
    rounds = rounds_of(clustering, accuracy, stage1)
    return CellResult(cell, Status(State.DONE), Run(summary, tuple(rounds), versions))


def not_done(cell: Cell, state: State = State.MISSING, note: str = "") -> CellResult:
    """The cell without a result."""
    return CellResult(cell, Status(state, note), None)


def finish(cell: Cell, folder: Path, tick: Callable[[], None] = lambda: None) -> RunResult:
    """Stands in for a run: it succeeds at once."""
    tick()
    leave(folder, summary_of(cell), rounds_of([0.5, 0.9, 0.96, 0.96], [0.2, 0.3, 0.4, 0.5]))
    return OK
