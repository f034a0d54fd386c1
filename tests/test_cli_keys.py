"""`pina keys` as users see it."""

import re
from pathlib import Path

from typer.testing import CliRunner, Result

from pina_flwr.cli import app as pina
from pina_flwr.secure_sum.registry import load_identity


def keys(*arguments: str) -> Result:
    return CliRunner().invoke(pina, ["keys", *arguments])


def test_makes_keys_and_prints_their_lines_for_the_registry(tmp_path: Path) -> None:
    result = keys("0", "7", "--folder", str(tmp_path / "k"))
    assert result.exit_code == 0
    registry = tmp_path / "registry.toml"
    registry.write_text("[keys]\n" + result.stdout)
    assert set(load_identity(registry, tmp_path / "k", [0, 7]).own) == {0, 7}


def test_never_replaces_one(tmp_path: Path) -> None:
    assert keys("3", "--folder", str(tmp_path)).exit_code == 0
    before = (tmp_path / "member-3.pem").read_bytes()
    again = keys("3", "--folder", str(tmp_path))
    assert again.exit_code == 2
    assert re.fullmatch(r"error: .*member-3\.pem: exists already; .*\n", again.stderr)
    assert (tmp_path / "member-3.pem").read_bytes() == before


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = keys("3", "--folder", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert re.fullmatch(r"error: .*\n", result.stderr)


def test_numbers_only(tmp_path: Path) -> None:
    assert keys("-1", "--folder", str(tmp_path)).exit_code == 2
    assert keys("one", "--folder", str(tmp_path)).exit_code == 2
    assert not list(tmp_path.iterdir())
