"""The table of stage-1 signals is made as users make it, and its figures are those of clusterings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "num-users=40 images-per-user=12 sampling-rate=0.5 t-in=3 kmeans-restarts=4"


def table(*options: str) -> subprocess.CompletedProcess[str]:
    """A run of it, in a process of its own: here, Opacus' package of the same name might be found first."""
    command = [sys.executable, "-m", "benchmarks.stage1_signals", *options]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=threads, text=True, capture_output=True, timeout=300)


def test_a_row_for_each_signal() -> None:
    done = table("-c", SMALL, "--layers", "2,3", "--grids", "1,2", "--redraws", "2")
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    numbers = {row[0]: row[1] for row in rows}
    assert numbers == {
        "ΔB": "256",
        "input of block 2, 1 × 1": "64",
        "input of block 2, 2 × 2": "256",
        "input of block 3, 1 × 1": "64",
        "input of block 3, 2 × 2": "256",
    }
    for _, _, exact, mean, least in rows:
        assert 0.25 <= float(least) <= float(mean) <= 1
        assert 0.25 <= float(exact) <= 1
    assert float(rows[2][2]) > 0.9  # rotated digits lie differently in their quadrants


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "nonsense=1"], "error: unknown option 'nonsense'"),
        (["-c", "seed=2", "--layers", "x"], "error: --layers = 'x': must be whole numbers, comma separated"),
        (["-c", "seed=2", "--layers", "9"], "error: features-layer = 9: the backbone has 4 layers"),
    ],
)
def test_mistakes(options: list[str], message: str) -> None:
    done = table(*options, "--redraws", "1")
    assert (done.returncode, done.stderr.strip()) == (2, message)
