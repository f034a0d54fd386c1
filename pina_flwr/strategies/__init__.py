"""The algorithms, one a file: all share the round of `clustered.py` and differ where their papers differ."""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.strategies.fedavg import FedAvg
from pina_flwr.strategies.ifca import IFCA
from pina_flwr.strategies.oracle import Oracle
from pina_flwr.strategies.pina import Pina, PinaRandomInit

STRATEGIES: dict[str, type[ClusteredTraining]] = {
    "pina": Pina,
    "pina-ri": PinaRandomInit,
    "fedavg": FedAvg,
    "ifca": IFCA,
    "oracle": Oracle,
}
