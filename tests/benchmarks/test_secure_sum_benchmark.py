"""The benchmark runs as its users run it, and its figures are what the secure sum is held to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RATIOS = ("client_speedup_vs_flower", "server_speedup_vs_flower", "client_over_keystream")


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    """A run of it, in a process of its own: here, Opacus' package of the same name might be found first."""
    command = [sys.executable, "-m", "benchmarks.secure_sum", *options]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=threads, text=True, capture_output=True, timeout=300)


def figures(*options: str) -> dict[str, Any]:
    """What the last line says."""
    done = benchmark(*options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def numbers(found: Any) -> Iterator[float]:
    """All numbers, at whatever depth."""
    if isinstance(found, dict | list):
        for inner in found.values() if isinstance(found, dict) else found:
            yield from numbers(inner)
    else:
        yield found


def test_figures_of_a_tiny_run() -> None:
    size = ("--size", "500", "--neighbours", "4", "--clients", "8", "--dropped", "1", "--repeats", "1")
    found = figures(*size, "--largest", "30")
    assert set(RATIOS) < set(found)
    assert all(math.isfinite(number) and number > 0 for number in numbers(found))
    ours = max(found["client_seconds"].values())
    assert found["client_speedup_vs_flower"] == pytest.approx(found["client_seconds_flower"] / ours)
    assert found["client_over_keystream"] == pytest.approx(ours / found["keystream_seconds"])
    assert found["client_speedup_vs_flower_with_floats"] > found["client_speedup_vs_flower"]
    assert [cohort["clients"] for cohort in found["cohorts"]] == [10, 30]
    small, large = found["cohorts"]
    for cohort in (small, large):  # a sealed pair of shares for each neighbour, and a header
        sealed = 92 * cohort["neighbours"]
        assert sealed < cohort["phases"]["share"]["bytes_up"] < sealed + 500
    few, more, many = (found["neighbours"][n] for n in ("10000", "100000", "1000000"))
    assert 0 < many - more <= more - few < 10  # each factor of ten adds about the same
    # A masked vector of 10,000 numbers of 20 bits, and little else.
    assert 25_000 < large["phases"]["mask"]["bytes_up"] < 26_000


def test_bounds_on_long_vectors() -> None:
    found = figures("--clients", "24", "--dropped", "2", "--repeats", "1", "--largest", "0")
    assert found["setting"]["size"] == 1_000_000
    assert found["setting"]["neighbours"] == 20
    assert found["client_speedup_vs_flower"] >= 5
    assert found["server_speedup_vs_flower"] >= 5
    assert found["client_over_keystream"] < 2


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--neighbours", "5"), "neighbours = 5"), (("--dropped", "40"), "dropped = 40")],
)
def test_settings_without_a_sum_are_refused(options: tuple[str, ...], named: str) -> None:
    done = benchmark(*options)
    assert done.returncode == 2
    assert named in done.stderr
