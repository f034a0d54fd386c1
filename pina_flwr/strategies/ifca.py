"""IFCA (Ghosh et al. 2020) without privacy: the upper line of the paper's Fig. 3a.

    random cluster models; each round:  users pick a model by loss and train it;
                                        each model moves by the mean update of the users that picked it
No clipping, no noise: ε = ∞.
"""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining


class IFCA(ClusteredTraining):
    """Random start, choice by loss, each cluster's own mean."""
