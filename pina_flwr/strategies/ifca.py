"""IFCA (Ghosh et al. 2020, arXiv 2006.04088), and IFCA under local DP, a row of the paper's Table 1.

    random cluster models; each round:  users pick a model by loss and train it;
                                        each model moves by the mean update of the users that picked it

**Without privacy** (ε = ∞): the upper line of the paper's Fig. 3a. Updates go through the secure sum, all
slots side by side. With `secure-sum = "trusted"` nothing is clipped, as its authors define it; SecAgg+ needs
vectors of bounded norm, so there updates are clipped to S.

**With privacy**: IFCA's server is told each user's update and cluster, so they leave each user under noise of
its own. A user puts its update into the slot it picked, the one-hot count beside it, the joint norm at most
S, and adds N(0, (z·S)²) to every number of the vector. The server adds these up, divides by the public q·|K|,
and divides each slot by the noisy share of users that picked it. One vector is 1/(2z²)-zCDP (Bun and Steinke
2016) for zero-out neighbours, whoever reads it; a user's releases compose, at most `participation-cap` of
them, and nothing is amplified: neither the server nor recipients of the models see more, so ε is the same
towards both, and z is the least with which it is met.

The paper says that its IFCA row has local DP for the ε of the others, and not how it counts or which z that
takes. With the z that central DP needs (`noise-multiplier`) a run states the larger ε that this has.
"""

from __future__ import annotations

from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import TRAITS


class IFCA(ClusteredTraining):
    """Random start, choice by loss, each cluster's own mean."""

    traits = TRAITS["ifca"]
