"""Randomised Hadamard transform: spreads a vector evenly over its coordinates before it is rounded.

x → H·D·x, with D a diagonal of random signs that everyone derives from a public seed and H the orthonormal
Walsh–Hadamard matrix (Ailon and Chazelle 2009; for secure sums Kairouz et al. 2021, arXiv 2102.06387, §5).
It keeps norms and sums, and each coordinate of the image is sub-Gaussian with variance ‖x‖² / padded over the
signs, which is what keeps a sum of integers within its bits. Vectors are zero-padded to a power of two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pina_flwr import seeding

Seed = object  # a whole number, a string, or a tuple of these; checked where it is used
RADIX = 16  # four butterfly steps at once as a small matrix product: five times as fast as one by one


def padded(size: int) -> int:
    """The least power of two that is at least `size`.

    Raises:
        ValueError: `size` is under 1.
    """
    if size < 1:
        raise ValueError(f"size = {size}: must be at least 1")
    return 1 << (size - 1).bit_length()


def rotate(vectors: NDArray[Any], seed: Seed) -> NDArray[np.float64]:
    """H·D·x of each row: float [users, size] → float64 [users, padded].

    Args:
        vectors: rows to rotate, finite or not.
        seed: public, whole numbers and strings; all who add up their vectors in a round use the same.

    Raises:
        ValueError: `vectors` has not two dimensions, or rows of no numbers.
        TypeError: `vectors` is not of floats, or `seed` holds anything else.
    """
    _check_floats(vectors)
    if vectors.ndim != 2:
        raise ValueError(f"vectors of shape {list(vectors.shape)}: must be [users, size]")
    size = vectors.shape[1]
    factors = _factors(padded(size), seed)
    spread = np.zeros((len(vectors), factors.size))
    np.multiply(vectors, factors[:size], out=spread[:, :size])
    return _hadamard(spread)


def unrotate(rotated: NDArray[Any], seed: Seed, size: int) -> NDArray[np.float64]:
    """The inverse of `rotate`: float [padded] or [users, padded] → float64 [size] or [users, size].

    Raises:
        ValueError: `rotated` has not 1 or 2 dimensions, or not `padded(size)` columns.
        TypeError: `rotated` is not of floats, or `seed` holds other than whole numbers and strings.
    """
    _check_floats(rotated)
    if rotated.ndim not in (1, 2) or rotated.shape[-1] != padded(size):
        raise ValueError(f"rotated of shape {list(rotated.shape)}: must be [{padded(size)}] or [users, …]")
    flat = np.ascontiguousarray(np.atleast_2d(rotated), dtype=np.float64)
    turned = _hadamard(flat)[:, :size] * _factors(flat.shape[1], seed)[:size]
    return turned.reshape((*rotated.shape[:-1], size))


def _check_floats(vectors: NDArray[Any]) -> None:
    if not isinstance(vectors, np.ndarray) or vectors.dtype not in (np.float32, np.float64):
        kind = getattr(vectors, "dtype", type(vectors).__name__)
        raise TypeError(f"vectors of {kind}: must be a numpy array of float32 or float64")


def _factors(size: int, seed: Seed) -> NDArray[np.float64]:
    """The signs of D, times the 1 / √size that makes H orthonormal."""
    drawn = seeding.generator(0, "rotation", _text(seed)).bytes((size + 7) // 8)
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8), count=size)
    signs = 1 - 2 * bits.astype(np.float64)
    return signs / math.sqrt(size)


def _text(seed: Seed) -> str:
    """The seed in writing: ("1", 2), (1, 2) and 12 differ, numpy's whole numbers equal Python's."""
    parts = seed if isinstance(seed, tuple) else (seed,)
    if not all(isinstance(part, str | int | np.integer) for part in parts):
        raise TypeError(f"seed = {seed!r}: must be made of whole numbers and strings")
    return repr(tuple(part if isinstance(part, str) else int(part) for part in parts))


def _hadamard(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of C-ordered [users, power of two] times the Hadamard matrix of ±1.

    H of size r·s is the Kronecker product of those of r and s, so it acts on one digit of the index after the
    other: `below` is the number of coordinates that lower digits span.
    """
    users, size = rows.shape
    below = 1
    while below < size:
        radix = min(RADIX, size // below)
        blocks = rows.reshape(users, size // (radix * below), radix, below)
        small = _matrix(radix)
        product: NDArray[np.float64] = blocks[..., 0] @ small if below == 1 else small @ blocks
        rows = product.reshape(users, size)
        below *= radix
    return rows


def _matrix(size: int) -> NDArray[np.float64]:
    matrix: NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
