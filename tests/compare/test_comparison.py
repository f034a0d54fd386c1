"""Many cells: resumed after anything, refused twice at a time, results written after each."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_cells import DEFAULTS, MATRIX, VERSIONS, comparison_of, finish
from rich.console import Console

import pina_flwr
from pina_flwr.compare import figures
from pina_flwr.compare.cells import NEEDED, State
from pina_flwr.compare.comparison import compare, locked, read_all, report, selection, write_results
from pina_flwr.config import ConfigError
from pina_flwr.runner import RunResult

SLOW = """
import sys, time
from pathlib import Path
from made_up_cells import MATRIX, VERSIONS, comparison_of, finish, leave, rounds_of
from pina_flwr.compare.comparison import compare, locked
from rich.console import Console

folder, done = Path(sys.argv[1]), []

def run(cell, place, tick):
    if done:
        leave(place, None, rounds_of([0.5]))
        print("running", flush=True)
        time.sleep(60)
    done.append(cell)
    return finish(cell, place)

comparison = comparison_of(folder)
with locked([comparison]):
    compare([comparison], lambda cell: True, run, lambda: VERSIONS, lambda: False, Console(stderr=True))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Drawing takes half a second a figure; test_figures.py is about it."""
    monkeypatch.setattr(figures, "as_png", lambda *_: b"a figure")


class Runs:
    """A runner that notes what it ran; `broken` cells fail, and after `stop` cells it wants to stop."""

    def __init__(self, broken: tuple[str, ...] = (), stop: int | None = None) -> None:
        self.names: list[str] = []
        self.broken, self.stop = broken, stop

    def __call__(self, cell, folder, tick) -> RunResult:
        self.names.append(cell.name)
        if cell.name in self.broken:
            return RunResult("finished:failed", "no luck", False, 1.0)
        return finish(cell, folder, tick)

    def stopped(self) -> bool:
        return self.stop is not None and len(self.names) >= self.stop


def go(comparison, runs=None, only=()):
    """Run the comparison; what was printed."""
    runs = runs or Runs()
    console = Console(file=io.StringIO(), width=200)
    wanted = selection([comparison], only)
    with locked([comparison]):
        compare([comparison], wanted, runs, lambda: VERSIONS, runs.stopped, console)
    return console.file.getvalue()


def states(comparison):
    return [comparison.status(cell).state for cell in comparison.cells]


def seeds_in_table(comparison):
    rows = csv.DictReader(io.StringIO((comparison.folder / "table.csv").read_text()))
    return {(row["row"], row["epsilon"]): row["seeds"] for row in rows}


def test_all_cells_run_once_and_leave_results(tmp_path):
    comparison, runs = comparison_of(tmp_path), Runs()
    said = go(comparison, runs)
    assert runs.names == [cell.name for cell in comparison.cells]
    assert set(states(comparison)) == {State.DONE}
    files = {path.name for path in comparison.folder.iterdir() if not path.name.startswith(".")}
    figures = {f"fig3{part}.{kind}" for part in "ab" for kind in ("png", "csv")}
    assert files == {"cells", "table.md", "table.csv", "page.md", *figures}
    assert "cell 8 of 8: PINA, ε = 8, seed 2" in said
    assert said.count("done, 0:00:00, accuracy 0.500") == 8


def test_a_restart_runs_what_is_not_done(tmp_path):
    comparison = comparison_of(tmp_path)
    go(comparison, Runs(stop=3))
    assert states(comparison) == [State.DONE] * 3 + [State.MISSING] * 5
    assert seeds_in_table(comparison)["FedAvg", "2.0"] == "1"
    runs = Runs()
    go(comparison, runs)
    assert runs.names == [cell.name for cell in comparison.cells[3:]]
    runs = Runs()
    go(comparison, runs)
    assert runs.names == []


def test_one_failure_does_not_lose_the_others_and_is_tried_again(tmp_path):
    comparison = comparison_of(tmp_path)
    said = go(comparison, Runs(broken=("pina-eps2-seed1",)))
    assert states(comparison).count(State.DONE) == 7
    assert "failed: no luck" in said
    assert seeds_in_table(comparison)["PINA", "2.0"] == "2"
    assert "failed: no luck" in (comparison.folder / "page.md").read_text()
    runs = Runs()
    go(comparison, runs)
    assert runs.names == ["pina-eps2-seed1"]
    assert "no luck" not in (comparison.folder / "page.md").read_text()


def test_a_changed_option_reruns_the_cells_it_concerns(tmp_path):
    go(comparison_of(tmp_path))
    changed, runs = comparison_of(tmp_path, MATRIX + "t-in = 3\n"), Runs()
    assert states(changed).count(State.CHANGED) == 4
    write_results(changed)
    assert seeds_in_table(changed)["PINA", "2.0"] == ""  # what is of another configuration is not mixed in
    said = go(changed, runs)
    assert runs.names == [cell.name for cell in changed.cells if cell.row == "PINA"]
    assert "(has another configuration: t-in)" in said
    assert len(list(changed.aside.iterdir())) == 4


def test_a_kill_in_the_middle_of_a_cell_costs_that_cell_only(tmp_path):
    paths = [str(Path(pina_flwr.__file__).parents[1]), str(Path(__file__).parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path)], env=env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        comparison = comparison_of(tmp_path)
        with pytest.raises(ConfigError, match="in use by another run"), locked([comparison]):
            pass
        process.kill()
        process.wait()
    assert states(comparison)[:3] == [State.DONE, State.UNFINISHED, State.MISSING]
    assert seeds_in_table(comparison)["FedAvg", "2.0"] == "1"
    runs = Runs()
    go(comparison, runs)
    assert runs.names == [cell.name for cell in comparison.cells[1:]]
    rounds = (comparison.folder_of(comparison.cells[1]) / "metrics.jsonl").read_text()
    assert rounds.count("\n") == 4


def test_only_some_rows(tmp_path):
    comparison, runs = comparison_of(tmp_path), Runs()
    go(comparison, runs, only=["FedAvg"])
    assert runs.names == [cell.name for cell in comparison.cells if cell.row == "FedAvg"]
    assert seeds_in_table(comparison)["PINA", "2.0"] == ""


def test_a_row_that_is_not_there_is_named(tmp_path):
    comparison = comparison_of(tmp_path)
    with pytest.raises(ConfigError, match=r"--only = 'Fedavg': is no row; did you mean 'FedAvg'\?"):
        selection([comparison], ["Fedavg"])
    with pytest.raises(ConfigError, match="is no row; must be one of FedAvg, PINA"):
        selection([comparison], ["xyz"])


def test_a_run_folder_is_no_folder_for_a_comparison(tmp_path):
    comparison = comparison_of(tmp_path)
    comparison.folder.mkdir()
    (comparison.folder / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds results"), locked([comparison]):
        pass


def test_results_are_made_anew_when_nothing_is_left_to_run(tmp_path):
    go(comparison_of(tmp_path, "rounds-to = 0.9\n" + MATRIX))
    (tmp_path / "out/table.md").unlink()
    runs = Runs()
    go(comparison_of(tmp_path, "rounds-to = 0.5\n" + MATRIX), runs)
    assert runs.names == []
    assert "first round at 0.5" in (tmp_path / "out/table.md").read_text()


def test_a_figure_that_has_nothing_to_show_any_more_goes(tmp_path):
    comparison = comparison_of(tmp_path)
    go(comparison)
    for cell in comparison.cells:
        (comparison.folder_of(cell) / "summary.json").unlink()
    write_results(comparison)
    assert not list(comparison.folder.glob("*.png"))
    assert "![" not in (comparison.folder / "page.md").read_text()


def test_a_result_that_was_damaged_is_run_again(tmp_path):
    comparison = comparison_of(tmp_path)
    go(comparison)
    summary, rounds = comparison.folder_of(comparison.cells[0]), comparison.folder_of(comparison.cells[5])
    (summary / "summary.json").write_text('{"accuracy": 0.')
    (rounds / "metrics.jsonl").write_text((rounds / "metrics.jsonl").read_text()[:-20])
    assert states(comparison).count(State.UNFINISHED) == 2
    write_results(comparison)
    assert seeds_in_table(comparison)["FedAvg", "2.0"] == "2"
    runs = Runs()
    said = go(comparison, runs)
    assert runs.names == [comparison.cells[0].name, comparison.cells[5].name]
    assert "(unfinished: metrics.jsonl has 3 rounds and summary.json 4; must have as many)" in said
    assert states(comparison) == [State.DONE] * 8


def test_one_damaged_file_does_not_keep_the_others_from_the_tables(tmp_path):
    comparison = comparison_of(tmp_path)
    go(comparison)
    path = comparison.folder_of(comparison.cells[0]) / "summary.json"
    path.write_text(path.read_text().replace('"accuracy": 0.5', '"accuracy": "x"'))
    report([comparison])
    assert states(comparison) == [State.UNFINISHED] + [State.DONE] * 7
    assert seeds_in_table(comparison)["FedAvg", "2.0"] == "2"
    assert "accuracy = 'x': must be a finite number" in (comparison.folder / "page.md").read_text()
    runs = Runs()
    go(comparison, runs)
    assert runs.names == [comparison.cells[0].name]


class TestReportOnly:
    def test_tables_are_made_of_three_files_a_cell_whoever_ran_it(self, tmp_path):
        """Cells of two folders, one of them on another machine, put together."""
        (tmp_path / "here").mkdir()
        here, there = comparison_of(tmp_path), comparison_of(tmp_path / "here")
        go(here, only=["FedAvg"])
        go(there, only=["PINA"])
        merged = comparison_of(tmp_path / "here")
        for cell in here.cells[::2]:  # FedAvg
            target = merged.folder_of(cell)
            target.mkdir()
            for name in NEEDED:
                shutil.copy(here.folder_of(cell) / name, target)
        report([merged])
        assert set(states(merged)) == {State.DONE}
        assert set(seeds_in_table(merged).values()) == {"1 2"}
        assert "8 of 8 cells are done" in (merged.folder / "page.md").read_text()
        runs = Runs()
        go(merged, runs)
        assert runs.names == []

    def test_nothing_is_made_where_there_is_nothing(self, tmp_path):
        comparison = comparison_of(tmp_path)
        with pytest.raises(ConfigError, match=r"out: is no folder; must be one with cells of .*matrix\.toml"):
            report([comparison])
        assert not comparison.folder.exists()

    def test_no_folder_of_the_machine_is_in_what_is_kept(self, tmp_path):
        data = tmp_path / "data"
        data.mkdir()
        options = {"dataset": str(data), "backbone": str(data), "cache-dir": str(tmp_path / "cache")}
        comparison = comparison_of(tmp_path, extra=options)
        go(comparison)
        texts = [path.read_text() for path in comparison.folder.rglob("cell.toml")]
        texts += [(comparison.folder / name).read_text() for name in ("table.md", "table.csv", "fig3a.csv")]
        assert len(texts) == 11
        assert not any(str(tmp_path) in text for text in texts)


class TestSeveralMatrices:
    def write(self, folder, name):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(MATRIX)
        return folder / name

    def test_each_has_a_folder_of_its_name(self, tmp_path):
        files = [self.write(tmp_path, name) for name in ("a.toml", "b.toml")]
        found = read_all(files, DEFAULTS, {}, None, tmp_path)
        assert [c.folder for c in found] == [tmp_path / "runs/compare/a", tmp_path / "runs/compare/b"]

    def test_all_run_in_the_order_given(self, tmp_path):
        files = [self.write(tmp_path, name) for name in ("a.toml", "b.toml")]
        found, runs = read_all(files, DEFAULTS, {}, None, tmp_path), Runs()
        console = Console(file=io.StringIO(), width=200)
        with locked(found):
            compare(found, lambda _: True, runs, lambda: VERSIONS, runs.stopped, console)
        assert runs.names == 2 * [cell.name for cell in found[0].cells]
        assert "cell 16 of 16: PINA, ε = 8, seed 2" in console.file.getvalue()
        for comparison in found:
            assert "8 of 8 cells are done" in (comparison.folder / "page.md").read_text()

    def test_they_can_not_share_one(self, tmp_path):
        files = [self.write(tmp_path / folder, "a.toml") for folder in ("x", "y")]
        with pytest.raises(ConfigError, match=r"y/a\.toml: must have a name of its own"):
            read_all(files, DEFAULTS, {}, None, tmp_path)
        with pytest.raises(ConfigError, match="--output = 'o': must be left out with 2 matrix files"):
            read_all(files, DEFAULTS, {}, Path("o"), tmp_path)
