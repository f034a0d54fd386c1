import dataclasses
import errno
import json
import logging
import math
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Message
from flwr.superlink.grid import HttpGrid
from support import LocalGrid, by_round, failed, json_of, lost, rows_of, run, shapes, tiny

import server_app
from pina_flwr import server
from pina_flwr.config import ConfigError, RunConfig, to_dict
from pina_flwr.messages import TRAIN
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.plan import plan
from pina_flwr.strategies.clustered import TrainingFailed

Make = Callable[..., RunConfig]


def values(config: RunConfig, **changes: object) -> dict[str, object]:
    return to_dict(config) | {name.replace("_", "-"): value for name, value in changes.items()}


class TestMistakes:
    """A user's mistake is one line in the log; the run counts as failed, since the ServerApp raises."""

    def ends(self, grid: LocalGrid, options: dict[str, object], log: pytest.LogCaptureFixture) -> str:
        with pytest.raises(ConfigError) as raised:
            server.main(grid, options, 1)
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
                {"strategy": "mine"},
                "error: strategy = 'mine': must be one of pina, pina-ri, fedavg, fedprox, fednova, ifca, "
                "oracle, fedmedian, fedtrimmedavg, krum, multikrum, bulyan, or a class of your own such as "
                "my_package.my_module:MyStrategy",
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
        server.main(LocalGrid(c), to_dict(c), 1)
        assert not [record for record in flwr_log.records if record.levelname == "ERROR"]
        assert json_of(c, "summary.json")["rounds"] == 2


class TestDeployment:
    """Flower hands a deployed ServerApp an HttpGrid; nothing may be asked of its nodes in these cases."""

    FIT = {"diagnostics": False, "noise_cohort_size": 0, "ledger": "ledger.jsonl"}  # noqa: RUF012
    GRID = HttpGrid.__new__(HttpGrid)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"diagnostics": True}, "diagnostics = true: nodes would tell what ε does not cover; set false"),
            ({"reproducible_noise": True}, "reproducible-noise = true: protects nobody; set false"),
            (
                {"noise_cohort_size": 10_000},
                "noise-cohort-size = 10000: simulates the noise of more users than there are; set 0",
            ),
            (
                {"ledger": ""},
                "ledger = '': must name a file that lasts, to count what earlier runs released",
            ),
            ({}, "secure-sum = 'trusted': exists in simulation only; set 'secagg+'"),
            (
                {"round_timeout": 60.0},
                "round-timeout = 60: leaves 7.5 s for a phase of the secure sum, in which nodes start a "
                "process; must be at least 80",
            ),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("run", ["private", "not"])
    def test_what_only_simulates_is_refused(
        self, config: Make, options: dict[str, object], message: str, run: str
    ) -> None:
        private = {} if run == "private" else {"epsilon": math.inf}
        if run == "not" and options.keys() & {"noise_cohort_size", "ledger"}:
            message = "secure-sum = 'trusted': exists in simulation only; set 'secagg+'"
        c = config(**self.FIT | private | options)
        with pytest.raises(ConfigError) as raised:
            server.run(self.GRID, c, "1")
        assert str(raised.value) == f"{message} (the nodes are real)"
        assert not Path(c.output).exists()

    def test_what_protects_is_let_through(self, config: Make) -> None:
        real = config(**self.FIT, secure_sum="secagg+")
        server.refuse_deployment(self.GRID, real)
        with pytest.raises(ConfigError, match="ledger = ''"):
            server.refuse_deployment(self.GRID, dataclasses.replace(real, ledger=""))

    def test_a_simulation_may_do_all_of_it(self, config: Make) -> None:
        c = config(reproducible_noise=True)
        assert c.diagnostics
        server.refuse_deployment(LocalGrid(c), c)


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
            server.run(grid, config, "1")
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
            server.run(LocalGrid(broken), broken, "1")
        assert not (folder / "summary.json").exists()

    def test_a_folder_without_results_loses_nothing(self, tmp_path: Path) -> None:
        mine = tmp_path / "adapters" / "mine.txt"
        mine.parent.mkdir()
        mine.write_text("keep")
        server.open_folder(tiny(output=str(tmp_path)))
        assert mine.read_text() == "keep"


def places(path: Path) -> list[tuple[int, int]]:
    """Stage and round of each entry of a ledger."""
    with Ledger.open(path) as ledger:
        return [(entry.stage, entry.round) for entry in ledger.entries]


class TestLedger:
    """The server's count: what a round releases is on disk before anyone is asked for it."""

    def test_an_entry_is_there_before_its_round_is_asked_for(self, config: Make) -> None:
        c = config(noise_multiplier=1.0)
        path, seen = Path(c.output) / "releases.jsonl", []

        def look(request: Message, reply: Message) -> list[Message]:
            if request.metadata.message_type == TRAIN:
                lines = path.read_text().splitlines()
                last = json.loads(lines[-1])["entry"]
                seen.append((int(request.metadata.group_id), len(lines), last["stage"], last["round"]))
            return [reply]

        run(c, intercept=look)
        assert seen == [(1, 1, 1, 1), (2, 2, 1, 2), (3, 3, 2, 1), (4, 4, 2, 2)]

    def test_entries_are_what_the_report_counts(self, config: Make) -> None:
        c = config(noise_multiplier=1.0)
        run(c)
        with Ledger.open(Path(c.output) / "releases.jsonl") as ledger:
            assert [(e.run, e.stage, e.round) for e in ledger.entries] == [
                ("1", 1, 1),
                ("1", 1, 2),
                ("1", 2, 1),
                ("1", 2, 2),
            ]
            assert {type(e.release).__name__ for e in ledger.entries} == {"SkellamRelease"}
            total = epsilon(ledger.releases(), 14**-1.1)
        assert total == pytest.approx(json_of(c, "summary.json")["epsilon"]["recipient"])

    def test_rounds_without_users_and_dropped_ones_count_too(self, config: Make) -> None:
        c = config(strategy="fedavg", noise_multiplier=1.0, t_tr=4, sampling_rate=0.95)
        run(c, 2, intercept=by_round({2: lost, 3: failed}))
        assert [row.dropped is None for row in rows_of(c)] == [True, False, False, True]
        assert places(Path(c.output) / "releases.jsonl") == [(2, t) for t in range(1, 5)]

    def test_what_the_papers_sketch_does_not_protect_is_entered(self, config: Make) -> None:
        c = config(stage1="sketch", sketch="paper", noise_multiplier=1.0)
        run(c)
        with Ledger.open(Path(c.output) / "releases.jsonl") as ledger:
            kinds = {type(e.release).__name__ for e in ledger.entries if (e.stage, e.round) == (1, 2)}
        assert kinds == {"ZcdpRelease", "UnprotectedRelease"}

    def test_without_noise_only_a_lasting_one_is_written(self, config: Make, tmp_path: Path) -> None:
        """No later run on the same users may claim a finite ε."""
        path = tmp_path / "ledger.jsonl"
        c = config(epsilon=math.inf)
        run(c)
        assert places(Path(c.output) / "releases.jsonl") == []
        free = config(epsilon=math.inf, ledger=str(path))
        run(free)
        assert places(path) == [(1, 1), (1, 2), (2, 1), (2, 2)]
        private = config(ledger=str(path), noise_cohort_size=0)
        with pytest.raises(ConfigError, match="earlier runs spent all there is"):
            run(private)

    def test_simulated_noise_is_not_entered_in_a_lasting_one(self, config: Make, tmp_path: Path) -> None:
        c = config(ledger=str(tmp_path / "ledger.jsonl"), noise_cohort_size=10_000)
        with pytest.raises(ConfigError, match="noise-cohort-size = 10000"):
            run(c)
        assert places(tmp_path / "ledger.jsonl") == []

    @pytest.mark.parametrize(
        "place", ["run/releases.jsonl", "run/../run/releases.jsonl", "link/releases.jsonl"]
    )
    def test_a_lasting_one_is_not_the_runs_own(self, config: Make, tmp_path: Path, place: str) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "run")
        c = config(ledger=str(tmp_path / place), noise_cohort_size=0, output=str(tmp_path / "run"))
        with pytest.raises(ConfigError, match=r"ledger = .*name another file"):
            run(c)

    def test_of_the_folder_is_that_of_one_run(self, config: Make) -> None:
        c = config(strategy="fedavg", noise_multiplier=1.0)
        for _ in range(2):
            run(c)
            assert places(Path(c.output) / "releases.jsonl") == [(2, 1), (2, 2)]
            assert json_of(c, "privacy.json")["earlier_releases"] is None

    @pytest.mark.parametrize(("stage1", "spent"), [("dp-kmeans", 2.0), ("sketch", 6.0)])
    def test_that_lasts_counts_earlier_runs(
        self, config: Make, tmp_path: Path, stage1: str, spent: float
    ) -> None:
        """The second run gets what is left of ε, so its noise is larger, and clients accept that."""
        path = tmp_path / "lasting" / "ledger.jsonl"
        lasting = {"ledger": str(path), "stage1": stage1, "sampling_rate": 0.9, "participation_cap": 2}
        lasting["noise_cohort_size"] = 0
        first = config(**lasting, epsilon=spent, output=str(tmp_path / "1"))
        second = config(**lasting, output=str(tmp_path / "2"))
        for c in (first, second):
            run(c, 2)
            assert not [row for row in rows_of(c) if row.dropped or row.refusals]
        before, after = json_of(first, "summary.json"), json_of(second, "summary.json")
        assert 0.98 * spent < before["epsilon"]["recipient"] <= spent
        assert 7.9 < after["epsilon"]["recipient"] <= 8
        start, end = rows_of(second)[0].epsilon, rows_of(second)[-1].epsilon
        assert before["epsilon"]["recipient"] < start < end == after["epsilon"]["recipient"]  # type: ignore[operator]
        alone = plan(second, 14, shapes(second))
        assert after["noise_multiplier"]["stage2"] > alone.stage2
        assert after["noise_multiplier"]["stage1"] >= alone.stage1
        assert json_of(first, "privacy.json")["earlier_releases"] is None
        assert json_of(second, "privacy.json")["earlier_releases"] == 4
        assert len(places(path)) == 8

    def test_that_is_spent(self, config: Make, tmp_path: Path, flwr_log: pytest.LogCaptureFixture) -> None:
        ledger = str(tmp_path / "ledger.jsonl")
        spender = config(strategy="fedavg", ledger=ledger, noise_multiplier=0.3, noise_cohort_size=0)
        run(spender)
        spent = json_of(spender, "summary.json")["epsilon"]["recipient"]
        assert spent > 8
        grid = LocalGrid(config(ledger=ledger, noise_cohort_size=0), 2)
        with pytest.raises(ConfigError) as raised:
            server.main(grid, to_dict(grid.config), 1)
        assert len(str(raised.value).splitlines()) == 1
        assert "epsilon = 8" in str(raised.value)
        assert f"{spent:.4g}" in str(raised.value)
        assert str(raised.value) in flwr_log.text
        assert not grid.trained("mean")
        assert len(places(Path(ledger))) == 2

    @pytest.mark.parametrize("damage", ["changed", "swapped", "no ledger"])
    def test_that_is_corrupt(self, config: Make, tmp_path: Path, damage: str) -> None:
        """Who counts from nothing again spends a budget twice."""
        path = tmp_path / "ledger.jsonl"
        c = config(strategy="fedavg", ledger=str(path), noise_multiplier=2.0, noise_cohort_size=0)
        run(c)
        first, second = path.read_text().splitlines()
        broken = {
            "changed": [first, second.replace('"round":2', '"round":3')],
            "swapped": [second, first],
            "no ledger": ["something else"],
        }[damage]
        path.write_text("".join(line + "\n" for line in broken))
        grid = LocalGrid(c)
        with pytest.raises(ConfigError, match=r"ledger\.jsonl: line [12]: .*; restore the file") as raised:
            server.run(grid, c, "1")
        assert len(str(raised.value).splitlines()) == 1
        assert not grid.trained()
        assert path.read_text().splitlines() == broken

    def test_that_is_corrupt_does_not_cost_earlier_results(self, config: Make, tmp_path: Path) -> None:
        run(config(strategy="fedavg"))
        (tmp_path / "ledger.jsonl").write_text("something else\n")
        c = config(strategy="fedavg", ledger=str(tmp_path / "ledger.jsonl"), noise_cohort_size=0)
        with pytest.raises(ConfigError, match=r"ledger\.jsonl: line 1"):
            run(c)
        for kept in ("summary.json", "adapters", "releases.jsonl"):
            assert (Path(c.output) / kept).exists()

    def test_on_a_full_disk_ends_the_run_and_keeps_the_models(
        self, config: Make, monkeypatch: pytest.MonkeyPatch, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        real, room = os.write, [3]

        def write(descriptor: int, data: bytes) -> int:
            if bytes(data).startswith(b'{"entry":'):
                room[0] -= 1
                if room[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        c = config(noise_multiplier=1.0)
        grid = LocalGrid(c)
        with pytest.raises(TrainingFailed, match="No space left on device") as raised:
            server.run(grid, c, "1")
        assert len(str(raised.value).splitlines()) == 1
        assert "nothing may be released" in str(raised.value)
        assert len(grid.trained("update")) == 1  # nobody was asked for the second round
        assert places(Path(c.output) / "releases.jsonl") == [(1, 1), (1, 2), (2, 1)]
        assert len(rows_of(c)) == 3
        assert len(list((Path(c.output) / "adapters").glob("*/adapter_config.json"))) == c.clusters
        assert not (Path(c.output) / "summary.json").exists()


def test_clients_know_the_run_by_flowers_id(config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
    """A round of another run is none of theirs; what `main` hands on is what the ClientApp is told."""
    c = config(strategy="fedavg", noise_multiplier=1.0)
    server.main(LocalGrid(c, 2), to_dict(c), 1)
    assert not any(row.dropped for row in rows_of(c))
    with pytest.raises(TrainingFailed, match="clients refused: parameters differ from the run's"):
        server.main(LocalGrid(c, 2), to_dict(c), 2)
    last = flwr_log.records[-1].getMessage()  # Flower does not say what was raised
    assert last.startswith("training failed: every round of stage 2 was dropped: ")


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
