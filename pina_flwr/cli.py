"""The `pina` command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pina_flwr.config import ConfigError, RunConfig, expanded, parse
from pina_flwr.runner import RunResult, size
from pina_flwr.runner import run as run_app
from pina_flwr.runner.app import find_app, run_config
from pina_flwr.runner.output import LOG, prepared
from pina_flwr.runner.overrides import Scalar, absolute_paths, check_known, parse_overrides
from pina_flwr.runner.progress import ProgressBar
from pina_flwr.runner.superlink import INTERRUPTED

if TYPE_CHECKING:
    from pina_flwr.compare.grid import Cell
    from pina_flwr.compare.results import Comparison

FAILURE = 1
MISTAKE = 2
"""Exit status after a user's mistake."""
SIGNAL_BASE = 128
"""Exit status after a signal, less its number."""
CONFIDENCE = 0.95
"""Of the limits that `audit` finds: more would cost power."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Options = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        metavar="KEY=VALUE|FILE.toml",
        help="Set options of a run. Repeatable; later ones win.",
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="SuperNodes to simulate. Default: one for each two CPUs.")
]
AppFolder = Annotated[
    Path | None,
    typer.Option("--app", help="Folder of the app. Default: this one, or the one pina is installed from."),
]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def pina() -> None:
    """Differentially private clustered federated learning (PINA) on Flower."""


@app.command()
def run(
    config: Options = None,
    nodes: Nodes = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: the option output.")
    ] = None,
    app_dir: AppFolder = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in that folder.")] = False,
) -> None:
    """Simulate a federated run on this machine and wait for its end.

    Relative paths are taken from the working directory. Exit status: 0 if the run completed, 2 after a
    mistake in the options, 130 or 143 if stopped by a signal, else 1.
    """
    try:
        status = _run(config or [], nodes, output, app_dir, overwrite)
    except ConfigError as error:
        status = _fail(str(error), MISTAKE)
    raise typer.Exit(status)


@app.command()
def compare(
    matrices: Annotated[
        list[Path],
        typer.Argument(metavar="MATRIX.toml…", help="What to compare; see pina_flwr/compare/matrix.py."),
    ],
    config: Options = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for cells and results. Default: runs/compare/NAME OF MATRIX."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run the cells of this row only. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and how far they are.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Write tables and figures of the cells there are; run none.")
    ] = False,
    nodes: Nodes = None,
    app_dir: AppFolder = None,
) -> None:
    """Run matrices of strategies, ε and seeds, and write tables and figures over the seeds.

    Options of -c lie over the presets and under the rows. Started again, it goes on where it was: cells that
    are done with the same options stay. Exit status: 0 if all cells are done, 1 if some failed, 2 after a
    mistake, which is found before anything runs, 130 or 143 if stopped by a signal.
    """
    try:
        if dry_run and report_only:
            raise ConfigError("--dry-run: must be left out with --report-only, which writes")
        comparisons, wanted, source = _read(matrices, config or [], output, only or [], app_dir)
        if dry_run:
            status = _list_cells(comparisons, wanted)
        elif report_only:
            status = _report_only(comparisons, wanted)
        else:
            status = _compare(comparisons, wanted, source, nodes)
    except ConfigError as error:
        status = _fail(str(error), MISTAKE)
    except OSError as error:
        status = _fail(str(error), FAILURE)
    raise typer.Exit(status)


@app.command()
def privacy(
    config: Options = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            min=1, help="Hidden size of the backbone. Default: 64 for tiny-vit, else 384 (ViT-Small)."
        ),
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="Classes of the data set.")] = 10,
    curve: Annotated[Path | None, typer.Option(help="Write ε after every round to this CSV file.")] = None,
    tighter: Annotated[
        bool, typer.Option("--tighter", help="Also show the tighter accountant's figures.")
    ] = False,
) -> None:
    """Show what a run would cost in privacy, without running it.

    With the option epsilon the noise is calibrated to it; with noise-multiplier, ε is worked out. Exit
    status: 2 after a mistake in the options.
    """
    from pina_flwr.report.privacy_table import show

    try:
        options = _run_config(config or [])
        show(Console(), options, hidden, classes, curve, tighter)
    except ConfigError as error:
        raise typer.Exit(_fail(str(error), MISTAKE)) from None


@app.command()
def audit(
    config: Options = None,
    canaries: Annotated[int, typer.Option(max=20_000, help="Users of a round, all of them canaries.")] = 500,
    rounds: Annotated[int, typer.Option(max=10_000, help="Rounds, each with fresh coins and noise.")] = 40,
    delta: Annotated[float, typer.Option(help="δ at which ε is compared.")] = 5e-4,
) -> None:
    """Try to refute the ε that a run would claim for one round, by canaries in its real mechanism.

    Takes seconds; says most at noise-multiplier = 1.5. Exit status: 1 if the claim is refuted, 2 after a
    mistake in the options.
    """
    from pina_flwr.canaries import Audit
    from pina_flwr.report.audit_table import show

    try:
        options = _run_config(config or [])
        found = Audit.of(options, canaries, rounds)
        result = found.run(delta, CONFIDENCE)
        show(Console(), found, result, CONFIDENCE)
    except ConfigError as error:
        raise typer.Exit(_fail(str(error), MISTAKE)) from None
    except RuntimeError as error:
        raise typer.Exit(_fail(str(error), FAILURE)) from None
    raise typer.Exit(0 if result.holds else FAILURE)


@app.command()
def keys(
    users: Annotated[list[int], typer.Argument(min=0, help="Numbers of the users, from 0.")],
    folder: Annotated[Path, typer.Option(help="Where the private keys go, one PEM file a user.")] = Path(
        "keys"
    ),
) -> None:
    """Make long-term keys of users, for signed secure sums (secagg-signed).

    Prints the lines of the registry that all nodes need; collect them under [keys] in one file. Private keys
    are for the user's own node: node-config signing-keys. Exit status: 2 after a mistake.
    """
    from pina_flwr.secure_sum.registry import new_key_file

    try:
        for user in users:
            typer.echo(new_key_file(folder, user))
    except ValueError as error:
        raise typer.Exit(_fail(str(error), MISTAKE)) from None


def main() -> None:
    """Entry point of the `pina` command."""
    app(prog_name="pina")


def _run(
    config: Sequence[str], nodes: int | None, output: Path | None, app_dir: Path | None, overwrite: bool
) -> int:
    source = find_app(app_dir)
    overrides, target = _options(config, output, run_config(source))
    with prepared(target, overwrite=overwrite), _signals_caught() as caught:
        simulation = size.measure(nodes)
        typer.echo(f"Starting Flower: {simulation}. Results go to {target}.")
        console = Console()
        bar = ProgressBar(console, target) if console.is_terminal else None
        with bar or contextlib.nullcontext():
            result = run_app(
                source,
                overrides,
                target,
                simulation,
                on_line=bar.line if bar else _print_line,
                on_wait=bar.update if bar else lambda: None,
                interrupted=lambda: bool(caught),
            )
        return _report(result, target, caught)


def _read(
    matrices: Sequence[Path],
    config: Sequence[str],
    output: Path | None,
    only: Sequence[str],
    app_dir: Path | None,
) -> tuple[Sequence[Comparison], Callable[[Cell], bool], Path]:
    """What to compare, which of its cells, and the app that runs them."""
    from pina_flwr.compare.comparison import read_all, selection

    source = find_app(app_dir)
    defaults = run_config(source)
    extra = parse_overrides(config, defaults)
    comparisons = read_all(matrices, defaults, extra, output, Path.cwd())
    return comparisons, selection(comparisons, only), source


def _compare(
    comparisons: Sequence[Comparison], wanted: Callable[[Cell], bool], source: Path, nodes: int | None
) -> int:
    from pina_flwr.compare.comparison import compare, locked
    from pina_flwr.compare.made_with import made_with

    with locked(comparisons), _signals_caught() as caught:
        simulation = size.measure(nodes)

        def run_one(cell: Cell, folder: Path, tick: Callable[[], None]) -> RunResult:
            return run_app(
                source,
                cell.overrides,
                folder,
                simulation,
                on_line=lambda _line: None,  # it is in the cell's run.log
                on_wait=tick,
                interrupted=lambda: bool(caught),
            )

        all_ended = compare(
            comparisons,
            wanted,
            run_one,
            versions=lambda: made_with(source, simulation),
            stopped=lambda: bool(caught),
            console=Console(),
        )
        return _report_cells(comparisons, wanted, [] if all_ended else caught)


def _report_only(comparisons: Sequence[Comparison], wanted: Callable[[Cell], bool]) -> int:
    from pina_flwr.compare.comparison import report

    report(comparisons)
    _report_cells(comparisons, wanted, caught=[])
    return 0


def _list_cells(comparisons: Sequence[Comparison], wanted: Callable[[Cell], bool]) -> int:
    for comparison in comparisons:
        typer.echo(f"{comparison.matrix.path} in {comparison.folder}:")
        for cell in filter(wanted, comparison.cells):
            typer.echo(f"  {cell}: {comparison.status(cell)}")
    return 0


def _report_cells(
    comparisons: Sequence[Comparison], wanted: Callable[[Cell], bool], caught: Sequence[int]
) -> int:
    """Say how the comparisons ended; the exit status. caught: the signals that kept cells from ending."""
    from pina_flwr.compare.cells import State

    states = [c.status(cell).state for c in comparisons for cell in c.cells if wanted(cell)]
    done, failed = states.count(State.DONE), states.count(State.FAILED)
    folders = ", ".join(str(comparison.folder) for comparison in comparisons)
    typer.echo(f"{done} of {len(states)} cells are done. Tables, figures and page.md are in {folders}.")
    if caught:
        return _fail(f"stopped before its end by {signal.Signals(caught[0]).name}", SIGNAL_BASE + caught[0])
    if failed:
        return _fail(f"{failed} of {len(states)} cells failed; the next start tries them again", FAILURE)
    return 0


def _run_config(config: Sequence[str]) -> RunConfig:
    """The run that the options describe."""
    defaults = run_config(find_app(None))
    return parse({**defaults, **parse_overrides(config, defaults)})


def _options(
    config: Sequence[str], output: Path | None, defaults: Mapping[str, Scalar]
) -> tuple[dict[str, Scalar], Path]:
    """Overrides of the run config, checked and with absolute paths, and the output folder."""
    overrides = parse_overrides(config, defaults)
    if output is not None:
        overrides["output"] = str(output)
    options = parse({**defaults, **overrides})
    check_known(overrides, defaults)
    overrides |= absolute_paths({**defaults, **overrides}, Path.cwd())
    return overrides, expanded("output", options.output).resolve()


@contextlib.contextmanager
def _signals_caught() -> Iterator[list[int]]:
    """A list that receives the signals that ask for an end; those ignored so far (nohup) stay ignored."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = {number: handler for number, handler in earlier.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def _report(result: RunResult, target: Path, caught: Sequence[int]) -> int:
    """Say how the run ended; the exit status."""
    if result.ok:
        typer.echo(f"Done in {result.seconds:.0f} s. Everything is in {target}.")
        return 0
    if caught and result.status == INTERRUPTED:
        return _fail(f"{result.reason} by {signal.Signals(caught[0]).name}", SIGNAL_BASE + caught[0])
    if result.mistake:
        return _fail(result.reason, MISTAKE)
    return _fail(f"{result.reason} (log: {target / LOG})", FAILURE)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _fail(reason: str, status: int) -> int:
    typer.echo(f"error: {reason}", err=True)
    return status
