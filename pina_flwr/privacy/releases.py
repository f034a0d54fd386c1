"""Mechanisms as data: what a run lets out about a user, in the form that the accountant composes.

Adjacency is add/remove of one user's whole data set (zero-out: the user's contribution becomes zero)
everywhere in this package. A release's sensitivity is 1 in units of the clip norm, so its noise multiplier z
is σ / S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GaussianRelease:
    """`count` releases of a Gaussian mechanism of l2 sensitivity 1, each on a Poisson sample of the users.

    Attributes:
        noise_multiplier: z, standard deviation of the noise over the sensitivity; finite and above 0.
        sampling_rate: q in (0, 1], probability with which a user is in each sample; 1 is no amplification.
        count: how often it is released; at least 0.

    Raises:
        ValueError: a field is out of its bounds.
        TypeError: `count` is not an int.
    """

    noise_multiplier: float
    sampling_rate: float
    count: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ValueError(f"noise_multiplier = {self.noise_multiplier}: must be finite and above 0")
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate = {self.sampling_rate}: must be above 0 and at most 1")
        _check_count(self.count)


@dataclass(frozen=True)
class UnprotectedRelease:
    """`count` releases that no noise hides, so that no finite ε holds once `count` is above 0.

    Attributes:
        reason: why, as a sentence for the report.
        count: how often it is released; at least 0.

    Raises:
        ValueError: `count` is negative.
        TypeError: `count` is not an int.
    """

    reason: str
    count: int

    def __post_init__(self) -> None:
        _check_count(self.count)


Release = GaussianRelease | UnprotectedRelease


def _check_count(count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count = {count!r}: must be an int")
    if count < 0:
        raise ValueError(f"count = {count}: must be at least 0")
