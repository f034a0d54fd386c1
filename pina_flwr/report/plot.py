"""The plot of a run: test accuracy and clustering accuracy over its rounds, as one PNG.

Uses matplotlib's objects and its Agg renderer: no display and no pyplot, whose global state and chosen
backend belong to whoever imported us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pina_flwr.report.metrics_log import RoundRow

# Blue and vermilion of Okabe and Ito's palette: told apart with any colour vision, in grey by markers.
BLUE, LIGHT_BLUE, VERMILION = "#0072B2", "#8CC3E2", "#D55E00"


def plot(rows: Sequence[RoundRow], path: str | Path, title: str) -> None:
    """Write the figure of `rows` to `path` as a PNG of 1000 × 560 pixels."""
    figure = draw(rows, title)
    figure.savefig(path, format="png")


def draw(rows: Sequence[RoundRow], title: str) -> Figure:
    """The figure: accuracy (mean, worst cluster) and clustering accuracy by round, stage 1 shaded.

    A round without a value is bridged by the line; a curve without any value is left out.
    """
    figure = Figure(figsize=(10, 5.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _shade_stage1(axes, rows)
    worst = [row.worst_cluster_accuracy for row in rows]
    mean = [row.accuracy for row in rows]
    _curve(axes, rows, worst, label="test accuracy, worst cluster", color=LIGHT_BLUE, marker="o")
    _curve(axes, rows, mean, label="test accuracy, mean", color=BLUE, marker="o")
    clustering = [row.clustering_accuracy for row in rows]
    _curve(axes, rows, clustering, label="clustering accuracy", color=VERMILION, marker="s", linestyle="--")
    _mark_dropped(axes, rows)
    _label(axes, rows, title)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=11, columnspacing=1.2)
    return figure


def _curve(
    axes: Axes,
    rows: Sequence[RoundRow],
    values: Sequence[float | None],
    *,
    label: str,
    color: str,
    marker: str,
    linestyle: str = "-",
) -> None:
    points = [
        (row.round, v) for row, v in zip(rows, values, strict=True) if v is not None and math.isfinite(v)
    ]
    if points:
        x, y = zip(*points, strict=True)
        size = 6 if len(points) <= 60 else 2
        axes.plot(
            x, y, label=label, color=color, marker=marker, markersize=size, linestyle=linestyle, linewidth=2
        )


def _shade_stage1(axes: Axes, rows: Sequence[RoundRow]) -> None:
    first_stage = [row.round for row in rows if row.stage == 1]
    if first_stage:
        axes.axvspan(
            min(first_stage) - 0.5, max(first_stage) + 0.5, color="#E8E8E8", label="stage 1", zorder=0
        )


def _mark_dropped(axes: Axes, rows: Sequence[RoundRow]) -> None:
    dropped = [row.round for row in rows if row.dropped is not None]
    if dropped:
        axes.scatter(dropped, [0] * len(dropped), label="dropped round", color="black", marker="x", zorder=3)


def _label(axes: Axes, rows: Sequence[RoundRow], title: str) -> None:
    axes.set_title(title, fontsize=14, parse_math=False, wrap=True)
    axes.set_xlabel("round", fontsize=12)
    axes.set_ylabel("accuracy (share correct)", fontsize=12)
    axes.tick_params(labelsize=11)
    numbers = [row.round for row in rows] or [1]
    axes.set_xlim(min(numbers) - 0.5, max(numbers) + 0.5)
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=15, integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)
