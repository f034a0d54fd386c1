"""Running the cells of comparisons one after the other, and writing what is known after each.

Interrupted at any point, by a signal or by a kill, the cells that are done stay done, and the next start goes
on with the one that was running.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from pina_flwr.compare import figures, table
from pina_flwr.compare.cells import State, Status, run_cell
from pina_flwr.compare.grid import Cell, cells_of
from pina_flwr.compare.made_with import MadeWith
from pina_flwr.compare.matrix import read_matrix
from pina_flwr.compare.page import page
from pina_flwr.compare.progress import Board
from pina_flwr.compare.results import Comparison
from pina_flwr.config import ConfigError, expanded
from pina_flwr.report.files import write_atomically
from pina_flwr.runner import RunResult
from pina_flwr.runner.output import prepared
from pina_flwr.runner.overrides import Scalar

HOME = Path("runs/compare")
"""Where comparisons go unless told otherwise, below the working directory."""

Runner = Callable[[Cell, Path, Callable[[], None]], RunResult]
"""Runs a cell, its results going to the folder; it calls the third argument several times a second."""


def read_all(
    files: Sequence[Path],
    defaults: Mapping[str, Scalar],
    extra: Mapping[str, Scalar],
    output: Path | None,
    folder: Path,
) -> tuple[Comparison, ...]:
    """The comparisons of matrix files, all of their cells checked.

    Args:
        files: matrix files.
        defaults: the app's run config.
        extra: options of the command line.
        output: where results go; None: a folder of the matrix's name below `HOME`.
        folder: what relative paths start from.

    Raises:
        ConfigError: a file or a cell is not valid, or two of them would share a folder.
    """
    if output is not None and len(files) > 1:
        raise ConfigError(f"--output = {str(output)!r}: must be left out with {len(files)} matrix files")
    found: list[Comparison] = []
    for file in files:
        matrix = read_matrix(file)
        place = (folder / expanded("--output", output or HOME / matrix.name)).resolve()
        if any(other.folder == place for other in found):
            raise ConfigError(f"{file}: must have a name of its own, since results go to {place}")
        found.append(Comparison(matrix, cells_of(matrix, defaults, extra, folder), place))
    return tuple(found)


def selection(comparisons: Sequence[Comparison], only: Sequence[str]) -> Callable[[Cell], bool]:
    """Whether a cell is of the rows named; of any row if none is.

    Raises:
        ConfigError: no comparison has a row of such a name.
    """
    names = list(dict.fromkeys(row.name for comparison in comparisons for row in comparison.matrix.rows))
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(names)}"
            raise ConfigError(f"--only = {name!r}: is no row; {hint}")
    return lambda cell: not only or cell.row in only


@contextlib.contextmanager
def locked(comparisons: Sequence[Comparison]) -> Iterator[None]:
    """The folders of the comparisons, made and ours in the context.

    Raises:
        ConfigError: one can't be written, is in use by another comparison, or is the folder of a run.
    """
    with contextlib.ExitStack() as stack:
        for comparison in comparisons:
            stack.enter_context(prepared(comparison.folder, overwrite=False))
        yield


def compare(
    comparisons: Sequence[Comparison],
    wanted: Callable[[Cell], bool],
    runner: Runner,
    versions: Callable[[], MadeWith],
    stopped: Callable[[], bool],
    console: Console,
) -> bool:
    """Run the cells that are not done, in order, until all have been tried or `stopped` says so.

    Args:
        comparisons: their folders are ours (see `locked`).
        wanted: whether a cell is to run at all.
        runner: see `Runner`.
        versions: what the next cell will be computed with.
        stopped: whether to end.
        console: where to say how it goes.

    Returns:
        Whether all of them ran to their end, be it a failure.

    Raises:
        OSError: results can't be written.
    """
    todo = [
        (comparison, cell)
        for comparison in comparisons
        for cell in comparison.cells
        if wanted(cell) and comparison.status(cell).state is not State.DONE
    ]
    ended = 0
    with Board(console, [cell for _, cell in todo], _wall_times(comparisons)) as board:
        for comparison, cell in todo:
            if stopped():
                break
            outcome = _run(comparison, cell, runner, versions(), board)
            ended += outcome.state is not State.UNFINISHED
            write_results(comparison)
    for comparison in comparisons:
        write_results(comparison)
    return ended == len(todo)


def report(comparisons: Sequence[Comparison]) -> None:
    """Write tables, figures and page of the cells that are done, and run nothing.

    Raises:
        ConfigError: a comparison has no folder.
        OSError: results can't be written.
    """
    for comparison in comparisons:
        if not comparison.folder.is_dir():
            raise ConfigError(
                f"{comparison.folder}: is no folder; must be one with cells of {comparison.matrix.path}"
            )
    for comparison in comparisons:
        write_results(comparison)


def write_results(comparison: Comparison) -> None:
    """Write tables, figures and page anew from the folders of the cells.

    Raises:
        OSError: they can't be written.
    """
    matrix, folder = comparison.matrix, comparison.folder
    results = comparison.results()
    lines = table.lines_of(matrix, results)
    tables = table.markdown(matrix, lines)
    write_atomically(folder / "table.csv", table.as_csv(lines))
    write_atomically(folder / "table.md", f"# {matrix.name}\n\n{tables}\n")
    drawn = []
    for figure in figures.FIGURES:
        curves = figures.curves_of(lines, figure.field)
        write_atomically(folder / f"{figure.name}.csv", figures.as_csv(curves))
        image = folder / f"{figure.name}.png"
        if curves:
            write_atomically(image, figures.as_png(matrix, figure, curves))
            drawn.append(figure)
        else:
            image.unlink(missing_ok=True)
    write_atomically(folder / "page.md", page(comparison, results, tables, drawn))


def _run(comparison: Comparison, cell: Cell, runner: Runner, versions: MadeWith, board: Board) -> Status:
    """Run one cell and say so; how it ended."""
    folder, before = comparison.folder_of(cell), comparison.status(cell)
    board.begin(cell, folder)
    if before.is_kept:
        board.say(f"  what its folder holds goes to {comparison.aside} ({before})")

    def run(cell: Cell, folder: Path) -> RunResult:
        return runner(cell, folder, board.tick)

    outcome = run_cell(cell, folder, comparison.aside, versions, run)
    left = comparison.result(cell).run
    board.end(cell, outcome, None if left is None else left.summary.accuracy)
    return outcome


def _wall_times(comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
    """Seconds that done cells took, by row."""
    known: dict[str, list[float]] = {}
    for result in (result for comparison in comparisons for result in comparison.results()):
        if result.run is not None:
            known.setdefault(result.cell.row, []).append(result.run.summary.seconds)
    return known
