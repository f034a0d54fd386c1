"""A workbench as each process of a run has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ragged_users import configure, ragged

from pina_flwr.data.users import load_users
from pina_flwr.models.backbone import load_backbone
from pina_flwr.training.activations import open_activations
from pina_flwr.training.workbench import Workbench


@pytest.fixture
def bench() -> Callable[..., Workbench]:
    """A workbench of six ragged users under run options."""

    def make(**options: Any) -> Workbench:
        config = configure(**options)
        users = ragged(load_users(config))
        return Workbench(config, users, load_backbone(config, 10), open_activations(config))

    return make
