"""PINA (arXiv 2604.20596, Algorithm 1), and PINA with random initialisation in place of stage 1 (Fig. 3).

    stage 1, T_in rounds:  the cohort trains B of a rank-1 LoRA; private summaries of ΔB are clustered;
                           centroid i becomes B of cluster model i
    stage 2, T_tr rounds:  each user picks the model with the least loss (Eq. 6) and trains it; the update,
                           clipped to S (Eq. 7), goes through the secure sum with its share of noise; the
                           server rescales each cluster's aggregate (Eq. 8, 9 or another rule) and applies it

Stage 1 is in `pina_flwr/stage1`, the rules in `pina_flwr/normality.py`, a user's side in
`pina_flwr/client.py`.
"""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import TRAITS


class Pina(ClusteredTraining):
    """PINA."""

    traits = TRAITS["pina"]

    def choose(self, round_: int) -> str:
        """By loss; in the first `self-assign-rounds` by the centroid nearest to the user's noiseless ΔB.

        Both are local: the choice leaves a user only inside its protected vector.
        """
        by_centroid = round_ <= self.config.self_assign_rounds and bool(self._first().arrays)
        return "nearest" if by_centroid else "loss"


class PinaRandomInit(ClusteredTraining):
    """PINA + RI: cluster models start in random directions; the rest is PINA."""

    traits = TRAITS["pina-ri"]
