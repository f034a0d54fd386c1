import multiprocessing
import os
from pathlib import Path

import pytest

from pina_flwr.secure_sum.once import DIGITS, Once
from pina_flwr.secure_sum.session import Session
from pina_flwr.secure_sum.wire import MASK, UNMASK


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_each_round_is_claimed_once(tmp_path: Path) -> None:
    once = Once(tmp_path / "a" / "b")
    assert once.claim(Session("7", 3), MASK)
    assert not once.claim(Session("7", 3), MASK)
    assert not once.claim(Session("7", 2), MASK)
    assert once.claim(Session("7", 4), MASK)


def test_phases_and_runs_apart(tmp_path: Path) -> None:
    once = Once(tmp_path)
    assert once.claim(Session("7", 3), MASK)
    assert once.claim(Session("7", 3), UNMASK)
    assert once.claim(Session("8", 3), MASK)
    assert once.claim(Session("../8", 3), MASK)  # names of runs are no paths
    assert len(list(tmp_path.iterdir())) == 4


def test_it_outlives_the_process(tmp_path: Path) -> None:
    assert Once(tmp_path).claim(Session("7", 3), MASK)
    assert not Once(tmp_path).claim(Session("7", 3), MASK)


def test_a_write_cut_short_claims_no_less(tmp_path: Path) -> None:
    """A number is written over the one before, digit for digit: never is there an empty file in between."""
    assert Once(tmp_path).claim(Session("7", 3), MASK)
    assert len(file_in(tmp_path).read_bytes()) == DIGITS
    assert Once(tmp_path).claim(Session("7", 2**63 - 1), MASK)
    assert len(file_in(tmp_path).read_bytes()) == DIGITS


@pytest.mark.parametrize("data", [b"7", b"x" * DIGITS, b"1" * (DIGITS + 1), b"-" + b"1" * (DIGITS - 1)])
def test_a_broken_file_lets_nothing_through(tmp_path: Path, data: bytes) -> None:
    assert Once(tmp_path).claim(Session("7", 3), MASK)
    file_in(tmp_path).write_bytes(data)
    with pytest.raises(ValueError, match="must hold a round of 20 digits"):
        Once(tmp_path).claim(Session("7", 4), MASK)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"exists|directory"):
        Once(tmp_path / "file").claim(Session("7", 4), MASK)


def _claims(folder: Path, results: "multiprocessing.Queue[int]") -> None:
    results.put(sum(Once(folder).claim(Session("7", round_), MASK) for round_ in range(1, 51)))


def test_two_processes_never_both(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_claims, args=(tmp_path, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(got) <= 50
    assert int(file_in(tmp_path).read_bytes()) == 50


def test_a_write_that_the_disk_cuts_short_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, write = Once(tmp_path), os.pwrite
    assert once.claim(Session("7", 11), MASK)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:19], at))
    with pytest.raises(OSError, match="in part only"):
        once.claim(Session("7", 29), MASK)
