"""Tiny random models in folders, written once a session, and no network."""

from __future__ import annotations

from collections.abc import Callable

import huggingface_hub
import pytest
from tiny_models import save_model

from pina_flwr.config import parse
from pina_flwr.models.backbone import Backbone, load_backbone


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny model of some kind."""
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            made[kind] = save_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture
def load(folder_of: Callable[[str], str]) -> Callable[..., Backbone]:
    """A tiny backbone of some kind under run options."""

    def make(kind: str, classes: int = 3, **options: object) -> Backbone:
        name = kind if kind == "tiny-vit" else folder_of(kind)
        keys = {key.replace("_", "-"): value for key, value in options.items()}
        return load_backbone(parse({"backbone": name} | keys), classes)

    return make
