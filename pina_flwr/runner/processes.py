"""Child processes that lead process groups of their own, so that they can be stopped with all they started.

Ray starts its processes in the group of the daemon that starts Ray. Signals from the terminal reach none of
these groups: whoever started them decides when they end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

TERM_SECONDS = 3.0
KILL_SECONDS = 1.0


def spawn(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: IO[bytes] | int
) -> subprocess.Popen[str]:
    """Start `command` in a process group of its own; stdout and stderr go to `output`."""
    return subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """End every process of the group that `process` leads: first asked (SIGTERM), then made (SIGKILL)."""
    for number, patience in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        _signal(process.pid, number)
        deadline = time.monotonic() + patience
        # A group that holds only ended children nobody has collected looks alive; hence the deadlines.
        while _signal(process.pid, 0) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
    process.wait()


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; False if there is no such group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of ended processes
        return False
    return True
