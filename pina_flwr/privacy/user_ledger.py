"""What each user of a node has released: the client's own count, which no server can set back.

One interface and two stores. In a simulation the ledger is part of Flower's `Context.state`, which lives as
long as the run and travels with every message, so it is small. In a deployment it is a file a user, which
outlives runs. Either way a round is charged before its reply exists, and a round once charged is not charged
again: rounds of a run come in ascending order of (stage, round), and a stale one is refused.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from pina_flwr.config import ConfigError
from pina_flwr.messages import pack, unpack
from pina_flwr.privacy.ledger import Entry, Ledger, check_place, make_folder, merged, open_locked
from pina_flwr.privacy.policy import Refusal
from pina_flwr.privacy.release_json import dumps, loads, release_from_dict, release_to_dict
from pina_flwr.privacy.releases import Release

COUNTS, NAMES = "user-ledger", "user-ledger-names"  # keys in Context.state
LOCK = ".lock"
MOST_OPEN = 256  # files
PATIENCE = 10.0  # seconds that a message waits for another one of the node

Place = tuple[int, int]
Numbers = NDArray[np.int64]


class UserLedger(Protocol):
    """What users have released so far. Users are numbers from 0."""

    def spent(self, user: int) -> list[Release]:
        """All that a user has released, in all runs, with counts added up."""
        ...

    def rounds(self, user: int) -> int:
        """How many rounds a user took part in, in all runs and stages."""
        ...

    def taken(self, user: int, run: str, stage: int) -> int:
        """How many rounds of one stage of a run a user took part in."""
        ...

    def last(self, user: int, run: str) -> Place:
        """Stage and round in which a user last took part in a run; (0, 0) if it never did."""
        ...

    def charge(self, users: Sequence[int], run: str, stage: int, round_: int, release: Release) -> None:
        """Count what a round releases about each of some users, before anything of theirs is used.

        Raises:
            Refusal: "stale round", if one of the users took part in this round or a later one of this run.
                Nobody is charged then.
            ValueError: a user named twice or none at all, no such round, or a release with a count under 1.
            ConfigError: it can't be written. Some may have been charged, and nothing may be released.
        """
        ...


class StateLedger:
    """The ledger of one run in the node's `Context.state`.

    Raises:
        ValueError: the state holds something else under its keys.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        self._run = ""
        self._stages: list[int] = []
        self._releases: list[Release] = []  # distinct, each with count 1
        self._users: list[int] = []
        self._counts: Numbers = np.zeros((0, 0), np.int64)  # [users, releases]
        self._taken: Numbers = np.zeros((0, 0), np.int64)  # rounds, [users, stages]
        self._last: Numbers = np.zeros((0, 2), np.int64)  # stage and round, [users, 2]
        if COUNTS in state or NAMES in state:
            self._load()
        self._rows = {user: row for row, user in enumerate(self._users)}

    def spent(self, user: int) -> list[Release]:
        """See `UserLedger.spent`."""
        counts = self._counts[self._rows[user]].tolist() if user in self._rows else []
        pairs = zip(self._releases, counts, strict=False)
        return [dataclasses.replace(release, count=count) for release, count in pairs if count]

    def rounds(self, user: int) -> int:
        """See `UserLedger.rounds`."""
        return int(self._taken[self._rows[user]].sum()) if user in self._rows else 0

    def taken(self, user: int, run: str, stage: int) -> int:
        """See `UserLedger.taken`."""
        if user not in self._rows or run != self._run or stage not in self._stages:
            return 0
        return int(self._taken[self._rows[user], self._stages.index(stage)])

    def last(self, user: int, run: str) -> Place:
        """See `UserLedger.last`."""
        if user not in self._rows or run != self._run:
            return 0, 0
        stage, round_ = self._last[self._rows[user]].tolist()
        return stage, round_

    def charge(self, users: Sequence[int], run: str, stage: int, round_: int, release: Release) -> None:
        """See `UserLedger.charge`.

        Raises:
            ValueError: also if the state belongs to another run.
        """
        _check_charge(users, run, stage, round_, release)
        if self._run not in ("", run):
            raise ValueError(f"this node's state belongs to run {self._run!r}, not {run!r}")
        _refuse_stale(self, users, run, (stage, round_))
        self._run = run
        self._make_room(users, stage, release)
        rows = [self._rows[user] for user in users]
        self._counts[rows, self._releases.index(dataclasses.replace(release, count=1))] += release.count
        self._taken[rows, self._stages.index(stage)] += 1
        self._last[rows] = stage, round_
        self._save()

    def _make_room(self, users: Sequence[int], stage: int, release: Release) -> None:
        """Rows for new users, columns for a new stage and a new release."""
        for user in users:
            if user not in self._rows:
                self._rows[user] = len(self._users)
                self._users.append(user)
        if stage not in self._stages:
            self._stages.append(stage)
        one = dataclasses.replace(release, count=1)
        if one not in self._releases:
            self._releases.append(one)
        self._counts = _grown(self._counts, len(self._users), len(self._releases))
        self._taken = _grown(self._taken, len(self._users), len(self._stages))
        self._last = _grown(self._last, len(self._users), 2)

    def _save(self) -> None:
        arrays = {"counts": self._counts, "taken": self._taken, "last": self._last}
        users = np.array(self._users, dtype=np.int64)
        self._state[COUNTS] = pack({name: _small(a) for name, a in {**arrays, "users": users}.items()})
        releases = [dumps(release_to_dict(release)) for release in self._releases]
        self._state[NAMES] = ConfigRecord({"run": self._run, "stages": self._stages, "releases": releases})

    def _load(self) -> None:
        try:
            arrays, names = unpack(self._state.array_records[COUNTS]), self._state.config_records[NAMES]
            self._run, self._stages = str(names["run"]), [int(s) for s in names["stages"]]  # type: ignore
            self._releases = [release_from_dict(loads(text)) for text in names["releases"]]  # type: ignore
            self._users = arrays["users"].tolist()
            wide = {name: array.astype(np.int64) for name, array in arrays.items()}
            self._counts, self._taken, self._last = wide["counts"], wide["taken"], wide["last"]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"the ledger in this node's state can't be read: {problem}") from problem
        width = {"counts": len(self._releases), "taken": len(self._stages), "last": 2}
        shapes = {name: (len(self._users), size) for name, size in width.items()}
        wrong = [name for name, shape in shapes.items() if wide[name].shape != shape or wide[name].min() < 0]
        if wrong or len(set(self._users)) != len(self._users):
            raise ValueError(f"the ledger in this node's state is damaged: {', '.join(wrong) or 'users'}")


class FileLedger:
    """One ledger file a user in a folder, across runs; the folder is locked until closed or forgotten.

    Between what `spent` says and a later `charge`, no other process of the node can charge anything.

    Args:
        folder: created if missing.
        wait: seconds to wait for another process to be done with the folder.

    Raises:
        ConfigError: the folder can't be written, or another process keeps it.
    """

    def __init__(self, folder: str | Path, wait: float = PATIENCE) -> None:
        self._folder = Path(folder)
        self._open: dict[int, Ledger] = {}
        try:
            make_folder(self._folder)
            lock = open_locked(self._folder / LOCK, wait)
        except OSError as problem:
            raise ConfigError(
                f"{folder}: must be a folder for ledgers that can be written ({problem.strerror})"
            ) from problem
        self._closer = weakref.finalize(self, os.close, lock)

    def spent(self, user: int) -> list[Release]:
        """See `UserLedger.spent`."""
        return merged(entry.release for entry in self._entries(user))

    def rounds(self, user: int) -> int:
        """See `UserLedger.rounds`."""
        return len(self._entries(user))

    def taken(self, user: int, run: str, stage: int) -> int:
        """See `UserLedger.taken`."""
        return sum((entry.run, entry.stage) == (run, stage) for entry in self._entries(user))

    def last(self, user: int, run: str) -> Place:
        """See `UserLedger.last`."""
        places = ((entry.stage, entry.round) for entry in self._entries(user) if entry.run == run)
        return max(places, default=(0, 0))

    def charge(self, users: Sequence[int], run: str, stage: int, round_: int, release: Release) -> None:
        """See `UserLedger.charge`. On disk, for all users, when this returns."""
        _check_charge(users, run, stage, round_, release)
        _refuse_stale(self, users, run, (stage, round_))
        entry = Entry(run, stage, round_, release)
        for user in users:
            self._ledger(user).append(entry)

    def close(self) -> None:
        """Let other processes of the node have the folder."""
        for ledger in self._open.values():
            ledger.close()
        self._closer()

    def __enter__(self) -> FileLedger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _entries(self, user: int) -> tuple[Entry, ...]:
        return self._ledger(user).entries

    def _ledger(self, user: int) -> Ledger:
        """A node may have more users than a process may have open files: the one opened first gives way."""
        if not self._closer.alive:
            raise ValueError(f"{self._folder}: the ledger is closed")
        if _checked(user) not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[user] = Ledger.open(self._folder / f"user-{user}.jsonl")
        return self._open[user]


def _check_charge(users: Sequence[int], run: str, stage: int, round_: int, release: Release) -> None:
    if len(users) == 0 or len({_checked(user) for user in users}) < len(users):
        raise ValueError("users: must be at least one, and each named once")
    check_place(run, stage, round_)
    if release.count < 1:
        raise ValueError(f"count = {release.count}: a round releases something")


def _refuse_stale(ledger: UserLedger, users: Sequence[int], run: str, place: Place) -> None:
    if any(ledger.last(user, run) >= place for user in users):
        raise Refusal("stale round")


def _checked(user: int) -> int:
    if isinstance(user, bool) or not isinstance(user, int) or user < 0:
        raise ValueError(f"user {user!r}: must be a whole number from 0")
    return user


def _grown(table: Numbers, rows: int, columns: int) -> Numbers:
    """The table with zeros below and to the right."""
    grown = np.zeros((rows, columns), np.int64)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown


def _small(table: Numbers) -> NDArray[np.unsignedinteger]:
    """The same numbers in the smallest unsigned type that holds them."""
    return table.astype(np.min_scalar_type(int(table.max(initial=0))))
