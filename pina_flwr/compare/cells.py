"""One cell: a run in a folder of its own that may be interrupted, fail, be killed, and be taken up again.

The folder says by itself how far it is. `cell.toml` is written before the run starts and holds all its
options; the run writes its summary last. So a cell is done if its options are those asked for, its summary
is of such a run and whole, as are its rounds, and no `failed.txt` says that the run failed for all that. Only
then is a cell not run again, and never are files of two runs in one folder: what has other options or is
damaged is moved aside first.

Nothing in it depends on the machine or on where the folder lies. Of a data set or a backbone in a local
folder only the folder's name counts, and it may stand for a Hugging Face id (owner/name) that ends with it:
a cell that ran elsewhere, its `NEEDED` files copied, is done here too.
"""

from __future__ import annotations

import enum
import itertools
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from pina_flwr.compare.grid import Cell
from pina_flwr.compare.made_with import MadeWith
from pina_flwr.config import ConfigError, RunConfig, to_dict
from pina_flwr.report import metrics_log, summary
from pina_flwr.report.files import write_atomically
from pina_flwr.report.summary import Summary
from pina_flwr.report.typed import from_values
from pina_flwr.runner import RunResult
from pina_flwr.runner.output import prepared
from pina_flwr.runner.overrides import read_toml
from pina_flwr.runner.superlink import INTERRUPTED

RECORD = "cell.toml"
FAILED = "failed.txt"
NEEDED = (RECORD, summary.FILE_NAME, metrics_log.FILE_NAME)
"""All that tables, figures and page are made of."""
PLACES = ("output", "cache-dir", "cache-gib")
"""Options that say where things are kept. No result depends on them."""
NAMED = ("dataset", "backbone")
"""Options that name a thing or a local folder which holds it."""

Runner = Callable[[Cell, Path], RunResult]
"""Runs a cell, its results going to the folder, which exists and is ours."""


class State(enum.Enum):
    """How far a cell is."""

    DONE = "done"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    CHANGED = "has another configuration"
    MISSING = "not begun"


@dataclass(frozen=True)
class Status:
    """State of a cell; note: why it failed, what can't be read, or in what its options differ."""

    state: State
    note: str = ""

    @property
    def is_kept(self) -> bool:
        """What is there is neither the cell's result nor the debris of a run of it: it is moved aside."""
        return self.state is State.CHANGED or (self.state is State.UNFINISHED and self.note != "")

    def __str__(self) -> str:
        return self.state.value + (f": {self.note}" if self.note else "")


@dataclass(frozen=True)
class Record:
    """What `cell.toml` holds: options by their run-config keys, and what the cell was computed with."""

    options: Mapping[str, Any]
    made_with: MadeWith


def status(cell: Cell, folder: Path) -> Status:
    """How far the cell is in its folder, which need not exist."""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        return Status(State.CHANGED, "is no folder")
    if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return Status(State.MISSING)
    if not (folder / RECORD).exists():
        return Status(State.CHANGED, f"holds files but no {RECORD}")
    try:
        record = read_record(folder)
    except ConfigError as error:
        return Status(State.UNFINISHED, str(error))
    if changed := differences(cell.config, record.options):
        return Status(State.CHANGED, ", ".join(changed))
    failure = folder / FAILED
    if failure.is_file():
        lines = failure.read_text(encoding="utf-8", errors="replace").splitlines()
        return Status(State.FAILED, lines[0] if lines else "no reason given")
    if not (folder / summary.FILE_NAME).exists():
        return Status(State.UNFINISHED)
    damage = _damage(cell, folder)
    return Status(State.UNFINISHED, damage) if damage else Status(State.DONE)


def run_cell(cell: Cell, folder: Path, aside: Path, versions: MadeWith, runner: Runner) -> Status:
    """Run a cell from its start.

    Args:
        cell: the run.
        folder: its folder, made if need be. What an earlier attempt at the same run left there goes.
        aside: folder that receives what has another configuration or can't be read.
        versions: what the cell is computed with.
        runner: see `Runner`.

    Returns:
        DONE, FAILED or, if it was interrupted, UNFINISHED.

    Raises:
        OSError: not even the failure can be written down.
    """
    if status(cell, folder).is_kept:
        _move(folder, aside)
    trace = ""
    try:
        # An old failure is forgotten after what it left: until then it keeps that from counting as a result.
        with prepared(folder, overwrite=True):
            write_record(folder, cell, versions)
            (folder / FAILED).unlink(missing_ok=True)
            result = runner(cell, folder)
        if result.status == INTERRUPTED:
            return Status(State.UNFINISHED)
        reason = result.reason or _damage(cell, folder)
    except Exception as error:  # whatever it is, the other cells can do without this one
        reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        reason = str(error) if isinstance(error, ConfigError) else reason
    if not reason:
        return Status(State.DONE)
    reason = " ".join(reason.split()) or "no reason given"
    write_atomically(folder / FAILED, f"{reason}\n{trace}")
    return Status(State.FAILED, reason)


def differences(asked: RunConfig, options: Mapping[str, Any]) -> list[str]:
    """Keys of the options in which a cell that was run with `options` is not the one asked for.

    An option that is younger than the cell is no difference as long as it has its default.
    """
    wanted, usual = to_dict(asked), to_dict(RunConfig())
    had = {**usual, **options}
    keys = [*wanted, *(key for key in options if key not in wanted)]
    return [key for key in keys if key not in PLACES and not _agree(key, wanted.get(key), had[key])]


def write_record(folder: Path, cell: Cell, versions: MadeWith) -> None:
    """Write `cell.toml`, which `read_record` reads."""
    options = {key: _portable(key, value) for key, value in to_dict(cell.config).items()}
    told = {key: value for key, value in options.items() if key not in PLACES}
    table = {"cell": str(cell), "options": told, "made-with": asdict(versions)}
    write_atomically(folder / RECORD, tomli_w.dumps(table))


def read_record(folder: Path) -> Record:
    """The content of `cell.toml`, which newer or older code may have written.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    try:
        table = read_toml(folder / RECORD)
        return Record(dict(table["options"]), from_values(MadeWith, table["made-with"]))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / RECORD}: must be what pina compare wrote: {error}") from error


def _agree(key: str, asked: Any, had: Any) -> bool:
    """Whether two values of an option mean the same; asked is None if there is no such option any more."""
    asked, had = _portable(key, asked), _portable(key, had)
    return bool(asked == had) or (key in NAMED and (_is_copy(asked, had) or _is_copy(had, asked)))


def _is_copy(local: Any, name: Any) -> bool:
    """Whether a local folder, `./x`, is called like the repository `owner/x`."""
    owner, slash, last = str(name).partition("/")
    return bool(slash) and owner != "." and local == f"./{last}"


def _portable(key: str, value: Any) -> Any:
    """Of a local folder its name, as `./name`; any other value as it is."""
    if key not in NAMED or not isinstance(value, str):
        return value
    name = summary.known_as(value)
    return value if name == value else f"./{name}"


def _damage(cell: Cell, folder: Path) -> str:
    """What keeps the results from being the cell's and complete; empty if nothing does."""
    try:
        told = summary.read_summary(folder)
        numbers = [row.round for row in metrics_log.read(folder)]
    except ConfigError as error:
        return str(error)
    if others := _of_another_run(cell, told):
        return f"{summary.FILE_NAME} is of another run, by its {', '.join(others)}"
    if len(numbers) != told.rounds:
        count = f"{len(numbers)} rounds and {summary.FILE_NAME} {told.rounds}"
        return f"{metrics_log.FILE_NAME} has {count}; must have as many"
    if numbers != list(range(1, len(numbers) + 1)):
        return f"{metrics_log.FILE_NAME}: must have rounds 1 to {told.rounds} in order, each once"
    return ""


def _of_another_run(cell: Cell, told: Summary) -> list[str]:
    """Fields of a summary that are options too and differ from the cell's."""
    found = [name for name in ("strategy", "seed") if getattr(told, name) != getattr(cell.config, name)]
    # A summary has of a local folder its name, and that may stand for owner/name.
    return found + [name for name in NAMED if _last(getattr(told, name)) != _last(getattr(cell.config, name))]


def _last(name: str) -> str:
    return summary.known_as(name).rpartition("/")[2]


def _move(folder: Path, aside: Path) -> None:
    aside.mkdir(parents=True, exist_ok=True)
    names = (f"{folder.name}-{number}" for number in itertools.count(1))
    folder.rename(next(aside / name for name in names if not os.path.lexists(aside / name)))
