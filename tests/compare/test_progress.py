"""What a comparison says while it runs."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
from made_up_cells import comparison_of, leave, rounds_of
from rich.console import Console

from pina_flwr.compare import progress
from pina_flwr.compare.cells import State, Status
from pina_flwr.compare.progress import Board, clock, expected, time_left

DONE = Status(State.DONE)


@pytest.fixture
def cells(tmp_path):
    """FedAvg and PINA in turn."""
    return comparison_of(tmp_path).cells


@pytest.fixture
def now(monkeypatch):
    """A clock that tests set."""
    watch = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: watch.seconds))
    return watch


def console(terminal=False):
    return Console(file=io.StringIO(), width=120, force_terminal=terminal)


class TestTimeLeft:
    def test_a_cell_takes_as_long_as_others_of_its_row(self):
        known = {"a": [10.0, 20.0], "b": [60.0]}
        assert expected("a", known) == 15.0
        assert expected("c", known) == 30.0  # the mean of all
        assert expected("a", {}) is None

    def test_it_adds_up(self):
        assert time_left(["a", "a", "b"], {"a": [10.0], "b": [60.0]}) == 80.0
        assert time_left(["a"], {}) is None
        assert time_left([], {}) == 0.0

    def test_as_a_clock(self):
        assert [clock(seconds) for seconds in (0.4, 61, 3723)] == ["0:00:00", "0:01:01", "1:02:03"]


def test_a_line_for_the_start_and_the_end_of_a_cell(cells, now, tmp_path):
    out = console()
    with Board(out, cells[:3], {}) as board:
        board.begin(cells[0], tmp_path)
        now.seconds = 10.0
        board.end(cells[0], DONE, 0.512)
        board.begin(cells[1], tmp_path)
        now.seconds = 12.0
        board.end(cells[1], Status(State.FAILED, "no luck"), None)
        board.begin(cells[2], tmp_path)
        now.seconds = 32.0
        board.end(cells[2], DONE, None)
    assert out.file.getvalue().splitlines() == [
        "cell 1 of 3: FedAvg, ε = 2, seed 1",
        "  done, 0:00:10, accuracy 0.512; 0:00:20 left",
        "cell 2 of 3: PINA, ε = 2, seed 1",
        "  failed: no luck, 0:00:02; 0:00:10 left",  # by the one that is done
        "cell 3 of 3: FedAvg, ε = 8, seed 1",
        "  done, 0:00:20",
    ]


def test_what_ran_before_tells_how_long_it_will_take(cells, now, tmp_path):
    out = console()
    with Board(out, cells[:2], {"PINA": [60.0], "FedAvg": [20.0]}) as board:
        board.begin(cells[0], tmp_path)
        now.seconds = 40.0
        board.end(cells[0], DONE, None)
    assert out.file.getvalue().splitlines()[1] == "  done, 0:00:40; 0:01:00 left"


def test_an_interrupted_cell_says_nothing_of_how_long_one_takes(cells, now, tmp_path):
    out = console()
    with Board(out, cells[:2], {}) as board:
        board.begin(cells[0], tmp_path)
        now.seconds = 40.0
        board.end(cells[0], Status(State.UNFINISHED), None)
    assert out.file.getvalue().splitlines()[1] == "  unfinished, 0:00:40"


def test_bars_in_a_terminal_follow_the_rounds(cells, tmp_path):
    out = console(terminal=True)
    with Board(out, cells[:2], {"PINA": [60.0]}) as board:
        board.begin(cells[0], tmp_path)
        leave(tmp_path, None, rounds_of([0.5, None], [0.25, None]))
        wait_for(board, out, "round 2/2, accuracy 0.250")
        wait_for(
            board, out, "0:02:00 left"
        )  # no round tells its time, so two cells as long as the one before


def wait_for(board, out, text):
    """Go on until the bars, which are drawn ten times a second, say so."""
    deadline = time.monotonic() + 10
    while text not in out.file.getvalue():
        assert time.monotonic() < deadline, out.file.getvalue()
        board.tick()
        time.sleep(0.02)
