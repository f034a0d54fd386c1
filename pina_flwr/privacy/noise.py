"""Gaussian noise for privacy: OS entropy through a cryptographic generator, never a global or seeded one.

Every call keys ChaCha20 with 256 fresh bits: no state exists that a forked worker could repeat or a seed fix.
The noise is continuous Gaussian in floats; attacks on their low bits (Mironov 2012) are out of its scope.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from randomgen import ChaCha

KEY_BYTES = 32


def gaussian(shape: int | tuple[int, ...], std: float, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Independent draws from N(0, std²), drawn in float64 and rounded once.

    Args:
        shape: shape of the result.
        std: standard deviation; 0 gives zeros.
        dtype: float32 or float64.

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
    draws = secret_generator().standard_normal(shape)
    draws *= std
    return draws.astype(dtype, copy=False)


def secret_generator() -> np.random.Generator:
    """A generator that nobody can predict: ChaCha20 under a fresh key from the operating system."""
    return np.random.Generator(ChaCha(key=int.from_bytes(os.urandom(KEY_BYTES), "little"), rounds=20))
