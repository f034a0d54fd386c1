"""Fig. 3 of PINA (arXiv 2604.20596): clustering (a) and classification accuracy (b) over rounds, by row.

Lines are means over seeds, bands reach from the least to the greatest of them. One panel for each ε. Rounds
are those of both stages, so that what stage 1 costs shows. A round enters once every seed that is done has a
value for it: a mean over other seeds than its neighbours' would jump.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pina_flwr.compare.matrix import Matrix, epsilon_name
from pina_flwr.compare.results import Run, Score, measured
from pina_flwr.compare.table import Line

# Okabe and Ito's palette without its yellow, which is faint on white: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":", "-.")
"""With more rows than colours, the colours come again in another style."""
WIDTH, HEIGHT, DPI = 6.0, 5.2, 100
"""Of a panel, in inches."""


@dataclass(frozen=True)
class Figure3:
    """One of the two figures: its name, its title, and the field of a round that it shows."""

    name: str
    title: str
    field: str


FIGURES = (
    Figure3("fig3a", "Clustering accuracy", "clustering_accuracy"),
    Figure3("fig3b", "Accuracy", "accuracy"),
)


@dataclass(frozen=True)
class Point:
    """A round of a curve: its number over both stages, its stage, and the seeds' values."""

    round: int
    stage: int
    score: Score


@dataclass(frozen=True)
class Curve:
    """A row at one ε."""

    row: str
    epsilon: float
    points: tuple[Point, ...]


def curves_of(lines: Sequence[Line], field: str) -> list[Curve]:
    """The curves that have a point."""
    curves = (Curve(line.row, line.epsilon, _points(line.runs, field)) for line in lines)
    return [curve for curve in curves if curve.points]


def as_csv(curves: Sequence[Curve]) -> str:
    """One line for each row, ε and round, unrounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["row", "epsilon", "round", "stage", "seeds", "mean", "sd", "least", "greatest"])
    for curve in curves:
        for point in curve.points:
            value = point.score
            place = [curve.row, curve.epsilon, point.round, point.stage, len(value.values)]
            sd = "" if value.sd is None else value.sd
            writer.writerow([*place, value.mean, sd, value.least, value.greatest])
    return file.getvalue()


def as_png(matrix: Matrix, figure: Figure3, curves: Sequence[Curve]) -> bytes:
    """The figure as a PNG."""
    file = io.BytesIO()
    draw(matrix, figure, curves).savefig(file, format="png")
    return file.getvalue()


def draw(matrix: Matrix, figure: Figure3, curves: Sequence[Curve]) -> Figure:
    """The figure: a panel for each ε that has a curve, a row in the same colour everywhere."""
    epsilons = [epsilon for epsilon in matrix.epsilons if any(c.epsilon == epsilon for c in curves)]
    canvas = Figure(figsize=(WIDTH * max(1, len(epsilons)), HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(1, max(1, len(epsilons)), sharey=True, squeeze=False)[0]
    for panel, epsilon in zip(panels, epsilons, strict=False):
        _label(panel, epsilon)
        for curve in curves:
            if curve.epsilon == epsilon:
                _draw_curve(panel, curve, [row.name for row in matrix.rows].index(curve.row))
    title = f"{figure.title}: mean over {_seeds(curves)}, bands from the least to the greatest"
    canvas.suptitle(title, fontsize=13, parse_math=False, wrap=True)
    _legend(canvas, panels)
    return canvas


def _seeds(curves: Sequence[Curve]) -> str:
    counts = sorted({len(point.score.values) for curve in curves for point in curve.points})
    if counts[-1:] == [1]:
        return "1 seed"
    return f"{' to '.join(map(str, dict.fromkeys((*counts[:1], *counts[-1:]))))} seeds"


def _points(runs: Sequence[Run], field: str) -> tuple[Point, ...]:
    if field == "clustering_accuracy":
        runs = [run for run in runs if run.summary.clusters > 1]
    by_round: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        for row, value in measured(run.rounds, field):
            by_round.setdefault(row.round, []).append((row.stage, value))
    return tuple(
        Point(number, found[0][0], Score(tuple(value for _, value in found)))
        for number, found in sorted(by_round.items())
        if len(found) == len(runs)
    )


def _draw_curve(axes: Axes, curve: Curve, place: int) -> None:
    rounds = [point.round for point in curve.points]
    scores = [point.score for point in curve.points]
    colour = COLOURS[place % len(COLOURS)]
    style = STYLES[place // len(COLOURS) % len(STYLES)]
    means = [score.mean for score in scores]
    axes.plot(
        rounds, means, label=curve.row, color=colour, linestyle=style, linewidth=2, marker="o", markersize=3
    )
    if any(len(score.values) > 1 for score in scores):
        low, high = [score.least for score in scores], [score.greatest for score in scores]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)


def _label(axes: Axes, epsilon: float) -> None:
    axes.set_title(f"ε = {epsilon_name(epsilon)}", fontsize=12)
    axes.set_xlabel("round, both stages", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)


def _legend(canvas: Figure, panels: Sequence[Axes]) -> None:
    """One legend beneath, each row once."""
    entries = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if entries:
        columns = min(len(entries), 2 + 2 * len(panels))
        legend = canvas.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
