"""The log of rounds is strict JSON, is written as it happens and survives an interruption."""

import dataclasses
import json
import math

import numpy as np
import pytest

from pina_flwr.config import ConfigError
from pina_flwr.report.metrics_log import MetricsLog, RoundRow, read, strict_json

FULL = RoundRow(
    round=9,
    rounds=28,
    stage=2,
    loss=0.7,
    accuracy=0.8,
    worst_cluster_accuracy=0.6,
    cluster_accuracy=[1.0, 0.6],
    clustering_accuracy=0.97,
    ari=0.9,
    cluster_sizes=[120, 112],
    update_norm_mean=1.5,
    update_norm_max=2.5,
    weights=[0.5, 0.0],
    noise_std=1e-4,
    epsilon=3.5,
    bytes_up=1000,
    bytes_down=2000,
    seconds=0.25,
    cohort=50,
    left_out=1,
    dropped=None,
    survivors=48,
    refusals={"budget spent": 1, "stale round": 1},
    lost={"share": 1, "mask": 1},
    ignored=4,
)


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_rows_come_back_as_written(tmp_path):
    log = MetricsLog(tmp_path / "new" / "folder")
    rows = [
        RoundRow(round=1, rounds=28, stage=1, cohort=50),
        FULL,
        dataclasses.replace(FULL, dropped="too few"),
    ]
    for number, row in enumerate(rows, start=1):
        log.append(row)
        assert read(tmp_path / "new" / "folder") == rows[:number]  # on disk as it happens


def test_keys_are_the_fields_and_not_finite_is_null(tmp_path):
    row = dataclasses.replace(
        FULL, loss=math.nan, epsilon=math.inf, accuracy=np.float32("nan"), weights=[-math.inf, 0.5]
    )
    MetricsLog(tmp_path).append(row)
    values = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse_constant)
    assert list(values) == [field.name for field in dataclasses.fields(RoundRow)]
    assert (values["loss"], values["epsilon"], values["accuracy"]) == (None, None, None)
    assert values["weights"] == [None, 0.5]


def test_a_new_log_empties_the_old_one(tmp_path):
    MetricsLog(tmp_path).append(FULL)
    MetricsLog(tmp_path)
    assert read(tmp_path) == []


def test_a_last_line_cut_anywhere_is_left_out(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(FULL)
    first = log.path.read_bytes()
    log.append(dataclasses.replace(FULL, round=10, dropped="zu früh"))
    whole = log.path.read_bytes()
    for end in range(len(first), len(whole) - 1):
        log.path.write_bytes(whole[:end])
        assert read(tmp_path) == [FULL]
    log.path.write_bytes(whole[:-1])  # only the newline is missing
    assert [row.round for row in read(tmp_path)] == [9, 10]


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"round": 1}', '{"unknown": 1}', ""])
def test_a_bad_line_before_the_last_is_named(tmp_path, line):
    log = MetricsLog(tmp_path)
    log.path.write_text(line + "\n")
    log.append(FULL)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1"):
        read(tmp_path)


def test_a_folder_without_a_log_is_named(tmp_path):
    with pytest.raises(ConfigError, match="must be the output folder of a run"):
        read(tmp_path / "nowhere")


def test_strict_json_takes_numpy_and_refuses_the_unknown():
    value = {"a": np.array([1.0, np.nan]), "b": np.int64(3), "c": (True, None, "x"), "d": np.bool_(False)}
    assert json.loads(strict_json(value)) == {"a": [1.0, None], "b": 3, "c": [True, None, "x"], "d": False}
    with pytest.raises(TypeError):
        strict_json({"a": {1, 2}})
