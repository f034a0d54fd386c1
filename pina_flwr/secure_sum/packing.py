"""Numbers mod 2^b as b bits each on the wire.

Layout: the numbers fill a matrix of 32 rows and ⌈size / 32⌉ columns, row by row, zeros last. Each column is a
string of 32·b bits, the number of row i in bits i·b to i·b + b - 1, lowest first, and so b words of 32 bits.
These are the columns of a matrix of b rows, which is sent row by row, words little-endian. All steps work on
whole rows, and under 128 bytes are added to fill up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEWEST_BITS, MOST_BITS = 8, 32
WORD = 32  # bits, and numbers a column
WIRE = np.dtype("<u4")


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` numbers of `bits` bits take: under 128 more than size·bits / 8.

    Raises:
        ValueError: `size` is under 1, or `bits` not from 8 to 32.
    """
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits = {bits}: must be from {FEWEST_BITS} to {MOST_BITS}")
    return _columns(size) * bits * WIRE.itemsize


def pack(values: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Numbers below 2^bits for the wire: uint32 [size] → uint8 [packed_size(size, bits)].

    Raises:
        ValueError: `values` is of another shape or dtype or holds too large a number; or as `packed_size`.
    """
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or values.ndim != 1:
        raise ValueError(f"values {_described(values)}: must be a numpy array of uint32 [size]")
    packed = np.zeros(packed_size(values.size, bits), np.uint8)
    if (largest := int(values.max())) >> bits:
        raise ValueError(f"values up to {largest}: must be below 2^{bits}")
    columns = _columns(values.size)
    words = packed.view(WIRE).reshape(bits, columns)
    shifted = np.empty(columns, np.uint32)
    for number in range(WORD):
        row = values[number * columns : (number + 1) * columns]
        (word, low), part = divmod(number * bits, WORD), shifted[: row.size]
        words[word, : row.size] |= np.left_shift(row, low, out=part)
        if low + bits > WORD:
            words[word + 1, : row.size] |= np.right_shift(row, WORD - low, out=part)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint32]:
    """The inverse of `pack`: uint8 [packed_size(size, bits)] → uint32 [size].

    Raises:
        ValueError: `packed` is of another shape or dtype or not filled up with zeros; or as `packed_size`.
    """
    length = packed_size(size, bits)
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.shape != (length,):
        raise ValueError(f"packed {_described(packed)}: must be a numpy array of uint8 [{length}]")
    columns = _columns(size)
    words = np.ascontiguousarray(packed).view(WIRE).reshape(bits, columns)
    values = np.empty((WORD, columns), np.uint32)
    shifted = np.empty(columns, np.uint32)
    for number, row in enumerate(values):
        word, low = divmod(number * bits, WORD)
        np.right_shift(words[word], low, out=row)
        if low + bits > WORD:
            row |= np.left_shift(words[word + 1], WORD - low, out=shifted)
        row &= (1 << bits) - 1
    flat = values.reshape(-1)
    if flat[size:].any():
        raise ValueError(f"packed {_described(packed)}: must be zero after {size} numbers")
    return flat[:size]


def _columns(size: int) -> int:
    if size < 1:
        raise ValueError(f"size = {size}: must be at least 1")
    return -(-size // WORD)


def _described(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return f"of type {type(array).__name__}"
    return f"of {array.dtype} {list(array.shape)}"
