"""A ledger of releases: an append-only file that is on disk before what it records is let out.

One JSON object a line: an entry, and the SHA-256 of the line before's hash followed by this entry (a hash
chain, as in Haber and Stornetta 1991). Changed, lost, doubled and swapped lines are found when the ledger is
opened, and refused: who counts from nothing again spends a budget twice. The chain has no secret, so it
guards against accidents and careless edits, not against someone who computes it anew; and whole lines missing
at the end leave a valid, shorter chain.

An entry is written and fsynced first, and what it records is used or sent only then. So a last line without
its newline is one whose writer died, and nothing of it was released. It is set aside, unless it is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pina_flwr.config import ConfigError
from pina_flwr.privacy.release_json import dumps, kind_of, loads, release_from_dict, release_to_dict
from pina_flwr.privacy.releases import Release
from pina_flwr.privacy.scalars import scalar

log = logging.getLogger(__name__)

LARGEST_INDEX = 2**31 - 1  # of a stage or a round
LONGEST_RUN, LONGEST_NOTE = 200, 2000  # characters
BEFORE_ALL = hashlib.sha256(b"pina-flwr ledger 1").hexdigest()  # what the first line's hash builds on
HEAD, MIDDLE, END = b'{"entry":', b',"sha256":"', b'"}'
FRAME = len(MIDDLE) + 64 + len(END)
POLL = 0.02  # seconds between looks at a lock


@dataclass(frozen=True)
class Entry:
    """What one round released.

    run: id of the run. stage, round: from 1. release: the mechanism and how often. note: for people.

    Raises:
        ValueError: a field is of a wrong type or out of bounds.
        TypeError: `release` is no release.
    """

    run: str
    stage: int
    round: int
    release: Release
    note: str = ""

    def __post_init__(self) -> None:
        check_place(self.run, self.stage, self.round)
        kind_of(self.release)
        if len(str(scalar("note", self.note, str))) > LONGEST_NOTE:
            raise ValueError(f"note: must have at most {LONGEST_NOTE} characters")

    def to_dict(self) -> dict[str, Any]:
        """The entry, ready for JSON."""
        place = {"run": self.run, "stage": self.stage, "round": self.round}
        return {**place, "release": release_to_dict(self.release), "note": self.note}

    @classmethod
    def from_dict(cls, values: Any) -> Entry:
        """Inverse of `to_dict`.

        Raises:
            ValueError: it is no entry.
        """
        if not isinstance(values, dict) or set(values) != {"run", "stage", "round", "release", "note"}:
            raise ValueError("not an entry")
        return cls(**{**values, "release": release_from_dict(values["release"])})


def check_place(run: str, stage: int, round_: int) -> None:
    """Raise `ValueError` unless these name a round of a run: printable text, and two numbers from 1."""
    text = str(scalar("run", run, str))
    if not (0 < len(text) <= LONGEST_RUN and text.isprintable()):
        raise ValueError(f"run: must be 1 to {LONGEST_RUN} printable characters")
    for key, value in (("stage", stage), ("round", round_)):
        scalar(key, value, int)
        if not 1 <= value <= LARGEST_INDEX:
            raise ValueError(f"{key}: must be within 1..{LARGEST_INDEX}")


def merged(releases: Iterable[Release]) -> list[Release]:
    """The same releases, those alike but for their count as one; in the order of their first occurrence."""
    counts: dict[Release, int] = {}
    for release in releases:
        one = dataclasses.replace(release, count=1)
        counts[one] = counts.get(one, 0) + release.count
    return [dataclasses.replace(one, count=count) for one, count in counts.items()]


class Ledger:
    """An open ledger file. It stays locked until closed, left as a context, or forgotten."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over a locked descriptor, open for reading and appending; see `open`."""
        self._path, self._descriptor = path, descriptor
        self._entries: list[Entry] = []
        self._digest, self._size = BEFORE_ALL, 0
        self._closer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, path: str | Path) -> Ledger:
        """Open a ledger and replay it; a missing one is created, with its folders.

        Raises:
            ConfigError: it can't be read and written, another process has it open, or it is corrupt.
        """
        path = Path(path)
        try:
            make_folder(path.parent)
            ledger = cls(path, open_locked(path))
            try:
                ledger._replay()
            except BaseException:
                ledger.close()
                raise
        except OSError as problem:
            raise ConfigError(
                f"{path}: must be a ledger file that can be read and written ({problem.strerror})"
            ) from problem
        return ledger

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, oldest first."""
        return tuple(self._entries)

    def releases(self, run: str | None = None) -> list[Release]:
        """What was released, in one run or in all, with counts added up."""
        return merged(entry.release for entry in self._entries if run in (None, entry.run))

    def append(self, entry: Entry) -> None:
        """Write an entry; it is on disk when this returns. If it can't be, the file is as it was before.

        Raises:
            ConfigError: the disk is full or fails, or someone else changed the file. Then nothing that the
                entry records may be let out.
            ValueError: the ledger is closed.
        """
        line, digest = _seal(dumps(entry.to_dict()).encode(), self._digest)
        self._write(line + b"\n")
        self._entries.append(entry)
        self._digest = digest

    def close(self) -> None:
        """Close the file and free its lock."""
        self._closer()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        if not self._closer.alive:
            raise ValueError(f"{self._path}: the ledger is closed")
        try:
            self._check_untouched()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except BaseException as problem:
            self._cut()
            if isinstance(problem, OSError):
                raise ConfigError(
                    f"{self._path}: the entry can't be written ({problem.strerror}), so nothing may be "
                    "released; make room or mend the disk"
                ) from problem
            raise
        self._size += len(data)

    def _check_untouched(self) -> None:
        """Locks bind only those who ask for them."""
        ours = os.fstat(self._descriptor)
        try:
            same = os.path.samestat(ours, os.stat(self._path)) and ours.st_size == self._size
        except FileNotFoundError:
            same = False
        if not same:
            self.close()
            raise ConfigError(f"{self._path}: was changed or removed while open; restore it and start again")

    def _cut(self) -> None:
        """Undo a failed write; where that fails too, append no more: opening again sorts it out."""
        if not self._closer.alive:
            return
        try:
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
        except OSError:
            self.close()

    def _replay(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            *lines, tail = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            self._take(line, number)
            self._size += len(line) + 1
        if tail:
            self._mend(tail, len(lines) + 1)

    def _take(self, line: bytes, number: int) -> None:
        try:
            entry, self._digest = _unseal(line, self._digest)
        except (ValueError, TypeError) as problem:
            raise ConfigError(
                f"{self._path}: line {number}: {problem}; restore the file from a copy (moving it away "
                "forgets what was released)"
            ) from problem
        self._entries.append(entry)

    def _mend(self, tail: bytes, number: int) -> None:
        """Deal with a last line that lacks its newline.

        The beginning of an entry's line is never whole JSON. So with more after whole JSON, a newline was
        lost, and the entry may be one of which something was released.
        """
        if _begins_with_json(tail):
            self._take(tail, number)
            self._size += len(tail)
            self._write(b"\n")
            log.warning("%s: line %d lacked its newline; it is whole and counts", self._path, number)
            return
        torn = Path(f"{self._path}.torn")
        with torn.open("ab") as file:
            file.write(tail + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(torn.parent)
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        log.warning(
            "%s: line %d was cut short while being written, so nothing of it was released; set aside in %s",
            self._path,
            number,
            torn,
        )


def _seal(payload: bytes, before: str) -> tuple[bytes, str]:
    """The line of an entry without its newline, and its hash."""
    digest = hashlib.sha256(before.encode() + payload).hexdigest()
    return HEAD + payload + MIDDLE + digest.encode() + END, digest


def _unseal(line: bytes, before: str) -> tuple[Entry, str]:
    payload = line[len(HEAD) : -FRAME]
    sealed, digest = _seal(payload, before)
    if sealed != line:
        raise ValueError("was changed, or does not follow from the line before it")
    return Entry.from_dict(loads(payload)), digest


def _begins_with_json(data: bytes) -> bool:
    try:
        json.JSONDecoder().raw_decode(data.decode(errors="replace"))
    except ValueError:
        return False
    return True


def open_locked(path: Path, wait: float = 0.0) -> int:
    """Open a file for reading and appending, creating it, as the only process that does.

    Args:
        path: in an existing folder.
        wait: seconds to wait for another process to let go of it.

    Returns:
        The descriptor. Closing it, or the death of the process, frees the lock.

    Raises:
        ConfigError: another process has it, the file system has no locks, or it is no regular file.
        OSError: it can't be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: must be a regular file")
        _lock(descriptor, path, wait)
        if status.st_size == 0:  # perhaps new: make its name last too
            sync_folder(path.parent)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path, wait: float) -> None:
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{path}: in use by another process; wait until it is done") from None
        except OSError as problem:
            raise ConfigError(
                f"{path}: must be on a file system with locks ({problem.strerror})"
            ) from problem
        time.sleep(POLL)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, on disk when this returns.

    Raises:
        OSError: it can't be created, or a file is in the way.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster; a file is found out below
            path.mkdir(mode=0o700)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names created in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
