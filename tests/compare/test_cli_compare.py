"""`pina compare` as users see it, on the embedded digits."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from made_up_cells import leave, rounds_of, summary_of
from support import TINY
from support import run as run_here
from test_cli import CODE, read_until, wait_until
from typer.testing import CliRunner, Result

import pina_flwr
from pina_flwr import cli
from pina_flwr.compare import figures
from pina_flwr.compare.grid import Cell
from pina_flwr.config import parse
from pina_flwr.runner import RunResult
from pina_flwr.runner.superlink import INTERRUPTED

APP = Path(pina_flwr.__file__).parents[1]
MATRIX = """
presets = ["tiny.toml"]
seeds = [1, 2]
epsilons = [8.0]
rounds-to = 0.5

[options]
cache-dir = "cache"

[[row]]
name = "FedAvg"
strategy = "fedavg"

[[row]]
name = "PINA"
"""
CELLS = ["fedavg-eps8-seed1", "pina-eps8-seed1", "fedavg-eps8-seed2", "pina-eps8-seed2"]
RESULTS = ["table.md", "table.csv", "fig3a.png", "fig3a.csv", "fig3b.png", "fig3b.csv", "page.md"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a matrix."""
    (tmp_path / "m.toml").write_text(MATRIX)
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class InProcess:
    """Runs cells in this process: by the app's own code, or pretending to.

    ran: their names. broken: those that fail. interrupted_in: one in the middle of which the signal comes.
    """

    real: bool
    ran: list[str] = field(default_factory=list)
    broken: tuple[str, ...] = ()
    interrupted_in: str = ""
    number: signal.Signals = signal.SIGTERM

    def __call__(
        self,
        app: Path,
        overrides: Mapping[str, Any],
        output: Path,
        _size: object,
        **asked: Callable[..., Any],
    ) -> RunResult:
        self.ran.append(output.name)
        if output.name in self.broken:
            return RunResult("finished:failed", "the run ended as finished:failed: no luck", False, 1.0)
        if output.name == self.interrupted_in:
            (output / "metrics.jsonl").write_text('{"round": 1, "rounds": 3, "stage": 2}\n')
            os.kill(os.getpid(), self.number)
            assert asked["interrupted"]()
            return RunResult(INTERRUPTED, "stopped before its end", False, 1.0)
        asked["on_wait"]()
        config = parse({**cli.run_config(app), **overrides, "output": str(output)})
        if self.real:
            run_here(config)
        else:
            rounds = rounds_of([0.5] * (config.t_tr + 1), [0.6] * (config.t_tr + 1), stage1=1)
            cell = Cell("any", config.epsilon, config.seed, config, overrides)
            leave(output, summary_of(cell, rounds=len(rounds)), rounds)
        return RunResult("finished:completed", "", False, 1.0)


@pytest.fixture
def runs(monkeypatch):
    """What stands in for cells and figures, where only the command matters."""
    runner = InProcess(real=False)
    monkeypatch.setattr(cli, "run_app", runner)
    monkeypatch.setattr(figures, "as_png", lambda *_: b"a figure")
    return runner


@pytest.fixture
def real_runs(monkeypatch, bare):
    """Cells run for real, without Flower's processes."""
    runner = InProcess(real=True)
    monkeypatch.setattr(cli, "run_app", runner)
    return runner


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *(arguments or ("m.toml",)), "--app", str(APP)])


def out(folder: Path, name: str = "m") -> Path:
    return folder / "runs/compare" / name


def json_of(folder: Path, cell: str) -> dict[str, Any]:
    return json.loads((out(folder) / "cells" / cell / "summary.json").read_text())


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_real_runs_become_a_table_figures_and_a_page(folder, real_runs):
    result = compare()
    assert (result.exit_code, result.stderr) == (0, "")
    assert real_runs.ran == CELLS
    assert f"4 of 4 cells are done. Tables, figures and page.md are in {out(folder)}." in result.stdout
    assert all((out(folder) / name).stat().st_size > 0 for name in RESULTS)
    for line, row in zip(lines_of(out(folder) / "table.csv"), ("fedavg", "pina"), strict=True):
        by_seed = [json_of(folder, f"{row}-eps8-seed{seed}") for seed in (1, 2)]
        assert float(line["accuracy_mean"]) == statistics.fmean(s["accuracy"] for s in by_seed)
        assert float(line["accuracy_sd"]) == statistics.stdev(s["accuracy"] for s in by_seed)
        assert float(line["epsilon_recipient"]) == max(s["epsilon"]["recipient"] for s in by_seed) <= 8
        assert (line["seeds"], line["rounds"]) == ("1 2", "2" if row == "fedavg" else "4")
    last = lines_of(out(folder) / "fig3a.csv")[-1]
    clustering = [json_of(folder, f"pina-eps8-seed{seed}")["clustering_accuracy"] for seed in (1, 2)]
    assert (last["round"], float(last["mean"])) == ("4", statistics.fmean(clustering))
    page = (out(folder) / "page.md").read_text()
    assert "4 of 4 cells are done." in page
    assert "num-users = 14" in page


def test_cells_share_the_activations_of_their_seed_and_survive_damage_to_them(folder, real_runs):
    (folder / "m.toml").write_text(MATRIX.replace("[1, 2]", "[1]") + "reproducible-noise = true\n")

    def cached() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.safetensors")}

    assert compare("m.toml", "--only", "FedAvg").exit_code == 0
    written = cached()
    assert written
    assert compare().exit_code == 0
    assert cached() == written
    before = json_of(folder, CELLS[1])["accuracy"]
    for path in written:
        path.write_bytes(path.read_bytes()[:-7])
    (out(folder) / "cells" / CELLS[1] / "summary.json").unlink()
    assert compare().exit_code == 0
    assert json_of(folder, CELLS[1])["accuracy"] == before
    assert real_runs.ran == [CELLS[0], CELLS[1], CELLS[1]]


def test_one_failing_cell_does_not_lose_the_others(folder, runs):
    runs.broken = (CELLS[1],)
    result = compare()
    assert result.exit_code == 1
    assert result.stderr == "error: 1 of 4 cells failed; the next start tries them again\n"
    assert "failed: the run ended as finished:failed: no luck" in result.stdout
    assert runs.ran == CELLS
    assert "(1 of 2 seeds)" in (out(folder) / "table.md").read_text()
    runs.broken, runs.ran = (), []
    assert compare().exit_code == 0
    assert runs.ran == [CELLS[1]]
    assert "(1 of 2 seeds)" not in (out(folder) / "table.md").read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_goes_on_with_the_cell_that_was_running(folder, runs, number, status):
    runs.interrupted_in, runs.number = CELLS[1], number
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in background jobs
    try:
        result = compare()
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == status
    assert result.stderr == f"error: stopped before its end by {number.name}\n"
    assert "1 of 4 cells are done" in result.stdout
    assert runs.ran == CELLS[:2]
    runs.interrupted_in, runs.ran = "", []
    assert compare().exit_code == 0
    assert runs.ran == CELLS[1:]


def test_interrupted_before_the_first_cell_an_old_failure_is_not_the_reason(folder, runs, monkeypatch):
    runs.broken = (CELLS[1],)
    assert compare().exit_code == 1
    measure = cli.size.measure
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in background jobs

    def interrupted(nodes):
        os.kill(os.getpid(), signal.SIGINT)
        return measure(nodes)

    monkeypatch.setattr(cli.size, "measure", interrupted)
    runs.ran = []
    try:
        result = compare()
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr == "error: stopped before its end by SIGINT\n"
    assert runs.ran == []


def test_changed_options_move_the_old_cell_aside_and_say_so(folder, runs):
    assert compare().exit_code == 0
    (folder / "m.toml").write_text(MATRIX + "t-tr = 1\n")
    runs.ran = []
    assert "PINA, ε = 8, seed 1: has another configuration: t-tr" in compare("m.toml", "--dry-run").stdout
    result = compare()
    assert result.exit_code == 0
    assert runs.ran == [CELLS[1], CELLS[3]]
    aside = out(folder) / "aside"
    assert f"what its folder holds goes to {aside} (has another configuration: t-tr)" in result.stdout
    assert sorted(path.name for path in aside.iterdir()) == [f"{CELLS[1]}-1", f"{CELLS[3]}-1"]
    assert [line["rounds"] for line in lines_of(out(folder) / "table.csv")] == ["3", "2"]


def test_several_matrices(folder, runs):
    one = MATRIX.replace("[1, 2]", "[1]")
    (folder / "a.toml").write_text(one)
    (folder / "b.toml").write_text(one.replace("[1]", "[3]"))
    result = compare("a.toml", "b.toml")
    assert result.exit_code == 0
    assert len(runs.ran) == 4
    assert "cell 4 of 4: PINA, ε = 8, seed 3" in result.stdout
    assert [lines_of(out(folder, name) / "table.csv")[0]["seeds"] for name in "ab"] == ["1", "3"]


def test_a_dry_run_lists_cells_and_writes_nothing(folder, runs):
    result = compare("m.toml", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"m.toml in {out(folder)}:",
        *(f"  {row}, ε = 8, seed {seed}: not begun" for seed in (1, 2) for row in ("FedAvg", "PINA")),
    ]
    assert not (folder / "runs").exists()
    assert runs.ran == []


def test_a_report_runs_nothing(folder, runs):
    assert compare("m.toml", "--only", "FedAvg").exit_code == 0
    old = (out(folder) / "table.md").read_text()
    for name in RESULTS:
        (out(folder) / name).unlink(missing_ok=True)
    runs.ran = []
    result = compare("m.toml", "--report-only")
    assert result.exit_code == 0
    assert "2 of 4 cells are done" in result.stdout
    assert runs.ran == []
    assert (out(folder) / "table.md").read_text() == old


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.toml"], "none.toml: No such file"),
        (["m.toml", "-c", "t-tr=0"], "-c: t-tr = 0: must be at least 1 (row 'FedAvg' of m.toml)"),
        (["m.toml", "-c", "seed=3"], "-c: seed = 3: must be left out, since seeds sets it"),
        (["m.toml", "--only", "PINAA"], "--only = 'PINAA': is no row; did you mean 'PINA'?"),
        (["m.toml", "m.toml"], "m.toml: must have a name of its own"),
        (["m.toml", "tiny.toml"], "tiny.toml: "),
        (["m.toml", "--output", "m.toml"], "must be a folder that can be written"),
        (["m.toml", "--report-only"], "is no folder; must be one with cells of m.toml"),
        (["m.toml", "--report-only", "--dry-run"], "--dry-run: must be left out with --report-only"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(folder, runs, arguments, error):
    result = compare(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert error in result.stderr
    assert runs.ran == []
    assert not (folder / "runs").exists()


def test_a_folder_that_can_not_be_written_is_an_error_of_one_line(folder, runs):
    out(folder).mkdir(parents=True)
    (out(folder) / "table.csv").mkdir()
    result = compare("m.toml", "--report-only")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_with_flower_it_is_interrupted_and_goes_on(folder, real_runs):
    """The command in a process of its own, with nothing replaced: Ctrl-C in the second cell, then its end."""
    (folder / "m.toml").write_text(MATRIX.replace("[1, 2]", "[1]"))
    (folder / "tiny.toml").write_text(tomli_w.dumps({**TINY, "t-tr": 1}))
    assert compare("m.toml", "--only", "FedAvg").exit_code == 0
    first, second = (out(folder) / "cells" / name for name in CELLS[:2])
    before = (first / "summary.json").stat().st_mtime_ns
    with start("compare", "m.toml", "--app", str(APP)) as process:
        read_until(process, "cell 1 of 1: PINA, ε = 8, seed 1")
        wait_until((second / "run.log").exists)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "error: stopped before its end by SIGINT\n")
    with start("compare", "m.toml", "--app", str(APP)) as process:
        said, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert "cell 1 of 1: PINA, ε = 8, seed 1" in said
    assert (first / "summary.json").stat().st_mtime_ns == before
    assert all((out(folder) / name).stat().st_size > 0 for name in RESULTS)
    assert [line["seeds"] for line in lines_of(out(folder) / "table.csv")] == ["1", "1"]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `pina` as a process."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        env=os.environ | {"PYTHONPATH": str(APP)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
