"""`metrics.jsonl`: one line of strict JSON for every round, written as the round ends.

Strict JSON has no NaN and no infinity: both are written as null, as is a value that was not measured.
Each line is flushed, so an interrupted run keeps every finished round; a last line cut short is ignored
on reading.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from pina_flwr.config import ConfigError
from pina_flwr.report.typed import Count, NotNegative, Seconds, Share, Within, from_values

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """What is known of one round. None: not measured in this round, or (`epsilon`) no finite value."""

    round: Count
    """Number of the round, from 1, over both stages."""
    rounds: Count
    """Rounds of both stages together."""
    stage: int
    """1 (initialisation) or 2 (clustered training)."""
    loss: float | None = None
    """Mean training loss, each user under the cluster model it picks."""
    accuracy: Share | None = None
    """Mean test accuracy over groups, each user with the cluster model it picks."""
    worst_cluster_accuracy: Share | None = None
    """The lowest entry of `cluster_accuracy`."""
    cluster_accuracy: list[Share | None] | None = None
    """Test accuracy by hidden cluster (group) of users."""
    clustering_accuracy: Share | None = None
    """Share of users in the cluster matched to their group; None for natural splits."""
    ari: Annotated[float, Within(-1, 1)] | None = None
    """Adjusted Rand index; None for natural splits."""
    cluster_sizes: list[Count] | None = None
    """Users that pick each cluster."""
    update_norm_mean: NotNegative | None = None
    """Mean l2 norm of the cohort's updates before clipping."""
    update_norm_max: NotNegative | None = None
    """Largest l2 norm of the cohort's updates before clipping."""
    weights: list[float | None] | None = None
    """w_i, the factor on the aggregate of each cluster (Eq. 8, Eq. 9 or its replacement)."""
    noise_std: NotNegative | None = None
    """σ, standard deviation of the noise on each coordinate of the decoded mean."""
    epsilon: NotNegative | None = None
    """ε spent so far towards recipients of the models; None: no finite ε."""
    bytes_up: Count | None = None
    """Bytes from clients to the server."""
    bytes_down: Count | None = None
    """Bytes from the server to clients."""
    seconds: Seconds | None = None
    """Wall time of the round."""
    cohort: Count = 0
    """Users sampled."""
    left_out: Count = 0
    """Users whose update was not finite and so was left out, since the last evaluation."""
    dropped: str | None = None
    """Why the round was dropped; None if it counts."""
    survivors: Count | None = None
    """Users whose vectors are in the secure sum; None if there was none."""
    refusals: dict[str, Count] | None = None
    """Reasons for which clients refused, and for how many users."""
    lost: dict[str, Count] | None = None
    """Users that vanished, by phase of the secure sum. Who vanished in the last one is in the sum."""
    ignored: Count = 0
    """Messages that the secure sum ignored: late, double or not asked for."""


class MetricsLog:
    """Writes `metrics.jsonl` in `folder`, which is created if need be; a log of an earlier run is emptied."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def append(self, row: RoundRow) -> None:
        """Add one line; it has left this process when the call returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(strict_json(dataclasses.asdict(row)) + "\n")


def read(folder: str | Path) -> list[RoundRow]:
    """Rows of `folder`/metrics.jsonl, in order; a last line that was cut short is left out.

    Raises:
        ConfigError: there is no such file, or a line other than the last is not a row.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"folder = {str(folder)!r}: holds no {FILE_NAME}; must be the output folder of a run"
        )
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(from_values(RoundRow, json.loads(line)))
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # empty after a final newline, or cut by an interruption
                break
            raise ConfigError(f"{path}, line {number}: must be the JSON row of a round: {error}") from error
    return rows


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text (RFC 8259) of nested dicts, lists, scalars and numpy values, with null for nan and inf.

    Raises:
        TypeError: a value of another type.
    """
    text = json.dumps(_finite(value), allow_nan=False, indent=indent, ensure_ascii=False)
    # Half a surrogate pair, as in the name of a file that is no UTF-8, can't be written but escaped.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
