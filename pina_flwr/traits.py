"""What server and clients must know alike about a strategy, worked out by each from the strategy's name.

The built-in strategies are in `TRAITS`: what only counts privacy need not load their classes, and torch with
them. A strategy of somebody else, named by a dotted path, has them as the class attribute `traits`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

STARTS = ("stage1", "random", "shared")
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)  # package.module:Class


@dataclass(frozen=True)
class Traits:
    """Facts about a strategy.

    Attributes:
        start: of the cluster models: what stage 1 finds, random directions, or all alike.
        one_model: there is one model for all users (C = 1), so users choose none. It starts "shared".
        rule: the rule for aggregates that its definition fixes; empty: the run's `normality`.
        knows_groups: users are told their true group and don't choose.
        proximal: the local objective has the proximal term of FedProx.
        normalised: a user's update is divided by its number of local steps, as in FedNova.
        local_noise: in a private run each user sends an update with noise of its own, without a secure sum.
        in_the_clear: each user sends its update as it is; there is neither a secure sum nor central DP.
        per_malicious: updates needed for each of the `malicious-users`, and three more; 0: any will do.

    Raises:
        ValueError: they contradict each other.
    """

    start: str = "random"
    one_model: bool = False
    rule: str = ""
    knows_groups: bool = False
    proximal: bool = False
    normalised: bool = False
    local_noise: bool = False
    in_the_clear: bool = False
    per_malicious: int = 0

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(f"start = {self.start!r}: must be one of {', '.join(STARTS)}")
        if self.one_model and (self.start != "shared" or self.knows_groups):
            raise ValueError("one_model: must have start = 'shared' and no knows_groups")
        if self.local_noise and self.start == "stage1":
            raise ValueError("local_noise: goes with no secure sums, of which start = 'stage1' may have some")
        if self.in_the_clear and (not self.one_model or self.local_noise or self.rule != "none"):
            raise ValueError("in_the_clear: must have one_model, rule = 'none' and no local_noise")
        if self.per_malicious < 0 or (self.per_malicious and not self.in_the_clear):
            raise ValueError("per_malicious: must be at least 0, and 0 without in_the_clear")

    def fewest_updates(self, malicious: int) -> int:
        """Updates that a round needs if `malicious` users may send anything."""
        return self.per_malicious * malicious + 3 if self.per_malicious else 1


IN_THE_CLEAR = Traits(start="shared", one_model=True, rule="none", in_the_clear=True)
TRAITS: dict[str, Traits] = {
    "pina": Traits(start="stage1"),
    "pina-ri": Traits(),
    "fedavg": Traits(start="shared", one_model=True, rule="none"),
    "fedprox": Traits(start="shared", one_model=True, rule="none", proximal=True),
    "fednova": Traits(start="shared", one_model=True, rule="none", normalised=True),
    "ifca": Traits(rule="count", local_noise=True),
    "oracle": Traits(start="shared", rule="count", knows_groups=True),
    "fedmedian": IN_THE_CLEAR,
    "fedtrimmedavg": IN_THE_CLEAR,
    "krum": replace(IN_THE_CLEAR, per_malicious=2),  # 2f + 2 < n, Blanchard et al.
    "multikrum": replace(IN_THE_CLEAR, per_malicious=2),
    "bulyan": replace(IN_THE_CLEAR, per_malicious=4),  # n ≥ 4f + 3, El Mhamdi et al.
}
"""Of the built-in strategies."""


@lru_cache(maxsize=64)
def traits_of(strategy: str) -> Traits:
    """The traits of a strategy, by its name or by the dotted path of its class, which is then imported.

    Raises:
        ConfigError: there is no such strategy.
    """
    if strategy in TRAITS:
        return TRAITS[strategy]
    if not PATH.fullmatch(strategy):
        from pina_flwr.config import ConfigError  # here, since configurations are built on this module

        raise ConfigError(
            f"strategy = {strategy!r}: must be one of {', '.join(TRAITS)}, or a class of your own such as "
            "my_package.my_module:MyStrategy"
        )
    from pina_flwr.strategies.plugin import load_strategy  # here, since it loads torch

    return load_strategy(strategy).traits
