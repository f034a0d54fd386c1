import json
import logging
import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.superlink.grid import HttpGrid
from support import LocalGrid, failed, json_of, run, tiny

import server_app
from pina_flwr import server
from pina_flwr.config import ConfigError, RunConfig, to_dict

Make = Callable[..., RunConfig]


def values(config: RunConfig, **changes: object) -> dict[str, object]:
    return to_dict(config) | {name.replace("_", "-"): value for name, value in changes.items()}


class TestMistakes:
    """A user's mistake is one line in the log; the run counts as failed, since the ServerApp raises."""

    def ends(self, grid: LocalGrid, options: dict[str, object], log: pytest.LogCaptureFixture) -> str:
        with pytest.raises(ConfigError) as raised:
            server.main(grid, options)
        logging.getLogger("flwr").error("ServerApp raised", exc_info=raised.value)  # as Flower does
        assert "Traceback" not in log.text
        (line, _) = [record.getMessage() for record in log.records if record.levelname == "ERROR"]
        assert line.startswith("error: ")
        assert len(line.splitlines()) == 1
        return line

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"lerning_rate": 0.1}, "error: unknown option 'lerning-rate'; did you mean 'learning-rate'?"),
            ({"sampling_rate": 2.0}, "error: sampling-rate = 2.0: must be at most 1"),
            ({"seed": True}, "error: seed = True: must be a whole number"),
            (
                {"strategy": "ifca"},
                "error: epsilon = 8.0, noise-multiplier = 0.0: strategy 'ifca' runs without privacy; "
                "set inf and 0",
            ),
            (
                {"noise_cohort_size": 3},
                "error: noise-cohort-size = 3: must be at least the expected cohort, q·|K| = 9.8, or 0 for "
                "the noise of the true cohort",
            ),
        ],
    )
    def test_in_an_option(
        self, config: Make, flwr_log: pytest.LogCaptureFixture, changes: dict[str, object], line: str
    ) -> None:
        c = config()
        assert self.ends(LocalGrid(c), values(c, **changes), flwr_log) == line

    def test_that_only_a_node_sees(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        c = config(num_users=10_000)
        line = self.ends(LocalGrid(c, 2), values(c), flwr_log)
        assert line.startswith("error: num-users = 10000: ")

    def test_a_node_that_fails_at_start(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        c = config()
        line = self.ends(LocalGrid(c, 2, intercept=failed), values(c), flwr_log)
        assert line.endswith("failed at start (out of memory)")

    def test_nothing_is_logged_of_a_run_that_succeeds(
        self, config: Make, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        c = config(strategy="fedavg", epsilon=math.inf)
        server.main(LocalGrid(c), to_dict(c))
        assert not [record for record in flwr_log.records if record.levelname == "ERROR"]
        assert json_of(c, "summary.json")["rounds"] == 2


def test_real_nodes_are_refused_an_ideal_functionality(config: Make) -> None:
    """Flower hands a deployed ServerApp an HttpGrid; nothing may be asked of its nodes."""
    with pytest.raises(ConfigError, match="secure-sum = 'trusted': exists in simulation only"):
        server.run(HttpGrid.__new__(HttpGrid), config())


def test_the_app_has_its_main() -> None:
    assert server_app.app is not None
    assert server_app.server is server


class TestOutputFolder:
    @pytest.mark.parametrize("output", ["file", "file/below"])
    def test_that_cannot_be_made(self, tmp_path: Path, output: str) -> None:
        (tmp_path / "file").write_text("in the way")
        path = str(tmp_path / output)
        with pytest.raises(ConfigError) as raised:
            server.open_folder(tiny(output=path))
        assert str(raised.value).startswith(f"output = {path!r}: can't be written (")
        assert len(str(raised.value).splitlines()) == 1

    def test_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").mkdir()
        with pytest.raises(ConfigError, match=r"can't be written \(Is a directory\)"):
            server.open_folder(tiny(output=str(tmp_path)))

    def test_is_found_out_before_any_node_is_asked(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        config = tiny(output=str(tmp_path / "file"))
        grid = LocalGrid(config)
        with pytest.raises(ConfigError):
            server.run(grid, config)
        assert not grid.exchanges
        assert grid.looks == 0

    def test_is_made_with_its_parents(self, tmp_path: Path) -> None:
        config = tiny(output=str(tmp_path / "a" / "b"))
        folder = server.open_folder(config)
        assert tomllib.loads((folder / "config.toml").read_text())["strategy"] == "pina"

    def test_a_home_folder_is_understood(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert server.open_folder(tiny(output="~/runs/a")) == tmp_path / "runs" / "a"

    def test_holds_nothing_of_an_earlier_runs_conclusions(self, config: Make) -> None:
        first = config(epsilon=math.inf)
        run(first)
        folder = Path(first.output)
        assert len(list((folder / "adapters").iterdir())) == 4
        second = config(epsilon=math.inf, strategy="fedavg")
        run(second)
        assert len(list((folder / "adapters").iterdir())) == 1
        broken = config(epsilon=math.inf, dataset="/no/such/folder")
        with pytest.raises(ConfigError):
            server.run(LocalGrid(broken), broken)
        assert not (folder / "summary.json").exists()

    def test_a_folder_without_results_loses_nothing(self, tmp_path: Path) -> None:
        mine = tmp_path / "adapters" / "mine.txt"
        mine.parent.mkdir()
        mine.write_text("keep")
        server.open_folder(tiny(output=str(tmp_path)))
        assert mine.read_text() == "keep"


def test_strict_json(tmp_path: Path) -> None:
    server.write_json(tmp_path / "a.json", {"a": math.nan, "b": [math.inf, 1.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": [None, 1.5]}


def test_the_log_says_what_happens(config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
    run(config(noise_multiplier=1.0), 2)
    lines = [record.getMessage() for record in flwr_log.records]
    assert lines[0] == "pina on digits with tiny-vit: 14 users, 10 a round, 4 rounds"
    assert lines[1] == "noise multiplier z = 1, 1 in stages 1, 2"
    assert [line.split(" · ")[0] for line in lines[2:6]] == [f"round {t}/4" for t in range(1, 5)]
    assert "accuracy" in lines[5]
    assert lines[5].endswith("0 s left")


def test_the_end_says_what_the_run_showed(config: Make, capsys: pytest.CaptureFixture[str]) -> None:
    c = config(noise_multiplier=1.0)
    run(c)
    out = capsys.readouterr().out
    assert "PINA on digits, tiny-vit, seed 1" in out
    assert f"Report: {Path(c.output).resolve()}" in out
    assert "14 users" in out.rstrip().splitlines()[-2] + out.rstrip().splitlines()[-1]
