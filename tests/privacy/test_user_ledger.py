"""One behaviour, two stores: a node's state and files, each opened anew at every look."""

import errno
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from pina_flwr.config import ConfigError
from pina_flwr.messages import pack, unpack
from pina_flwr.privacy import user_ledger
from pina_flwr.privacy.ledger import Entry, Ledger
from pina_flwr.privacy.policy import Refusal
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease, ZcdpRelease
from pina_flwr.privacy.user_ledger import COUNTS, NAMES, FileLedger, StateLedger

ONE = GaussianRelease(1.25, 1.0, 1)
RELEASES: list[Release] = [ONE, ZcdpRelease(0.1 + 0.2, 1), UnprotectedRelease("no noise", 1)]
RUN = "1234567890123456789"


@pytest.fixture(params=["state", "files"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], object]:
    """Opens the same ledger again and again, as each message does."""
    content = RecordDict()

    def from_state() -> object:
        nonlocal content
        content = recorddict_from_proto(recorddict_to_proto(content))
        return nullcontext(StateLedger(content))

    return from_state if request.param == "state" else lambda: FileLedger(tmp_path / "node" / "ledgers")


def test_nothing_is_spent_at_first(opened: Callable) -> None:
    with opened() as ledger:
        assert ledger.spent(3) == []
        assert ledger.rounds(3) == 0
        assert ledger.taken(3, RUN, 1) == 0
        assert ledger.last(3, RUN) == (0, 0)


def test_what_is_charged_is_spent(opened: Callable) -> None:
    with opened() as ledger:
        ledger.charge([3, 5], RUN, 1, 2, RELEASES[1])
    with opened() as ledger:
        ledger.charge([5], RUN, 2, 1, ONE)
        ledger.charge([5], RUN, 2, 4, GaussianRelease(1.25, 1.0, 2))
    with opened() as ledger:
        assert ledger.spent(3) == [RELEASES[1]]
        assert ledger.spent(5) == [RELEASES[1], GaussianRelease(1.25, 1.0, 3)]
        assert ledger.spent(4) == []
        assert [ledger.rounds(user) for user in (3, 4, 5)] == [1, 0, 3]
        assert [ledger.taken(5, RUN, stage) for stage in (1, 2, 3)] == [1, 2, 0]
        assert [ledger.last(user, RUN) for user in (3, 4, 5)] == [(1, 2), (0, 0), (2, 4)]


@pytest.mark.parametrize("place", [(1, 1), (2, 2), (2, 3)])
def test_a_stale_round_is_refused_and_nobody_is_charged(opened: Callable, place: tuple[int, int]) -> None:
    """A server that replays a round gets nothing twice."""
    with opened() as ledger:
        ledger.charge([1], RUN, 2, 3, ONE)
    for _ in range(2):
        with opened() as ledger:
            with pytest.raises(Refusal) as refusal:
                ledger.charge([0, 1, 2], RUN, *place, ONE)
            assert refusal.value.reason == "stale round"
            assert ledger.spent(0) == ledger.spent(2) == []
    with opened() as ledger:
        assert ledger.spent(0) == ledger.spent(2) == []
        assert ledger.spent(1) == [ONE]
        assert ledger.rounds(1) == 1
        assert ledger.last(1, RUN) == (2, 3)
        ledger.charge([0, 1, 2], RUN, 2, 4, ONE)


@pytest.mark.parametrize(
    "arguments",
    [
        ([], RUN, 1, 1, ONE),
        ([1, 1], RUN, 1, 1, ONE),
        ([-1], RUN, 1, 1, ONE),
        ([True], RUN, 1, 1, ONE),
        ([1.0], RUN, 1, 1, ONE),
        (["../x"], RUN, 1, 1, ONE),
        ([1], "", 1, 1, ONE),
        ([1], RUN, 0, 1, ONE),
        ([1], RUN, 1, 0, ONE),
        ([1], RUN, 1, 2**31, ONE),
        ([1], RUN, 1, True, ONE),
        ([1], RUN, 1, 1, GaussianRelease(1.0, 1.0, 0)),
    ],
    ids=str,
)
def test_a_charge_that_makes_no_sense_is_an_error(opened: Callable, arguments: tuple) -> None:
    with opened() as ledger:
        with pytest.raises(ValueError, match=r"user|run|stage|round|count") as problem:
            ledger.charge(*arguments)
        assert not isinstance(problem.value, Refusal)
        assert ledger.spent(1) == []


@pytest.mark.parametrize("seed", range(3))
def test_counts_equal_what_was_charged(opened: Callable, seed: int) -> None:
    """Random rounds, some of them stale, against plain bookkeeping."""
    draws = np.random.default_rng(seed)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    refused = 0
    for _ in range(25):
        users = [int(user) for user in draws.permutation(6)[: draws.integers(1, 4)]]
        place = int(draws.integers(1, 3)), int(draws.integers(1, 12))
        which = int(draws.integers(3))
        stale = any(place <= last[user] for user in users)
        with opened() as ledger, pytest.raises(Refusal, match="stale") if stale else nullcontext():
            ledger.charge(users, RUN, *place, RELEASES[which])
        refused += stale
        for user in [] if stale else users:
            counts[user, which] += 1
            taken[user, place[0]] += 1
            last[user] = place
    assert 0 < refused < 25
    with opened() as ledger:
        for user in range(6):
            spent = {RELEASES.index(replace(r, count=1)): r.count for r in ledger.spent(user)}
            assert spent == {which: n for (u, which), n in counts.items() if u == user}
            assert [ledger.taken(user, RUN, s) for s in (1, 2)] == [taken[user, 1], taken[user, 2]]
            assert ledger.rounds(user) == taken[user, 1] + taken[user, 2]
            assert ledger.last(user, RUN) == last[user]


# In the state of a node -------------------------------------------------------------------------------


def test_the_state_is_small_for_many_users() -> None:
    """2,500 users, 30 rounds of two stages, 3 distinct releases: under 60 kB with every message."""
    state, users = RecordDict(), list(range(0, 25_000, 10))
    start = time.process_time()
    for round_ in range(1, 31):
        stage = 1 if round_ <= 10 else 2
        StateLedger(state).charge(users, RUN, stage, round_, RELEASES[round_ % 3])
    elapsed = time.process_time() - start
    size = recorddict_to_proto(state).ByteSize()
    assert size < 60_000
    ledger = StateLedger(state)
    assert [release.count for release in ledger.spent(24_990)] == [10, 10, 10]
    assert (ledger.taken(0, RUN, 1), ledger.taken(0, RUN, 2), ledger.last(0, RUN)) == (10, 20, (2, 30))
    assert elapsed < 3  # measured: 0.07 s


def test_numbers_beyond_a_byte_are_kept() -> None:
    state = RecordDict()
    StateLedger(state).charge([70_000], RUN, 1, 2**31 - 1, GaussianRelease(1.0, 1.0, 10**12))
    ledger = StateLedger(state)
    assert ledger.spent(70_000) == [GaussianRelease(1.0, 1.0, 10**12)]
    assert ledger.last(70_000, RUN) == (1, 2**31 - 1)


def test_a_state_belongs_to_one_run() -> None:
    state = RecordDict()
    StateLedger(state).charge([1], RUN, 1, 1, ONE)
    assert StateLedger(state).taken(1, "other", 1) == 0
    assert StateLedger(state).last(1, "other") == (0, 0)
    with pytest.raises(ValueError, match="belongs to run"):
        StateLedger(state).charge([1], "other", 1, 1, ONE)
    assert StateLedger(state).spent(1) == [ONE]


def test_the_rest_of_the_state_is_left_alone() -> None:
    state = RecordDict({"mine": ConfigRecord({"x": 1})})
    StateLedger(state)
    assert set(state) == {"mine"}
    StateLedger(state).charge([1], RUN, 1, 1, ONE)
    assert set(state) == {"mine", COUNTS, NAMES}


def damage_arrays(**change: np.ndarray) -> Callable[[RecordDict], None]:
    def change_state(state: RecordDict) -> None:
        state[COUNTS] = pack({**unpack(state.array_records[COUNTS]), **change})

    return change_state


def damage_names(**change: object) -> Callable[[RecordDict], None]:
    return lambda state: state.config_records[NAMES].update(change)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop(COUNTS),
        lambda state: state.pop(NAMES),
        lambda state: state.update({COUNTS: ConfigRecord({})}),
        lambda state: state.update({COUNTS: ArrayRecord()}),
        damage_arrays(counts=np.zeros((1, 1))),
        damage_arrays(counts=np.array([[1], [-1]])),
        damage_arrays(taken=np.zeros(2)),
        damage_arrays(last=np.zeros((2, 3))),
        damage_arrays(users=np.array([1, 1])),
        damage_arrays(users=np.array([1, 2, 3])),
        damage_names(releases=[]),
        damage_names(releases=["{}"]),
        damage_names(releases=['{"type":"gaussian","noise-multiplier":NaN,"sampling-rate":1.0,"count":1}']),
        damage_names(releases="x"),
        damage_names(stages=[]),
    ],
)
def test_a_damaged_state_is_refused(damage: Callable[[RecordDict], object]) -> None:
    state = RecordDict()
    StateLedger(state).charge([1, 2], RUN, 1, 1, ONE)
    damage(state)
    with pytest.raises(ValueError, match="ledger in this node's state"):
        StateLedger(state)


# In files ---------------------------------------------------------------------------------------------


def test_runs_add_up_and_each_has_its_own_rounds(tmp_path: Path) -> None:
    for run in ("run-a", "run-b"):
        with FileLedger(tmp_path) as ledger:
            assert ledger.last(4, run) == (0, 0)
            ledger.charge([4], run, 1, 1, ONE)
            ledger.charge([4], run, 2, 1, ONE)
    with FileLedger(tmp_path) as ledger:
        assert ledger.spent(4) == [GaussianRelease(1.25, 1.0, 4)]
        assert (ledger.rounds(4), ledger.taken(4, "run-a", 2)) == (4, 1)
        with pytest.raises(Refusal, match="stale"):
            ledger.charge([4], "run-a", 2, 1, ONE)


def test_each_user_has_a_ledger_file(tmp_path: Path) -> None:
    with FileLedger(tmp_path) as ledger:
        ledger.charge([12, 7], RUN, 1, 1, ONE)
    for user in (7, 12):
        with Ledger.open(tmp_path / f"user-{user}.jsonl") as file:
            assert file.entries == (Entry(RUN, 1, 1, ONE),)


def test_a_charge_is_on_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1]
    )
    with FileLedger(tmp_path) as ledger:
        ledger.charge([7, 12], RUN, 1, 1, ONE)
        assert {str(tmp_path / f"user-{user}.jsonl") for user in (7, 12)} <= set(synced)


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_ledger, "MOST_OPEN", 5)
    with FileLedger(tmp_path) as ledger:
        before = len(os.listdir("/proc/self/fd"))
        for round_ in (1, 2):
            ledger.charge(list(range(20)), RUN, 1, round_, ONE)
        assert [ledger.rounds(user) for user in range(22)] == [2] * 20 + [0] * 2
        assert len(os.listdir("/proc/self/fd")) == before + 5
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_corrupt_file_is_refused_and_kept(tmp_path: Path) -> None:
    with FileLedger(tmp_path) as ledger:
        ledger.charge([1, 2], RUN, 1, 1, ONE)
    path = tmp_path / "user-2.jsonl"
    changed = path.read_bytes().replace(b'"count":1', b'"count":0')
    path.write_bytes(changed)
    with FileLedger(tmp_path) as ledger:
        for attempt in (
            lambda: ledger.spent(2),
            lambda: ledger.last(2, RUN),
            lambda: ledger.charge([1, 2], RUN, 1, 2, ONE),
        ):
            with pytest.raises(ConfigError, match=r"user-2\.jsonl: line 1: .*restore"):
                attempt()
        assert ledger.spent(1) == [ONE]
    assert path.read_bytes() == changed


def test_a_full_disk_releases_nothing_and_may_charge_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if "user-2" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with FileLedger(tmp_path) as ledger:
        with pytest.raises(ConfigError, match="No space left"):
            ledger.charge([1, 2, 3], RUN, 1, 1, ONE)
        assert [ledger.rounds(user) for user in (1, 2, 3)] == [1, 0, 0]
        monkeypatch.undo()
        ledger.charge([1, 2, 3], RUN, 1, 2, ONE)
    with FileLedger(tmp_path) as ledger:
        assert [ledger.rounds(user) for user in (1, 2, 3)] == [2, 1, 1]


def test_two_messages_take_turns(tmp_path: Path) -> None:
    """What one saw as spent is still so when it charges: the other waits, or is refused."""
    code = f"""
import sys
from pina_flwr.privacy.user_ledger import FileLedger
from pina_flwr.privacy.releases import GaussianRelease
with FileLedger({str(tmp_path)!r}) as ledger:
    print(ledger.rounds(1), flush=True)
    sys.stdin.readline()
    ledger.charge([1], "other", 1, 1, GaussianRelease(1.25, 1.0, 1))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            FileLedger(tmp_path, wait=0.05)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        with FileLedger(tmp_path, wait=20) as ledger:
            assert ledger.spent(1) == [ONE]
    finally:
        process.kill()
        process.communicate()


def test_a_forgotten_ledger_frees_its_folder(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        FileLedger(tmp_path, wait=0)
    del ledger
    with FileLedger(tmp_path, wait=0) as ledger:
        pass
    with pytest.raises(ValueError, match="closed"):
        ledger.spent(1)


def test_a_folder_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/no")):
        with pytest.raises(ConfigError, match="must be a folder"):
            FileLedger(folder)


def test_charging_after_300_rounds_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Ledger.open(tmp_path / "user-1.jsonl") as file:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for round_ in range(1, 301):
            file.append(Entry(RUN, 1, round_, ONE))
    times = []
    for round_ in range(301, 306):
        start = time.perf_counter()
        with FileLedger(tmp_path) as ledger:
            assert ledger.spent(1) == [GaussianRelease(1.25, 1.0, round_ - 1)]
            ledger.charge([1], RUN, 1, round_, ONE)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # measured: 5 ms, with fsync
