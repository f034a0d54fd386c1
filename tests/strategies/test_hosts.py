from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from support import LocalGrid, lost, node_id, tiny

from pina_flwr.config import ConfigError
from pina_flwr.messages import CONFIG
from pina_flwr.strategies import hosts
from pina_flwr.strategies.hosts import Hosts, discover


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "POLL_SECONDS", 0.001)


def place(partition: int, partitions: int) -> dict[str, Any]:
    return {"partition-id": partition, "num-partitions": partitions}


def mistake(grid: LocalGrid, timeout: float = 30) -> str:
    with pytest.raises(ConfigError) as raised:
        discover(grid, timeout)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_by_node() -> None:
    found = Hosts({0: 70, 1: 80, 2: 70, 3: 80}, 10)
    assert len(found) == 4
    assert found.by_node([3, 0, 2]) == {80: [3], 70: [0, 2]}
    assert found.by_node([]) == {}


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_every_user_is_found_once(nodes: int) -> None:
    found = discover(LocalGrid(tiny(), nodes), 30)
    assert found.node_of == {user: node_id(user % nodes) for user in range(14)}
    assert found.num_classes == 10


def test_more_nodes_than_users() -> None:
    found = discover(LocalGrid(tiny(num_users=3), 5), 30)
    assert found.node_of == {user: node_id(user) for user in range(3)}


def test_waits_for_nodes_that_register_late() -> None:
    grid = LocalGrid(tiny(), 4, appears={0: 3, 1: 12, 2: 5, 3: 9})
    assert len(discover(grid, 30)) == 14
    assert grid.looks >= 12


def test_gives_up_if_no_node_appears() -> None:
    grid = LocalGrid(tiny(), 1, appears={0: 10**9})
    assert mistake(grid, timeout=0.05) == "round-timeout: only 0 of 1 nodes appeared in time"


def test_gives_up_if_a_node_stays_away() -> None:
    grid = LocalGrid(tiny(), 3, appears={1: 10**9})
    assert mistake(grid, timeout=0.5) == "round-timeout: only 2 of 3 nodes appeared in time"


def test_a_node_whose_data_are_not_there() -> None:
    message = mistake(LocalGrid(tiny(dataset="/no/such/folder"), 2))
    assert message.startswith("dataset = '/no/such/folder': ")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_node_that_does_not_know_its_place(wrong: int) -> None:
    message = mistake(LocalGrid(tiny(), 2, node_configs={wrong: {"partition-id": 0}}))
    assert message == "node-config: must give partition-id and num-partitions as whole numbers"


@pytest.mark.parametrize(
    "places",
    [
        [(0, 3), (1, 3), (1, 3)],
        [(0, 2), (1, 2), (1, 2)],
        [(1, 3), (2, 3), (2, 3)],
        [(0, 1), (0, 3), (1, 3)],
    ],
    ids=["one missing", "one twice", "first missing", "they disagree"],
)
def test_users_must_be_hosted_once_each(places: list[tuple[int, int]]) -> None:
    grid = LocalGrid(tiny(), 3, node_configs={i: place(*p) for i, p in enumerate(places)})
    assert (
        mistake(grid) == "node-config: nodes must host users 0, 1, 2, … once each; check every partition-id"
    )


def test_a_node_that_fails() -> None:
    def fail(request: Message, reply: Message) -> list[Message]:
        return [Message(Error(1, "no\nClientApp"), reply_to=request)]

    assert mistake(LocalGrid(tiny(), 3, intercept=fail)).endswith(": failed at start (no ClientApp)")


def test_a_node_that_does_not_answer() -> None:
    assert (
        mistake(LocalGrid(tiny(), 3, intercept=lost)) == "round-timeout: 1 of 1 nodes did not answer in time"
    )

    def one_lost(request: Message, reply: Message) -> list[Message]:
        return [] if request.metadata.dst_node_id == node_id(1) else [reply]

    grid = LocalGrid(tiny(), 3, intercept=one_lost)
    assert mistake(grid) == "round-timeout: 1 of 3 nodes did not answer in time"


def test_a_node_that_sees_another_mistake() -> None:
    def complain(request: Message, reply: Message) -> list[Message]:
        answer = RecordDict({CONFIG: ConfigRecord({"error": "device = 'cuda': not available here"})})
        return [Message(answer, reply_to=request)] if request.metadata.dst_node_id == node_id(1) else [reply]

    assert mistake(LocalGrid(tiny(), 2, intercept=complain)) == "device = 'cuda': not available here"
