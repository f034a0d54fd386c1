"""The private SuperLink of one run.

Two daemons: `flower-superlink --simulation` keeps the run's state in memory, and `flower-superexec` starts
the simulation process, which starts Ray. Both work in an empty folder, because Ray puts the working directory
of its driver on the workers' path ahead of the app. `FLWR_HOME` and the port are theirs alone, so that
neither the user's own `~/.flwr` nor another SuperLink is touched.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import tomli_w

from pina_flwr.runner.processes import ProcessGroup

NAME = "pina"
"""Name of the connection in the private config.toml."""
INTERRUPTED = "interrupted"
START_SECONDS = 120.0
STATUS_SECONDS = 60.0
ATTEMPTS = 3
POLL_SECONDS = 0.1


class RunError(RuntimeError):
    """Why a run did not succeed, in one line.

    Args:
        reason: the line.
        status: the status of the run, if it got that far.
        mistake: the reason is a user's mistake.
    """

    def __init__(self, reason: str, *, status: str = "", mistake: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.mistake = mistake


class SuperLink:
    """SuperLink and SuperExec in simulation mode, started and stopped as a context.

    Args:
        folder: temporary folder for all their files.
        interrupted: whether the user wants the run stopped.

    Raises:
        RunError: a daemon can't be started, or the run was interrupted meanwhile.
    """

    def __init__(self, folder: Path, interrupted: Callable[[], bool]) -> None:
        self._folder = folder
        self._interrupted = interrupted
        self._env = environment(folder)
        self._home = folder / "flwr"
        self._cwd = folder / "cwd"
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        self._home.mkdir()
        self._cwd.mkdir()
        self._group = ProcessGroup(self._folder)
        try:
            self._start()
        except BaseException:
            self._group.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.stop()

    def flwr(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the `flwr` command with its output piped; it ends with the SuperLink, if not before."""
        command = [self._find("flwr"), *arguments]
        return self._group.spawn(command, env=self._env, cwd=self._cwd, output=subprocess.PIPE)

    def status(self) -> tuple[str, str]:
        """Status and details of the one run, as `flwr list` gives them; ("", "") if it can't be asked."""
        process = self.flwr("list", NAME, "--format", "json")
        try:
            run = json.loads(process.communicate(timeout=STATUS_SECONDS)[0])["runs"][0]
            return run["status"], run["status-details"]
        except (subprocess.TimeoutExpired, ValueError, LookupError):
            return "", ""

    def check(self) -> None:
        """Raise `RunError` if a daemon has ended or the run was interrupted."""
        if self._interrupted():
            raise RunError("stopped before its end", status=INTERRUPTED)
        for name, process in self._daemons.items():
            if process.poll() is not None:
                reason = f"{name} ended with exit status {process.returncode}{self._last_error(name)}"
                raise RunError(reason)

    def _start(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            port = _free_port()
            self._start_superlink(port)
            try:
                self._wait_for(port)
                break
            except RunError as error:
                # Another program may have taken the port between our look and the SuperLink's.
                if attempt == ATTEMPTS or "address already in use" not in str(error):
                    raise
        connection = {"address": f"127.0.0.1:{port}", "insecure": True}
        config = {"superlink": {"default": NAME, NAME: connection}}
        (self._home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        self._daemon("flower-superexec", ["--insecure", "--runtime-api-address", f"127.0.0.1:{port}"])

    def _start_superlink(self, port: int) -> None:
        arguments = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        self._daemon("flower-superlink", arguments)

    def _daemon(self, command: str, arguments: list[str]) -> None:
        with self._log(command).open("wb") as log:
            self._daemons[command] = self._group.spawn(
                [self._find(command), *arguments], env=self._env, cwd=self._cwd, output=log
            )

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(port):
            self.check()
            if time.monotonic() > deadline:
                raise RunError(f"flower-superlink did not answer within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        self.check()  # else it was another program that answered

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _last_error(self, name: str) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((f": {line.strip()}" for line in reversed(lines) if "rror" in line.split("[")[0]), "")

    def _find(self, command: str) -> str:
        path = shutil.which(command, path=self._env["PATH"])
        if path is None:
            raise RunError(f"{command} is not installed beside {sys.executable}")
        return path


def environment(folder: Path) -> dict[str, str]:
    """The environment of a private SuperLink and all it starts: ours, without what leads elsewhere."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    ours.pop("RAY_ADDRESS", None)  # would send the simulation to a Ray cluster
    no_proxy = ours.get("no_proxy") or ours.get("NO_PROXY")
    direct = ",".join([*([no_proxy] if no_proxy else []), "127.0.0.1", "localhost"])
    return ours | {
        # The daemons find each other's commands by PATH, and this environment need not be activated.
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), ours.get("PATH", os.defpath)]),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a notice
        "PYTHONUNBUFFERED": "1",
        # Threads that wait for each other by spinning slow a busy machine down many times over.
        "OMP_WAIT_POLICY": ours.get("OMP_WAIT_POLICY", "PASSIVE"),
        "no_proxy": direct,
        "NO_PROXY": direct,
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
