"""What a sum costs as the cohort grows, with as many neighbours as its size and dropout ask for.

A client's work and messages grow with its neighbours k, and k with the logarithm of the cohort (Bell et al.
2020). Up to a few hundred members k grows faster, as so few have little more than their dropouts to spare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.secure_sum.measured_grid import Load
from benchmarks.secure_sum.ours import OurRound
from pina_flwr.secure_sum.parameters import choose
from pina_flwr.secure_sum.session import Rules
from pina_flwr.secure_sum.wire import PHASES, kind_of

COHORTS = (10, 30, 100, 300, 1000)
BEYOND = (10_000, 100_000, 1_000_000)  # for these k is only computed
DROPOUT = 0.1
SIZE, BITS = 10_000, 20


@dataclass(frozen=True)
class Phase:
    """Of one client: seconds of work, and bytes of the messages that it sends and gets, all headers in."""

    seconds: float
    bytes_up: float
    bytes_down: float


@dataclass(frozen=True)
class Cohort:
    """A whole sum of `clients`, a tenth of whom vanish after sharing keys. phases: means per client asked."""

    clients: int
    neighbours: int
    threshold: int
    phases: Mapping[str, Phase]
    server_seconds: float

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(largest: int) -> Iterator[Cohort]:
    """One cohort after the other, up to a size."""
    rules = Rules(DROPOUT)
    vector = np.random.default_rng(0).integers(0, 1 << BITS, SIZE, dtype=np.uint32)
    for clients in (n for n in COHORTS if n <= largest):
        done = OurRound(vector, BITS, clients, rules, int(DROPOUT * clients))
        chosen, loads = rules.parameters(clients), done.grid.loads
        phases = {phase: _mean(loads[kind_of(phase)]) for phase in PHASES if kind_of(phase) in loads}
        yield Cohort(clients, chosen.neighbours, chosen.threshold, phases, done.server_seconds)


def neighbours_beyond() -> dict[int, int]:
    """k of cohorts that are too large to run here."""
    return {clients: choose(clients, DROPOUT, 0.0).neighbours for clients in BEYOND}


def _mean(load: Load) -> Phase:
    return Phase(load.seconds / load.asked, load.bytes_up / load.asked, load.bytes_down / load.asked)
