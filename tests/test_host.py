"""A node before anything is loaded. What is refused is tested where nodes are opened (test_client.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny

from pina_flwr import host
from pina_flwr.client import open_node
from pina_flwr.config import RunConfig
from pina_flwr.host import open_host


class TestUsers:
    @pytest.mark.parametrize("partition", [0, 2])
    def test_are_those_of_the_node(self, partition: int) -> None:
        place = {"partition-id": partition, "num-partitions": 3}
        assert open_host(tiny(), place, "1").users == open_node(tiny(), place, "1").users

    def test_are_not_looked_up_if_the_configuration_says_how_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(config: RunConfig) -> int:
            return 7

        monkeypatch.setattr(host, "_count", load)
        place = {"partition-id": 1, "num-partitions": 2}
        assert list(open_host(tiny(num_users=14), place, "1").users) == list(range(1, 14, 2))
        natural = tiny(num_users=0, user_column="writer", rotations=1, clusters=1, dataset="somewhere")
        assert list(open_host(natural, place, "1").users) == [1, 3, 5]


def test_once_lies_beside_the_ledger(tmp_path: Path) -> None:
    place: dict[str, object] = {"partition-id": 0, "num-partitions": 1}
    assert open_host(tiny(diagnostics=False), place, "1").once is None
    once = open_host(tiny(diagnostics=False), place | {"ledger": str(tmp_path)}, "1").once
    assert once is not None
    assert once.folder == tmp_path / "secure-sums"
