"""`pina run` as users see it, on a small app with the real `flwr`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from mini_app import write_app
from typer.testing import CliRunner, Result

import pina_flwr
from pina_flwr.cli import app as pina
from pina_flwr.runner.output import prepared

FAULTS = {"PYTHONFAULTHANDLER": "1"}
# What runs in the background of a script ignores SIGINT, and so do its children; `pina run` respects that.
CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from pina_flwr.cli import main
main()
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(pina, ["run", *arguments])


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small app in a folder with a blank; the working directory has an app with other code."""
    decoy = write_app(tmp_path / "decoy", code="decoy")
    monkeypatch.chdir(decoy)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return write_app(tmp_path / "my app", code="right")


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (["-c", "sed=3"], "unknown option 'sed'; did you mean 'seed'?"),
            (["-c", "seed=x"], "seed = 'x': must be a whole number"),
            (["-c", "epsilon=-1"], "epsilon = -1.0: must be above 0"),
            (["-c", "epsilon=1e400"], "epsilon = 1e400: is out of range"),
            (["-c", "clusters=2"], "clusters: must be listed under"),
            (["-c", "none.toml"], "none.toml: No such file"),
            (["-c", "seed"], "-c 'seed': must be key=value"),
            (["--output", "pyproject.toml"], "must be a folder that can be written"),
            (["-c", "output=pyproject.toml"], "must be a folder that can be written"),
            (["--app", "none"], "--app = 'none': must be a folder"),
        ],
    )
    def test_end_with_one_line_before_anything_starts(self, app, arguments, error):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert error in result.stderr
        assert not Path("results").exists()

    def test_results_are_not_overwritten_unasked(self, app):
        Path("results").mkdir()
        Path("results/metrics.jsonl").write_text('{"round": 1}\n')
        result = invoke()
        assert result.exit_code == 2
        assert "already holds results (metrics.jsonl)" in result.stderr
        assert Path("results/metrics.jsonl").read_text() == '{"round": 1}\n'

    def test_a_folder_in_use_is_refused(self, app):
        with prepared(Path("results"), overwrite=False):
            result = invoke("--overwrite")
        assert result.exit_code == 2
        assert result.stderr == f"error: output = {str(Path('results').resolve())!r}: in use by another run\n"

    def test_found_by_the_server_app_end_with_its_line(self, app):
        result = invoke("--app", str(app), "-c", "dataset=mistake")
        assert result.exit_code == 2
        assert result.stderr == "error: dataset = 'mistake': must be another\n"
        assert "Traceback" not in result.stdout


class TestRuns:
    def test_a_run_has_its_own_code_options_and_nodes(self, app, tmp_path, monkeypatch):
        """Also: a stale result is replaced, and neither HOME nor a Ray cluster or a proxy is needed."""
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        output = tmp_path / "out put"
        output.mkdir()
        (output / "summary.json").write_text('{"client": "stale"}')
        (tmp_path / "decoy/preset.toml").write_text("seed = 5\nepsilon = inf\n")
        where = ["--app", str(app), "--output", "../out put", "--overwrite"]
        result = invoke(*where, "--nodes", "3", "-c", "preset.toml", "-c", "seed=6")
        assert (result.exit_code, result.stderr) == (0, "")
        summary = json.loads((output / "summary.json").read_text())
        assert summary["client"] == {"code": "right", "cwd": [], "nodes": 3}
        config = {"dataset": "digits", "output": str(output), "seed": 6, "epsilon": float("inf")}
        assert summary["config"] == config
        first, *logged, last = result.stdout.splitlines()
        assert "3 nodes" in first
        assert logged[0] == "mode digits"
        assert not any("flwr" in line for line in logged)
        assert str(output) in last
        assert "INFO :      mode digits" in (output / "run.log").read_text()
        assert not (tmp_path / "home").exists()

    def test_a_failure_is_not_a_success(self, app):
        result = invoke("--app", str(app), "-c", "dataset=bug")
        assert result.exit_code == 1
        log = Path("results/run.log").resolve()
        assert result.stderr == f"error: the run ended as finished:failed: the reason (log: {log})\n"
        assert "RuntimeError: the reason" in log.read_text()


def test_an_interrupt_ends_the_run_and_all_it_started(app):
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a path short enough for Ray
        process = start("--app", str(app), "-c", "dataset=endless", TMPDIR=temporary)
        read_until(process, "mode endless")
        wait_until(lambda: any("raylet" in command for command in commands_with(temporary)))
        check_end(process, signal.SIGINT, temporary)


def test_so_does_a_termination_while_flower_starts(app):
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        process = start("--app", str(app), TMPDIR=temporary)
        read_until(process, "Starting Flower")
        wait_until(lambda: any("flower-superlink" in command for command in commands_with(temporary)))
        check_end(process, signal.SIGTERM, temporary)


def check_end(process: subprocess.Popen[str], number: signal.Signals, temporary: str) -> None:
    """Send the signal and see that nothing is left."""
    process.send_signal(number)
    try:
        _, error = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # on which it prints where it hangs
        pytest.fail(f"still running: {process.communicate()[1]}, with {commands_with(temporary)}")
    assert error == f"error: stopped before its end by {number.name}\n"
    assert process.returncode == 128 + number
    assert os.listdir(temporary) == []
    wait_until(lambda: not commands_with(temporary))


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, process.communicate()


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start `pina run` as a process."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "run", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(pina_flwr.__file__).parents[1])} | FAULTS | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def commands_with(text: str) -> list[str]:
    """Command lines of processes that have `text` in them or in their environment."""
    lines = subprocess.run(
        ["ps", "axeww", "-o", "command="], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in lines.splitlines() if text in line]


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
