"""What a node remembers of a secure sum between two messages, in Flower's `Context.state`.

One type a stage; what it holds is all that its members still need. Storing the next stage replaces the one
before, so the keys of a session are gone with the stage that needed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, RecordDict
from numpy.typing import NDArray

from pina_flwr.secure_sum.participant import Advertised, Bytes, Masked, Roster, Shared
from pina_flwr.secure_sum.session import LARGEST_ID, Session, Terms
from pina_flwr.secure_sum.session import NUMBERS as TERMS
from pina_flwr.secure_sum.wire import KEY, PUBLIC, Arrays, Malformed, pack

NUMBERS, TABLES = "secagg-state", "secagg-state-arrays"  # keys in Context.state
T = TypeVar("T", int, str)


@dataclass(frozen=True)
class HasAdvertised:
    """Members that have advertised keys."""

    session: Session
    members: Sequence[Advertised]


@dataclass(frozen=True)
class HasShared:
    """Members that have shared their secrets."""

    terms: Terms
    roster: Roster
    members: Sequence[Shared]

    @property
    def session(self) -> Session:
        """Of which sum."""
        return self.terms.session


@dataclass(frozen=True)
class HasMasked:
    """Members whose vectors are with the server.

    present: who of the roster had shared, [r]. agreed: what members signed about who survived, uint8 [r];
    empty before.
    """

    terms: Terms
    roster: Roster
    present: NDArray[np.bool_]
    members: Sequence[Masked]
    agreed: Bytes

    @property
    def session(self) -> Session:
        """Of which sum."""
        return self.terms.session


@dataclass(frozen=True)
class HasUnmasked:
    """All is over. advertised, survivors: how many members, as the node was told."""

    session: Session
    advertised: int
    survivors: int


Stage = HasAdvertised | HasShared | HasMasked | HasUnmasked


def recall(state: RecordDict) -> Stage | None:
    """What a node remembers, None before its first sum.

    Raises:
        Malformed: the state holds something else under its keys. There is no going on from there, as nobody
            knows what the node has answered.
    """
    if NUMBERS not in state and TABLES not in state:
        return None
    try:
        return _stage(state.config_records[NUMBERS], Arrays.of(state, TABLES))
    except (KeyError, TypeError, ValueError):
        raise Malformed("what the node remembers: makes no sense") from None


def _stage(numbers: ConfigRecord, arrays: Arrays) -> Stage:
    """The stage in a record; KeyError, TypeError or ValueError if there is none."""
    session = Session(_of(numbers, "run", str), _of(numbers, "round", int))
    kind = _of(numbers, "stage", str)
    if kind == HasUnmasked.__name__:
        return HasUnmasked(session, _of(numbers, "advertised", int), _of(numbers, "survivors", int))
    ids = arrays.read("members", np.int64, (None,)).tolist()
    if len(set(ids)) < len(ids) or not all(0 <= member <= LARGEST_ID for member in ids):
        raise ValueError("members: must be different ids")
    if kind == HasAdvertised.__name__:
        return HasAdvertised(session, _advertised(ids, arrays))
    terms = Terms(session, *(_of(numbers, name, int) for name in TERMS))
    roster, neighbours = _roster(arrays), arrays.read("neighbours", np.int64, (len(ids), terms.neighbours))
    count = len(roster.ids)
    strangers = any(roster.position(member) < 0 for member in ids)
    if strangers or (neighbours < 0).any() or (neighbours >= count).any():
        raise ValueError("members or neighbours: must be in the roster")
    if kind == HasShared.__name__:
        seeds = [seed.tobytes() for seed in arrays.read("seeds", np.uint8, (len(ids), KEY))]
        keys = arrays.read("keys", np.uint8, (len(ids), terms.neighbours, 2 * KEY))
        return HasShared(
            terms, roster, [Shared(*row) for row in zip(ids, seeds, neighbours, keys, strict=True)]
        )
    if kind != HasMasked.__name__:
        raise ValueError("stage: must be the name of one")
    held = arrays.read("held", np.uint8, (len(ids), terms.neighbours, 2 * KEY))
    present, agreed = arrays.read("present", np.bool_, (count,)), arrays.read("agreed", np.uint8, (None,))
    if len(agreed) not in (0, count):
        raise ValueError("agreed: must be of all in the roster, or empty")
    members = [Masked(*row) for row in zip(ids, neighbours, held, strict=True)]
    return HasMasked(terms, roster, present, members, agreed)


def _roster(arrays: Arrays) -> Roster:
    ids = arrays.read("ids", np.int64, (None,))
    if (np.diff(ids) <= 0).any():
        raise ValueError("ids: must ascend")
    return Roster(ids, arrays.read("public", np.uint8, (len(ids), PUBLIC)))


def remember(state: RecordDict, stage: Stage) -> None:
    """Put a stage in the place of the one before."""
    numbers: dict[str, ConfigRecordValues] = {
        "run": stage.session.run,
        "round": stage.session.round,
        "stage": type(stage).__name__,
    }
    arrays: dict[str, np.ndarray] = {"members": np.zeros(0, np.int64)}
    if isinstance(stage, HasUnmasked):
        numbers |= {"advertised": stage.advertised, "survivors": stage.survivors}
    else:
        arrays["members"] = np.array([m.member for m in stage.members], np.int64)
    if isinstance(stage, HasAdvertised):
        secrets = [member.cipher + member.pair + member.seed for member in stage.members]
        arrays["secrets"] = _table(secrets, 3 * KEY)
    if isinstance(stage, HasShared | HasMasked):
        numbers |= stage.terms.numbers
        shape = len(stage.members), stage.terms.neighbours
        arrays["neighbours"] = np.array([m.neighbours for m in stage.members], np.int64).reshape(shape)
        arrays |= {"ids": stage.roster.ids, "public": stage.roster.public}
    if isinstance(stage, HasShared):
        arrays["seeds"] = _table([m.seed for m in stage.members], KEY)
        arrays["keys"] = np.array([m.keys for m in stage.members], np.uint8).reshape(*shape, 2 * KEY)
    if isinstance(stage, HasMasked):
        arrays["held"] = np.array([m.held for m in stage.members], np.uint8).reshape(*shape, 2 * KEY)
        arrays |= {"present": stage.present, "agreed": stage.agreed}
    state[NUMBERS], state[TABLES] = ConfigRecord(numbers), pack(arrays)


def _table(rows: Sequence[bytes], width: int) -> Bytes:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), width)


def _advertised(ids: Sequence[int], arrays: Arrays) -> list[Advertised]:
    secrets = arrays.read("secrets", np.uint8, (len(ids), 3 * KEY))
    found = []
    for member, row in zip(ids, secrets, strict=True):
        text = row.tobytes()
        found.append(Advertised(member, text[:KEY], text[KEY : 2 * KEY], text[2 * KEY :]))
    return found


def _of(record: ConfigRecord, name: str, kind: type[T]) -> T:
    value = record[name]
    if type(value) is not kind:
        raise TypeError(f"{name} of type {type(value).__name__}: must be {kind.__name__}")
    return value
