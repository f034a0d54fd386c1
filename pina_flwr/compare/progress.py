"""How a comparison goes, in the terminal: a bar for all cells, one for the present one, and the time left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pina_flwr.compare.cells import State, Status
from pina_flwr.compare.grid import Cell
from pina_flwr.report.metrics_log import RoundRow
from pina_flwr.runner.progress import RoundReader
from pina_flwr.runner.progress import time_left as rounds_left


class Board:
    """Says what happens, and shows bars if the console is a terminal. A context manager.

    Args:
        console: where to.
        cells: those that are to run, in order.
        known: wall times of cells that ran before, by row, seconds.
    """

    def __init__(self, console: Console, cells: Sequence[Cell], known: Mapping[str, Sequence[float]]) -> None:
        self._cells = list(cells)
        self._seconds = {row: list(values) for row, values in known.items()}
        self._done = 0
        self._began = self._last_row_at = time.monotonic()
        self._rows: list[RoundRow] = []
        self._reader: RoundReader | None = None
        columns = [TextColumn("{task.description}", markup=False), BarColumn()]
        columns.append(TextColumn("{task.fields[note]}", markup=False))
        self._console, self._bars = console, console.is_terminal
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._all = self._progress.add_task("cells", total=len(self._cells), note="")
        self._one = self._progress.add_task("", total=None, note="", visible=False)

    def __enter__(self) -> Self:
        if self._bars:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are some."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, cell: Cell, folder: Path) -> None:
        """The next cell starts; its rounds will be logged in the folder."""
        self._began = self._last_row_at = time.monotonic()
        self._rows = []
        self._reader = RoundReader(folder)
        self.say(f"cell {self._done + 1} of {len(self._cells)}: {cell}")
        self._progress.reset(self._one, total=None, description=str(cell), note="starting", visible=True)
        self.tick()

    def tick(self) -> None:
        """Show the rounds that were logged since the last call, and the time left. Called often."""
        if not self._bars or self._reader is None:
            return
        if rows := self._reader.new_rows():
            self._rows += rows
            self._last_row_at = time.monotonic()
        if self._rows:
            last = self._rows[-1]
            accuracy = next((row.accuracy for row in reversed(self._rows) if row.accuracy is not None), None)
            note = f"round {last.round}/{last.rounds}"
            note += f", accuracy {accuracy:.3f}" if accuracy is not None else ""
            self._progress.update(self._one, completed=last.round, total=last.rounds, note=note)
        self._progress.update(self._all, completed=self._done, note=self._left_text())

    def end(self, cell: Cell, outcome: Status, accuracy: float | None) -> None:
        """The cell has ended. accuracy: its test accuracy, if it has one."""
        seconds = time.monotonic() - self._began
        self._done += 1
        self._reader, self._rows = None, []
        if outcome.state is State.DONE:
            self._seconds.setdefault(cell.row, []).append(seconds)
        score = "" if accuracy is None else f", accuracy {accuracy:.3f}"
        left = self._left_text()
        self.say(f"  {outcome}, {clock(seconds)}{score}" + (f"; {left}" if left else ""))
        self._progress.update(self._one, visible=False)
        self._progress.update(self._all, completed=self._done, note=left)

    def _left_text(self) -> str:
        left = self._left()
        return f"{clock(left)} left" if left else ""

    def _left(self) -> float | None:
        rows = [cell.row for cell in self._cells[self._done :]]
        if self._reader is None:
            return time_left(rows, self._seconds)
        now = time.monotonic()
        present = self._present_left(rows[0], now)
        if present is None:
            return None
        known = self._seconds or {rows[0]: [now - self._began + present]}
        rest = time_left(rows[1:], known)
        return None if rest is None else present + rest

    def _present_left(self, row: str, now: float) -> float | None:
        """Seconds that the present cell takes yet: by its rounds, or before the first by earlier cells."""
        by_rounds = rounds_left(self._rows, now - self._last_row_at) if self._rows else None
        whole = expected(row, self._seconds)
        by_cells = None if whole is None else max(0.0, whole - (now - self._began))
        return by_cells if by_rounds is None else by_rounds


def expected(row: str, known: Mapping[str, Sequence[float]]) -> float | None:
    """Seconds that a cell of the row takes: the mean of that row's cells, or else of all; None if unknown."""
    everything = [seconds for values in known.values() for seconds in values]
    own = known.get(row) or everything
    return statistics.fmean(own) if own else None


def time_left(rows: Sequence[str], known: Mapping[str, Sequence[float]]) -> float | None:
    """Seconds that cells of these rows take one after the other; None if nothing is known."""
    parts = [part for row in rows if (part := expected(row, known)) is not None]
    return sum(parts) if len(parts) == len(rows) else None


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
