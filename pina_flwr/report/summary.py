"""The end of a run: `summary.json`, the table in the terminal and one plain sentence on what the run showed.

Every ε is printed with the adversary it holds against, because sampling amplifies privacy only towards
those who see the released models and not towards the server that draws the sample. ε is rounded up. A
noise cohort larger than the cohort that ran is always named: ε then holds for a deployment of that size
and not for the run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.filesize import decimal as file_size
from rich.table import Table
from rich.text import Text

from pina_flwr.config import ConfigError
from pina_flwr.report.files import write_atomically
from pina_flwr.report.metrics_log import RoundRow, strict_json
from pina_flwr.report.typed import Count, NotNegative, Seconds, Share, Within, from_values

FILE_NAME = "summary.json"
FOUND = 0.95
"""Clustering accuracy, rounded to two places, from which the groups count as found."""
PARTLY_FOUND = 0.8
NEAR_CHANCE = 0.02

NAMES = {
    "pina": "PINA",
    "pina-ri": "PINA with random initialisation",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "ifca": "IFCA",
    "oracle": "The oracle",
    "fedmedian": "FedMedian",
    "fedtrimmedavg": "FedTrimmedAvg",
    "krum": "Krum",
    "multikrum": "MultiKrum",
    "bulyan": "Bulyan",
}
ADVERSARIES = {
    "recipient": "model recipients",
    "server": "the server (not amplified)",
    "sketch": "the reader of a single sketch (local)",
}


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """ε of a user per adversary. None (or inf): no finite guarantee; 0: that adversary is told nothing."""

    recipient: NotNegative | None
    """Recipients of the models: amplified by sampling."""
    server: NotNegative | None
    """The server: not amplified, worst participation count."""
    sketch: NotNegative | None
    """Whoever reads one sketch of stage 1: local. 0 where no single sketch leaves a client."""


@dataclass(frozen=True, kw_only=True)
class NoiseMultipliers:
    """z of each stage; None or 0: no noise."""

    stage1: NotNegative | None
    stage2: NotNegative | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to. None: not measured or not applicable. Its fields are the keys of summary.json."""

    strategy: str
    accuracy: Share | None
    """Mean test accuracy over groups after the last round."""
    worst_cluster_accuracy: Share | None
    clustering_accuracy: Share | None
    ari: Annotated[float, Within(-1, 1)] | None
    rounds: Count
    """Rounds of both stages, dropped ones included."""
    seconds: Seconds
    epsilon: Epsilons
    delta: Share
    noise_cohort_size: Count
    """The noise is that of a cohort of this many users; 0: of the cohort that ran."""
    cohort: NotNegative
    """Users expected in a round, q·|K|."""
    users: Count
    seed: int
    dataset: str
    backbone: str
    clusters: Count
    """Cluster models trained; 1 for FedAvg."""
    groups: Count | None
    """Hidden groups; None where they are unknown (natural split)."""
    noise_multiplier: NoiseMultipliers
    caveats: list[str] = field(default_factory=list)
    """What must be known to read ε (`guarantee.caveats`)."""
    epsilon_as_paper_counts: dict[str, NotNegative | None] | None = None
    """ε by adversary where the paper's count differs from ours; None otherwise."""
    dropped_rounds: Count = 0
    trained: bool = True
    """A round of stage 2 counted; otherwise the models are those that training starts from."""
    in_the_clear: bool = False
    """Users sent their updates as they are: there was neither a secure sum nor central DP."""
    local_updates: bool = False
    """Each user protected its update by noise of its own; nothing is amplified."""
    test_on: str = "test"
    """What accuracy was measured on: test images, or training images that are held out ("validation")."""


def write_summary(folder: str | Path, summary: Summary) -> Path:
    """Write `folder`/summary.json so that readers find the old or the whole new one, even after a crash."""
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, strict_json(dataclasses.asdict(summary), indent=2) + "\n")
    return path


def read_summary(folder: str | Path) -> Summary:
    """The summary in `folder`. Fields that only newer code knows are ignored.

    Raises:
        ConfigError: there is none, or it is not one: a field is missing or of a wrong type.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"folder = {str(folder)!r}: holds no {FILE_NAME}; must be the output folder of a finished run"
        )
    try:
        return from_values(Summary, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: must be the {FILE_NAME} that a run wrote: {error}") from error


def print_summary(console: Console, summary: Summary, rows: Sequence[RoundRow], folder: str | Path) -> None:
    """Print the table, its caveats beneath, and where the report is."""
    console.print(table(summary, rows))
    for caveat in summary.caveats:
        console.print(Text(f"• {caveat}"))
    # One unbroken line, so that the path can be clicked or copied.
    console.print(Text(f"Report: {Path(folder).resolve()}"), soft_wrap=True)


def table(summary: Summary, rows: Sequence[RoundRow]) -> Table:
    """The summary as a terminal table; totals over rounds come from `rows`."""
    about = f"{_name(summary)} on {summary.dataset}, {summary.backbone}, seed {summary.seed}"
    result = Table(title=Text(about), show_header=False, title_justify="left")
    result.add_column(style="bold")
    result.add_column(overflow="fold")
    for section in (_score_lines(summary, rows), _cost_lines(summary, rows), _privacy_lines(summary)):
        for label, value in section:
            result.add_row(Text(label), Text(value))
        result.add_section()
    return result


def sentence(summary: Summary, chance: float | None = None) -> str:
    """One plain sentence on what the run showed.

    Args:
        summary: the run.
        chance: accuracy of guessing (1 / classes); an accuracy about or below it is said to be so.
    """
    if not summary.trained:
        return (
            f"{_name(summary)} trained nothing: every round of stage 2 was dropped, so the models are those "
            f"that training starts from,{_privacy_clause(summary)}."
        )
    clusters, accuracy = _clusters_clause(summary), _accuracy_clause(summary, chance)
    dropped = (
        f", with {summary.dropped_rounds} of {summary.rounds} rounds dropped"
        if summary.dropped_rounds
        else ""
    )
    return f"{_name(summary)} {clusters}{accuracy}{_privacy_clause(summary)}{dropped}."


def known_as(name: str) -> str:
    """A data set or backbone as readers know it: of a local folder its name, as they have it elsewhere."""
    return Path(name).name if name.startswith(("/", "./", "../", "~")) else name


def _clusters_clause(summary: Summary) -> str:
    accuracy = _finite(summary.clustering_accuracy)
    # With fewer users than groups some groups are empty.
    groups = None if summary.groups is None else min(summary.groups, summary.users)
    users = "1 user" if summary.users == 1 else f"{summary.users:,} users"
    if summary.clusters == 1:
        return f"trained one model for {users}"
    if summary.strategy == "oracle" and groups != 1:
        return f"was given the {groups} hidden groups of {users}"
    if groups is None:
        return f"trained {summary.clusters} cluster models for {users}, whose true groups are unknown,"
    if groups == 1:
        form = "forms" if summary.users == 1 else "form"
        return f"trained {summary.clusters} cluster models for {users}, who {form} one group,"
    if accuracy is None:
        return f"trained {summary.clusters} cluster models for {users} (clustering accuracy not measured)"
    verdict = _verdict(round(accuracy, 2), enough_clusters=summary.clusters >= groups)
    return f"{verdict} the {groups} hidden groups of {users} (clustering accuracy {accuracy:.2f})"


def _verdict(clustering_accuracy: float, *, enough_clusters: bool) -> str:
    if clustering_accuracy >= FOUND and enough_clusters:
        return "found"
    return "only partly found" if clustering_accuracy >= PARTLY_FOUND else "did not find"


def _accuracy_clause(summary: Summary, chance: float | None) -> str:
    accuracy = _finite(summary.accuracy)
    if accuracy is None:
        return f", {summary.test_on} accuracy not measured,"
    if chance is None or accuracy > chance + NEAR_CHANCE:
        return f" and reached {accuracy:.2f} mean {summary.test_on} accuracy"
    relation = "below" if accuracy < chance - NEAR_CHANCE else "about"
    return (
        f" and reached only {accuracy:.2f} mean {summary.test_on} accuracy, {relation} chance ({chance:.2f}),"
    )


def _privacy_clause(summary: Summary) -> str:
    epsilon = _finite(summary.epsilon.recipient)
    if epsilon is not None:
        noise = f", noise of a {summary.noise_cohort_size:,}-user cohort" if _borrows_noise(summary) else ""
        return f" at ε = {rounded_up(epsilon)} (model recipients{noise})"
    if _is_noisy(summary):
        return " with no finite ε towards model recipients"
    if summary.in_the_clear:
        return " without privacy: no secure sum, no central DP (ε = ∞)"
    return " without privacy noise (ε = ∞)"


def _score_lines(summary: Summary, rows: Sequence[RoundRow]) -> list[tuple[str, str]]:
    lines = [
        (f"{summary.test_on} accuracy, mean", _score(summary.accuracy)),
        (f"{summary.test_on} accuracy, worst cluster", _score(summary.worst_cluster_accuracy)),
    ]
    if summary.clusters > 1:
        missing = "groups unknown" if summary.groups is None else "not measured"
        lines.append(("clustering accuracy", _score(summary.clustering_accuracy, missing)))
        lines.append(("adjusted Rand index", _score(summary.ari, missing)))
        sizes = next((row.cluster_sizes for row in reversed(rows) if row.cluster_sizes), None)
        if sizes:
            lines.append(("users per cluster", ", ".join(f"{size:,}" for size in sizes)))
    return lines


def _cost_lines(summary: Summary, rows: Sequence[RoundRow]) -> list[tuple[str, str]]:
    rounds = f"{summary.rounds}"
    if summary.dropped_rounds:
        reasons = sorted({row.dropped for row in rows if row.dropped})
        rounds += f", {summary.dropped_rounds} of them dropped" + (
            f" ({'; '.join(reasons)})" if reasons else ""
        )
    lines = [
        ("rounds", rounds),
        ("users, of them in a round", f"{summary.users:,}, about {summary.cohort:,.0f}"),
        ("time", _duration(summary.seconds)),
    ]
    left_out = sum(row.left_out for row in rows)
    if left_out:
        lines.append(("updates left out, not finite", f"{left_out:,}"))
    if any(row.bytes_up is not None for row in rows):
        up, down = sum(row.bytes_up or 0 for row in rows), sum(row.bytes_down or 0 for row in rows)
        lines.append(("sent to server, to clients", f"{file_size(up)}, {file_size(down)}"))
    return lines


def _privacy_lines(summary: Summary) -> list[tuple[str, str]]:
    epsilons = dataclasses.asdict(summary.epsilon)
    noisy, who = _is_noisy(summary), dict(ADVERSARIES)
    if noisy:
        amplified = "not amplified" if summary.local_updates else "amplified by sampling"
        who["recipient"] += f" ({amplified})"
    lines = [(f"ε towards {name}", epsilon_text(epsilons[key])) for key, name in who.items()]
    for key, value in (summary.epsilon_as_paper_counts or {}).items():
        lines.append((f"ε as the paper counts, towards {who.get(key, key)}", epsilon_text(value)))
    if summary.in_the_clear:
        return [*lines, ("privacy", "no secure sum, no central DP")]
    z = summary.noise_multiplier
    lines.append(("δ", f"{summary.delta:.2g}"))
    lines.append(("noise multiplier, stage 1, stage 2", f"{_multiplier(z.stage1)}, {_multiplier(z.stage2)}"))
    if noisy and summary.local_updates:
        lines.append(("noise", "each user's own"))
    elif noisy:
        size = summary.noise_cohort_size
        lines.append(("noise of a cohort of", f"{size:,} users" if size else "the users who took part"))
    return lines


def _name(summary: Summary) -> str:
    return NAMES.get(summary.strategy, summary.strategy)


def _borrows_noise(summary: Summary) -> bool:
    return summary.noise_cohort_size > math.ceil(summary.cohort)


def _is_noisy(summary: Summary) -> bool:
    return any(_finite(z) for z in (summary.noise_multiplier.stage1, summary.noise_multiplier.stage2))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _score(value: float | None, missing: str = "not measured") -> str:
    return missing if _finite(value) is None else f"{value:.3f}"


def epsilon_text(value: float | None) -> str:
    if value == 0:
        return "0 (nothing is released, or ε rounds to 0)"
    epsilon = _finite(value)
    return "∞ (no finite guarantee)" if epsilon is None else rounded_up(epsilon)


def rounded_up(epsilon: float) -> str:
    """Two decimals, upwards: a printed ε is never below the true one. The second is left out if it is 0.

    From a billion on three significant digits, upwards: 1.24e+9.
    """
    if math.isinf(epsilon):
        return "∞"
    if epsilon >= 1e9:
        return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(float(epsilon))):.2e}"
    text = f"{Decimal(repr(float(epsilon))).quantize(Decimal('0.01'), rounding=ROUND_CEILING):,}"
    return text.removesuffix("0")


def _multiplier(z: float | None) -> str:
    return f"{z:.3g}" if _finite(z) else "none"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
