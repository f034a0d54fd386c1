"""A cell's folder says how far it is, and files of two runs never share one."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from made_up_cells import MATRIX, OK, VERSIONS, comparison_of, finish, leave, rounds_of, summary_of

from pina_flwr.compare.cells import (
    FAILED,
    RECORD,
    State,
    Status,
    differences,
    read_record,
    run_cell,
    status,
    write_record,
)
from pina_flwr.config import ConfigError, RunConfig, to_dict
from pina_flwr.report.summary import read_summary
from pina_flwr.runner import RunResult
from pina_flwr.runner.output import prepared
from pina_flwr.runner.superlink import INTERRUPTED

BROKEN = RunResult("finished:failed", "the run ended\nas finished:failed", False, 1.0)
STOPPED = RunResult(INTERRUPTED, "stopped before its end", False, 1.0)


@pytest.fixture
def cell(tmp_path):
    return comparison_of(tmp_path).cells[0]


@pytest.fixture
def place(tmp_path):
    """Folder of the cell, and where old ones go."""
    return tmp_path / "cells/a", tmp_path / "aside"


def run(cell, place, runner=finish) -> Status:
    return run_cell(cell, *place, VERSIONS, runner)


def never(cell, folder):
    raise AssertionError("must not run")


def test_a_cell_that_ran_is_done(cell, place):
    folder, aside = place
    assert status(cell, folder).state is State.MISSING
    assert run(cell, place) == status(cell, folder) == Status(State.DONE)
    assert read_record(folder).made_with == VERSIONS
    assert read_record(folder).options["epsilon"] == 2.0
    assert not {"output", "cache-dir"} & set(read_record(folder).options)
    assert not aside.exists()


def test_an_infinite_epsilon_survives_the_record(tmp_path, place):
    folder, _ = place
    text = 'seeds = [1]\nepsilons = [inf]\n[[row]]\nname = "A"'
    (cell,) = comparison_of(tmp_path, text).cells
    run(cell, place)
    assert read_record(folder).options["epsilon"] == math.inf
    assert status(cell, folder).state is State.DONE


def test_a_failure_is_kept_with_its_reason_until_the_next_attempt(cell, place):
    folder, _ = place
    assert run(cell, place, lambda *_: BROKEN) == Status(State.FAILED, "the run ended as finished:failed")
    assert (folder / FAILED).read_text() == "the run ended as finished:failed\n"
    assert status(cell, folder) == Status(State.FAILED, "the run ended as finished:failed")
    assert run(cell, place).state is State.DONE
    assert not (folder / FAILED).exists()


def test_a_run_that_failed_after_its_summary_is_no_result(cell, place):
    folder, _ = place

    def late(cell, folder):
        finish(cell, folder)
        return BROKEN

    assert run(cell, place, late).state is State.FAILED
    assert status(cell, folder).state is State.FAILED


def test_what_raises_is_a_failure_too(cell, place):
    folder, _ = place

    def bug(cell, folder):
        raise RuntimeError("out of\nluck")

    assert run(cell, place, bug) == Status(State.FAILED, "RuntimeError: out of luck")
    assert "Traceback" in (folder / FAILED).read_text()


@pytest.mark.parametrize("left", ["nothing", "no rounds", "a summary of another app"])
def test_a_success_without_results_is_a_failure(cell, place, left):
    folder, _ = place

    def silent(cell, folder):
        if left == "no rounds":
            leave(folder, summary_of(cell), [])
            (folder / "metrics.jsonl").unlink()
        if left == "a summary of another app":
            leave(folder, None, [])
            (folder / "summary.json").write_text('{"accuracy": 0.9}')
        return OK

    outcome = run(cell, place, silent)
    assert outcome.state is State.FAILED
    assert ("metrics.jsonl" if left == "no rounds" else "summary.json") in outcome.note
    assert status(cell, folder).state is State.FAILED


def test_an_interruption_is_no_failure(cell, place):
    folder, _ = place

    def half(cell, folder):
        leave(folder, None, rounds_of([0.5]))
        return STOPPED

    assert run(cell, place, half).state is State.UNFINISHED
    assert not (folder / FAILED).exists()
    assert status(cell, folder).state is State.UNFINISHED

    def check(cell, folder):
        assert not (folder / "metrics.jsonl").exists()  # of the run that was cut short
        return finish(cell, folder)

    assert run(cell, place, check).state is State.DONE


def test_another_configuration_goes_aside_and_is_kept(tmp_path, place):
    folder, aside = place
    old, new, newer = (comparison_of(tmp_path, MATRIX, {"t-tr": rounds}).cells[0] for rounds in (1, 2, 3))
    run(old, place)
    (folder / "notes.txt").write_text("mine")
    assert status(new, folder) == Status(State.CHANGED, "t-tr")

    def check(cell, folder):
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [RECORD]
        return finish(cell, folder)

    assert run(new, place, check).state is State.DONE
    assert (aside / "a-1/notes.txt").read_text() == "mine"
    assert status(old, aside / "a-1").state is State.DONE
    run(newer, place)
    assert status(new, aside / "a-2").state is State.DONE


def test_files_that_nobody_can_tell_go_aside_too(cell, place):
    folder, aside = place
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    assert status(cell, folder).state is State.CHANGED
    run(cell, place)
    assert (aside / "a-1/summary.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder_goes_aside_too(cell, place, kind):
    folder, aside = place
    folder.parent.mkdir(parents=True)
    folder.write_text("mine") if kind == "file" else folder.symlink_to("nowhere")
    assert status(cell, folder) == Status(State.CHANGED, "is no folder")
    assert run(cell, place).state is State.DONE
    assert (aside / "a-1").is_symlink() or (aside / "a-1").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"of": "another version"}'),
        ("summary.json", '{"strategy": "pi'),
        ("summary.json", ""),
        ("summary.json", "[]"),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", '{"round": 1, "rounds": 4, "stage": 2}\n'),
        ("metrics.jsonl", "\x00\n" * 4),
        ("metrics.jsonl", None),
    ],
)
def test_a_result_that_can_not_be_read_is_none_and_goes_aside(cell, place, name, text):
    folder, aside = place
    run(cell, place)
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    found = status(cell, folder)
    assert found.state is State.UNFINISHED
    assert name in found.note
    assert run(cell, place).state is State.DONE
    assert (aside / "a-1" / name).exists() == (text is not None)
    assert read_summary(folder).accuracy == 0.5


ILL_TYPED = [
    ("summary.json", ("accuracy",), "x"),
    ("summary.json", ("caveats",), None),
    ("summary.json", ("seconds",), None),
    ("summary.json", ("seconds",), math.inf),
    ("summary.json", ("epsilon", "recipient"), "8"),
    ("summary.json", ("accuracy",), 1e308),
    ("summary.json", ("clustering_accuracy",), -0.5),
    ("summary.json", ("ari",), 2.0),
    ("summary.json", ("seconds",), 1e30),
    ("summary.json", ("epsilon", "server"), -1.0),
    ("summary.json", ("users",), 10**400),
    ("metrics.jsonl", ("clustering_accuracy",), 1e308),
    ("metrics.jsonl", ("cohort",), -1),
    ("metrics.jsonl", ("accuracy",), "x"),
    ("metrics.jsonl", ("round",), "2"),
]


def damage(folder, name, keys, value):
    """Set a field of the JSON file, in metrics.jsonl of its second line."""
    lines = (folder / name).read_text().splitlines() if name == "metrics.jsonl" else None
    values = json.loads(lines[1] if lines else (folder / name).read_text())
    *tables, key = keys
    place = values
    for table in tables:
        place = place[table]
    place[key] = value
    text = json.dumps(values)
    (folder / name).write_text(
        "".join(f"{line}\n" for line in [lines[0], text, *lines[2:]]) if lines else text
    )


@pytest.mark.parametrize(("name", "keys", "value"), ILL_TYPED)
def test_a_field_of_a_wrong_type_is_damage_that_is_named(cell, place, name, keys, value):
    folder, _ = place
    run(cell, place)
    damage(folder, name, keys, value)
    found = status(cell, folder)
    assert (found.state, found.is_kept) == (State.UNFINISHED, True)
    assert name in found.note
    assert keys[-1] in found.note
    assert run(cell, place).state is State.DONE


@pytest.mark.parametrize(("name", "text"), [("summary.json", "["), ("metrics.jsonl", "["), (RECORD, "a = [")])
def test_what_is_nested_too_deeply_is_damage(cell, place, name, text):
    folder, _ = place
    run(cell, place)
    (folder / name).write_text(text + 100_000 * "[" + 100_001 * "]" + "\n\n")
    found = status(cell, folder)
    assert (found.state, found.is_kept) == (State.UNFINISHED, True)
    assert name in found.note


def test_a_summary_with_a_field_of_newer_code_counts(cell, place):
    folder, _ = place
    run(cell, place)
    damage(folder, "summary.json", ("newer",), [1])
    damage(folder, "metrics.jsonl", ("newer",), [1])
    assert status(cell, folder) == Status(State.DONE)


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 9), ("strategy", "ifca"), ("dataset", "b"), ("backbone", "b")]
)
def test_the_summary_of_another_run_is_no_result(cell, place, key, value):
    folder, aside = place
    run(cell, place)
    damage(folder, "summary.json", (key,), value)
    found = status(cell, folder)
    assert found == Status(State.UNFINISHED, f"summary.json is of another run, by its {key}")
    assert run(cell, place).state is State.DONE
    assert (aside / "a-1/summary.json").exists()


def test_a_local_folder_may_stand_in_the_summary_for_what_the_cell_names(tmp_path, place):
    folder, _ = place
    text = 'seeds = [1]\nepsilons = [8]\n[options]\ndataset = "owner/mnist"\n[[row]]\nname = "A"'
    (cell,) = comparison_of(tmp_path, text).cells
    run(cell, place)
    damage(folder, "summary.json", ("dataset",), "mnist")
    assert status(cell, folder).state is State.DONE


@pytest.mark.parametrize("order", [[0, 0, 0, 0], [1, 0, 2, 3], [0, 1, 2, 2]])
def test_rounds_must_be_there_in_order_and_once(cell, place, order):
    folder, _ = place
    run(cell, place)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{lines[number]}\n" for number in order))
    note = "metrics.jsonl: must have rounds 1 to 4 in order, each once"
    assert status(cell, folder) == Status(State.UNFINISHED, note)


def test_an_empty_or_merely_locked_folder_is_a_cell_not_begun(cell, place):
    folder, aside = place
    with prepared(folder, overwrite=False):
        assert status(cell, folder).state is State.MISSING
    assert run(cell, place).state is State.DONE
    assert not aside.exists()


def test_a_folder_in_use_by_a_run_is_left_alone(cell, place):
    folder, _ = place
    with prepared(folder, overwrite=False):
        outcome = run(cell, place, never)
    assert outcome.state is State.FAILED
    assert "in use by another run" in outcome.note


class TestDifferences:
    def test_only_results_count(self):
        config = RunConfig()
        same = dataclasses.replace(config, output="x", cache_dir="y", cache_gib=1.0)
        assert differences(same, to_dict(config)) == []
        assert differences(same, {}) == []
        other = dataclasses.replace(config, seed=2, lora_rank=8)
        assert differences(other, to_dict(config)) == ["seed", "lora-rank"]

    @pytest.mark.parametrize(
        ("asked", "had", "same"),
        [
            ("/data/a/mnist", "/home/b/mnist", True),
            ("/data/a/mnist", "./mnist", True),
            ("owner/mnist", "./mnist", True),
            ("/data/a/mnist", "owner/mnist", True),
            ("owner/mnist", "other/mnist", False),
            ("/data/a/mnist", "/data/a/mnist2", False),
            ("/data/a/mnist", "owner/mnist2", False),
            ("digits", "./digits", False),  # the embedded data set and somebody's folder
            ("mnist", "owner/mnist", False),
        ],
    )
    def test_where_data_and_backbone_lie_is_none(self, asked, had, same):
        for field in ("dataset", "backbone"):
            config = dataclasses.replace(RunConfig(), **{field: asked})
            options = to_dict(RunConfig()) | {field: had}
            assert differences(config, options) == ([] if same else [field])
        kept = dataclasses.replace(RunConfig(), strategy=asked)
        assert differences(kept, to_dict(RunConfig()) | {"strategy": had}) == ["strategy"]

    def test_an_option_younger_than_the_cell_may_have_its_default(self):
        options = to_dict(RunConfig())
        del options["clusters"]
        assert differences(RunConfig(), options) == []
        assert differences(dataclasses.replace(RunConfig(), clusters=2), options) == ["clusters"]

    def test_an_option_that_is_no_more_is_a_difference(self):
        assert differences(RunConfig(), {**to_dict(RunConfig()), "old": 1}) == ["old"]


@pytest.mark.parametrize("text", ["", "[options]\n", "options = 1\n[made-with]\n", "= ="])
def test_a_record_that_is_none_is_refused(cell, tmp_path, text):
    write_record(tmp_path, cell, VERSIONS)
    assert read_record(tmp_path).made_with == VERSIONS
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ConfigError, match=RECORD):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["= =", "[options]\n", "python"])
def test_a_record_that_can_not_be_read_is_damage_and_says_so(cell, place, text):
    """It is not taken for one that is missing."""
    folder, aside = place
    run(cell, place)
    whole = (folder / RECORD).read_text()
    text = whole.replace('python = "3.11.1"', 'python = ["3"]') if text == "python" else text
    (folder / RECORD).write_text(text)
    found = status(cell, folder)
    assert (found.state, found.is_kept) == (State.UNFINISHED, True)
    assert RECORD in found.note
    assert "holds files but no" not in found.note
    assert run(cell, place).state is State.DONE
    assert (aside / "a-1" / RECORD).read_text() == text


def test_the_record_of_newer_or_older_code_counts(cell, place):
    folder, _ = place
    run(cell, place)
    text = (folder / RECORD).read_text()
    newer = text.replace("[made-with]\n", '[made-with]\njax = "1"\n').replace('torch = "2.9.0"\n', "")
    assert len(newer.splitlines()) == len(text.splitlines())
    (folder / RECORD).write_text(newer.replace("cpus = 2\n", ""))
    assert status(cell, folder) == Status(State.DONE)
    assert read_record(folder).made_with == dataclasses.replace(VERSIONS, torch="", cpus=0)
