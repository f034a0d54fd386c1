"""The algorithms, one a file: all share the round of `clustered.py` and differ where their papers differ."""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.strategies.fedavg import FedAvg
from pina_flwr.strategies.fednova import FedNova
from pina_flwr.strategies.fedprox import FedProx
from pina_flwr.strategies.ifca import IFCA
from pina_flwr.strategies.in_the_clear import Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from pina_flwr.strategies.oracle import Oracle
from pina_flwr.strategies.pina import Pina, PinaRandomInit
from pina_flwr.strategies.plugin import load_strategy

STRATEGIES: dict[str, type[ClusteredTraining]] = {
    "pina": Pina,
    "pina-ri": PinaRandomInit,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "ifca": IFCA,
    "oracle": Oracle,
    "fedmedian": FedMedian,
    "fedtrimmedavg": FedTrimmedAvg,
    "krum": Krum,
    "multikrum": MultiKrum,
    "bulyan": Bulyan,
}


def strategy_class(name: str) -> type[ClusteredTraining]:
    """The class of the run option `strategy`: a built-in one, or the user's own by its dotted path.

    Raises:
        ConfigError: a path that leads to no strategy.
    """
    return STRATEGIES.get(name) or load_strategy(name)
