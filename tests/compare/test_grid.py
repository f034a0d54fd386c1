"""Cells: every combination once, their options laid over each other, every mistake found before any runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from made_up_cells import DEFAULTS, MATRIX, comparison_of

from pina_flwr.compare.grid import cells_of
from pina_flwr.compare.matrix import read_matrix
from pina_flwr.config import ConfigError, parse, to_dict

ROOT = Path(__file__).parents[2]
HEAD = "seeds = [1]\nepsilons = [2.0]\n"


def test_every_combination_once_seed_by_seed(tmp_path):
    cells = comparison_of(tmp_path, MATRIX + '[[row]]\nname = "No noise"\nepsilons = [inf]\n').cells
    assert [cell.name for cell in cells[:5]] == [
        "fedavg-eps2-seed1",
        "pina-eps2-seed1",
        "fedavg-eps8-seed1",
        "pina-eps8-seed1",
        "no-noise-epsinf-seed1",
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 10
    assert str(cells[4]) == "No noise, ε = ∞, seed 1"
    for cell in cells:
        assert (cell.config.epsilon, cell.config.seed) == (cell.epsilon, cell.seed)
        assert parse({**DEFAULTS, **cell.overrides}) == cell.config
        assert "output" not in cell.overrides


def test_later_layers_win(tmp_path):
    names = ["t-tr", "t-in", "lora-alpha", "local-epochs", "head-std"]
    values = [
        ("a.toml", [1, 2, 1.0, 1, 0.1]),
        ("b.toml", [None, 3, 2.0, 2, 0.2]),
        ("c.toml", [None, None, None, None, 0.5]),
    ]
    for name, row in values:
        lines = [f"{key} = {value}" for key, value in zip(names, row, strict=True) if value is not None]
        (tmp_path / name).write_text("\n".join([*lines, "epsilon = 5.0", "seed = 9", "output = 'x'"]))
    text = f"""
        presets = ["a.toml", "b.toml"]
        {HEAD}
        [options]
        lora-alpha = 3.0
        local-epochs = 3
        head-std = 0.3
        [[row]]
        name = "A"
        presets = ["c.toml"]
        clusters = 3
    """
    (cell,) = comparison_of(tmp_path, text, {"local-epochs": 4, "head-std": 0.4, "clusters": 2}).cells
    c = cell.config
    assert (c.t_tr, c.t_in, c.lora_alpha, c.local_epochs, c.head_std) == (1, 3, 3.0, 4, 0.5)
    assert (c.clusters, c.epsilon, c.seed, c.output) == (3, 2.0, 1, DEFAULTS["output"])


def test_paths_are_taken_from_the_working_directory(tmp_path):
    (tmp_path / "images").mkdir()
    text = HEAD + '[options]\ndataset = "images"\ncache-dir = "cache"\n[[row]]\nname = "A"'
    (cell,) = comparison_of(tmp_path, text).cells
    assert cell.config.dataset == cell.overrides["dataset"] == str(tmp_path / "images")
    assert cell.overrides["cache-dir"] == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "row", "extra", "where", "error"),
    [
        ("lora-rang = 1", "", {}, "{m}, [options]: ", "unknown option 'lora-rang'; did you mean"),
        ("", "lora-rang = 1", {}, "{m}, row 'B': ", "unknown option 'lora-rang'; did you mean 'lora-rank'?"),
        ("", "", {"lora-rang": 1}, "-c: ", "unknown option 'lora-rang'"),
        ("lora-rank = 'x'", "", {}, "{m}, [options]: ", "lora-rank = 'x': must be a whole number"),
        ("", "presets = ['p.toml']", {}, "{p}: ", "t-tr = 0: must be at least 1"),
        ("", "mechanism = 'gaussian'", {}, "{m}, row 'B': ", "mechanism = 'gaussian': is not of integers"),
        ("", "strategy = ['pina']", {}, "{m}, row 'B': ", "strategy = ['pina']: must be a string"),
        ("", "a.b = 1", {}, "{m}, row 'B': ", "unknown option 'a.b'"),
        ("", "noise-multiplier = 1.0", {}, "{m}, row 'B': ", "noise-multiplier = 1.0:"),
        ("ledger = 'l.jsonl'", "", {}, "{m}, [options]: ", "must be empty, since cells are no sequel"),
        ("diagnostics = false", "", {}, "{m}, [options]: ", "diagnostics = false: must be true"),
        ("", "noise-cohort-size = 5", {}, "{m}, row 'B': ", "must be at least the expected cohort"),
        ("bits = 8", "", {}, "{m}, [options]: ", "bits = 8: too small for"),
        ("", "sampling-rate = 0.005", {}, "{m}, row 'B': ", "sampling-rate = 0.005: of 232 users, one alone"),
        ("", "", {"seed": 4}, "-c: ", "seed = 4: must be left out, since seeds sets it"),
    ],
)  # fmt: skip
def test_a_mistake_names_where_it_was_made(tmp_path, options, row, extra, where, error):
    (tmp_path / "p.toml").write_text("t-tr = 0\n")
    text = f'{HEAD}[options]\n{options}\n[[row]]\nname = "A"\n[[row]]\nname = "B"\n{row}\n'
    with pytest.raises(ConfigError) as caught:
        comparison_of(tmp_path, text, extra)
    message = str(caught.value)
    assert message.startswith(where.format(m=tmp_path / "matrix.toml", p=tmp_path / "p.toml"))
    assert error in message
    assert "\n" not in message


def test_noise_that_is_given_is_refused_even_at_the_usual_epsilon(tmp_path):
    with pytest.raises(ConfigError, match=r"noise-multiplier = 1\.0: must be 0, since noise follows from"):
        comparison_of(tmp_path, 'seeds = [1]\nepsilons = [8.0]\n[[row]]\nname = "A"\nnoise-multiplier = 1.0')


def test_an_option_that_the_app_lacks_is_named(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(HEAD + '[[row]]\nname = "A"\nclusters = 2\n')
    defaults = {"dataset": "digits", "output": "x", "seed": 1, "epsilon": 8.0}
    with pytest.raises(ConfigError, match="row 'A': clusters: must be listed under"):
        cells_of(read_matrix(path), defaults, {}, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("table1-*.toml")), ids=lambda path: path.name)
def test_the_matrices_that_come_with_the_app_are_valid(path, tmp_path):
    cells = cells_of(read_matrix(path), DEFAULTS, {}, tmp_path)
    assert {cell.epsilon for cell in cells} >= {2.0, 8.0}
    assert {cell.seed for cell in cells} == {1, 2, 3}
    assert all(cell.epsilon in (2.0, 8.0, math.inf) for cell in cells)
    assert {"fedavg", "pina", "pina-ri", "oracle"} <= {cell.config.strategy for cell in cells}


@pytest.mark.parametrize("path", (ROOT / "conf").glob("ablations-*.toml"), ids=lambda path: path.name)
def test_ablations_change_one_thing_at_a_time(path, tmp_path):
    cells = cells_of(read_matrix(path), DEFAULTS, {}, tmp_path)
    rows = {cell.row: dict(to_dict(cell.config)) for cell in cells if cell.seed == 1}
    for row, options in rows.items():
        changed = {key for key, value in options.items() if value != rows[base_of(row)][key]}
        # What goes with a switch: the sketch's own options, and the server learning rates of a rule.
        along = {"stage1-signal", "sketch", "sketch-size", "server-lr", "server-lr-no"}
        changed -= along if len(changed) > 1 else set()
        assert len(changed) <= 1, row
    assert len({cell.name for cell in cells}) == len(cells)


def base_of(row):
    """The row that differs from this one by a single switch."""
    unequal, eq_8 = "groups of 70/10/10/10 %", "normality: Eq. 8"
    return unequal if row.startswith(unequal) else "normality: Eq. 9, steps × C" if eq_8 in row else "PINA"


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("search-*.toml")), ids=lambda path: path.name)
def test_searches_see_neither_test_images_nor_the_seeds_of_the_tables(path, tmp_path):
    cells = cells_of(read_matrix(path), DEFAULTS, {}, tmp_path)
    assert all(cell.config.test_on == "validation" for cell in cells)
    assert not {cell.seed for cell in cells} & {1, 2, 3}
