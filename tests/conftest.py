"""What all tests share: one thread for torch, Flower's identity of a task, the log of Flower's logger.

Of several processes (`pytest -n 2 --dist loadfile`) each gets the tests of a file together.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from support import tiny

from pina_flwr import server
from pina_flwr.config import RunConfig
from pina_flwr.privacy import guarantee

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests to processes file by file; where another way was asked for, that one."""
    if config.getoption("dist") != "loadfile":
        return None
    from by_file import ByFile  # tests run without xdist, too

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes, one begins with the tests that run one at a time: they take longest."""
    if hasattr(config, "workerinput"):
        from by_file import is_one_at_a_time

        items.sort(key=lambda item: not is_one_at_a_time(item.nodeid))


@pytest.fixture(autouse=True)
def _task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's runtime sets these before it calls an app; messages read them."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_app` makes an app's modules importable: for the test's own time."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Small configurations whose output goes to the test's own folder."""

    def make(**options: Any) -> RunConfig:
        return tiny(**({"output": str(tmp_path / "run")} | options))

    return make


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a picture and without the tighter accountant's figure, which take most of a short run."""
    monkeypatch.setattr(server, "plot", lambda *_: None)
    monkeypatch.setattr(guarantee, "tighter", lambda *_: None)


@pytest.fixture
def flwr_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Flower's logger logs, handed on to the root logger or not."""
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog
