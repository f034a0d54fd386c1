"""Who takes part in a round: Poisson sampling, up to the participation cap."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pina_flwr.config import RunConfig
from pina_flwr.privacy.cohort import largest_cohort, participation_cap
from pina_flwr.privacy.noise import open_entropy
from pina_flwr.seeding import generator


class Sampler:
    """Draws the cohorts of a run.

    Amplification holds against those who can't tell who was sampled, so a private run draws from the
    operating system's entropy; a run's seed is no secret.
    """

    def __init__(self, config: RunConfig, users: int):
        self.config, self.users = config, users
        self._taken: dict[int, Counter[int]] = {1: Counter(), 2: Counter()}

    def cohort(self, stage: int, server_round: int) -> list[int]:
        """The users of a round of `stage`; each joins with probability q until it did as often as it may.

        Empty if more were drawn than the encoding has room for, which has a chance of 1e-9.
        """
        drawn = np.flatnonzero(self._draws(server_round) < self.config.sampling_rate).tolist()
        if not self.config.private:
            return drawn
        taken, cap = self._taken[stage], participation_cap(self.config, stage)
        cohort = [user for user in drawn if taken[user] < cap]
        if len(cohort) > largest_cohort(self.users, self.config.sampling_rate):
            return []
        taken.update(cohort)
        return cohort

    def _draws(self, server_round: int) -> np.ndarray:
        source = (
            open_entropy(self.config).generator("cohort", server_round)
            if self.config.private
            else generator(self.config.seed, "cohort", server_round)
        )
        return source.random(self.users)
