"""The example of docs/secure-sum.md works as it stands, and is as short as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from pina_flwr.secure_sum.local_grid import LocalGrid, as_task

PAGE = Path(__file__).parents[2] / "docs" / "secure-sum.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_it_sums(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(example(), str(PAGE), "exec"), names)
    client_app, server_app = names["client_app"], names["server_app"]
    assert isinstance(client_app, ClientApp)
    assert isinstance(server_app, ServerApp)
    with as_task():
        server_app(LocalGrid(client_app, 10), Context(1, 0, {}, RecordDict(), {}))
    assert capsys.readouterr().out == "[45 45 45 45] 10 \n"


def test_it_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 30
    assert "pina_flwr" not in re.sub(r"pina_flwr\.secure_sum", "", example())


RUN = """
from flwr.simulation import run_simulation
run_simulation(server_app, client_app, num_supernodes=10)
"""


def test_it_runs_in_flower(tmp_path: Path) -> None:
    """Where nodes register while the ServerApp already runs."""
    (tmp_path / "example.py").write_text(example() + RUN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PAGE.parents[1]), "FLWR_HOME": str(tmp_path / "flwr")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "[45 45 45 45] 10 \n" in done.stdout, done.stderr[-2000:]
