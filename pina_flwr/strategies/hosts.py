"""Which node hosts which user, found out before training starts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from pina_flwr.config import ConfigError
from pina_flwr.messages import CONFIG, WHO, plain, request, why

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Hosts:
    """node_of: the node that hosts each user; users are 0..|K|-1. num_classes: of the users' labels."""

    node_of: dict[int, int]
    num_classes: int

    def __len__(self) -> int:
        return len(self.node_of)

    def by_node(self, users: Iterable[int]) -> dict[int, list[int]]:
        """The nodes that host these users, and which of them each hosts."""
        found: dict[int, list[int]] = {}
        for user in users:
            found.setdefault(self.node_of[user], []).append(user)
        return found


def discover(grid: Grid, timeout: float) -> Hosts:
    """Wait until all nodes are there, and ask each which users it hosts.

    Nodes register while the ServerApp already runs. The first one that answers says how many there are.

    Raises:
        ConfigError: a node found the configuration wrong, or nodes do not appear or answer in time.
    """
    deadline = time.monotonic() + timeout
    first = _wait_for(grid, 1, deadline)[:1]
    expected = int(_ask(grid, first, deadline)[first[0]]["partitions"])  # type: ignore[arg-type]
    nodes = _wait_for(grid, expected, deadline)
    node_of: dict[int, int] = {}
    answers = _ask(grid, nodes, deadline)
    hosted = 0
    for node, answer in answers.items():
        users = answer["users"]
        assert isinstance(users, list)
        node_of |= {int(user): node for user in users}
        hosted += len(users)
    if sorted(node_of) != list(range(hosted)) or not node_of:
        raise ConfigError("node-config: nodes must host users 0, 1, 2, … once each; check every partition-id")
    return Hosts(node_of, int(answers[nodes[0]]["classes"]))  # type: ignore[arg-type]


def _wait_for(grid: Grid, count: int, deadline: float) -> list[int]:
    while len(nodes := sorted(grid.get_node_ids())) < count:
        if time.monotonic() > deadline:
            raise ConfigError(f"round-timeout: only {len(nodes)} of {count} nodes appeared in time")
        time.sleep(POLL_SECONDS)
    return nodes


def _ask(grid: Grid, nodes: Sequence[int], deadline: float) -> dict[int, ConfigRecord]:
    questions = [request(RecordDict({CONFIG: ConfigRecord({})}), node, WHO, 0) for node in nodes]
    answers: dict[int, ConfigRecord] = {}
    for reply in grid.send_and_receive(questions, timeout=max(1.0, deadline - time.monotonic())):
        if reply.has_error():
            raise ConfigError(f"node {reply.metadata.src_node_id}: failed at start ({why(reply)})")
        answer = reply.content.config_records[CONFIG]
        if "error" in answer:
            raise ConfigError(plain(str(answer["error"])))
        answers[reply.metadata.src_node_id] = answer
    if missing := set(nodes) - set(answers):
        raise ConfigError(f"round-timeout: {len(missing)} of {len(nodes)} nodes did not answer in time")
    return answers
