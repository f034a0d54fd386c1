"""One run from start to verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tomli_w

from pina_flwr.report import summary
from pina_flwr.runner.app import stage
from pina_flwr.runner.output import LOG
from pina_flwr.runner.overrides import Scalar
from pina_flwr.runner.size import SimulationSize
from pina_flwr.runner.superlink import INTERRUPTED, NAME, POLL_SECONDS, RunError, SuperLink

COMPLETED = "finished:completed"
STATUS_SECONDS = 30.0
RETRIES = 10
SHORT = 30
"""Characters of a temporary folder's path that leave room for Ray's socket names (about 100 allowed)."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^INFO\s*:(\s{1,6}|$)")
_MISTAKE = re.compile(r"^ERROR\s*:\s+error: (?P<reason>.+)")
# What Flower says of every simulation.
_CHATTER = re.compile(
    r"\s*(Successfully installed |Starting (logstream|Flower Simulation)|(WARNING\s*:\s+)?Since flwr 1\.32"
    r"|Federation `|To change federation size|flwr federation simulation-config "
    r"|\(ClientAppActor pid=\d+\) WARNING\s*:\s+Manually terminating |$)"
)


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: str
    """As Flower names it ("finished:completed", …), "interrupted", or "" if the run did not get that far."""
    reason: str
    """Why it did not succeed, in one line; empty if it did."""
    mistake: bool
    """The reason is a user's mistake that the ServerApp reported."""
    seconds: float
    """Wall time, start of the daemons included."""

    @property
    def ok(self) -> bool:
        """The run completed and wrote its summary."""
        return not self.reason


def run(
    app: Path,
    overrides: Mapping[str, Scalar],
    output: Path,
    size: SimulationSize,
    *,
    on_line: Callable[[str], None] = print,
    on_wait: Callable[[], None] = lambda: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run `app` on a private SuperLink until it has ended, and end everything that was started for it.

    Args:
        app: folder of a Flower app.
        overrides: run-config values that differ from those in the app's pyproject.toml.
        output: absolute path of a folder that exists and holds no results (see `output.prepared`); the app
            gets it as its option `output`.
        size: SuperNodes and their resources.
        on_line: receives each line that the app logs.
        on_wait: called several times a second.
        interrupted: asked several times a second; true ends the run.
    """
    began = time.monotonic()
    result = RunResult(COMPLETED, "", False, 0.0)
    with _workspace() as folder, (output / LOG).open("w", encoding="utf-8") as log:
        try:
            stage(app, folder / "app")
            settings = tomli_w.dumps({**overrides, "output": str(output)})
            (folder / "run.toml").write_text(settings, encoding="utf-8")
            with SuperLink(folder, interrupted) as link:
                _Follower(link, log, on_line, on_wait).follow(folder, size)
            check_summary(output)
        except RunError as error:
            result = RunResult(error.status, str(error), error.mistake, 0.0)
        except OSError as error:
            result = RunResult("", str(error), False, 0.0)
        if result.status not in (COMPLETED, INTERRUPTED) and not result.mistake:
            _keep_daemon_logs(folder, log)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


class _Follower:
    """Starts the run, passes on what it logs, and finds out how it ended."""

    def __init__(
        self, link: SuperLink, log: IO[str], on_line: Callable[[str], None], on_wait: Callable[[], None]
    ) -> None:
        self._link = link
        self._log = log
        self._on_line = on_line
        self._on_wait = on_wait
        self._started = False
        self._before: list[str] = []
        """What `flwr run` says before the run has started: its errors, in a box."""

    def follow(self, folder: Path, size: SimulationSize) -> None:
        """Return when the run has completed.

        Raises:
            RunError: it did not.
        """
        client = self._link.flwr(
            *("run", str(folder / "app"), NAME, "--stream", "-c", str(folder / "run.toml")),
            *("--federation-config", size.federation_config()),
        )
        for line in self._lines(client):
            if found := _MISTAKE.match(line):
                raise RunError(found["reason"].strip(), mistake=True)
            self._pass_on(line)
        self._check_status()

    def _lines(self, client: subprocess.Popen[str]) -> Iterator[str]:
        """Lines of `client` without colours, also kept in the log, until it ends."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(client, lines), daemon=True).start()
        while True:
            self._on_wait()
            self._link.check()
            try:
                line = lines.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if line is None:
                return
            line = _COLOUR.sub("", line.rstrip())
            self._log.write(line + "\n")
            self._log.flush()
            yield line

    def _pass_on(self, line: str) -> None:
        if not self._started:
            self._started = line.startswith("Successfully started run")
            self._before.append(line.strip("│╭╮╰╯─ "))
        elif not _CHATTER.match(plain := _LEVEL.sub("", line)):
            self._on_line(plain)

    def _check_status(self) -> None:
        if not self._started:
            self._link.check()
            raise RunError(f"flwr could not start the run: {_sentence(self._before)}")
        deadline = time.monotonic() + STATUS_SECONDS
        status, details = self._link.status()
        while status and not status.startswith("finished") and time.monotonic() < deadline:
            self._link.check()
            status, details = self._link.status()
        if status == COMPLETED:
            return
        self._link.check()  # a daemon that has ended is the better reason
        raise RunError(f"the run ended as {status or 'unknown'}: {_first_line(details)}", status=status)


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """A new folder, removed afterwards, whose path is short enough for Ray's sockets."""
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= SHORT else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="pina-", dir=base))
    try:
        yield folder
    finally:
        for _ in range(RETRIES):  # a process that was just killed may still be adding to it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(POLL_SECONDS)


def _pump(client: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert client.stdout is not None
    with client.stdout:
        for line in client.stdout:
            lines.put(line)
    lines.put(None)


def _keep_daemon_logs(folder: Path, log: IO[str]) -> None:
    for path in folder.glob("*.log"):
        text = _COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace"))
        log.write(f"\n{path.stem}:\n{text}")


def _sentence(lines: list[str]) -> str:
    said = [line for line in lines if line and line != "Error" and not line.startswith("Using SuperLink")]
    return " ".join(said) or "it did not say why"


def _first_line(details: str) -> str:
    text = details.removeprefix("Simulation failed with exception: ").strip()
    return text.splitlines()[0] if text else "no details given"


def check_summary(output: Path) -> None:
    """Raise `RunError` unless `output` has the summary that a run writes last."""
    if not (output / summary.FILE_NAME).is_file():
        reason = f"the run completed but left no {summary.FILE_NAME} in {output}"
        raise RunError(reason, status=COMPLETED)
