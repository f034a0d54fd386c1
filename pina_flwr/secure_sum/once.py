"""What a node has answered, kept in files: every phase of every sum at most once, whatever else happens.

`Context.state` alone does not ensure it. Flower sends a reply before it saves the state, so a node that dies
in between, or that a server makes work on two messages at once, would find the state as it was before. Of
two masked vectors under the same masks the difference is bare, and of two answers in the last phase the
server could have both shares of a member.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pina_flwr.secure_sum.session import Session

DIGITS = 20  # of a round, always as many, so that a write is never cut between two numbers


@dataclass(frozen=True)
class Once:
    """A folder with one small file for each run and phase, which holds the last round answered."""

    folder: Path

    def claim(self, session: Session, phase: str) -> bool:
        """Whether this phase of this round, or a later one, has not been claimed before. Now it is, for good.

        Raises:
            OSError: the files can't be read or written.
            ValueError: a file holds something else than a round.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{hashlib.sha256(session.run.encode()).hexdigest()[:32]}-{phase}"
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if session.round <= _round_in(os.pread(file, 2 * DIGITS, 0), self.folder / name):
                return False
            if os.pwrite(file, b"%0*d" % (DIGITS, session.round), 0) != DIGITS:
                raise OSError(
                    errno.ENOSPC, "what was answered is written in part only", str(self.folder / name)
                )
            os.fsync(file)
            self._sync()
        finally:
            os.close(file)
        return True

    def _sync(self) -> None:
        """Make the names of new files last, too."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _round_in(data: bytes, path: Path) -> int:
    if not data:
        return 0
    if len(data) != DIGITS or not data.isdigit():
        raise ValueError(f"{path}: must hold a round of {DIGITS} digits")
    return int(data)
