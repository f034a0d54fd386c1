"""Flower's SecAgg+ and ours on the same numbers, by turns, and ours against the bare cipher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.secure_sum.flower_baseline import FlowerRound
from benchmarks.secure_sum.keystream import bare
from benchmarks.secure_sum.ours import OurRound
from benchmarks.secure_sum.timing import Taken, in_turns
from pina_flwr.secure_sum.parameters import Parameters
from pina_flwr.secure_sum.session import Rules

WIDTHS = (20, 32)  # b: 20 is the app's default, 32 what Flower has
TURNS = 5  # of clients for each of the server, which takes much longer


@dataclass(frozen=True)
class Setting:
    """size: d. neighbours: k. dropped: clients that share keys and then vanish. repeats: of the server."""

    size: int
    neighbours: int
    clients: int
    dropped: int
    repeats: int


@dataclass(frozen=True)
class Comparison:
    """Medians: of one client's masked vector, of the server's unmasking, each of Flower and of ours by b.

    Ratios take our slower width, and leave out what Flower does to floats unless they say so.
    """

    setting: Setting
    client_flower: Taken
    server_flower: Taken
    client_ours: Mapping[int, float]
    server_ours: Mapping[int, float]
    keystream: float

    def figures(self) -> dict[str, Any]:
        """All figures by name, seconds and ratios, for JSON."""
        client, server = max(self.client_ours.values()), max(self.server_ours.values())
        return {
            "client_speedup_vs_flower": self.client_flower.integers / client,
            "server_speedup_vs_flower": self.server_flower.integers / server,
            "client_over_keystream": client / self.keystream,
            "client_speedup_vs_flower_with_floats": self.client_flower.total / client,
            "server_speedup_vs_flower_with_floats": self.server_flower.total / server,
            "client_seconds_flower": self.client_flower.integers,
            "client_seconds_flower_with_floats": self.client_flower.total,
            "server_seconds_flower": self.server_flower.integers,
            "server_seconds_flower_with_floats": self.server_flower.total,
            "client_seconds": {str(bits): seconds for bits, seconds in self.client_ours.items()},
            "server_seconds": {str(bits): seconds for bits, seconds in self.server_ours.items()},
            "keystream_seconds": self.keystream,
            "setting": asdict(self.setting),
        }


def balanced(neighbours: int) -> Parameters:
    """The lowest threshold for so many neighbours."""
    return Parameters(neighbours, neighbours // 2 + 1)


def compare(setting: Setting) -> Comparison:
    """Set up a round of each, then time their parts."""
    vector = np.random.default_rng(0).uniform(-1, 1, setting.size).astype(np.float32)
    k, n, dropped = setting.neighbours, setting.clients, setting.dropped
    flower = FlowerRound(vector, n, k, dropped)
    numbers = flower.quantised().astype(np.uint32)
    rules = Rules(dropped / n, 0.0, k, balanced(k).threshold)
    ours = {b: OurRound(numbers & np.uint32(2**b - 1), b, n, rules, dropped) for b in WIDTHS}
    clients = {str(b): ours[b].masked_vector for b in WIDTHS} | {
        "flower": flower.masked_vector,
        "keystream": lambda: bare(numbers, k + 1),
    }
    servers = {str(b): ours[b].unmask for b in WIDTHS} | {"flower": flower.unmask}
    client = in_turns(clients, TURNS * setting.repeats)
    server = in_turns(servers, setting.repeats)
    return Comparison(
        setting,
        client["flower"],
        server["flower"],
        {b: client[str(b)].total for b in WIDTHS},
        {b: server[str(b)].total for b in WIDTHS},
        client["keystream"].total,
    )
