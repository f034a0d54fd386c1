"""A model card beside every adapter: what it is, and what it guarantees to those it learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pina_flwr.config import RunConfig
from pina_flwr.privacy.guarantee import Bound, Guarantee, Subject, caveats, guarantee
from pina_flwr.privacy.plan import IN_THE_CLEAR
from pina_flwr.report.summary import epsilon_text

FILE_NAME = "README.md"


def write_cards(subject: Subject, folders: Sequence[Path], base: str) -> None:
    """Write the card of each adapter folder, in place of the empty one that PEFT leaves.

    Args:
        subject: the run and its noise.
        folders: one a cluster, in order.
        base: the model that the adapters are for.
    """
    for cluster, folder in enumerate(folders):
        text = _card(subject, cluster, len(folders), base)
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


def _card(subject: Subject, cluster: int, clusters: int, base: str) -> str:
    c = subject.config
    head = ["---", f'base_model: "{base}"', "library_name: peft", "---", ""]
    title = f"# Cluster model {cluster} of {clusters}"
    about = (
        f"LoRA adapter and classifier trained by pina-flwr: strategy `{c.strategy}`, data `{c.dataset}`, "
        f"{subject.users:,} users in all, {c.t_tr} rounds. It serves the users whose images it fits best; "
        "the others have models of their own."
    )
    return "\n".join([*head, title, "", about, "", "## Privacy of the users", "", *_privacy(subject), ""])


def _privacy(subject: Subject) -> list[str]:
    config = subject.config
    if config.traits.in_the_clear:
        return [f"None (ε = ∞). {IN_THE_CLEAR}"]
    if not config.private:
        return ["None: no noise was added (ε = ∞)."]
    held = guarantee(subject)
    lines = [
        f"User-level (ε, δ) differential privacy, δ = {held.delta:.3g}, for one user's whole data set, all "
        "cluster models of the run together:",
        "",
        "| towards | ε |",
        "|---|---|",
        *(f"| {who} | {epsilon_text(bound.epsilon)} |" for who, bound in _bounds(config, held)),
        "",
    ]
    return [*lines, *(f"- {caveat}" for caveat in caveats(subject))]


def _bounds(config: RunConfig, held: Guarantee) -> list[tuple[str, Bound]]:
    sampled = "not amplified" if config.local_updates else (
        f"amplified by sampling, q = {config.sampling_rate:g}"
    )  # fmt: skip
    rows = [
        (f"whoever has the models ({sampled})", held.recipient),
        ("the server (not amplified)", held.server),
    ]
    return rows if held.sketch is None else [*rows, ("the reader of a single sketch (local)", held.sketch)]
