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

    On the safe side: the z returned was itself checked. ε must fall as z grows; log ε is nearly linear in
    log z, so interpolation there, kept in a bracket that bisection shrinks, takes about eight trials.

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

    def excess(z: float) -> float:
        """log of ε over the target: 0 or less is enough noise."""
        found = spent(releases_of(z), delta)
        return math.log(found / epsilon) if found > 0 else -math.inf

    low, high = _bracket(excess, epsilon, delta)
    if low is None:
        return SMALLEST_Z
    trial = 0
    while high[0] > low[0] * (1 + tolerance):
        z = _inside(low, high, tolerance, trial)
        at = z, excess(z)
        low, high = (low, at) if at[1] <= 0 else (at, high)
        trial += 1
    return high[0]


Point = tuple[float, float]
"""z and log of ε over the target."""


def _bracket(excess: Callable[[float], float], epsilon: float, delta: float) -> tuple[Point | None, Point]:
    """Too little noise and enough of it, by doubling or halving from z = 1; None if no z is too little."""
    low, high = None, (1.0, excess(1.0))
    while high[1] > 0:
        low, z = high, 2 * high[0]
        if z > LARGEST_Z:
            raise ConfigError(
                f"epsilon = {epsilon:g}: out of reach at delta = {delta:g} with any noise multiplier up to "
                f"{LARGEST_Z:g}; raise epsilon or delta"
            )
        high = z, excess(z)
    while low is None and high[0] > SMALLEST_Z:
        at = high[0] / 2, excess(high[0] / 2)
        low, high = (None, at) if at[1] <= 0 else (at, high)
    return low, high


def _inside(low: Point, high: Point, tolerance: float, trial: int) -> float:
    """The next z to try: a little beyond the interpolated one, on either side in turn; each third bisects."""
    if trial % 3 == 2 or not (math.isfinite(low[1]) and math.isfinite(high[1])):
        return math.sqrt(low[0] * high[0])
    z = low[0] * (high[0] / low[0]) ** (low[1] / (low[1] - high[1]))
    z *= 1 + tolerance / 3 if trial % 3 == 0 else 1 - tolerance / 3
    margin = 1 + tolerance / 3
    return min(max(z, low[0] * margin), high[0] / margin)
