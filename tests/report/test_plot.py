"""The plot shows what the rows say, whatever they lack."""

import dataclasses
import math
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from pina_flwr.report.metrics_log import RoundRow
from pina_flwr.report.plot import BLUE, LIGHT_BLUE, VERMILION, draw, plot


def run_of(stage1=8, stage2=20, **changes):
    """Rows of a run without accuracy in stage 1 and with rising accuracy in stage 2."""
    total = stage1 + stage2
    rows = [RoundRow(round=t, rounds=total, stage=1, cohort=50) for t in range(1, stage1 + 1)]
    for t in range(1, stage2 + 1):
        rise = 1 - math.exp(-t / 6)
        scores = {"accuracy": 0.2 + 0.7 * rise, "worst_cluster_accuracy": 0.1 + 0.7 * rise}
        scores |= {"clustering_accuracy": min(1.0, 0.7 + 0.03 * t), **changes}
        rows.append(RoundRow(round=stage1 + t, rounds=total, stage=2, cohort=50, **scores))
    return rows


def curves(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def legend(figure):
    return {text.get_text() for text in figure.legends[0].get_texts()} if figure.legends else set()


def test_curves_carry_the_rows():
    rows = run_of()
    figure = draw(rows, "digits")
    lines = curves(figure)
    for label, name in [
        ("test accuracy, mean", "accuracy"),
        ("test accuracy, worst cluster", "worst_cluster_accuracy"),
        ("clustering accuracy", "clustering_accuracy"),
    ]:
        np.testing.assert_array_equal(lines[label].get_xdata(), range(9, 29))
        np.testing.assert_array_equal(lines[label].get_ydata(), [getattr(row, name) for row in rows[8:]])
    assert legend(figure) == {*lines, "stage 1"}
    axes = figure.axes[0]
    assert (axes.get_title(), axes.get_xlabel()) == ("digits", "round")
    assert "accuracy" in axes.get_ylabel()


def test_worst_cluster_is_the_lighter_line():
    assert sum(to_rgb(LIGHT_BLUE)) > sum(to_rgb(BLUE))
    assert curves(draw(run_of(), ""))["test accuracy, worst cluster"].get_color() == LIGHT_BLUE


def test_stage_1_is_shaded_up_to_its_last_round():
    (shade,) = draw(run_of(stage1=8), "").axes[0].patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0.5, 8.5)
    assert not draw(run_of(stage1=0), "").axes[0].patches


def test_natural_split_has_no_clustering_curve():
    figure = draw(run_of(clustering_accuracy=None), "")
    assert legend(figure) == {"test accuracy, mean", "test accuracy, worst cluster", "stage 1"}


def test_rounds_without_a_value_are_bridged():
    rows = run_of(stage1=0, stage2=5)
    rows[1] = dataclasses.replace(rows[1], accuracy=None)
    rows[3] = dataclasses.replace(rows[3], accuracy=math.nan)
    np.testing.assert_array_equal(curves(draw(rows, ""))["test accuracy, mean"].get_xdata(), [1, 3, 5])


def test_dropped_rounds_are_marked():
    rows = run_of()
    rows[11] = dataclasses.replace(rows[11], dropped="2 of 50 users answered", accuracy=None)
    figure = draw(rows, "")
    assert "dropped round" in legend(figure)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()  # every entry is in it, so it is at its widest
    assert len(legend(figure)) == 5
    assert 0 <= box.x0 <= box.x1 <= 1000
    (marks,) = [c for c in figure.axes[0].collections if c.get_label() == "dropped round"]
    np.testing.assert_array_equal(marks.get_offsets(), [[12, 0]])


@pytest.mark.parametrize(
    "rows",
    [
        run_of(),
        run_of(stage1=0, stage2=1),
        run_of(stage1=1, stage2=0),
        run_of(stage1=0, stage2=2, accuracy=None, worst_cluster_accuracy=None, clustering_accuracy=None),
        [],
    ],
    ids=["run", "single row", "single row of stage 1", "nothing measured", "no rows"],
)
def test_png_of_1000_pixels(tmp_path, rows):
    path = tmp_path / "accuracy.png"
    plot(rows, path, "seed $1_x^ is no formula")
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (560, 1000)
    vermilion = np.abs(image[..., :3] - to_rgb(VERMILION)).max(axis=2) < 0.02
    assert vermilion.any() == any(row.clustering_accuracy is not None for row in rows)


def test_pyplot_is_not_imported():
    code = "import sys, pina_flwr.report.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
