"""The tables: means of the right cells, and everything that must be known to read them."""

from __future__ import annotations

import csv
import io
import statistics

import pytest
from made_up_cells import MATRIX, comparison_of, done, not_done

from pina_flwr.compare.cells import State
from pina_flwr.compare.table import as_csv, lines_of, markdown
from pina_flwr.report.summary import Epsilons

CLUSTERING = [None, 0.5, 0.96, 0.97]
ACCURACIES = {
    ("FedAvg", 2.0): (0.60, 0.62),
    ("FedAvg", 8.0): (0.70, 0.72),
    ("PINA", 2.0): (0.80, 0.86),
    ("PINA", 8.0): (0.90, 0.94),
}


@pytest.fixture
def comparison(tmp_path):
    return comparison_of(tmp_path)


def all_done(comparison, **changes):
    """Every cell with its accuracy of `ACCURACIES`."""
    return [
        done(cell, CLUSTERING, accuracy=ACCURACIES[cell.row, cell.epsilon][cell.seed - 1], **changes)
        for cell in comparison.cells
    ]


def table_of(comparison, results):
    """The Markdown, and the cells of its table rows, by row and column."""
    text = markdown(comparison.matrix, lines_of(comparison.matrix, results))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return text, rows


def details_of(rows, row, epsilon):
    """The line of the second table, by column."""
    head = next(line for line in rows if line[:2] == ["ε", "accuracy"])
    cells = next(line for line in rows if line[:2] == [row, epsilon])
    return dict(zip(head, cells[1:], strict=True))


def records_of(comparison, results):
    """Lines of the CSV, by row and ε."""
    text = as_csv(lines_of(comparison.matrix, results))
    return {(line["row"], line["epsilon"]): line for line in csv.DictReader(io.StringIO(text))}


def test_mean_and_deviation_over_seeds_rows_down_epsilon_across(comparison):
    _, rows = table_of(comparison, all_done(comparison))
    assert rows[:4] == [
        ["test accuracy", "ε = 2", "ε = 8"],
        ["---", "---", "---"],
        ["FedAvg", "0.610 ± 0.014", "0.710 ± 0.014"],
        ["PINA", "0.830 ± 0.042", "0.920 ± 0.028"],
    ]


def test_says_which_images_accuracy_was_measured_on(comparison):
    results = [done(cell, test_on="validation") for cell in comparison.cells]
    _, rows = table_of(comparison, results)
    assert rows[0][0] == "validation accuracy"
    _, rows = table_of(comparison, [*results[1:], done(comparison.cells[0])])
    assert rows[0][0] == "test and validation accuracy"


def test_a_mean_over_fewer_seeds_says_so(comparison):
    results = all_done(comparison)
    results[1], results[0] = not_done(comparison.cells[1]), not_done(comparison.cells[0], State.FAILED, "no")
    results[4] = not_done(comparison.cells[4])
    text, rows = table_of(comparison, results)
    assert rows[2] == ["FedAvg", "–", "0.710 ± 0.014"]
    assert rows[3] == ["PINA", "0.860 (1 of 2 seeds)", "0.920 ± 0.028"]
    assert "over seeds 1, 2; with fewer done, how many" in text
    records = records_of(comparison, results)
    assert [records["PINA", e]["seeds"] for e in ("2.0", "8.0")] == ["2", "1 2"]
    assert {record["seeds_asked"] for record in records.values()} == {"2"}


def test_a_seed_whose_accuracy_is_missing_is_not_in_the_mean(comparison):
    results = all_done(comparison)
    results[1] = done(comparison.cells[1], CLUSTERING, accuracy=None)
    _, rows = table_of(comparison, results)
    assert rows[3][1] == "0.860 (1 of 2 seeds)"


def test_a_row_has_a_dash_where_it_is_not_run(tmp_path):
    comparison = comparison_of(tmp_path, MATRIX + '[[row]]\nname = "No noise"\nepsilons = [inf]\n')
    results = [done(cell, CLUSTERING, accuracy=0.5) for cell in comparison.cells]
    _, rows = table_of(comparison, results)
    assert rows[0] == ["test accuracy", "ε = 2", "ε = 8", "ε = ∞"]
    assert rows[2][3] == rows[4][1] == rows[4][2] == "–"
    assert rows[4][3] == "0.500 ± 0.000"


def test_clustering_and_rounds(comparison):
    results = [
        done(cell, [None, 0.2, 0.96 if cell.seed == 1 else 0.7, 0.9], stage1=1, clustering_accuracy=0.9)
        for cell in comparison.cells
    ]
    _, rows = table_of(comparison, results)
    found = details_of(rows, "PINA", "2")
    assert found["clustering, last round"] == "0.900 ± 0.000"
    assert found["from half of the rounds on"] == "0.200 ± 0.000 (least 0.200)"
    assert found["first round at 0.95"] == "3, never"
    assert found["rounds"] == "4 (1)"
    alone = details_of(rows, "FedAvg", "2")
    assert [alone[name] for name in ("clustering, last round", "first round at 0.95")] == ["–", "–"]


def test_epsilon_is_the_greatest_of_any_seed_rounded_up(comparison):
    results = [
        done(cell, CLUSTERING, epsilon=Epsilons(recipient=1.9 + 0.0301 * cell.seed, server=None, sketch=0.0))
        for cell in comparison.cells
    ]
    _, rows = table_of(comparison, results)
    found = details_of(rows, "PINA", "2")
    columns = ("ε, recipients", "ε, server", "ε, single sketch")
    assert [found[name] for name in columns] == ["1.97", "∞", "0"]
    record = records_of(comparison, results)["PINA", "2.0"]
    assert float(record["epsilon_recipient"]) == 1.9 + 0.0301 * 2
    assert record["epsilon_server"] == "inf"
    assert record["epsilon_recipient_as_paper_counts"] == ""


def test_what_the_paper_would_count_stands_beside_no_finite_epsilon(comparison):
    nothing = Epsilons(recipient=None, server=None, sketch=None)
    counts = {"recipient": 2.0, "server": 30.0, "sketch": 1.234}
    results = [
        done(cell, CLUSTERING, epsilon=nothing, epsilon_as_paper_counts=counts) for cell in comparison.cells
    ]
    found = details_of(table_of(comparison, results)[1], "PINA", "8")
    assert found["ε, recipients"] == "∞ (as the paper counts: 2.0)"
    assert found["ε, single sketch"] == "∞ (as the paper counts: 1.24)"
    assert records_of(comparison, results)["PINA", "8.0"]["epsilon_server_as_paper_counts"] == "30.0"


def test_every_caveat_once_with_the_rows_it_is_about(comparison):
    results = [
        done(cell, CLUSTERING, caveats=["all", *(["some"] if cell.row == "PINA" else [])])
        for cell in comparison.cells
    ]
    text, _ = table_of(comparison, results)
    assert "\n- all\n- some (PINA at ε = 2; PINA at ε = 8)" in text
    assert text.count("- all") == 1


def test_text_can_not_break_the_table(tmp_path):
    comparison = comparison_of(tmp_path, MATRIX.replace('"PINA"', '"a|b <i>"'))
    text, rows = table_of(comparison, [done(cell, CLUSTERING) for cell in comparison.cells])
    assert rows[3][0] == "a\\|b &lt;i>"
    assert "<i>" not in text


def test_the_csv_is_not_rounded_and_always_rectangular(comparison):
    results = all_done(comparison)
    results[0], results[4] = not_done(comparison.cells[0]), not_done(comparison.cells[4])
    records = records_of(comparison, results)
    assert list(records) == [(row, epsilon) for row in ("FedAvg", "PINA") for epsilon in ("2.0", "8.0")]
    assert all(None not in record and None not in record.values() for record in records.values())
    record = records["PINA", "2.0"]
    assert float(record["accuracy_mean"]) == statistics.fmean([0.80, 0.86])
    assert float(record["accuracy_sd"]) == statistics.stdev([0.80, 0.86])
    assert (record["first_rounds"], record["rounds"], record["delta"]) == ("3 3", "4", "0.001")
    assert records["FedAvg", "2.0"]["accuracy_mean"] == ""


def test_nothing_done_is_a_table_of_dashes(comparison):
    results = [not_done(cell) for cell in comparison.cells]
    text, rows = table_of(comparison, results)
    assert rows[2:4] == [["FedAvg", "–", "–"], ["PINA", "–", "–"]]
    assert "δ" not in text
    assert set(records_of(comparison, results)) == set(ACCURACIES_AS_TEXT)


ACCURACIES_AS_TEXT = [(row, str(epsilon)) for row, epsilon in ACCURACIES]
