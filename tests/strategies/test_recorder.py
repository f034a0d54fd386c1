"""From outcomes of rounds to the summary: what counts as trained, and the caveats."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import tiny

from pina_flwr.privacy.guarantee import Subject, caveats
from pina_flwr.privacy.plan import Shapes, plan
from pina_flwr.report.metrics_log import RoundRow, read
from pina_flwr.report.summary import Summary, print_summary, read_summary, sentence, write_summary
from pina_flwr.strategies.clustered import Outcome
from pina_flwr.strategies.recorder import Recorder

SHAPES = Shapes(sketch=64, adapter=500)


def subject_of(**options: Any) -> Subject:
    config = tiny(**({"noise_multiplier": 1.0} | options))
    return Subject(config, plan(config, 14, SHAPES), 14, SHAPES)


def noted(folder: Path, *outcomes: Outcome, **options: Any) -> tuple[Recorder, list[RoundRow]]:
    """A recorder that was told of these outcomes, and the rows that it wrote."""
    recorder = Recorder(subject_of(**options), folder)
    recorder.announce(len(outcomes))
    for outcome in outcomes:
        recorder.note(outcome)
    return recorder, read(folder)


def summary_after(folder: Path, dropped: list[str]) -> Summary:
    """The summary of a run of two rounds of stage 1, then of rounds of stage 2 with these reasons."""
    recorder = Recorder(subject_of(), folder)
    stages = [(1, ""), (1, ""), *((2, reason) for reason in dropped)]
    recorder.announce(len(stages))
    for round_, (stage, reason) in enumerate(stages, start=1):
        recorder.note(Outcome(stage=stage, round=round_, cohort=10, dropped=reason))
    return recorder.summary(seconds=1.0, clusters=4)


@pytest.mark.parametrize(
    ("dropped", "trained"), [(["", ""], True), (["lost", ""], True), (["lost", "lost"], False)]
)
def test_only_rounds_of_stage_2_that_count_train(tmp_path: Path, dropped: list[str], trained: bool) -> None:
    summary = summary_after(tmp_path, dropped)
    assert summary.trained is trained
    assert ("trained nothing" in sentence(summary)) is not trained


def test_file_and_terminal_tell_every_caveat_once(tmp_path: Path) -> None:
    write_summary(tmp_path, summary_after(tmp_path, ["", ""]))
    summary = read_summary(tmp_path)
    assert summary.caveats == caveats(subject_of())
    console = Console(file=io.StringIO(), width=1000)
    print_summary(console, summary, [], tmp_path)
    told = [line.strip()[2:] for line in console.file.getvalue().splitlines() if line.startswith("•")]
    assert told == summary.caveats
    assert told[0].startswith("The noise is that of a cohort of 10,000 users")
    assert "server" in " ".join(told)
    assert len(set(told)) == len(told)


class TestDropout:
    """What a round's secure sum told goes into its row and its line, and no more."""

    def test_survivors(self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture) -> None:
        _, (row,) = noted(tmp_path, Outcome(stage=2, round=1, cohort=10, survivors=9))
        assert (row.cohort, row.survivors, row.refusals, row.dropped) == (10, 9, None, None)
        assert (row.lost, row.ignored) == (None, 0)
        assert "cohort 10 · 1 vanished" in flwr_log.text

    def test_in_which_phases_they_were_lost(self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture) -> None:
        """Who is lost in the last one is in the sum already, and has not vanished."""
        outcome = Outcome(
            stage=2, round=1, cohort=10, survivors=7, lost={"share": 1, "mask": 2, "unmask": 4}, ignored=3
        )
        _, (row,) = noted(tmp_path, outcome)
        assert (row.survivors, row.lost, row.ignored) == (7, {"share": 1, "mask": 2, "unmask": 4}, 3)
        assert "cohort 10 · 3 vanished (1 in share, 2 in mask, 4 in unmask)" in flwr_log.text

    def test_nobody_vanished(self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture) -> None:
        _, (row,) = noted(tmp_path, Outcome(stage=2, round=1, cohort=10, survivors=10))
        assert row.survivors == 10
        assert "vanished" not in flwr_log.text

    def test_refusals(self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture) -> None:
        refusals = {"budget spent": 2, "stale round": 1}
        _, (row,) = noted(tmp_path, Outcome(stage=2, round=1, cohort=40, survivors=37, refusals=refusals))
        assert row.refusals == refusals
        assert "cohort 40 · refused: budget spent (2), stale round (1) · 3 vanished" in flwr_log.text

    def test_of_a_dropped_round_the_reason_says_it(
        self, tmp_path: Path, flwr_log: pytest.LogCaptureFixture
    ) -> None:
        dropped = "1 of 10 members survived, 9 are needed (clients refused: budget spent)"
        outcome = Outcome(
            stage=2, round=1, cohort=10, survivors=1, refusals={"budget spent": 9}, dropped=dropped
        )
        _, (row,) = noted(tmp_path, outcome)
        assert (row.dropped, row.survivors, row.refusals) == (dropped, 1, {"budget spent": 9})
        assert flwr_log.text.count("budget spent") == 1
        assert "vanished" not in flwr_log.text


def test_every_round_is_charged_counted_or_not(tmp_path: Path) -> None:
    outcomes = [
        Outcome(stage=1 if t <= 2 else 2, round=t, cohort=10, dropped="" if t % 2 else "lost")
        for t in range(1, 5)
    ]
    recorder, rows = noted(tmp_path, *outcomes)
    epsilons = [row.epsilon for row in rows]
    assert epsilons == sorted(set(epsilons))  # type: ignore[type-var]
    summary = recorder.summary(seconds=1.0, clusters=4)
    assert summary.epsilon.recipient == epsilons[-1]
    assert summary.dropped_rounds == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reproducible_noise": True}, "The noise is drawn from the run's seed (reproducible-noise)"),
        ({"epsilon": math.inf, "noise_multiplier": 0.0}, "No noise is added"),
        ({"stage1": "sketch", "sketch": "paper"}, "A sketch shows which positions it keeps"),
    ],
)
def test_no_finite_epsilon_is_none_with_its_reason(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    recorder, rows = noted(
        tmp_path, *(Outcome(stage=1 + (t > 2), round=t, cohort=10) for t in range(1, 5)), **options
    )
    summary = recorder.summary(seconds=1.0, clusters=4)
    assert rows[-1].epsilon is None
    assert summary.epsilon.recipient is summary.epsilon.server is None
    assert any(caveat.startswith(said) for caveat in summary.caveats)
