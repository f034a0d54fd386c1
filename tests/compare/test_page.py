"""The page says what the tables rest on: configuration, versions, wall time and seed of every cell."""

from __future__ import annotations

import dataclasses
import tomllib

from made_up_cells import MATRIX, VERSIONS, comparison_of, done, not_done

from pina_flwr.compare.cells import PLACES, State
from pina_flwr.compare.figures import FIGURES
from pina_flwr.compare.matrix import SET_BY_MATRIX
from pina_flwr.compare.page import page
from pina_flwr.config import to_dict

OLDER = dataclasses.replace(VERSIONS, code="000000000000", commit="old")


def page_of(comparison, results, figures=()):
    return page(comparison, results, "THE TABLES", figures)


def all_done(comparison, **changes):
    return [done(cell, [0.5, 0.9], **changes) for cell in comparison.cells]


def section(text, title):
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_it_begins_with_how_far_the_comparison_is(tmp_path):
    comparison = comparison_of(tmp_path)
    assert "\n8 of 8 cells are done.\n" in page_of(comparison, all_done(comparison))
    results = all_done(comparison)
    results[0] = not_done(comparison.cells[0], State.FAILED, "no luck")
    results[1] = not_done(comparison.cells[1], State.CHANGED, "seed")
    results[2] = not_done(comparison.cells[2])
    said = "5 of 8 cells are done, 1 failed, 1 has another configuration, 1 not begun."
    text = page_of(comparison, results, FIGURES[:1])
    assert text.startswith(f"# matrix\n\n{said}\n\nTHE TABLES\n")
    assert text.count("![") == 1
    assert "![Clustering accuracy over rounds](fig3a.png)" in text


def test_the_configuration_is_whole(tmp_path):
    """What all share together with what a row has of its own is all that its cells ran with."""
    text = MATRIX.replace('name = "PINA"', 'name = "PINA"\nt-in = 4') + "\n"
    comparison = comparison_of(tmp_path, text, {"lora-alpha": 3.0})
    told = section(page_of(comparison, all_done(comparison)), "Configuration")
    shared = tomllib.loads(told.split("```toml\n")[1].split("```")[0])
    assert shared["lora-alpha"] == 3.0
    assert '- **FedAvg**: `strategy = "fedavg"`, `t-in = 10`\n' in told
    assert '- **PINA**: `strategy = "pina"`, `t-in = 4`\n' in told
    assert set(shared) | {"strategy", "t-in"} | set(PLACES) | set(SET_BY_MATRIX) == set(
        to_dict(comparison.cells[0].config)
    )
    assert "Seeds: 1, 2. ε: 2, 8." in told


def test_of_local_folders_it_has_the_name(tmp_path):
    (tmp_path / "images").mkdir()
    options = {"dataset": str(tmp_path / "images"), "backbone": "owner/vit", "cache-dir": "cache"}
    comparison = comparison_of(tmp_path, extra=options)
    told = section(page_of(comparison, all_done(comparison)), "Configuration")
    shared = tomllib.loads(told.split("```toml\n")[1].split("```")[0])
    assert (shared["dataset"], shared["backbone"]) == ("images", "owner/vit")


def test_versions_and_machine(tmp_path):
    comparison = comparison_of(tmp_path)
    told = section(page_of(comparison, all_done(comparison)), "Versions and machine")
    rows = dict(rows_of(told)[2:])
    assert rows["git commit"] == "abc"
    assert rows["SHA-256 of its code"] == "123456789abc"
    assert (rows["torch"], rows["flwr"], rows["CPUs"], rows["GPUs"]) == ("2.9.0", "1.42.0", "2", "–")
    assert "sets of versions" not in told


def test_cells_of_different_versions_are_marked(tmp_path):
    comparison = comparison_of(tmp_path)
    results = all_done(comparison)
    results[2] = done(comparison.cells[2], [0.5, 0.9], versions=OLDER)
    text = page_of(comparison, results)
    told = section(text, "Versions and machine")
    assert "computed with 2 sets of versions" in told
    assert ["git commit", "abc", "old"] in rows_of(told)
    versions = [row[5] for row in rows_of(section(text, "Cells"))[2:]]
    assert versions == ["1", "1", "2", "1", "1", "1", "1", "1"]


def test_commits_with_equal_code_are_one_version(tmp_path):
    comparison = comparison_of(tmp_path)
    results = all_done(comparison)
    later = dataclasses.replace(VERSIONS, commit="def")
    results[2] = done(comparison.cells[2], [0.5, 0.9], versions=later)
    told = section(page_of(comparison, results), "Versions and machine")
    assert ["git commit", "abc, def"] in rows_of(told)
    assert "sets of versions" not in told


def test_every_cell_with_seed_wall_time_and_state(tmp_path):
    comparison = comparison_of(tmp_path)
    results = all_done(comparison, seconds=125.4, accuracy=0.8125)
    results[3] = not_done(comparison.cells[3], State.FAILED, "a | b")
    text = section(page_of(comparison, results), "Cells")
    rows = rows_of(text)[2:]
    assert [row[:3] for row in rows] == [
        [name, epsilon, seed] for seed in "12" for epsilon in "28" for name in ("FedAvg", "PINA")
    ]
    assert rows[0][3:] == ["0:02:05", "0.812", "1", "done"]
    assert rows[3][3:] == ["–", "–", "–", r"failed: a \| b"]
    assert "0:14:38 in all" in text


def test_before_the_first_cell_it_is_a_page_too(tmp_path):
    comparison = comparison_of(tmp_path)
    text = page_of(comparison, [not_done(cell) for cell in comparison.cells])
    assert "0 of 8 cells are done, 8 not begun." in text
    assert "No cell is done." in text
    assert "0:00:00 in all" in text
