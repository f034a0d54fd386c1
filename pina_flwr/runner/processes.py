"""A process group of our own, so that everything started for a run can be ended, whoever started it.

Ray starts its processes in the group of the daemon that starts Ray. Signals from the terminal don't reach the
group: this process decides when it ends. Should this process die without a chance to decide (SIGKILL), the
guard does: a small process that leads the group and waits for the end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

TERM_SECONDS = 5.0
"""Time that processes get to end after SIGTERM."""
POLL_SECONDS = 0.05
_GUARD = """
import os, shutil, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.read()
group = os.getpgrp()
if os.fork() == 0:
    os.setpgid(0, 0)
    os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class ProcessGroup:
    """Processes that are ended together.

    Args:
        folder: temporary folder of the group; removed only if this process dies.
    """

    def __init__(self, folder: Path) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def spawn(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: IO[bytes] | int
    ) -> subprocess.Popen[str]:
        """Start `command` in the group; its stdout and stderr go to `output`.

        Raises:
            OSError: it can't be started.
        """
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            process_group=self._guard.pid,
        )
        self._children.append(process)
        return process

    def stop(self) -> None:
        """End the group: SIGTERM, and once our children have ended or had their time, SIGKILL."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        while any(child.poll() is None for child in self._children) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()
        self._guard.communicate()

    def _signal(self, number: int) -> None:
        # Until we have waited for the guard no other group can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, number)
