"""What the cells left, read back, and the figures of a cell and of all seeds together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pina_flwr.compare.cells import State, Status, read_record, status
from pina_flwr.compare.grid import Cell
from pina_flwr.compare.made_with import MadeWith
from pina_flwr.compare.matrix import Matrix
from pina_flwr.report import metrics_log
from pina_flwr.report.metrics_log import RoundRow
from pina_flwr.report.summary import Summary, read_summary


@dataclass(frozen=True)
class Run:
    """What a finished cell left."""

    summary: Summary
    rounds: tuple[RoundRow, ...]
    made_with: MadeWith

    @property
    def clustering(self) -> list[tuple[RoundRow, float]]:
        """Rounds with their clustering accuracy, where there is one; none with a single model."""
        return [] if self.summary.clusters == 1 else measured(self.rounds, "clustering_accuracy")


@dataclass(frozen=True)
class CellResult:
    """A cell, how far it is, and what it left if it is done."""

    cell: Cell
    status: Status
    run: Run | None


@dataclass(frozen=True)
class Comparison:
    """A matrix, its cells, and the absolute folder that receives everything."""

    matrix: Matrix
    cells: tuple[Cell, ...]
    folder: Path

    @property
    def aside(self) -> Path:
        """Where cells of another configuration go."""
        return self.folder / "aside"

    def folder_of(self, cell: Cell) -> Path:
        """The folder of a cell's run."""
        return self.folder / "cells" / cell.name

    def status(self, cell: Cell) -> Status:
        """How far the cell is."""
        return status(cell, self.folder_of(cell))

    def results(self) -> tuple[CellResult, ...]:
        """All cells as they are now."""
        return tuple(self.result(cell) for cell in self.cells)

    def result(self, cell: Cell) -> CellResult:
        """A cell as it is now."""
        now, folder = self.status(cell), self.folder_of(cell)
        if now.state is not State.DONE:
            return CellResult(cell, now, None)
        rounds = tuple(metrics_log.read(folder))
        return CellResult(cell, now, Run(read_summary(folder), rounds, read_record(folder).made_with))


@dataclass(frozen=True)
class Score:
    """A figure over seeds. sd: sample standard deviation (n - 1 in the divisor); None for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def greatest(self) -> float:
        return max(self.values)


def score(values: Iterable[float | None]) -> Score | None:
    """The score over the values that were measured; None if none was."""
    present = tuple(value for value in values if value is not None and math.isfinite(value))
    return Score(present) if present else None


def measured(rounds: Sequence[RoundRow], name: str) -> list[tuple[RoundRow, float]]:
    """The rounds in which the field `name` was measured, with its value."""
    found = [(row, getattr(row, name)) for row in rounds]
    return [(row, value) for row, value in found if value is not None and math.isfinite(value)]


def late_clustering(run: Run) -> float | None:
    """The least clustering accuracy from half of the rounds on, of both stages; None if never measured."""
    return min((value for row, value in run.clustering if 2 * row.round >= row.rounds), default=None)


def first_round(run: Run, level: float) -> int | None:
    """The first measured round, counted over both stages, with at least that clustering accuracy."""
    return next((row.round for row, value in run.clustering if value >= level), None)


def stage1_rounds(run: Run) -> int:
    """How many of the run's rounds were of stage 1."""
    return sum(row.stage == 1 for row in run.rounds)
