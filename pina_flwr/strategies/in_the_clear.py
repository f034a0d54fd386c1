"""Flower's own strategies that need every user's update: no secure sum, no central DP.

each round:  the cohort trains the one model; each user sends its update as it is, neither clipped nor noised;
             W ← W + what Flower's strategy makes of the updates

They withstand users who send nonsense; what they protect users from is nothing: the server sees each update,
and no ε holds. A run has to say so itself: `secure-sum = "none"`, `epsilon = inf`.

The aggregation is Flower's `aggregate_train`, over one message a user; all users weigh the same.

- FedMedian, FedTrimmedAvg: coordinate-wise median and trimmed mean (Yin et al. 2018, arXiv 1803.01498)
- Krum, MultiKrum: the update, or the mean of the n - f - 2, with the nearest neighbours (Blanchard et al.
  2017, arXiv 1703.02757)
- Bulyan: a trimmed mean around the median of the n - 2f that Krum likes best (El Mhamdi et al. 2018, arXiv
  1802.07927)
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from pina_flwr.config import check_updates
from pina_flwr.messages import TRAIN, request
from pina_flwr.strategies.fedavg import FedAvg
from pina_flwr.traits import TRAITS


class InTheClear(FedAvg):
    """One model for all, moved by what a strategy of Flower makes of the users' own updates.

    Raises:
        ConfigError: an expected cohort has fewer users than the strategy needs.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.malicious = self.config.malicious_users
        self.fewest = self.traits.fewest_updates(self.malicious)
        check_updates(self.config, len(self.hosts))

    @abstractmethod
    def flower(self, updates: int) -> flower.Strategy:
        """Flower's strategy, for so many updates."""

    def combine(self, rows: np.ndarray) -> np.ndarray | None:
        """What Flower's strategy makes of the updates [n, d]: float64 [d]."""
        if len(rows) < self.fewest:
            self._note(dropped=f"{len(rows)} updates arrived, {self.fewest} are needed")
            return None
        gc.freeze()  # Flower collects garbage at every update of Bulyan: 0.2 s each without this
        try:
            arrays, _ = self.flower(len(rows)).aggregate_train(self._outcome.round, as_replies(rows))
        finally:
            gc.unfreeze()
        assert arrays is not None  # there are enough
        self._note(noise_std=0.0)
        (array,) = arrays.values()
        made: np.ndarray = array.numpy()
        return made


def as_replies(rows: np.ndarray) -> Sequence[Message]:
    """A reply of each user, as Flower's strategies expect them; in float64, as Krum subtracts squares."""
    return [
        request(
            RecordDict(
                {
                    "arrays": ArrayRecord({"update": Array(row)}),
                    "metrics": MetricRecord({"num-examples": 1}),
                }
            ),
            number,
            TRAIN,
            0,
        )
        for number, row in enumerate(rows.astype(np.float64), start=1)
    ]


class FedMedian(InTheClear):
    """The coordinate-wise median."""

    traits = TRAITS["fedmedian"]

    def flower(self, updates: int) -> flower.Strategy:
        """Without parameters."""
        return flower.FedMedian()


class FedTrimmedAvg(InTheClear):
    """The coordinate-wise mean without `trim-share` of the updates at either end."""

    traits = TRAITS["fedtrimmedavg"]

    def flower(self, updates: int) -> flower.Strategy:
        """With its β."""
        return flower.FedTrimmedAvg(beta=self.config.trim_share)


class Krum(InTheClear):
    """The one update whose n - f - 2 nearest neighbours are nearest."""

    traits = TRAITS["krum"]

    def flower(self, updates: int) -> flower.Strategy:
        """With its f."""
        return flower.Krum(num_malicious_nodes=self.malicious)


class MultiKrum(Krum):
    """The mean of the n - f - 2 updates that Krum likes best."""

    traits = TRAITS["multikrum"]

    def flower(self, updates: int) -> flower.Strategy:
        """With its f, and as many updates as may be kept."""
        kept = updates - self.malicious - 2
        return flower.MultiKrum(num_malicious_nodes=self.malicious, num_nodes_to_select=kept)


class Bulyan(InTheClear):
    """A trimmed mean around the median of the n - 2f updates that Krum likes best."""

    traits = TRAITS["bulyan"]

    def flower(self, updates: int) -> flower.Strategy:
        """With its f."""
        return flower.Bulyan(num_malicious_nodes=self.malicious)
