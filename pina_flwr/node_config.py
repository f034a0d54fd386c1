"""The node configuration: what the owner of a node sets, typed and validated once, at the border."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from pina_flwr.config import ConfigError, expanded

KEYS = ("partition-id", "num-partitions", "policy", "ledger", "key-registry", "signing-keys")
PATHS = KEYS[2:]


@dataclass(frozen=True)
class NodeConfig:
    """Which users a node hosts, and how it guards them.

    partition, partitions: every `partitions`-th user from `partition` on. policy: file with what the owner
    allows at most; empty in a simulation. ledger: folder that counts what users release, over runs; empty to
    count within the run. key_registry: file with the public keys of all users, for signed secure sums.
    signing_keys: folder with the private keys of this node's users.
    """

    partition: int
    partitions: int
    policy: str = ""
    ledger: str = ""
    key_registry: str = ""
    signing_keys: str = ""


def parse_node_config(values: Mapping[str, object]) -> NodeConfig:
    """Read Flower's node config. What is not known is refused: a misspelt `policy` would protect nobody.

    Raises:
        ConfigError: an option is unknown, missing or wrong.
    """
    for key in values:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; must be some of {', '.join(KEYS)}"
            raise ConfigError(f"node-config: unknown option {key!r}{hint}")
    try:
        partition, partitions = int(str(values["partition-id"])), int(str(values["num-partitions"]))
    except (KeyError, ValueError):
        raise ConfigError("node-config: must give partition-id and num-partitions as whole numbers") from None
    if not 0 <= partition < partitions:
        raise ConfigError(f"node-config: partition-id = {partition}: must be in 0..{partitions - 1}")
    paths = {key.replace("-", "_"): _path(key, str(values[key])) for key in PATHS if key in values}
    if "policy" in paths and "ledger" not in paths:
        raise ConfigError("node-config: policy without ledger: a budget over runs needs a folder to count in")
    if ("key_registry" in paths) != ("signing_keys" in paths):
        raise ConfigError("node-config: key-registry and signing-keys: each needs the other")
    return NodeConfig(partition, partitions, **paths)


def _path(key: str, text: str) -> str:
    if not text.strip():
        raise ConfigError(f"node-config: {key} = {text!r}: must be a path; leave it out for none")
    return str(expanded(f"node-config: {key}", text))
