"""The app folder: which one to run, its run config, and the copy of it that `flwr run` bundles."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pathspec

import pina_flwr
from pina_flwr.config import ConfigError
from pina_flwr.runner.overrides import Scalar, flatten, read_toml

CONFIG = "pyproject.toml"
BUNDLED = frozenset({".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"})
"""Suffixes that `flwr` puts into a bundle, with LICENSE and .gitignore."""


def find_app(folder: Path | None) -> Path:
    """The app to run: `folder`, else the working directory, else where this package was installed from.

    Modules in its folder can be imported from then on, as Flower's processes can: the option `strategy` may
    name one.

    Raises:
        ConfigError: `folder` is no Flower app, or neither of the others is.
    """
    found = _found(folder)
    if str(found) not in sys.path:
        sys.path.insert(0, str(found))
    return found


def run_config(app: Path) -> dict[str, Scalar]:
    """Defaults of the run config in the app's pyproject.toml, keys of nested tables joined by dots.

    Raises:
        ConfigError: the file can't be read.
    """
    table = read_toml(app / CONFIG)["tool"]["flwr"]["app"].get("config", {})
    return flatten(table)


def stage(app: Path, target: Path) -> None:
    """Copy to `target` what a bundle of `app` may hold: what its `fab-include` names, if it has one.

    `flwr run` walks the whole folder, virtual environments included, which takes seconds and fails on paths
    of more than ten parts. It also edits a pyproject.toml of the old format in place: here, the copy's.
    """
    chosen = read_toml(app / CONFIG)["tool"]["flwr"]["app"].get("fab-include", ["*"])
    spec = pathspec.GitIgnoreSpec.from_lines([*chosen, f"/{CONFIG}", "/.gitignore"])

    def left_out(folder: str, names: list[str]) -> set[str]:
        paths = [Path(folder, name) for name in names]
        return {path.name for path in paths if not _may_be_bundled(path) or not wanted(path)}

    def wanted(path: Path) -> bool:
        return path.is_dir() or spec.match_file(path.relative_to(app).as_posix())

    shutil.copytree(app, target, ignore=left_out, symlinks=True)


def _found(folder: Path | None) -> Path:
    if folder is not None:
        if not _is_app(folder):
            raise ConfigError(f"--app = {str(folder)!r}: must be a folder whose {CONFIG} has [tool.flwr.app]")
        return folder.resolve()
    for candidate in (Path.cwd(), Path(pina_flwr.__file__).resolve().parents[1]):
        if _is_app(candidate):
            return candidate
    raise ConfigError(f"--app: needed here, as no {CONFIG} with [tool.flwr.app] is in the working directory")


def _is_app(folder: Path) -> bool:
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return isinstance(config["tool"]["flwr"]["app"], dict)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _may_be_bundled(path: Path) -> bool:
    if path.name in ("LICENSE", ".gitignore"):
        return True
    if path.name.startswith(".") or path.is_symlink():
        return False
    if path.is_dir():
        return path.name != "__pycache__" and not (path / "pyvenv.cfg").exists()
    return path.suffix in BUNDLED
