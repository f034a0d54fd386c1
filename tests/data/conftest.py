"""Data sets as users have them: folders that the tests write, and a Hugging Face library that is offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import huggingface_hub
import pytest


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and a cache of the test's own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "hf-modules")


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., str]:
    """Write splits as a folder of parquet files, like a snapshot of a hub data set."""

    def write(**splits: datasets.Dataset) -> str:
        folder = tmp_path / "set" / "data"
        for name, split in splits.items():
            folder.mkdir(parents=True, exist_ok=True)
            split.to_parquet(str(folder / f"{name}-00000-of-00001.parquet"))
        return str(folder.parent)

    return write
