"""What a cell was computed with: the code's version and commit, the libraries, the machine."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pina_flwr.runner.app import CONFIG, stage
from pina_flwr.runner.overrides import read_toml
from pina_flwr.runner.size import SimulationSize

LIBRARIES = ("torch", "flwr", "numpy")
GIT_SECONDS = 20.0
DIGITS = 12
"""Of the code's SHA-256."""


@dataclass(frozen=True, kw_only=True)
class MadeWith:
    """Versions and machine, as text that people read. Empty or 0: the record of the cell does not say."""

    app: str = ""
    """Name and version of the app."""
    commit: str = ""
    """Its git commit, "with changes" if the code differs from it; empty if the app is in no repository."""
    code: str = ""
    """The first digits of the SHA-256 over its Python files: equal code, equal digits."""
    python: str = ""
    torch: str = ""
    flwr: str = ""
    numpy: str = ""
    machine: str = ""
    """Operating system and processor architecture."""
    cpus: int = 0
    gpus: int = 0


def made_with(app: Path, size: SimulationSize) -> MadeWith:
    """The versions in this environment of `app` and all it rests on.

    Raises:
        ConfigError: the app's pyproject.toml can't be read.
    """
    project = read_toml(app / CONFIG).get("project", {})
    return MadeWith(
        app=f"{project.get('name', app.name)} {project.get('version', '')}".strip(),
        commit=_commit(app),
        code=_code(app),
        python=platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
        machine=f"{platform.system()} {platform.machine()}",
        cpus=size.cpus,
        gpus=size.gpus,
    )


def _commit(app: Path) -> str:
    # Asked of a file of the app: an app that is not tracked may lie inside a repository of something else.
    if not _git(app, "ls-files", CONFIG):
        return ""
    changed = _git(app, "status", "--porcelain", "--", "*.py", CONFIG)
    return _git(app, "rev-parse", "HEAD") + (" with changes" if changed else "")


def _git(app: Path, *arguments: str) -> str:
    """What git says, or nothing if it is absent, slow, or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(app), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _code(app: Path) -> str:
    """Digest of the Python files that Flower would get, their names included."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "app"
        stage(app, copy)
        for path in sorted(copy.rglob("*.py")):
            digest.update(f"{path.relative_to(copy).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]
