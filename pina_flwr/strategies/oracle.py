"""The ceiling: clustered training when the true groups are known. Simulation only, it can't be deployed.

each round:  users train the model of their true group; each model moves by its group's noisy mean update
"""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import TRAITS


class Oracle(ClusteredTraining):
    """Models start alike and users are told their cluster."""

    traits = TRAITS["oracle"]

    def choose(self, round_: int) -> str:
        """By the true group."""
        return "group"
