"""The node configuration is read strictly: a misspelt option would protect nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from pina_flwr.config import ConfigError
from pina_flwr.node_config import NodeConfig, parse_node_config

PLACE = {"partition-id": 1, "num-partitions": "3"}


def test_reads_what_there_is() -> None:
    assert parse_node_config(PLACE) == NodeConfig(1, 3)
    full = PLACE | {"policy": "~/p.toml", "ledger": "~/ledgers"}
    home = Path.home()
    assert parse_node_config(full) == NodeConfig(1, 3, str(home / "p.toml"), str(home / "ledgers"))
    keys = PLACE | {"key-registry": "~/keys.toml", "signing-keys": "/keys"}
    assert parse_node_config(keys) == NodeConfig(1, 3, "", "", str(home / "keys.toml"), "/keys")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "must give partition-id and num-partitions"),
        ({"partition-id": 0, "num-partitions": "x"}, "must give partition-id and num-partitions"),
        ({"partition-id": 3, "num-partitions": 3}, "partition-id = 3: must be in 0..2"),
        (PLACE | {"polcy": "p.toml", "ledger": "l"}, "unknown option 'polcy'; did you mean 'policy'?"),
        (PLACE | {"colour": "red"}, "unknown option 'colour'; must be some of"),
        (PLACE | {"ledger": "~no-such-user/l"}, "ledger = '~no-such-user/l': "),
        (PLACE | {"policy": "", "ledger": "l"}, "policy = '': must be a path"),
        (PLACE | {"policy": "p.toml", "ledger": " "}, "ledger = ' ': must be a path"),
        (PLACE | {"policy": "p.toml"}, "policy without ledger"),
        (PLACE | {"key-registry": "k.toml"}, "key-registry and signing-keys: each needs the other"),
        (PLACE | {"signing-keys": "keys"}, "key-registry and signing-keys: each needs the other"),
        (PLACE | {"key-registry": "k.toml", "signing-keys": ""}, "signing-keys = '': must be a path"),
        (PLACE | {"key-regist": "k.toml"}, "unknown option 'key-regist'; did you mean 'key-registry'?"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_node_config(values)
    assert str(raised.value).startswith("node-config: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
