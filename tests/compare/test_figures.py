"""Fig. 3: the right curves, as numbers and as a picture."""

from __future__ import annotations

import csv
import io

import pytest
from made_up_cells import MATRIX, comparison_of, done, not_done

from pina_flwr.compare.comparison import write_results
from pina_flwr.compare.figures import COLOURS, FIGURES, STYLES, as_csv, as_png, curves_of, draw
from pina_flwr.compare.table import lines_of

CLUSTERING, ACCURACY = FIGURES
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def comparison(tmp_path):
    return comparison_of(tmp_path)


def curves(comparison, results, figure=CLUSTERING):
    return curves_of(lines_of(comparison.matrix, results), figure.field)


def all_done(comparison, by_seed):
    """Every cell with the clustering accuracies of its seed, and an accuracy of 0.4."""
    return [done(cell, by_seed[cell.seed], stage1=1, accuracy=0.4) for cell in comparison.cells]


def test_a_curve_is_the_mean_over_seeds_in_rounds_that_all_have(comparison):
    results = all_done(comparison, {1: [None, 0.5, 0.8, 1.0], 2: [None, None, 0.6, 0.5]})
    first, second = curves(comparison, results)
    assert [(curve.row, curve.epsilon) for curve in (first, second)] == [("PINA", 2.0), ("PINA", 8.0)]
    assert [(point.round, point.stage) for point in first.points] == [(3, 2), (4, 2)]
    assert [point.score.mean for point in first.points] == pytest.approx([0.7, 0.75])
    assert [point.score.values for point in first.points] == [(0.8, 0.6), (1.0, 0.5)]


def test_one_model_has_a_curve_of_accuracy_only(comparison):
    results = all_done(comparison, {1: [1.0, 1.0], 2: [1.0, 1.0]})
    assert {curve.row for curve in curves(comparison, results)} == {"PINA"}
    found = curves(comparison, results, ACCURACY)
    assert {curve.row for curve in found} == {"FedAvg", "PINA"}
    assert [point.score.mean for point in found[0].points] == pytest.approx([0.2, 0.4])


def test_a_seed_that_is_not_done_holds_no_round_back(comparison):
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    results[1] = not_done(comparison.cells[1])
    first, second = curves(comparison, results)
    assert [point.score.values for point in first.points] == [(0.7,), (0.8,)]
    assert [len(point.score.values) for point in second.points] == [2, 2]


def test_the_csv_has_every_point(comparison):
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    results[3] = not_done(comparison.cells[3])
    lines = list(csv.DictReader(io.StringIO(as_csv(curves(comparison, results)))))
    assert len(lines) == 4
    assert lines[0] == {
        "row": "PINA",
        "epsilon": "2.0",
        "round": "1",
        "stage": "1",
        "seeds": "2",
        "mean": "0.6",
        "sd": str(0.02**0.5),
        "least": "0.5",
        "greatest": "0.7",
    } | {"sd": lines[0]["sd"]}
    assert float(lines[0]["sd"]) == pytest.approx(0.02**0.5)
    assert (lines[2]["seeds"], lines[2]["sd"]) == ("1", "")


def test_the_picture_has_a_panel_an_epsilon_and_a_colour_a_row(comparison):
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    canvas = draw(comparison.matrix, ACCURACY, curves(comparison, results, ACCURACY))
    panels = canvas.axes
    assert [panel.get_title() for panel in panels] == ["ε = 2", "ε = 8"]
    for panel in panels:
        assert [line.get_label() for line in panel.lines] == ["FedAvg", "PINA"]
        assert [line.get_color() for line in panel.lines] == list(COLOURS[:2])
        assert len(panel.collections) == 2  # bands
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["FedAvg", "PINA"]
    suptitle = canvas.get_suptitle()
    assert suptitle == "Accuracy: mean over 2 seeds, bands from the least to the greatest"


def test_a_row_keeps_its_colour_where_others_have_no_curve(comparison):
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    (panel, _) = draw(comparison.matrix, CLUSTERING, curves(comparison, results)).axes
    assert [line.get_color() for line in panel.lines] == [COLOURS[1]]


@pytest.mark.parametrize(("missing", "said"), [([], "2 seeds"), ([1], "1 to 2 seeds"), ([1, 3], "1 seed")])
def test_the_title_says_over_how_many_seeds(comparison, missing, said):
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    for place in missing:
        results[place] = not_done(comparison.cells[place])
    title = draw(comparison.matrix, CLUSTERING, curves(comparison, results)).get_suptitle()
    assert f"mean over {said}," in title


def test_one_seed_has_no_band(comparison):
    results = [done(c, [0.5, 0.6]) if c.seed == 1 else not_done(c) for c in comparison.cells]
    (panel, _) = draw(comparison.matrix, CLUSTERING, curves(comparison, results)).axes
    assert len(panel.collections) == 0


def test_more_rows_than_colours_differ_in_style(tmp_path):
    rows = "".join(f'[[row]]\nname = "r{n}"\n' for n in range(len(COLOURS) + 1))
    comparison = comparison_of(tmp_path, f"seeds = [1]\nepsilons = [2.0]\n{rows}")
    results = [done(cell, [0.5, 0.6]) for cell in comparison.cells]
    (panel,) = draw(comparison.matrix, CLUSTERING, curves(comparison, results)).axes
    first, *_, last = panel.lines
    assert first.get_color() == last.get_color()
    assert (first.get_linestyle(), last.get_linestyle()) == STYLES[:2]


def test_names_are_no_formulas(tmp_path):
    comparison = comparison_of(tmp_path, MATRIX.replace('"PINA"', r'"a $\\frac$ b_c"'))
    results = all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]})
    image = as_png(comparison.matrix, CLUSTERING, curves(comparison, results))
    assert image.startswith(PNG)


def test_pictures_are_written_and_shown_on_the_page(comparison, monkeypatch):
    results = tuple(all_done(comparison, {1: [0.5, 0.6], 2: [0.7, 0.8]}))
    monkeypatch.setattr(type(comparison), "results", lambda _: results)
    comparison.folder.mkdir()
    write_results(comparison)
    for name in ("fig3a", "fig3b"):
        assert (comparison.folder / f"{name}.png").read_bytes().startswith(PNG)
        assert f"({name}.png)" in (comparison.folder / "page.md").read_text()
