"""What a cell was computed with: the commit only where it is the code's, and a digest of the code itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata

import pytest
from mini_app import write_app

from pina_flwr.compare.made_with import made_with
from pina_flwr.runner.size import SimulationSize

SIZE = SimulationSize(nodes=3, cpus=4, gpus=1)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def app(tmp_path):
    return write_app(tmp_path / "mini")


def git(folder, *arguments):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_versions_and_machine(app):
    found = made_with(app, SIZE)
    assert found.app == "mini 1.0.0"
    assert (found.python, found.torch) == (platform.python_version(), metadata.version("torch"))
    assert (found.cpus, found.gpus) == (4, 1)


def test_the_digest_is_of_the_code_and_of_nothing_else(app):
    before = made_with(app, SIZE)
    (app / "README.md").write_text("more")
    (app / "runs").mkdir()
    (app / "runs/metrics.jsonl").write_text("{}")
    assert made_with(app, SIZE).code == before.code
    (app / "client_app.py").rename(app / "other.py")
    renamed = made_with(app, SIZE).code
    (app / "server_app.py").write_text("pass\n")
    assert len({before.code, renamed, made_with(app, SIZE).code}) == 3


@needs_git
def test_the_commit_is_named_and_whether_the_code_differs_from_it(app):
    git(app, "init")
    assert made_with(app, SIZE).commit == ""  # nothing is committed
    git(app, "add", ".")
    git(app, "commit", "-m", "x")
    commit = git(app, "rev-parse", "HEAD")
    assert made_with(app, SIZE).commit == commit
    (app / "notes.txt").write_text("no code")
    assert made_with(app, SIZE).commit == commit
    (app / "server_app.py").write_text("pass\n")
    assert made_with(app, SIZE).commit == f"{commit} with changes"


@needs_git
def test_the_commit_of_a_repository_around_is_not_the_apps(app, tmp_path):
    git(tmp_path, "init")
    (tmp_path / "other.py").write_text("")
    git(tmp_path, "add", "other.py")
    git(tmp_path, "commit", "-m", "x")
    assert made_with(app, SIZE).commit == ""


def test_without_git_it_is_not_known(app, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert made_with(app, SIZE).commit == ""
