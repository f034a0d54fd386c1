"""FedAvg (McMahan et al. 2017) with user-level central DP through the secure sum (McMahan et al. 2018).

each round:  the cohort trains the one model; W ← W + (Σ clip(Δ_k) + noise) / (q·|K|)
"""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import TRAITS


class FedAvg(ClusteredTraining):
    """One model for all: the clustered round with C = 1, no stage 1 and no rescaling."""

    traits = TRAITS["fedavg"]
