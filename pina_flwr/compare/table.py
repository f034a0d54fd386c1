"""The table of a comparison: rows × ε, mean ± standard deviation over seeds, as Markdown and CSV.

Table 1 of PINA (arXiv 2604.20596) gives the mean of test accuracy. Beside it stand how the clustering went
and ε towards each adversary, as each run's summary has it: with the noise of a larger cohort than the one
that ran, ε is that of a deployment of such a size, and the table says so.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pina_flwr.compare.matrix import Matrix, epsilon_name
from pina_flwr.compare.results import (
    CellResult,
    Run,
    Score,
    first_round,
    late_clustering,
    score,
    stage1_rounds,
)
from pina_flwr.report.summary import rounded_up

NOTHING = "–"
ADVERSARIES = ("recipient", "server", "sketch")
COLUMNS = (
    *("", "ε", "accuracy", "worst cluster", "clustering, last round", "from half of the rounds on"),
    *("first round at {level:g}", "rounds", "ε, recipients", "ε, server", "ε, single sketch"),
)


@dataclass(frozen=True)
class Line:
    """A row at one ε, over its seeds.

    seeds: those whose run is done. of: how many there are to be. accuracy, worst, clustering: after the last
    round. late: each seed's least clustering accuracy from half of the rounds on. first: the first round of
    each seed at the matrix's `rounds-to`, None where it was never reached.
    """

    row: str
    epsilon: float
    seeds: tuple[int, ...]
    of: int
    runs: tuple[Run, ...]
    accuracy: Score | None
    worst: Score | None
    clustering: Score | None
    late: Score | None
    first: tuple[int | None, ...]

    def spent(self, adversary: str) -> float:
        """The greatest ε of any seed towards an adversary; inf: no finite one."""
        return max(_or_infinite(getattr(run.summary.epsilon, adversary)) for run in self.runs)

    def as_paper_counts(self, adversary: str) -> float | None:
        """ε as the paper counts, where that differs from ours."""
        counts = [run.summary.epsilon_as_paper_counts for run in self.runs]
        found = [count.get(adversary) for count in counts if count is not None]
        return max(map(_or_infinite, found)) if found else None


def lines_of(matrix: Matrix, results: Sequence[CellResult]) -> list[Line]:
    """One line for each row and ε, row by row."""
    return [_line(matrix, results, row.name, epsilon) for row in matrix.rows for epsilon in row.epsilons]


def markdown(matrix: Matrix, lines: Sequence[Line]) -> str:
    """The tables and what must be known to read them, without a heading."""
    return "\n".join([*_accuracies(matrix, lines), "", *_details(matrix, lines), "", *_notes(matrix, lines)])


def as_csv(lines: Sequence[Line]) -> str:
    """One line for each row and ε, unrounded; what is listed by seed is separated by blanks."""
    scores = ("accuracy", "worst", "clustering", "late")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["row", "epsilon", "seeds", "seeds_asked"]
        + [f"{name}_{part}" for name in scores for part in ("mean", "sd", "least")]
        + ["first_rounds", "rounds", "stage1_rounds", "delta", "noise_cohort_size"]
        + [f"epsilon_{adversary}" for adversary in ADVERSARIES]
        + [f"epsilon_{adversary}_as_paper_counts" for adversary in ADVERSARIES]
    )
    for line in lines:
        writer.writerow(
            [line.row, line.epsilon, " ".join(map(str, line.seeds)), line.of]
            + [value for name in scores for value in _parts(getattr(line, name))]
            + _of_runs(line)
        )
    return file.getvalue()


def escaped(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _line(matrix: Matrix, results: Sequence[CellResult], row: str, epsilon: float) -> Line:
    done = [
        (result.cell.seed, result.run)
        for result in results
        if (result.cell.row, result.cell.epsilon) == (row, epsilon) and result.run is not None
    ]
    runs = tuple(run for _, run in done)
    clustered = [run for run in runs if run.summary.clusters > 1]
    return Line(
        row=row,
        epsilon=epsilon,
        seeds=tuple(seed for seed, _ in done),
        of=len(matrix.seeds),
        runs=runs,
        accuracy=score(run.summary.accuracy for run in runs),
        worst=score(run.summary.worst_cluster_accuracy for run in runs),
        clustering=score(run.summary.clustering_accuracy for run in clustered),
        late=score(late_clustering(run) for run in clustered),
        first=tuple(first_round(run, matrix.rounds_to) for run in clustered if run.clustering),
    )


def _accuracies(matrix: Matrix, lines: Sequence[Line]) -> list[str]:
    """The paper's form: rows down, ε across."""
    found = {(line.row, line.epsilon): _score_of(line, line.accuracy) for line in lines}
    names = [f"ε = {epsilon_name(epsilon)}" for epsilon in matrix.epsilons]
    body = [
        [escaped(row.name), *(found.get((row.name, epsilon), NOTHING) for epsilon in matrix.epsilons)]
        for row in matrix.rows
    ]
    images = sorted({run.summary.test_on for line in lines for run in line.runs}) or ["test"]
    return _table([f"{' and '.join(images)} accuracy", *names], body)


def _details(matrix: Matrix, lines: Sequence[Line]) -> list[str]:
    head = [column.format(level=matrix.rounds_to) for column in COLUMNS]
    return _table(head, [_cells(line) for line in lines if line.runs])


def _cells(line: Line) -> list[str]:
    least = f" (least {line.late.least:.3f})" if line.late and line.late.sd is not None else ""
    return [
        *(escaped(line.row), epsilon_name(line.epsilon)),
        *(_score_of(line, value) for value in (line.accuracy, line.worst, line.clustering)),
        _score_of(line, line.late) + least,
        ", ".join("never" if value is None else str(value) for value in line.first) or NOTHING,
        " or ".join(_distinct(_rounds(run) for run in line.runs)),
        *(_epsilon(line, adversary) for adversary in ADVERSARIES),
    ]


def _notes(matrix: Matrix, lines: Sequence[Line]) -> list[str]:
    deltas = _distinct(f"{run.summary.delta:.3g}" for line in lines for run in line.runs)
    seeds = ", ".join(map(str, matrix.seeds))
    caveats = _caveats(lines)
    return [
        f"Mean ± sample standard deviation over seeds {seeds}; with fewer done, how many. Accuracy is the "
        "mean over hidden groups after the last round, each user with the cluster model it picks. Rounds are "
        "those of both stages; in brackets, how many of them are of stage 1. «From half of the rounds on» is "
        "each seed's least clustering accuracy from there, «first round» is by seed, both among the rounds "
        "that were evaluated." + (f" δ = {' or '.join(deltas)}." if deltas else ""),
        *(["", "What ε rests on:", "", *caveats] if caveats else []),
    ]


def _caveats(lines: Sequence[Line]) -> list[str]:
    """Every caveat of a summary once, with the rows that it is about unless it is about all."""
    rows: dict[str, list[str]] = {}
    present = [line for line in lines if line.runs]
    for line in present:
        for caveat in _distinct(caveat for run in line.runs for caveat in run.summary.caveats):
            rows.setdefault(caveat, []).append(f"{line.row} at ε = {epsilon_name(line.epsilon)}")
    everywhere = len(present)
    return [
        f"- {escaped(caveat)}" + ("" if len(names) == everywhere else f" ({escaped('; '.join(names))})")
        for caveat, names in rows.items()
    ]


def _of_runs(line: Line) -> list[object]:
    first = " ".join("never" if value is None else str(value) for value in line.first)
    if not line.runs:
        return [first, *[""] * (4 + 2 * len(ADVERSARIES))]
    counts = [line.as_paper_counts(adversary) for adversary in ADVERSARIES]
    return [
        first,
        " ".join(_distinct(str(run.summary.rounds) for run in line.runs)),
        " ".join(_distinct(str(stage1_rounds(run)) for run in line.runs)),
        " ".join(_distinct(repr(run.summary.delta) for run in line.runs)),
        " ".join(_distinct(str(run.summary.noise_cohort_size) for run in line.runs)),
        *(line.spent(adversary) for adversary in ADVERSARIES),
        *("" if count is None else count for count in counts),
    ]


def _score_of(line: Line, value: Score | None) -> str:
    if value is None:
        return NOTHING
    spread = "" if value.sd is None else f" ± {value.sd:.3f}"
    count = len(value.values)
    return f"{value.mean:.3f}{spread}" + (f" ({count} of {line.of} seeds)" if count < line.of else "")


def _epsilon(line: Line, adversary: str) -> str:
    strict, paper = line.spent(adversary), line.as_paper_counts(adversary)
    shown = "0" if strict == 0 else rounded_up(strict)
    return shown if paper is None else f"{shown} (as the paper counts: {rounded_up(paper)})"


def _rounds(run: Run) -> str:
    stage1 = stage1_rounds(run)
    return f"{run.summary.rounds}" + (f" ({stage1})" if stage1 else "")


def _parts(value: Score | None) -> list[object]:
    if value is None:
        return ["", "", ""]
    return [value.mean, "" if value.sd is None else value.sd, value.least]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(row)} |" for row in rows]


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _distinct(values: object) -> list[str]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload]
