"""The model card says what the adapter guarantees, and to whom."""

from __future__ import annotations

from pathlib import Path

import yaml
from support import json_of, run


def card(config, cluster: int = 0) -> str:
    folder = Path(config.output) / "adapters" / f"cluster-{cluster}"
    return (folder / "README.md").read_text(encoding="utf-8")


def test_every_adapter_has_the_guarantee_of_the_run(config):
    private = config()
    run(private)
    summary = json_of(private, "summary.json")
    for cluster in range(private.clusters):
        text = card(private, cluster)
        assert text.count(f"Cluster model {cluster} of {private.clusters}") == 1
        assert "| the server (not amplified) |" in text
        assert all(f"- {caveat}" in text for caveat in summary["caveats"])
    head = yaml.safe_load(text.split("---")[1])
    assert head == {"base_model": str(Path(private.output).resolve() / "backbone"), "library_name": "peft"}


def test_without_noise_it_says_so(config):
    free = config(epsilon=float("inf"))
    run(free)
    assert "None: no noise was added (ε = ∞)." in card(free)
    assert "| towards |" not in card(free)


def test_without_a_finite_guarantee_it_says_why(config):
    paper = config(stage1="sketch", sketch="paper", sketch_size=4)
    run(paper)
    text = card(paper)
    assert text.count("∞ (no finite guarantee)") == 3
    assert "no noise hides them" in text
