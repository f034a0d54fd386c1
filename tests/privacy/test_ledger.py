"""The ledger under everything that can happen to a file and to its writer."""

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pina_flwr.config import ConfigError
from pina_flwr.privacy import ledger as module
from pina_flwr.privacy.ledger import Entry, Ledger, merged
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease, ZcdpRelease

ONE = GaussianRelease(1.25, 1.0, 1)
OTHER = GaussianRelease(0.1 + 0.2, 0.5, 2)
ENTRIES = [
    Entry("run-1", 1, 1, ONE),
    Entry("run-1", 2, 1, OTHER, "dropped: 3 of 9 “answered”\n"),
    Entry("run-2", 1, 1, UnprotectedRelease("no noise", 1)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with `ENTRIES`, in a folder of its own."""
    path = tmp_path / "a" / "b" / "ledger.jsonl"
    with Ledger.open(path) as ledger:
        for entry in ENTRIES:
            ledger.append(entry)
    return path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A ledger of two short lines, for what is tried at each of its bytes."""
    path = tmp_path / "short.jsonl"
    with Ledger.open(path) as ledger:
        for round_ in (1, 2):
            ledger.append(Entry("r", 1, round_, ZcdpRelease(0.5, 1)))
    return path


def entries_of(path: Path) -> list[Entry]:
    with Ledger.open(path) as ledger:
        return list(ledger.entries)


def test_entries_come_back_in_order(path: Path) -> None:
    assert entries_of(path) == ENTRIES
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == len(ENTRIES)


def test_releases_of_one_run_and_of_all(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.append(Entry("run-2", 1, 2, GaussianRelease(1.25, 1.0, 4)))
        assert ledger.releases("run-1") == [ONE, OTHER]
        assert ledger.releases() == [GaussianRelease(1.25, 1.0, 5), OTHER, UnprotectedRelease("no noise", 1)]
        assert ledger.releases("run-3") == []


def test_merging_adds_up_what_differs_in_count_only() -> None:
    releases: list[Release] = [ONE, UnprotectedRelease("a", 1), GaussianRelease(1.25, 0.5, 1), ONE]
    assert merged(releases) == [GaussianRelease(1.25, 1.0, 2), *releases[1:3]]


def test_a_new_ledger_is_on_disk_with_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(module, "sync_folder", synced.append)
    with Ledger.open(tmp_path / "a" / "b" / "x.jsonl") as ledger:
        assert ledger.entries == ()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_an_entry_is_fsynced_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.fsync
    with Ledger.open(path) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), sizes.append(os.fstat(fd).st_size)))
        ledger.append(ENTRIES[0])
        assert sizes == [path.stat().st_size]


# Entries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"run": ""},
        {"run": "a\nb"},
        {"run": "x" * 201},
        {"run": 1},
        {"stage": 0},
        {"stage": True},
        {"stage": 2**31},
        {"round": 0},
        {"round": 1.0},
        {"round": -1},
        {"note": None},
        {"note": "x" * 2001},
    ],
    ids=str,
)
def test_entries_are_strict(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Entry(**{"run": "r", "stage": 1, "round": 1, "release": ONE, "note": "", **change})  # type: ignore[arg-type]


def test_an_entry_needs_a_release() -> None:
    with pytest.raises(TypeError, match="release"):
        Entry("r", 1, 1, {"type": "gaussian"})  # type: ignore[arg-type]


def test_an_entry_that_json_can_not_hold_is_refused_and_not_written(path: Path) -> None:
    strange = GaussianRelease(1.0, 1.0, 1)
    object.__setattr__(strange, "noise_multiplier", float("nan"))
    before = path.read_bytes()
    with Ledger.open(path) as ledger, pytest.raises(ValueError, match="noise-multiplier = nan"):
        ledger.append(Entry("r", 1, 1, strange))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "payload", [b"1", b"{}", b'{"run":"r","stage":1,"round":1,"release":{},"note":""}', b"\xff"]
)
def test_a_sealed_line_that_is_no_entry_is_refused(path: Path, payload: bytes) -> None:
    path.write_bytes(module._seal(payload, module.BEFORE_ALL)[0] + b"\n")
    with pytest.raises(ConfigError, match="line 1: "):
        Ledger.open(path)


# Corruption -------------------------------------------------------------------------------------------


def assert_refused(path: Path, data: bytes, line: int | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"line \d+: .*restore") as problem:
        Ledger.open(path)
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)
    assert line is None or f"line {line}: " in str(problem.value)
    assert path.read_bytes() == data
    assert not Path(f"{path}.torn").exists()


def test_every_changed_byte_is_found(short: Path) -> None:
    """Whichever byte becomes another, or a newline."""
    data = short.read_bytes()
    for place, byte in enumerate(data):
        for other in {byte ^ 1 << place % 8, ord("\n")} - {byte}:
            changed = bytearray(data)
            changed[place] = other
            short.write_bytes(changed)
            with pytest.raises(ConfigError, match="restore"):
                Ledger.open(short)
            assert short.read_bytes() == changed


def test_every_lost_byte_is_found(short: Path) -> None:
    """But for the last newline: without it the last entry is whole, and counts."""
    data = short.read_bytes()
    for place in range(len(data) - 1):
        short.write_bytes(data[:place] + data[place + 1 :])
        with pytest.raises(ConfigError, match="restore"):
            Ledger.open(short)


def test_lines_lost_doubled_or_swapped_are_found(path: Path) -> None:
    a, b, c = path.read_bytes().splitlines(keepends=True)
    assert_refused(path, b + c, line=1)
    assert_refused(path, a + c, line=2)
    assert_refused(path, a + a + b + c, line=2)
    assert_refused(path, a + b + c + c, line=4)
    assert_refused(path, a + b + b + c, line=3)
    assert_refused(path, b + a + c, line=1)
    assert_refused(path, a + c + b, line=2)
    assert_refused(path, a + b"\n" + b + c, line=2)
    assert_refused(path, a + b + c + b"\n", line=4)
    assert_refused(path, a + b + c + b"garbage\n", line=4)


def test_a_line_of_another_ledger_is_found(path: Path, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "other.jsonl") as other:
        other.append(ENTRIES[1])
        other.append(ENTRIES[1])
    a, _, c = path.read_bytes().splitlines(keepends=True)
    foreign = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)[1]
    assert_refused(path, a + foreign + c, line=2)


def test_the_last_newline_flipped_does_not_pass_for_a_torn_line(path: Path) -> None:
    """Its entry was acknowledged, so that it may not be set aside."""
    data = path.read_bytes()
    assert_refused(path, data[:-1] + b"\x0b", line=3)
    assert_refused(path, data[:-1] + b"\0" * 40, line=3)
    assert_refused(path, data[:-1] + data, line=3)


def test_whole_lines_missing_at_the_end_can_not_be_found(path: Path) -> None:
    """The limit that the module's docstring states."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert entries_of(path) == ENTRIES[:2]


# A writer that dies -----------------------------------------------------------------------------------


def test_a_line_cut_short_anywhere_is_set_aside(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, kept, torn = short.read_bytes(), entries_of(short)[:1], Path(f"{short}.torn")
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1, 3):
        short.write_bytes(whole[:cut])
        torn.unlink(missing_ok=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert entries_of(short) == kept
        assert short.read_bytes() == whole[:first]
        assert torn.read_bytes() == whole[first:cut] + b"\n"
        (record,) = caplog.records
        assert "line 2 was cut short" in record.getMessage()
        assert str(torn) in record.getMessage()


def test_after_a_torn_line_the_ledger_goes_on(path: Path) -> None:
    whole = path.read_bytes()
    for _ in range(2):
        path.write_bytes(whole + b'{"entry":{"run"')
        with Ledger.open(path) as ledger:
            ledger.append(ENTRIES[0])
        assert entries_of(path) == [*ENTRIES, ENTRIES[0]]
    assert Path(f"{path}.torn").read_bytes() == b'{"entry":{"run"\n' * 2


def test_zeros_that_a_power_cut_left_are_set_aside(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert entries_of(path) == ENTRIES


def test_a_whole_last_line_without_its_newline_counts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING):
        assert entries_of(path) == ENTRIES
    assert "line 3 lacked its newline" in caplog.text
    assert path.read_bytes() == whole
    assert not Path(f"{path}.torn").exists()


@contextmanager
def child(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code`; ended when the context is left."""
    head = "import os, signal, sys\nfrom pina_flwr.privacy.ledger import Entry, Ledger\n"
    head += "from pina_flwr.privacy.releases import GaussianRelease\nONE = GaussianRelease(1.25, 1.0, 1)\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, args)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killed_while_it_writes_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = """
    ledger, real = Ledger.open(sys.argv[1]), os.write
    ledger.append(Entry("r", 1, 1, ONE))
    def write(descriptor, data):
        real(descriptor, data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    os.write = write
    ledger.append(Entry("r", 1, 2, ONE))
    """
    with child(code, path) as process:
        assert process.wait(20) == -signal.SIGKILL
    assert not path.read_bytes().endswith(b"\n")
    assert entries_of(path) == [Entry("r", 1, 1, ONE)]
    assert Path(f"{path}.torn").exists()


def test_killed_at_any_time_it_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = """
    with Ledger.open(sys.argv[1]) as ledger:
        for round_ in range(1, 1_000_000):
            ledger.append(Entry("r", 1, round_, ONE))
            print(round_, flush=True)
    """
    with child(code, path) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        acknowledged = 20 + len(process.stdout.read().split("\n")) - 1
    rounds = [entry.round for entry in entries_of(path)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert acknowledged <= len(rounds) <= acknowledged + 1


# Two writers ------------------------------------------------------------------------------------------


def test_another_process_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = """
    ledger = Ledger.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.read()
    """
    with child(code, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            Ledger.open(path)
    assert entries_of(path) == []


def test_a_ledger_is_open_once_in_a_process_too(path: Path) -> None:
    with Ledger.open(path):
        for _ in range(2):
            with pytest.raises(ConfigError, match="in use"):
                Ledger.open(path)
    ledger = Ledger.open(path)
    del ledger
    assert entries_of(path) == ENTRIES


def test_a_refused_ledger_is_not_left_locked(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(b"x" + data)
    with pytest.raises(ConfigError, match="line 1"):
        Ledger.open(path)
    path.write_bytes(data)
    assert entries_of(path) == ENTRIES


def test_a_file_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="file system with locks"):
        Ledger.open(path)


@pytest.mark.parametrize("what", ["grown", "cut", "removed", "replaced"])
def test_what_others_do_to_an_open_ledger_is_noticed(path: Path, what: str) -> None:
    with Ledger.open(path) as ledger:
        data = path.read_bytes()
        if what in ("removed", "replaced"):
            path.unlink()
        if what != "removed":
            path.write_bytes({"grown": data + b"x", "cut": data[:-1], "replaced": data}[what])
        after = path.read_bytes() if path.exists() else None
        with pytest.raises(ConfigError, match="changed or removed"):
            ledger.append(ENTRIES[0])
        with pytest.raises(ValueError, match="closed"):
            ledger.append(ENTRIES[0])
    assert (path.read_bytes() if path.exists() else None) == after


# A disk that fails ------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_file_valid(path: Path) -> None:
    """A limit on the file's size makes the kernel write a part of the line and then refuse the rest."""
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger.open(path) as ledger:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"can't be written \(File too large\)"):
                ledger.append(ENTRIES[0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert list(ledger.entries) == ENTRIES
        ledger.append(ENTRIES[0])
    assert entries_of(path) == [*ENTRIES, ENTRIES[0]]


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_is_undone(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, problem: BaseException
) -> None:
    before, real = path.read_bytes(), getattr(os, call)
    calls: list[int] = []

    def fail(descriptor: int, *args: object) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            if call == "write":
                real(descriptor, b'{"ent')
            raise problem
        real(descriptor, *args)

    with Ledger.open(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            expected = ConfigError if isinstance(problem, OSError) else KeyboardInterrupt
            with pytest.raises(expected) as raised:
                ledger.append(ENTRIES[0])
        assert isinstance(problem, KeyboardInterrupt) or "No space left" in str(raised.value)
        assert path.read_bytes() == before
        ledger.append(ENTRIES[1])
    assert entries_of(path) == [*ENTRIES, ENTRIES[1]]


def test_when_a_failed_write_can_not_be_undone_nothing_more_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Ledger.open(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(ConfigError, match="Input/output error"):
                ledger.append(ENTRIES[0])
        with pytest.raises(ValueError, match="closed"):
            ledger.append(ENTRIES[0])
    assert entries_of(path) == [*ENTRIES, ENTRIES[0]]  # counted, though nothing was released: safe


def test_a_place_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    places = [tmp_path / "file" / "x.jsonl", tmp_path / "folder", tmp_path / "pipe", Path("/proc/no/x.jsonl")]
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        places.append(tmp_path / "closed" / "x.jsonl")
    for place in places:
        with pytest.raises(ConfigError, match=r"must be a (ledger|regular) file") as problem:
            Ledger.open(place)
        assert str(place) in str(problem.value)
        assert "\n" not in str(problem.value)


def test_a_read_only_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ConfigError, match="Read-only file system"):
        Ledger.open(path)


def test_a_closed_ledger_takes_nothing(path: Path) -> None:
    with Ledger.open(path) as ledger:
        pass
    with pytest.raises(ValueError, match="closed"):
        ledger.append(ENTRIES[0])
    ledger.close()
    assert entries_of(path) == ENTRIES


def test_opening_is_fast(tmp_path: Path) -> None:
    path, before = tmp_path / "x.jsonl", module.BEFORE_ALL
    with path.open("wb") as file:
        for round_ in range(1, 301):
            line, before = module._seal(module.dumps(Entry("r", 1, round_, ONE).to_dict()).encode(), before)
            file.write(line + b"\n")
    start = time.process_time()
    assert len(entries_of(path)) == 300
    assert time.process_time() - start < 0.2  # measured: 4 ms
