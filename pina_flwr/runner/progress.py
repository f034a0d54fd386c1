"""The progress bar of a run, read from its metrics.jsonl as it grows."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pina_flwr.report.metrics_log import FILE_NAME, RoundRow

RECENT = 5
"""Rounds whose mean duration the estimate of the time left rests on."""


class RoundReader:
    """Reads the rows that were added to metrics.jsonl since the last call; the file may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0

    def new_rows(self) -> list[RoundRow]:
        """Rows of lines that are complete."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := _row(line))]


class ProgressBar:
    """A bar below the log lines: rounds done, accuracy, time elapsed and left. A context manager."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._reader = RoundReader(folder)
        self._rows: list[RoundRow] = []
        self._last_row_at = time.monotonic()
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")]
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Print a log line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Show the rounds that were logged since the last call, and the time left."""
        rows = self._reader.new_rows()
        if rows:
            self._rows += rows
            self._last_row_at = time.monotonic()
        if not self._rows:
            return
        last = self._rows[-1]
        left = time_left(self._rows, time.monotonic() - self._last_row_at)
        notes = [f"{_clock(left)} left" if left is not None and last.round < last.rounds else ""]
        accuracy = next((row.accuracy for row in reversed(self._rows) if row.accuracy is not None), None)
        notes.append(f"accuracy {accuracy:.3f}" if accuracy is not None else "")
        self._progress.update(
            self._task,
            description=f"round {last.round}/{last.rounds}, stage {last.stage}",
            completed=last.round,
            total=last.rounds,
            note=", ".join(filter(None, notes)),
        )


def time_left(rows: list[RoundRow], since: float) -> float | None:
    """Seconds until the last round has ended, from the rounds of the present stage; None if unknown.

    Args:
        rows: rounds so far, at least one.
        since: seconds since the last of them ended.
    """
    last = rows[-1]
    recent = [row.seconds for row in rows if row.stage == last.stage and row.seconds is not None][-RECENT:]
    if not recent:
        return None
    return max(0.0, statistics.fmean(recent) * (last.rounds - last.round) - since)


def _row(line: bytes) -> RoundRow | None:
    try:
        return RoundRow(**json.loads(line))
    except (ValueError, TypeError):  # the bar is no reason to end a run
        return None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
