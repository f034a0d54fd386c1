"""The layer stands for itself: other Flower apps can take it as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pina_flwr import secure_sum

LAYER = "pina_flwr.secure_sum"
MODULES = sorted(Path(secure_sum.__path__[0]).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """All modules that a module of the layer imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, "leaves the package"
            yield f"{LAYER}.{node.module or ''}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            assert name not in ("__import__", "import_module"), "imports what nobody can tell"


def strangers(source: str) -> list[str]:
    """What of it is of the app's other packages."""
    inside = (LAYER, f"{LAYER}.")
    return [
        name
        for name in imported(source)
        if name.split(".")[0] == "pina_flwr" and not (name == inside[0] or name.startswith(inside[1]))
    ]


def test_there_are_modules() -> None:
    assert {"members.py", "secagg_plus.py", "keys.py"} <= {path.name for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_imports_nothing_else_of_the_app(path: Path) -> None:
    assert strangers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pina_flwr",
        "import pina_flwr.config",
        "import pina_flwr.secure_summary",
        "from pina_flwr import config",
        "from pina_flwr.config import ConfigError",
        "def f():\n    from pina_flwr.privacy import noise",
        "from pina_flwr.secure_sum.keys import seal\nfrom pina_flwr.models import block",
    ],
)
def test_would_notice(source: str) -> None:
    assert strangers(source)


@pytest.mark.parametrize(
    "source", ["from .. import config", "__import__('x')", "import importlib\nimportlib.import_module('x')"]
)
def test_would_notice_ways_round_it(source: str) -> None:
    with pytest.raises(AssertionError):
        strangers(source)


@pytest.mark.parametrize(
    "source",
    ["import numpy", "from pina_flwr.secure_sum import field", "from pina_flwr.secure_sum.keys import x"],
)
def test_lets_pass(source: str) -> None:
    assert strangers(source) == []
