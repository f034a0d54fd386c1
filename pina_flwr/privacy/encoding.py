"""Vectors as integers mod 2^b and back: the discretisation of distributed differential privacy.

A client rotates its clipped vector, scales it by γ, rounds each coordinate up or down at random so that it is
right on average, adds integer noise and wraps mod 2^b. The server adds up, unwraps, scales back and rotates
back (Kairouz et al. 2021, arXiv 2102.06387, Algorithms 1 and 2; Agarwal et al. 2021, arXiv 2110.04995).

Privacy rests on `Encoding.l2` alone, which every row that `encode` returns is held to: the integers of a
client have at most that norm, whatever its vector and whatever the draws. Neither the rotation nor the
rounding has to be secret. Wrapping is post-processing: it can spoil a result, never the guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pina_flwr.config import ConfigError
from pina_flwr.privacy import rotation
from pina_flwr.privacy.rotation import Seed

if TYPE_CHECKING:
    from torch import Tensor

MECHANISMS = ("skellam", "discrete-gaussian")
LEAST_BITS, MOST_BITS = 8, 32

# A row is rounded anew if its norm is above the bound, which happens with probability β at most. That biases
# what is kept by at most β/(1-β)·√D in l2 norm (the mean of 1 - β of the mass is x, less that of the rest,
# whose error is at most √D), 2β times the √D/2 of rounding itself. A larger β would save little: l2² holds
# √(2 ln 1/β), which is 5.3 at 10^-6 and 3.7 at 10^-3, times less than l2.
BETA, TRIES = 1e-6, 8
CLIP_TOLERANCE = 1e-6  # how far a norm may be over S, relative to it: float32 rounding
FLOAT_ERROR = 1e-12  # relative error of a norm or a rotation in float64, generously
LARGEST_REACH = 2.0**50  # γS: float64 then still resolves the fractions that are rounded
# (γ·σ)², to which `choose_encoding` keeps: rounding is negligible there and the samplers have digits left.
LARGEST_NOISE_VARIANCE = 2.0**36
CHUNK_BYTES, BYTES_PER_COORDINATE = 2**26, 48

# What discretisation may cost: the mean squared error over that of the continuous mechanism.
LARGEST_EXCESS, LARGEST_EXCESS_WITHOUT_NOISE = 1.5, 1.01
SCALE_TOLERANCE, HALVINGS, NEWTON_STEPS = 1e-6, 64, 60


@dataclass(frozen=True)
class Encoding:
    """How vectors of l2 norm up to S become integers mod 2^b; both sides derive it from the configuration.

    Attributes:
        size: d, coordinates of a vector.
        clip_norm: S.
        bits: b, 8 to 32.
        scale: γ, integer steps per unit.

    Raises:
        ValueError: a field is out of its bounds, or γ·S above 2^50.
    """

    size: int
    clip_norm: float
    bits: int
    scale: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size = {self.size}: must be at least 1")
        _check_bits(self.bits)
        for name in ("clip_norm", "scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value}: must be finite and above 0")
        if not 0 < self.reach <= LARGEST_REACH:
            raise ValueError(f"scale = {self.scale}: times clip_norm must be above 0 and at most 2^50")

    @property
    def padded(self) -> int:
        """D, integers that a client sends: the least power of two from d on."""
        return rotation.padded(self.size)

    @property
    def modulus(self) -> int:
        """2^b."""
        return 1 << self.bits

    @property
    def reach(self) -> float:
        """Largest l2 norm of a scaled vector before it is rounded: γS and the tolerances of floats."""
        return self.scale * self.clip_norm * (1 + 2 * CLIP_TOLERANCE)

    @property
    def l2(self) -> float:
        """Largest l2 norm of a client's integers: the l2 sensitivity, one client added or removed.

        With c = `reach`, min(c + √D, √(c² + D/4 + √(2 ln 1/β)·(c + √D/2))), Theorem 1 of Kairouz et al. 2021.
        The first always holds: rounding moves each coordinate by less than 1. A rounding Y of x is within the
        second with probability 1 - β: Y_j is f or f + 1 for f = ⌊x_j⌋, so E Y_j² ≤ x_j² + 1/4, and Y_j² takes
        values 2f + 1 apart. By Hoeffding's lemma ‖Y‖² - E‖Y‖² is then sub-Gaussian with variance
        Σ (2f + 1)²/4 = ‖f + 1/2‖² ≤ (c + √D/2)², as |f + 1/2 - x_j| ≤ 1/2, and exceeds √(2 ln 1/β) standard
        deviations with probability β at most.
        """
        c, root = self.reach, math.sqrt(self.padded)
        deviations = math.sqrt(2 * math.log(1 / BETA))
        likely = math.sqrt(c * c + root * root / 4 + deviations * (c + root / 2))
        return min(c + root, likely) * (1 + 2 * FLOAT_ERROR)

    @property
    def l1(self) -> float:
        """Largest l1 norm of a client's integers: at most √D·l2, and at most l2² since |v| ≤ v²."""
        return min(math.sqrt(self.padded) * self.l2, self.l2**2)


def encode(
    vectors: Tensor | NDArray[Any], encoding: Encoding, seed: Seed, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Clipped vectors [users, d] as integers [users, D], not yet noised nor wrapped.

    Each row is γ·H·D·x on average, and its l2 norm is at most `encoding.l2`: a row over it is rounded anew,
    and toward zero, which always fits, should that fail `TRIES` times (probability β^TRIES).

    Args:
        vectors: float32 or float64, of norm S at most.
        encoding: the parameters.
        seed: the round's public seed of the rotation.
        generator: where the rounding comes from.

    Raises:
        ValueError: wrong shape; a norm over S or not finite.
        TypeError: not a tensor or array of float32 or float64.
    """
    rows = _rows(vectors, encoding.size)
    encoded = np.empty((len(rows), encoding.padded), np.int64)
    step = max(1, CHUNK_BYTES // (BYTES_PER_COORDINATE * encoding.padded))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float64)
        _check_norms(part, encoding.clip_norm)
        exact = rotation.rotate(part, seed)
        exact *= encoding.scale
        encoded[start : start + step] = _round(exact, encoding.l2 * (1 - FLOAT_ERROR), generator)
    return encoded


def _rows(vectors: Tensor | NDArray[Any], size: int) -> NDArray[Any]:
    import torch  # here, since what only counts privacy is to start fast

    if isinstance(vectors, torch.Tensor) and vectors.dtype in (torch.float32, torch.float64):
        vectors = vectors.detach().cpu().numpy()
    if not isinstance(vectors, np.ndarray) or vectors.dtype not in (np.float32, np.float64):
        raise TypeError(f"vectors of {_kind(vectors)}: must be a tensor or array of float32 or float64")
    if vectors.ndim != 2 or vectors.shape[1] != size:
        raise ValueError(f"vectors of shape {list(vectors.shape)}: must be [users, {size}]")
    return vectors


def _kind(values: object) -> str:
    """What to call values of the wrong type: their dtype if they have one."""
    return str(getattr(values, "dtype", type(values).__name__))


def _norms(rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))


def _check_norms(rows: NDArray[np.float64], clip_norm: float) -> None:
    norms = _norms(rows)
    within = norms <= clip_norm * (1 + CLIP_TOLERANCE)  # false for NaN too
    if not within.all():
        raise ValueError(f"vector of norm {norms[~within][0]}: must be clipped to {clip_norm:g}")


def _round(exact: NDArray[np.float64], bound: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Conditional randomised rounding of rows to l2 norm `bound`."""
    rounded = _round_once(exact, generator)
    for _ in range(TRIES - 1):
        over = _norms(rounded) > bound
        if not over.any():
            return rounded
        rounded[over] = _round_once(exact[over], generator)
    over = _norms(rounded) > bound
    rounded[over] = np.trunc(exact[over]).astype(np.int64)
    return rounded


def _round_once(exact: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Each number up with a probability of its fraction, else down."""
    low = np.floor(exact)
    up = generator.random(exact.shape) < exact - low
    rounded = low.astype(np.int64)
    rounded += up
    return rounded


def wrap(values: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """Integers mod 2^bits, of any shape.

    Raises:
        ValueError: `bits` is not from 8 to 32.
        TypeError: `values` is not an array of int64.
    """
    _check_bits(bits)
    if not isinstance(values, np.ndarray) or values.dtype != np.int64:
        raise TypeError(f"values of {_kind(values)}: must be an array of int64")
    return (values & ((1 << bits) - 1)).astype(np.uint32)


def unwrap(total: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """The representative in [-2^(b-1), 2^(b-1)) of integers mod 2^b, of any shape.

    Raises:
        ValueError: `bits` is not from 8 to 32; a value is not in [0, 2^b).
        TypeError: `total` is not an array of integers.
    """
    _check_bits(bits)
    if not isinstance(total, np.ndarray) or total.dtype.kind not in "iu":
        raise TypeError(f"total of {_kind(total)}: must be an array of integers")
    if total.size and not (total.min() >= 0 and int(total.max()) < 1 << bits):
        raise ValueError(f"total from {total.min()} to {total.max()}: must be in [0, 2^{bits})")
    half = 1 << (bits - 1)
    return (total.astype(np.int64) ^ half) - half


def decode(total: NDArray[Any], encoding: Encoding, seed: Seed) -> NDArray[np.float64]:
    """The sum of the clients' vectors, float64 [d], from that of their integers mod 2^b, [D].

    Raises:
        ValueError: wrong length; a value is not in [0, 2^b).
        TypeError: `total` is not an array of integers.
    """
    values = unwrap(total, encoding.bits)
    if values.shape != (encoding.padded,):
        raise ValueError(f"total of shape {list(values.shape)}: must be [{encoding.padded}]")
    return rotation.unrotate(values / encoding.scale, seed, encoding.size)


def wrap_probability(encoding: Encoding, sum_std: float, clients: int, mechanism: str) -> float:
    """Upper bound on the chance that any coordinate of a noisy sum leaves [-2^(b-1), 2^(b-1)).

    Over the signs of the rotation, the rounding and the noise, for any fixed vectors of norm S at most. By
    Chernoff, a coordinate reaches t = 2^(b-1) with probability at most exp(K(λ) - λt) for every λ > 0, and -t
    likewise, where K adds up the bounds on the logarithms of the moment-generating functions of

    - the rotated sum, Σ_k ±v_k/√D with ‖v‖ ≤ γ·n·S: λ²γ²n²S² / (2D), as random signs are sub-Gaussian;
    - n rounding errors, each of mean 0 in an interval of length 1 given the rest: λ²n/8 by Hoeffding's lemma;
    - the noise, of parameter μ = (γ·sum_std)²: μ(cosh λ - 1) for Skellam, and μλ²/2 for discrete Gaussians
      whose parameters s add up to μ: E exp(λX) is exp(λ²s/2)·Σ_x exp(-(x - λs)²/2s) / Σ_x exp(-x²/2s), and
      a sum over shifted integers is no larger than that over the integers (Poisson summation).

    A union bound covers the 2D events. Rounding is conditioned on n independent events of probability 1 - β
    at least, which multiplies the chance of anything by (1 - β)^-n at most. Rounding toward zero adds
    n·β^TRIES.

    Args:
        encoding: the parameters.
        sum_std: the largest standard deviation of the noise on the sum, a coordinate, before scaling.
        clients: n, the most vectors that are added up.
        mechanism: one of `MECHANISMS`.

    Raises:
        ValueError: an argument is out of its bounds.
    """
    _check_sum(sum_std, clients, mechanism)
    smooth = (encoding.reach * clients) ** 2 / encoding.padded + clients / 4
    noise = (encoding.scale * sum_std) ** 2
    exponent = _chernoff(smooth, noise, encoding.modulus / 2, mechanism)
    exponent += math.log(2 * encoding.padded) - clients * math.log1p(-BETA)
    return min(1.0, math.exp(min(exponent, 0)) + clients * BETA**TRIES)


def _chernoff(smooth: float, noise: float, reached: float, mechanism: str) -> float:
    """min over λ > 0 of λ²·smooth/2 + K_noise(λ) - λ·reached; any λ gives a valid bound.

    For Skellam the minimum is where smooth·λ + noise·sinh λ = reached. As sinh λ ≥ λ, λ starts at or above
    it, from where Newton's method on a convex function only falls towards it.
    """
    if mechanism == "discrete-gaussian":
        return -(reached**2) / (2 * (smooth + noise))
    noise = max(noise, 1e-100)  # more noise only raises the bound, and none at all would be divided by
    point = min(reached / (smooth + noise), math.asinh(reached / noise))
    for _ in range(NEWTON_STEPS):
        gap = smooth * point + noise * math.sinh(point) - reached
        step = gap / (smooth + noise * math.cosh(point))
        point -= step
        if step <= 1e-9 * point:
            break
    return smooth * point**2 / 2 + 2 * noise * math.sinh(point / 2) ** 2 - point * reached


def excess(encoding: Encoding, sum_std: float, clients: int) -> float:
    """Mean squared error of the decoded sum over that of the continuous Gaussian at equal privacy.

    Equal privacy: integer noise in proportion to the integer sensitivity `l2`, as the continuous to S. To
    that comes the rounding of n clients, of variance 1/4 each at most. Without noise (`sum_std` = 0): one
    plus the squared error of the rounding over the squared norm of the sum, if vectors of norm S are
    uncorrelated; if they agree, that is n times less.

    Raises:
        ValueError: an argument is out of its bounds.
    """
    _check_sum(sum_std, clients, MECHANISMS[0])
    steps = encoding.scale * encoding.clip_norm
    if sum_std == 0:
        return 1 + encoding.padded / (4 * steps**2)
    return (encoding.l2 / steps) ** 2 + clients / (2 * encoding.scale * sum_std) ** 2


@lru_cache(maxsize=4096)
def choose_encoding(
    size: int,
    clip_norm: float,
    sum_std: float,
    clients: int,
    bits: int,
    mechanism: str = "skellam",
    wrap: float = 1e-4,
) -> Encoding:
    """The finest encoding whose sum stays within its bits, unless with probability `wrap`.

    γ is the largest, to a relative 10^-6, that keeps `wrap_probability` at most `wrap`, γ·S at most 2^49 and
    (γ·sum_std)² at most 2^36, beyond which more steps gain nothing.

    Args:
        size: d.
        clip_norm: S.
        sum_std: the largest standard deviation of the noise on the sum, a coordinate; 0 for none.
        clients: n, the most vectors that are added up.
        bits: b.
        mechanism: one of `MECHANISMS`.
        wrap: above 0 and under 1.

    Raises:
        ConfigError: `bits` is too small: `excess` would be over `LARGEST_EXCESS`, or without noise
            `LARGEST_EXCESS_WITHOUT_NOISE`. Says what would do.
        ValueError: another argument is out of its bounds.
    """
    demand = _Demand(size, clip_norm, sum_std, clients, mechanism, wrap)
    _check_bits(bits)
    _check_sum(sum_std, clients, mechanism)
    if not 0 < wrap < 1:
        raise ValueError(f"wrap = {wrap}: must be above 0 and under 1")
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and above 0")
    encoding = _finest(demand, bits)
    if encoding is not None:
        return encoding
    enough = next((width for width in range(bits + 1, MOST_BITS + 1) if _finest(demand, width)), None)
    advice = f"; {enough} would do" if enough else f", and so is {MOST_BITS}; take fewer clients or numbers"
    raise ConfigError(
        f"bits = {bits}: too small for {clients} clients' {size} numbers at clip norm {clip_norm:g} and "
        f"noise of std {sum_std:g}{advice}"
    )


class _Demand(NamedTuple):
    """What an encoding is chosen for: the arguments of `choose_encoding`."""

    size: int
    clip_norm: float
    sum_std: float
    clients: int
    mechanism: str
    wrap: float


def _finest(demand: _Demand, bits: int) -> Encoding | None:
    """The encoding of largest γ, or None if even that costs too much."""
    scale = _ceiling(demand, bits)
    if scale == 0:
        return None
    low = scale
    for _ in range(HALVINGS):
        if _fits(demand, bits, low):
            break
        scale, low = low, low / 2
    else:
        return None
    while scale > low * (1 + SCALE_TOLERANCE):
        middle = math.sqrt(low * scale)
        low, scale = (middle, scale) if _fits(demand, bits, middle) else (low, middle)
    encoding = Encoding(demand.size, demand.clip_norm, bits, low)
    limit = LARGEST_EXCESS if demand.sum_std > 0 else LARGEST_EXCESS_WITHOUT_NOISE
    return encoding if excess(encoding, demand.sum_std, demand.clients) <= limit else None


def _ceiling(demand: _Demand, bits: int) -> float:
    """An upper bound on γ; 0 if there is none.

    K(λ) is λ²/2 times a variance for discrete Gaussian noise, where Chernoff's bound can be solved for γ. For
    Skellam noise K is larger, hence γ smaller.
    """
    padded = rotation.padded(demand.size)
    variance = 4.0 ** (bits - 1) / (2 * math.log(2 * padded / demand.wrap)) - demand.clients / 4
    if variance <= 0:
        return 0.0
    unit_variance = (demand.clients * demand.clip_norm) ** 2 / padded + demand.sum_std**2
    limits = [math.sqrt(variance / unit_variance), LARGEST_REACH / (2 * demand.clip_norm)]
    if demand.sum_std > 0:
        limits.append(math.sqrt(LARGEST_NOISE_VARIANCE) / demand.sum_std)
    return min(limits)


def _fits(demand: _Demand, bits: int, scale: float) -> bool:
    encoding = Encoding(demand.size, demand.clip_norm, bits, scale)
    return wrap_probability(encoding, demand.sum_std, demand.clients, demand.mechanism) <= demand.wrap


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits = {bits}: must be a whole number from {LEAST_BITS} to {MOST_BITS}")


def _check_sum(sum_std: float, clients: int, mechanism: str) -> None:
    if not (math.isfinite(sum_std) and sum_std >= 0):
        raise ValueError(f"sum_std = {sum_std}: must be finite and at least 0")
    if clients < 1:
        raise ValueError(f"clients = {clients}: must be at least 1")
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism = {mechanism!r}: must be one of {', '.join(MECHANISMS)}")
