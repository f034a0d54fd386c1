"""From outcomes of rounds to the summary: what counts as trained, and the caveats."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from support import tiny

from pina_flwr.privacy.guarantee import caveats, plan
from pina_flwr.report.summary import Summary, print_summary, read_summary, sentence, write_summary
from pina_flwr.strategies.clustered import Outcome
from pina_flwr.strategies.hosts import Hosts
from pina_flwr.strategies.recorder import Recorder

CONFIG = tiny(noise_multiplier=1.0)
HOSTS = Hosts(node_of=dict.fromkeys(range(14), 1), num_classes=10)


def summary_after(folder: Path, dropped: list[str]) -> Summary:
    """The summary of a run of two rounds of stage 1, then of rounds of stage 2 with these reasons."""
    recorder = Recorder(CONFIG, plan(CONFIG, len(HOSTS)), folder, HOSTS)
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
    assert summary.caveats == caveats(CONFIG, plan(CONFIG, len(HOSTS)), len(HOSTS))
    console = Console(file=io.StringIO(), width=1000)
    print_summary(console, summary, [], tmp_path)
    told = [line.strip()[2:] for line in console.file.getvalue().splitlines() if line.startswith("•")]
    assert told == summary.caveats
    assert told[0].startswith("The noise is that of a cohort of 10,000 users")
    assert "server" in " ".join(told)
    assert len(set(told)) == len(told)
