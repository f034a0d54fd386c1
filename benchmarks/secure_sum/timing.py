"""Times that can be compared on a noisy machine: of the processor, in turns in one run, the median of each.

What is measured keeps one core busy and waits for nothing, so on an idle machine processor time is what a
clock on the wall would show; on a busy one it leaves out the turns of others.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time as now
from typing import Any


@dataclass(frozen=True)
class Taken:
    """Seconds of some work: all of it, and the part of it on floats, which not every protocol has."""

    total: float
    floats: float = 0.0

    @property
    def integers(self) -> float:
        """What is left for masks, keys, shares and messages."""
        return self.total - self.floats


@dataclass
class Stopwatch:
    """Adds up the seconds spent in what it wraps."""

    seconds: float = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, on the clock."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            start = now()
            try:
                return function(*args, **options)
            finally:
                self.seconds += now() - start

        return timed


@contextmanager
def replaced(module: Any, **functions: Any) -> Iterator[None]:
    """For as long as it lasts, functions of a module are others."""
    originals = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


@contextmanager
def watching(module: Any, *names: str) -> Iterator[Stopwatch]:
    """For as long as it lasts, adds up the time that functions of a module take."""
    watch = Stopwatch()
    with replaced(module, **{name: watch.wrap(getattr(module, name)) for name in names}):
        yield watch


def in_turns(tasks: Mapping[str, Callable[[], Taken]], repeats: int) -> dict[str, Taken]:
    """What each task takes, all of them once in every turn, so that a busy machine slows all alike.

    A task does its work once, and what it needs first off the clock. The median is that of the whole.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            taken[name].append(task())
    return {name: _median(times) for name, times in taken.items()}


def _median(times: list[Taken]) -> Taken:
    whole = statistics.median(taken.total for taken in times)
    return Taken(whole, whole - statistics.median(taken.integers for taken in times))
