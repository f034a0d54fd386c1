"""From a budget to the noise: the smallest noise multiplier whose ε stays within the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pina_flwr.config import ConfigError
from pina_flwr.privacy.accountant import epsilon as spent
from pina_flwr.privacy.releases import Release

LARGEST_Z = 2.0**30
SMALLEST_Z = 2.0**-20


def calibrate(
    releases_of: Callable[[float], Sequence[Release]], epsilon: float, delta: float, tolerance: float = 1e-3
) -> float:
    """Smallest noise multiplier z, to a relative `tolerance`, with ε of `releases_of(z)` at most `epsilon`.

    On the safe side: the z returned was itself checked. Bisection on a log scale; ε must fall as z grows.

    Args:
        releases_of: everything released when the noise multiplier sought is z.
        epsilon: the target ε, above 0 and finite.
        delta: δ in (0, 1).
        tolerance: how much larger than the smallest z the result may be, relative to it.

    Returns:
        z, at least `SMALLEST_Z` (which is returned if even less noise would do).

    Raises:
        ConfigError: no z up to `LARGEST_Z` keeps ε within the target.
        ValueError: `epsilon`, `delta` or `tolerance` out of bounds.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon = {epsilon}: must be finite and above 0")
    if not 1e-9 <= tolerance < math.inf:
        raise ValueError(f"tolerance = {tolerance}: must be finite and at least 1e-9")

    def enough(z: float) -> bool:
        return spent(releases_of(z), delta) <= epsilon

    high = 1.0
    while not enough(high):
        high *= 2
        if high > LARGEST_Z:
            raise ConfigError(
                f"epsilon = {epsilon:g}: out of reach at delta = {delta:g} with any noise multiplier up to "
                f"{LARGEST_Z:g}; raise epsilon or delta"
            )
    low = high / 2
    while enough(low):
        if low <= SMALLEST_Z:
            return SMALLEST_Z
        low, high = low / 2, low
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
