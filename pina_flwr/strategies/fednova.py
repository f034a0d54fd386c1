"""FedNova (Wang et al. 2020, arXiv 2007.07481), for plain SGD, with user-level central DP.

each round:  the cohort trains the one model, user k taking τ_k SGD steps;
             W ← W + (Σ clip(τ_eff / τ_k · Δ_k) + noise) / (q·|K|)

Averaging plain updates favours users who take many steps; averaging mean steps does not. τ_eff is a public
constant, the expected number of steps (`training/local_work.py`); the paper's weighted mean of the τ_k would
have to be released. With τ_k = τ_eff for all it is FedAvg; and so it is where S clips all updates, of which
only the directions are left then.

**Privacy.** That of FedAvg, to the digit: a user scales before it clips, so that what it adds to the secure
sum has norm at most S whatever its data and its τ_k; τ_k, which tells how many images it has, never leaves
it; all users weigh the same; and the server divides by the public q·|K|.
"""

from __future__ import annotations

from pina_flwr.strategies.fedavg import FedAvg
from pina_flwr.traits import TRAITS


class FedNova(FedAvg):
    """FedAvg of updates divided by the local steps that they took."""

    traits = TRAITS["fednova"]
