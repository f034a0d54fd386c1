"""FedProx (Li et al. 2020, arXiv 1812.06127) with user-level central DP through the secure sum.

each round:  the cohort trains the one model on its local loss + μ/2·‖w - W‖², W being the round's model;
             W ← W + (Σ clip(Δ_k) + noise) / (q·|K|)

Only the local objective (`training/local.py`, option `mu`) differs from FedAvg; μ = 0 is FedAvg. The paper
lets users do different amounts of local work: `local-epochs-least`. Its guarantee is FedAvg's: whatever a
user's objective, what leaves it is clipped to S and noised.
"""

from __future__ import annotations

from pina_flwr.strategies.fedavg import FedAvg
from pina_flwr.traits import TRAITS


class FedProx(FedAvg):
    """FedAvg with a proximal term in the users' objective."""

    traits = TRAITS["fedprox"]
