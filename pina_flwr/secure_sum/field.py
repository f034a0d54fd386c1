"""Arithmetic of the field with 2^16 elements, over whole arrays.

Elements are polynomials over GF(2) modulo x^16 + x^12 + x^3 + x + 1, their coefficients the bits of a uint16:
sums are exclusive ors. The modulus is primitive, so each element but 0 is a power of x, and products add
exponents, looked up in tables. The time of a look-up may depend on the elements: somebody else on the same
machine is not defended against.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint16]
POLYNOMIAL = 0x1100B
ORDER = 2**16 - 1  # of the group of all elements but 0
LOG_OF_0 = 2 * ORDER  # lies, whatever is added to it, where EXP is 0: products with 0 need no special case


def multiply(a: Elements, b: Elements) -> Elements:
    """Products, element by element, of two arrays whose shapes broadcast.

    Raises:
        TypeError: `a` or `b` is not an array of uint16.
    """
    return EXP[log(a) + log(b)]


def log(a: Elements) -> NDArray[np.int32]:
    """Exponents of x, 0 to `ORDER` - 1, and `LOG_OF_0` for 0; the inverse is to index `EXP`.

    Raises:
        TypeError: `a` is not an array of uint16.
    """
    if not isinstance(a, np.ndarray) or a.dtype != np.uint16:
        kind = getattr(a, "dtype", type(a).__name__)
        raise TypeError(f"elements of {kind}: must be a numpy array of uint16")
    return LOG[a]


def _shift_and_add(a: NDArray[np.uint32], b: int) -> NDArray[np.uint32]:
    """Products by the definition: multiples of x^i for each bit i of `b`, reduced by the polynomial."""
    product = np.zeros_like(a)
    while b:
        if b & 1:
            product ^= a
        a = (a << np.uint32(1)) ^ (a >> np.uint32(15)) * np.uint32(POLYNOMIAL)
        b >>= 1
    return product


def _tables() -> tuple[Elements, NDArray[np.int32]]:
    """EXP [4·ORDER + 1], all powers twice and then zeros, and LOG [2^16]."""
    powers = np.ones(1, np.uint32)
    while powers.size < ORDER:  # n powers times x^n are the next n
        (next_power,) = _shift_and_add(powers[-1:], 2)
        powers = np.concatenate([powers, _shift_and_add(powers, int(next_power))])
    powers = powers[:ORDER].astype(np.uint16)
    exp = np.zeros(2 * LOG_OF_0 + 1, np.uint16)
    exp[:LOG_OF_0] = np.tile(powers, 2)
    logs = np.full(2**16, LOG_OF_0, np.int32)
    logs[powers] = np.arange(ORDER)
    return exp, logs


EXP, LOG = _tables()
