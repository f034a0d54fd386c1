"""Noise for privacy: OS entropy through a cryptographic generator, never a global or seeded one.

`OSEntropy` keys ChaCha20 with 256 fresh bits whenever a generator is asked for: no state exists that a forked
worker could repeat or a seed fix. `SeededEntropy` stands in for it when a run is debugged, `keyed_generator`
makes noise that whoever knows the key can take away again (XNoise, Jiang et al. 2024, arXiv 2209.12528).

For modular sums the noise is integer: Skellam (Agarwal et al. 2021, arXiv 2110.04995) or discrete Gaussian
(Canonne et al. 2020, arXiv 2004.00010). ε and δ are computed for exact draws, but the samplers work in
float64. Their probabilities are off by about 2^-53, and relative to themselves by up to about 10^-9 for the
discrete Gaussian; of the candidates for Poisson variables, numpy accepts up to 18 % by a rule whose logarithm
is known to 2^-13 at variance 2^36 and to 2^-9 at the largest taken. The continuous Gaussian is itself in
floats. Attacks on their low bits (Mironov 2012) are out of its scope; integers have none to attack.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from randomgen import ChaCha

from pina_flwr.config import RunConfig

KEY_BYTES = 32
# Variances that the integer samplers take. Far below, 53 random bits cannot tell the chance of a draw other
# than 0 from none. Far above, numpy's Poisson loses too many digits, as it compares numbers of size r·log(r)
# at rate r.
SMALLEST_VARIANCE, LARGEST_VARIANCE = 2.0**-30, 2.0**40
BATCH = 2**18  # candidates of the discrete Gaussian made at once: they stay in the cache
CANDIDATES = 1.4  # made for each draw wanted; 46 to 76 % are accepted


class Entropy(Protocol):
    """Where the randomness of noise and keys comes from."""

    def generator(self, *purpose: object) -> np.random.Generator:
        """A generator for one purpose, e.g. `entropy.generator("noise", user)`, and for nothing else."""
        ...


@dataclass(frozen=True)
class OSEntropy:
    """The operating system's entropy: a fresh key at every call, whatever the purpose."""

    def generator(self, *purpose: object) -> np.random.Generator:
        """A generator that nobody can predict."""
        return secret_generator()


@dataclass(frozen=True)
class SeededEntropy:
    """Noise that can be reproduced, for debugging ONLY: whoever knows the seed can subtract all of it.

    The same purpose gives the same stream again: scope and purpose together must name the round and the user.
    """

    seed: int
    scope: tuple[object, ...] = ()

    def generator(self, *purpose: object) -> np.random.Generator:
        """The generator that seed, scope and purpose determine."""
        text = json.dumps(["pina-flwr reproducible noise", self.seed, *map(str, (*self.scope, *purpose))])
        return keyed_generator(hashlib.sha256(text.encode()).digest())


def open_entropy(config: RunConfig, *scope: object) -> Entropy:
    """The operating system's entropy, or with `reproducible-noise` the run's seed.

    scope: what sets these draws apart from all others of the run, e.g. step, round and node.
    """
    return SeededEntropy(config.seed, scope) if config.reproducible_noise else OSEntropy()


def secret_generator() -> np.random.Generator:
    """A generator that nobody can predict: ChaCha20 under a fresh key from the operating system."""
    return keyed_generator(os.urandom(KEY_BYTES))


def keyed_generator(key: bytes) -> np.random.Generator:
    """ChaCha20 under `key`: the same key gives the same draws, nobody without it can tell them from random.

    To take noise away again, draw the same shape with the same function on the same version of numpy, which
    may change its samplers between versions, and the same kind of machine (its logarithm decides too).

    Raises:
        TypeError: `key` is not bytes.
        ValueError: `key` is not 32 bytes long.
    """
    if not isinstance(key, bytes):
        raise TypeError(f"key of type {type(key).__name__}: must be bytes")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes: must be {KEY_BYTES}")
    return np.random.Generator(ChaCha(key=int.from_bytes(key, "little"), rounds=20))


def gaussian(
    shape: int | tuple[int, ...],
    std: float,
    dtype: DTypeLike = np.float32,
    generator: np.random.Generator | None = None,
) -> NDArray[Any]:
    """Independent draws from N(0, std²), drawn in float64 and rounded once.

    Args:
        shape: shape of the result.
        std: standard deviation; 0 gives zeros.
        dtype: float32 or float64.
        generator: where the draws come from; a fresh `secret_generator` if left out.

    Raises:
        ValueError: `std` is negative, not finite, or too small or large for `dtype`; `dtype` is another one.
    """
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise ValueError(f"dtype = {np.dtype(dtype)}: must be float32 or float64")
    if not (np.isfinite(std) and std >= 0):
        raise ValueError(f"std = {std}: must be finite and at least 0")
    if std == 0:
        return np.zeros(shape, dtype)
    # A tiny std would round to no noise at all, a huge one to infinities.
    limits = np.finfo(np.dtype(dtype))
    if not limits.tiny <= std <= limits.max / 100:
        raise ValueError(f"std = {std}: out of the range of {np.dtype(dtype)}")
    draws = (secret_generator() if generator is None else generator).standard_normal(shape)
    draws *= std
    return draws.astype(dtype, copy=False)


def skellam(
    generator: np.random.Generator, shape: int | tuple[int, ...], variance: float
) -> NDArray[np.int64]:
    """Independent draws from Sk(variance): the difference of two Poisson variables of mean variance / 2.

    Sums of independent draws are Skellam again, with the variances added.

    Args:
        generator: where the draws come from.
        shape: shape of the result.
        variance: 0 (gives zeros) or from `SMALLEST_VARIANCE` to `LARGEST_VARIANCE`.

    Raises:
        ValueError: any other variance.
    """
    _check_variance(variance)
    draws = generator.poisson(variance / 2, shape)
    draws -= generator.poisson(variance / 2, shape)
    return np.asarray(draws, dtype=np.int64)


def discrete_gaussian(
    generator: np.random.Generator, shape: int | tuple[int, ...], variance: float
) -> NDArray[np.int64]:
    """Independent draws from N_Z(0, variance): an integer y has probability ∝ exp(-y² / (2·variance)).

    Rejection from a discrete Laplace variable (Canonne et al. 2020, Algorithm 3). `variance` is the parameter
    σ². The variance of the draws is smaller: by 2·10^-7 of it at σ² = 1, by 0.2 % at 0.5, and all draws are 0
    at 0.01. Sums of draws are close to, but not, discrete Gaussian (Kairouz et al. 2021, arXiv 2102.06387).

    Draws beyond about 10 σ, of mass 10^-23 together, never occur.

    Args:
        generator: where the draws come from.
        shape: shape of the result.
        variance: σ², 0 (gives zeros) or from `SMALLEST_VARIANCE` to `LARGEST_VARIANCE`.

    Raises:
        ValueError: any other variance.
    """
    _check_variance(variance)
    draws = np.zeros(shape, np.int64)
    if variance == 0:
        return draws
    flat, filled = draws.reshape(-1), 0
    while filled < flat.size:
        wanted = min(flat.size - filled, BATCH)
        found = _accepted(generator, int(CANDIDATES * wanted) + 16, variance)[:wanted]
        flat[filled : filled + found.size] = found
        filled += found.size
    return draws


def _accepted(generator: np.random.Generator, candidates: int, variance: float) -> NDArray[np.int64]:
    """Those of so many candidates that are accepted: independent discrete Gaussian draws.

    ⌊t·E⌋ of an exponential variable E is geometric, the difference of two of them discrete Laplace of scale
    t. Accepting with probability exp(-c) is asking whether another exponential variable is at least c.
    """
    scale = math.floor(math.sqrt(variance)) + 1
    geometric = np.floor(scale * generator.standard_exponential((2, candidates)))
    laplace = geometric[0] - geometric[1]
    gap = np.abs(laplace) - variance / scale
    accepted = generator.standard_exponential(candidates) >= gap * gap / (2 * variance)
    return laplace[accepted].astype(np.int64)


def _check_variance(variance: float) -> None:
    if not (variance == 0 or SMALLEST_VARIANCE <= variance <= LARGEST_VARIANCE):
        raise ValueError(
            f"variance = {variance}: must be 0 or from {SMALLEST_VARIANCE:.1e} to {LARGEST_VARIANCE:.1e}"
        )
