"""A node before anything is loaded: which users it hosts, what its owner allows, whose keys it holds.

A deployed node is a new process for every message, and most messages of a secure sum need no more than this:
neither data nor backbone, nor the libraries that read them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.node_config import NodeConfig, parse_node_config
from pina_flwr.privacy.policy import Policy, load_policy
from pina_flwr.secure_sum.once import Once
from pina_flwr.secure_sum.registry import Identity, load_identity

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Host:
    """A node as its owner and the run configure it. run: Flower's id. policy: None in a simulation."""

    config: RunConfig
    where: NodeConfig
    run: str
    policy: Policy | None

    @property
    def users(self) -> range:
        """The users that this node hosts. How many there are in all may be known to the data only."""
        return range(
            self.where.partition, self.config.num_users or _count(self.config), self.where.partitions
        )

    @property
    def identity(self) -> Identity | None:
        """Keys that sign, for signed sums.

        Raises:
            ConfigError: they can't be used.
        """
        return load_keys(self.where, self.users) if self.where.key_registry else None

    @property
    def once(self) -> Once | None:
        """Lasting memory of what was answered, beside the ledger, which nodes may share."""
        folder = Path(self.where.ledger) / "secure-sums" / f"{self.where.partition}-{self.where.partitions}"
        return Once(folder) if self.where.ledger else None


def open_host(config: RunConfig, node_config: Mapping[str, object], run: str) -> Host:
    """The node that a message is for.

    Raises:
        ConfigError: the node's configuration is not usable, or does not go with the run's.
    """
    where = parse_node_config(node_config)
    policy = _policy(where.policy) if where.policy else None
    if policy or where.ledger or where.key_registry:
        _check_run(config, policy)
    if config.secagg_signed != bool(where.key_registry):
        raise ConfigError(
            f"secagg-signed = {str(config.secagg_signed).lower()}: node-config must have key-registry and "
            "signing-keys if and only if it is true"
        )
    return Host(config, where, run, policy)


def load_keys(where: NodeConfig, users: Sequence[int]) -> Identity:
    """The keys of a node's users; what is wrong with them is for the node's owner alone.

    Raises:
        ConfigError: they can't be used.
    """
    try:
        return load_identity(where.key_registry, where.signing_keys, users)
    except ValueError as mistake:
        log.error("error: %s", mistake)
        raise ConfigError("node-config: a node's keys can't be used; its log says why") from None


def _count(config: RunConfig) -> int:
    from pina_flwr.data.users import load_users  # here, since it loads torch and the data

    return len(load_users(config))


def _policy(path: str) -> Policy:
    """The policy; what is wrong with it is for the node's owner alone."""
    try:
        return load_policy(path)
    except ConfigError as mistake:
        log.error("error: %s", mistake)
        raise ConfigError("node-config: a node's policy can't be used; its log says why") from None


def _check_run(config: RunConfig, policy: Policy | None) -> None:
    """Refuse a run whose options would void what the node's owner asks for; they come from the server."""
    rules = [
        (
            not config.diagnostics,
            "diagnostics = true: a node with policy, ledger or key-registry tells nothing about its users",
        ),
        (
            not config.reproducible_noise or policy is None,
            "reproducible-noise = true: a node with a policy keeps its noise secret",
        ),
        (
            policy is None or config.secure_sum in policy.secure_sums,
            f"secure-sum = {config.secure_sum!r}: a node's policy does not accept it",
        ),
        (
            policy is None or not config.local_updates or "none" in policy.secure_sums,
            f"strategy = {config.strategy!r}: with it vectors leave one by one; a policy must have 'none' in "
            "secure-sums for that",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)
