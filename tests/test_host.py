"""A node before anything is loaded. What is refused is tested where nodes are opened (test_client.py)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support import tiny

from pina_flwr import host
from pina_flwr.client import open_node
from pina_flwr.config import ConfigError, RunConfig
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


@pytest.mark.parametrize("secure_sum", ["secagg+", "trusted"])
def test_who_signs_is_in_no_simulation(tmp_path: Path, secure_sum: str) -> None:
    """The run's configuration comes from the server's side; it can't turn off what signatures are for."""
    place = {"partition-id": 0, "num-partitions": 2, "key-registry": "r.toml", "signing-keys": "keys"}
    with pytest.raises(ConfigError, match=r"^diagnostics = true: "):
        open_host(tiny(secure_sum="secagg+", secagg_signed=True), place, "1")
    with pytest.raises(ConfigError, match=r"^secagg-signed = "):
        open_host(tiny(secure_sum=secure_sum, diagnostics=False), place, "1")
    with pytest.raises(ConfigError, match=r"^secagg-signed = true: signs what secure-sum = 'trusted'"):
        tiny(secure_sum="trusted", secagg_signed=True)


@pytest.mark.parametrize("sums", ["'secagg+'", "'secagg+', 'trusted'"])
def test_a_policy_must_accept_that_vectors_leave_one_by_one(tmp_path: Path, sums: str) -> None:
    path = tmp_path / "policy.toml"
    place = {"partition-id": 0, "num-partitions": 1, "policy": str(path), "ledger": str(tmp_path / "l")}
    local = tiny(strategy="ifca", epsilon=8.0, diagnostics=False, secure_sum="secagg+")
    clear = tiny(strategy="krum", epsilon=math.inf, diagnostics=False, secure_sum="none")
    path.write_text(f"max-epsilon = 8.0\ndelta = 1e-5\nsecure-sums = [{sums}]\n")
    with pytest.raises(ConfigError, match=r"^strategy = 'ifca': with it vectors leave one by one"):
        open_host(local, place, "1")
    with pytest.raises(ConfigError, match=r"^secure-sum = 'none': a node's policy does not accept it"):
        open_host(clear, place, "1")
    path.write_text(f"max-epsilon = 8.0\ndelta = 1e-5\nsecure-sums = [{sums}, 'none']\n")
    assert open_host(local, place, "1").policy is not None


def test_once_lies_beside_the_ledger(tmp_path: Path) -> None:
    place: dict[str, object] = {"partition-id": 0, "num-partitions": 1}
    assert open_host(tiny(diagnostics=False), place, "1").once is None
    once = open_host(tiny(diagnostics=False), place | {"ledger": str(tmp_path)}, "1").once
    assert once is not None
    assert once.folder.is_relative_to(tmp_path / "secure-sums")
    shared = {"ledger": str(tmp_path)}
    places = ({"partition-id": i, "num-partitions": 2} | shared for i in range(2))
    found = [open_host(tiny(diagnostics=False), place, "1").once for place in places]
    assert found[0] != found[1]  # nodes may share a folder: a user has a ledger of its own there
