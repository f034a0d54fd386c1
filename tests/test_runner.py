"""The runner behind `pina run`; what needs a whole run of Flower is in test_cli.py."""

import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from mini_app import write_app
from rich.console import Console

import pina_flwr
from pina_flwr.config import ConfigError
from pina_flwr.report.metrics_log import MetricsLog, RoundRow
from pina_flwr.runner import run
from pina_flwr.runner.app import find_app, run_config, stage
from pina_flwr.runner.output import EARLIER, LOCK, prepared
from pina_flwr.runner.overrides import absolute_paths, check_known, parse_overrides
from pina_flwr.runner.processes import ProcessGroup
from pina_flwr.runner.progress import ProgressBar, RoundReader, time_left
from pina_flwr.runner.run import check_summary
from pina_flwr.runner.size import SimulationSize, measure
from pina_flwr.runner.superlink import RunError, SuperLink, environment

DEFAULTS = {
    "dataset": "digits",
    "seed": 1,
    "epsilon": 8.0,
    "output": "runs/latest",
    "cache-dir": "",
    "on": True,
}


class TestOverrides:
    @pytest.mark.parametrize(
        ("items", "merged"),
        [
            ([], {}),
            (["seed=3"], {"seed": 3}),
            (["seed=3 epsilon=inf", "seed=4"], {"seed": 4, "epsilon": float("inf")}),
            (["epsilon=1e-2"], {"epsilon": 0.01}),
            (["on=false"], {"on": False}),
            (["dataset=cifar10"], {"dataset": "cifar10"}),
            (["dataset='a b'", 'output="c d"'], {"dataset": "a b", "output": "c d"}),
            (["output=5"], {"output": "5"}),  # a folder, not a number
            (["output=runs/x=1.toml"], {"output": "runs/x=1.toml"}),
            (["cache-dir="], {"cache-dir": ""}),
            (["seed=[1, 2]".replace(" ", "")], {"seed": "[1,2]"}),  # left to the validation
        ],
    )
    def test_pairs(self, items, merged):
        assert parse_overrides(items, DEFAULTS) == merged

    def test_files_and_pairs_apply_in_the_order_given(self, tmp_path):
        preset = tmp_path / "preset.toml"
        preset.write_text("seed = 7\nepsilon = 2.0\n")
        other = tmp_path / "other.toml"
        other.write_text("epsilon = 3.0\n[a]\nb = 1\n")
        merged = parse_overrides(["seed=1", str(preset), "seed=2", str(other)], DEFAULTS)
        assert merged == {"seed": 2, "epsilon": 3.0, "a.b": 1}

    @pytest.mark.parametrize("item", ["", "seed", "seed 3", "output=my runs", "seed=3 4", "=3", "seed='3"])
    def test_what_is_neither_is_named(self, item):
        if not item:
            assert parse_overrides([item], DEFAULTS) == {}
            return
        with pytest.raises(ConfigError, match="must be key=value") as error:
            parse_overrides([item], DEFAULTS)
        assert repr(item) in str(error.value)

    def test_a_bad_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
            parse_overrides([str(tmp_path / "none.toml")], DEFAULTS)
        (tmp_path / "bad.toml").write_text("seed = = 1")
        with pytest.raises(ConfigError, match=r"bad\.toml: is not valid TOML"):
            parse_overrides([str(tmp_path / "bad.toml")], DEFAULTS)
        (tmp_path / "dir.toml").mkdir()
        with pytest.raises(ConfigError, match=r"dir\.toml: Is a directory"):
            parse_overrides([str(tmp_path / "dir.toml")], DEFAULTS)
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"binary\.toml: is not valid TOML"):
            parse_overrides([str(tmp_path / "binary.toml")], DEFAULTS)

    @pytest.mark.parametrize("number", ["1e400", "-1e400", "1.5E+999", "1e-400", "9" * 30, "1_0e4_00"])
    def test_a_number_out_of_range_is_named(self, tmp_path, number):
        file = tmp_path / "x.toml"
        file.write_text(f"epsilon = {number}")
        for item in (f"epsilon={number}", str(file)):
            with pytest.raises(ConfigError, match=r"^epsilon") as error:
                parse_overrides([item], DEFAULTS)
            assert "range" in str(error.value) or "within" in str(error.value)

    @pytest.mark.parametrize("number", ["inf", "+inf", "-inf", "0.0", "0e5", "1e308"])
    def test_what_is_meant_is_taken(self, tmp_path, number):
        file = tmp_path / "x.toml"
        file.write_text(f"epsilon = {number}")
        for item in (f"epsilon={number}", str(file)):
            assert parse_overrides([item], DEFAULTS) == {"epsilon": float(number)}

    def test_a_whole_number_of_thousands_of_digits_is_left_to_the_validation(self):
        assert parse_overrides(["seed=" + "1" * 5000], DEFAULTS) == {"seed": "1" * 5000}

    def test_an_option_that_the_app_lacks_is_named(self):
        check_known({"seed": 2}, DEFAULTS)
        with pytest.raises(ConfigError, match="clusters: must be listed"):
            check_known({"clusters": 2}, DEFAULTS)

    def test_local_paths_become_absolute(self, tmp_path):
        (tmp_path / "images").mkdir()
        (tmp_path / "digits").mkdir()  # the embedded data set has precedence over a folder of its name
        config = {"dataset": "images", "backbone": "./vit", "cache-dir": "cache", "output": "x"}
        assert absolute_paths(config, tmp_path) == {
            "dataset": str(tmp_path / "images"),
            "backbone": str(tmp_path / "vit"),
            "cache-dir": str(tmp_path / "cache"),
        }
        names = {"dataset": "digits", "backbone": "owner/model", "cache-dir": ""}
        assert absolute_paths(names, tmp_path) == {}


class TestApp:
    def test_the_folder_given_then_the_working_directory_then_the_package(self, tmp_path, monkeypatch):
        app, other = write_app(tmp_path / "my app"), write_app(tmp_path / "other")
        monkeypatch.chdir(other)
        assert find_app(app) == app
        assert find_app(None) == other
        monkeypatch.chdir(tmp_path)
        assert find_app(None) == Path(pina_flwr.__file__).resolve().parents[1]
        monkeypatch.setattr(pina_flwr, "__file__", str(tmp_path / "site-packages/pina_flwr/__init__.py"))
        with pytest.raises(ConfigError, match="--app: needed here"):
            find_app(None)

    @pytest.mark.parametrize("text", [None, "", "[tool.flwr]", "not toml", "tool = 3"])
    def test_a_folder_without_an_app_is_named(self, tmp_path, text):
        if text is not None:
            (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(ConfigError, match="--app = "):
            find_app(tmp_path)

    def test_defaults_are_those_of_pyproject(self, tmp_path):
        config = run_config(write_app(tmp_path / "app"))
        assert config == {"dataset": "digits", "output": "results", "seed": 1, "epsilon": 8.0}

    def test_the_copy_holds_what_a_bundle_may_and_nothing_else(self, tmp_path):
        app = write_app(tmp_path / "app")
        files = ["package/model.json", "package/sub/code.py", ".gitignore", "LICENSE", "conf/x.toml"]
        files += ["env/pyvenv.cfg", "env/lib/a.py", ".venv/b.py", ".git/config.toml", "__pycache__/c.py"]
        files += ["weights.safetensors", "images/1.png"]
        for name in files:
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text("")
        (app / "link.py").symlink_to(tmp_path / "nowhere")
        stage(app, tmp_path / "copy")
        copied = {
            str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()
        }
        own = {"pyproject.toml", "server_app.py", "client_app.py"}
        assert copied == {*own, *files[:5]}

    def test_the_copy_of_this_app_holds_its_code_and_no_results(self, tmp_path):
        root = Path(pina_flwr.__file__).resolve().parents[1]
        app = tmp_path / "app"
        stage(root, app)
        code = {p.relative_to(root).as_posix() for p in root.glob("pina_flwr/**/*.py")}
        top = {"server_app.py", "client_app.py", "README.md", "LICENSE", "pyproject.toml", ".gitignore"}
        assert {p.relative_to(app).as_posix() for p in app.rglob("*") if p.is_file()} == {
            *code,
            *top,
            "pina_flwr/models/tiny_vit.json",
        }
        deep = app / "results/a/b/c/d/e/f/g/h/i/j/k"
        deep.mkdir(parents=True)
        (deep / "x.json").write_text("{}")
        (app / "big.json").write_text(
            os.urandom(6 << 20).hex()
        )  # over 10 MiB if bundled: is not compressible
        stage(app, tmp_path / "copy")
        assert not list((tmp_path / "copy").rglob("x.json"))
        bundle = build_fab_from_disk(tmp_path / "copy")
        (app / "results").rename(tmp_path / "elsewhere")
        assert bundle == build_fab_from_disk(app)  # as `flwr run` itself bundles it
        names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
        assert names == {*code, *top, "pina_flwr/models/tiny_vit.json", ".info/CONTENT"} - {".gitignore"}


class TestOutput:
    def test_a_new_folder_is_made(self, tmp_path):
        with prepared(tmp_path / "a/b", overwrite=False):
            assert [path.name for path in (tmp_path / "a/b").iterdir()] == [LOCK]

    def test_a_run_that_left_no_round_is_no_obstacle(self, tmp_path):
        MetricsLog(tmp_path)
        (tmp_path / "run.log").write_text("…")
        with prepared(tmp_path, overwrite=False):
            pass

    @pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
    def test_results_are_refused_and_stay(self, tmp_path, name):
        (tmp_path / name).write_text("{}")
        with (
            pytest.raises(ConfigError, match=f"already holds results \\({name}\\).*--overwrite"),
            prepared(tmp_path, overwrite=False),
        ):
            pass
        assert (tmp_path / name).read_text() == "{}"

    def test_overwrite_removes_what_a_run_wrote_and_nothing_else(self, tmp_path):
        for name in EARLIER:
            if "." in name:
                (tmp_path / name).write_text("x")
            else:
                (tmp_path / name).mkdir()
                (tmp_path / name / "file").write_text("x")
        (tmp_path / "notes.txt").write_text("mine")
        with prepared(tmp_path, overwrite=True):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "notes.txt"]

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_one_run_at_a_time(self, tmp_path, overwrite):
        (tmp_path / LOCK).write_text("")  # left by an earlier run
        with prepared(tmp_path, overwrite=False):
            (tmp_path / "metrics.jsonl").write_text("{}")
            with (
                pytest.raises(ConfigError, match=f"^output = '{tmp_path}': in use by another run$"),
                prepared(tmp_path, overwrite=overwrite),
            ):
                pass
            assert (tmp_path / "metrics.jsonl").exists()
        with prepared(tmp_path, overwrite=True):
            pass

    def test_a_killed_run_does_not_block(self, tmp_path):
        script = (
            "import sys, time; from pathlib import Path; from pina_flwr.runner.output import prepared\n"
            f"with prepared(Path({str(tmp_path)!r}), overwrite=False): print(flush=True); time.sleep(60)\n"
        )
        env = os.environ | {"PYTHONPATH": str(Path(pina_flwr.__file__).parents[1])}
        with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            with pytest.raises(ConfigError, match="in use"), prepared(tmp_path, overwrite=False):
                pass
            process.kill()
            process.wait()
        with prepared(tmp_path, overwrite=False):
            pass

    def test_a_file_in_the_way_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file/below", Path("/proc/pina")):
            with (
                pytest.raises(ConfigError, match=f"output = '{path}': must be a folder"),
                prepared(path, overwrite=True),
            ):
                pass


class TestSize:
    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            (SimulationSize(nodes=1, cpus=1), (1, 1, 0)),
            (SimulationSize(nodes=1, cpus=2), (1, 2, 0)),
            (SimulationSize(nodes=200, cpus=2), (1, 2, 0)),
            (SimulationSize(nodes=1, cpus=8), (1, 8, 0)),
            (SimulationSize(nodes=4, cpus=8), (4, 2, 0)),
            (SimulationSize(nodes=8, cpus=16, gpus=1), (8, 2, 0.125)),
            (SimulationSize(nodes=3, cpus=6, gpus=1), (3, 2, 0.3333)),
            (SimulationSize(nodes=25, cpus=64, gpus=7), (25, 2, 0.25)),
            (SimulationSize(nodes=1, cpus=16, gpus=4), (1, 16, 1.0)),
        ],
    )
    def test_what_each_node_gets(self, size, expected):
        assert (size.at_a_time, size.cpus_per_node, size.gpus_per_node) == expected

    @pytest.mark.parametrize("gpus", range(1, 9))
    @pytest.mark.parametrize("nodes", range(1, 40))
    def test_all_that_work_at_a_time_find_a_gpu(self, nodes, gpus):
        size = SimulationSize(nodes=nodes, cpus=64, gpus=gpus)
        started = min(int(64 / size.cpus_per_node), int(gpus / size.gpus_per_node))  # as Flower counts them
        assert size.at_a_time <= started <= gpus * int(1 / size.gpus_per_node)

    def test_a_gpu_is_asked_for_only_where_there_is_one(self):
        without = SimulationSize(nodes=3, cpus=6).federation_config()
        assert without == "num-supernodes=3 client-resources-num-cpus=2 init-args-num-cpus=6"
        one = SimulationSize(nodes=3, cpus=6, gpus=1).federation_config()
        assert one == without + " client-resources-num-gpus=0.3333 init-args-num-gpus=1"

    def test_this_machine(self):
        size = measure()
        assert 1 <= size.nodes <= size.cpus <= (os.cpu_count() or 1)
        assert size.nodes == max(1, size.cpus // 2)
        assert measure(7).nodes == 7


class TestProcesses:
    STUBBORN = "trap '' TERM HUP INT; echo $$ > {}; while :; do sleep 0.1; done"

    def start(self, folder: Path) -> tuple[ProcessGroup, int]:
        """A group whose child has a child that ignores SIGTERM; the id of the latter."""
        group = ProcessGroup(folder)
        file = folder / "pid"
        command = ["sh", "-c", f'sh -c "{self.STUBBORN.format(file).replace("$", chr(92) + "$")}" & wait']
        group.spawn(command, env=os.environ, cwd=folder, output=subprocess.DEVNULL)
        return group, read_pid(file)

    def test_stop_ends_grandchildren_that_ignore_sigterm(self, tmp_path):
        group, pid = self.start(tmp_path)
        assert is_running(pid)
        group.stop()
        assert ended(pid)
        assert tmp_path.exists()

    def test_the_group_and_its_folder_end_with_this_process(self, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        script = (
            "import os, sys, time; from pathlib import Path\n"
            "from pina_flwr.runner.processes import ProcessGroup\n"
            f"folder = Path({str(folder)!r})\n"
            "group = ProcessGroup(folder)\n"
            f"command = {self.STUBBORN.format(tmp_path / 'pid')!r}\n"
            "group.spawn(['sh', '-c', command], env=os.environ, cwd=folder, output=1)\n"
            "time.sleep(60)\n"
        )
        root = str(Path(pina_flwr.__file__).parents[1])
        process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": root})
        pid = read_pid(tmp_path / "pid")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert ended(pid)
        wait_until(lambda: not folder.exists())

    def test_output_is_kept(self, tmp_path):
        group = ProcessGroup(tmp_path)
        process = group.spawn(
            ["sh", "-c", "echo é; echo oops >&2"], env={}, cwd=tmp_path, output=subprocess.PIPE
        )
        assert process.communicate()[0] == "é\noops\n"
        group.stop()


class TestSuperLink:
    def test_the_environment_leads_nowhere_else(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLWR_HOME", "/home/user/.flwr")
        monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setenv("NO_PROXY", "example.org")
        env = environment(tmp_path)
        assert env["FLWR_HOME"] == str(tmp_path / "flwr")
        assert env["RAY_TMPDIR"] == str(tmp_path)
        assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in env
        assert "RAY_ADDRESS" not in env
        assert env["no_proxy"] == env["NO_PROXY"] == "example.org,127.0.0.1,localhost"

    def test_a_superlink_that_ends_at_once_is_an_error(self, tmp_path, monkeypatch):
        fake(tmp_path / "bin", monkeypatch, "echo hello; echo 'Error: no luck'; exit 3")
        with (
            pytest.raises(RunError, match=r"^flower-superlink ended with exit status 3: Error: no luck$"),
            SuperLink(tmp_path, lambda: False),
        ):
            pass

    def test_one_that_never_answers_can_be_interrupted(self, tmp_path, monkeypatch):
        fake(tmp_path / "bin", monkeypatch, f"echo $$ > {tmp_path}/pid; sleep 60")
        pid, began = tmp_path / "pid", time.monotonic()
        with (
            pytest.raises(RunError, match="stopped before its end"),
            # On a busy machine, what half a second leaves time for is not sure to have begun.
            SuperLink(tmp_path, lambda: has_content(pid) and time.monotonic() > began + 0.5),
        ):
            pass
        assert ended(read_pid(pid))

    def test_flower_that_is_not_installed_is_an_error(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(RunError, match="flower-superlink is not installed"), SuperLink(tmp_path, bool):
            pass

    def test_why_a_run_could_not_start_is_said(self, tmp_path):
        app = write_app(tmp_path / "app")
        text = (app / "pyproject.toml").read_text()
        (app / "pyproject.toml").write_text(text.replace('publisher = "tests"', ""))
        result = run(app, {}, tmp_path, SimulationSize(nodes=1, cpus=1))
        assert not result.ok
        assert not result.mistake
        assert result.status == ""
        assert "\n" not in result.reason
        assert 'Property "publisher" missing' in result.reason

    def test_a_run_without_a_summary_is_no_success(self, tmp_path):
        """Flower calls a ServerApp that raised SystemExit completed."""
        with pytest.raises(RunError, match=r"left no summary\.json"):
            check_summary(tmp_path)
        (tmp_path / "summary.json").write_text("{}")
        check_summary(tmp_path)


class TestProgress:
    def test_rows_are_read_once_and_only_when_complete(self, tmp_path):
        reader = RoundReader(tmp_path)
        assert reader.new_rows() == []
        log = MetricsLog(tmp_path)
        log.append(RoundRow(round=1, rounds=3, stage=1, seconds=1.0))
        log.append(RoundRow(round=2, rounds=3, stage=2, seconds=2.0))
        assert [row.round for row in reader.new_rows()] == [1, 2]
        with log.path.open("a") as file:
            file.write('{"round": 3, "rounds": 3,')
            file.flush()
            assert reader.new_rows() == []
            file.write(' "stage": 2}\nnot a row\n')
        assert [row.round for row in reader.new_rows()] == [3]
        assert reader.new_rows() == []

    def test_time_left_is_that_of_the_present_stage(self):
        slow = [RoundRow(round=n, rounds=10, stage=1, seconds=100.0) for n in (1, 2)]
        fast = [RoundRow(round=n, rounds=10, stage=2, seconds=4.0) for n in (3, 4)]
        assert time_left(slow, since=0.0) == 800.0
        assert time_left(slow + fast, since=3.0) == 21.0
        assert time_left(slow + fast, since=1000.0) == 0.0
        assert time_left([RoundRow(round=1, rounds=2, stage=1)], since=0.0) is None


class TestProgressBar:
    def test_it_shows_rounds_time_left_and_accuracy_below_the_log(self, tmp_path):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, color_system=None, width=100)
        with ProgressBar(console, tmp_path) as bar:
            bar.update()
            log = MetricsLog(tmp_path)
            log.append(RoundRow(round=1, rounds=200, stage=1, seconds=50.0, accuracy=0.5))
            log.append(RoundRow(round=2, rounds=200, stage=2, seconds=60.0))
            bar.update()
            bar.line("a line [with] brackets " + "x" * 100)
        shown = screen.getvalue()
        assert "starting" in shown
        assert "round 2/200, stage 2" in shown
        assert "3:18:00 left, accuracy 0.500" in shown or "3:17:59 left, accuracy 0.500" in shown
        assert "a line [with] brackets " + "x" * 100 + "\n" in shown


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a flower-superlink that runs `script` where the real one is looked for."""
    folder.mkdir()
    command = folder / "flower-superlink"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_pid(file: Path) -> int:
    """The process that writes it may be a Python yet to start: seconds, where others work beside it."""
    wait_until(lambda: has_content(file), seconds=60)
    return int(file.read_text())


def has_content(file: Path) -> bool:
    return file.exists() and bool(file.read_text().strip())


def is_running(pid: int) -> bool:
    """False also for a process that has ended and that nobody has collected."""
    result = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return result.stdout.strip()[:1] not in ("", "Z")


def ended(pid: int) -> bool:
    """True once the process has ended; waits for it."""
    wait_until(lambda: not is_running(pid))
    return True
