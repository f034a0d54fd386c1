"""Masks: keys of 32 bytes expanded to vectors of uniform uint32, added to and taken from a vector mod 2^32.

A mask is the keystream of AES-256 in counter mode (NIST SP 800-38A), read as little-endian words. The counter
starts at 0, as a key is for one mask only. Nobody without the key can tell a mask from random numbers. Sums
mod 2^b are the low b bits of sums mod 2^32, which 2^b divides: take them once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

KEY_BYTES = 32
BLOCK = 2**15  # words at once: zeros, keystream and this part of the vector stay in a core's cache
WORD = np.dtype("<u4")
ROOM = 16  # bytes that the cipher may want beyond what it writes


def expand(key: bytes, size: int) -> NDArray[np.uint32]:
    """The mask of a key: uint32 [size].

    Raises:
        TypeError: `key` is not bytes.
        ValueError: `key` is not 32 bytes, or `size` is negative.
    """
    if size < 0:
        raise ValueError(f"size = {size}: must be at least 0")
    mask = np.zeros(size, np.uint32)
    add_masks(mask, [key], [])
    return mask


def add_masks(total: NDArray[np.uint32], plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the masks of the keys `plus` to `total`, and subtract those of `minus`, in place, mod 2^32.

    Args:
        total: uint32 [size], C-contiguous and writable.
        plus, minus: keys of 32 bytes, all distinct: used twice, a key would cancel its mask or double it.

    Raises:
        TypeError: a key is not bytes.
        ValueError: a key is not 32 bytes or is there twice; `total` is of another shape, dtype or layout.
    """
    plus, minus = list(plus), list(minus)
    _check_total(total)
    _check_keys(plus + minus)
    adding, subtracting = _keystreams(plus), _keystreams(minus)
    zeros = bytes(BLOCK * WORD.itemsize)
    stream = bytearray(len(zeros) + ROOM)
    for start in range(0, total.size, BLOCK):
        part = total[start : start + BLOCK]
        mask = np.frombuffer(stream, WORD, part.size)
        plain = memoryview(zeros)[: mask.nbytes]
        for keystream in adding:
            keystream.update_into(plain, stream)
            np.add(part, mask, out=part)
        for keystream in subtracting:
            keystream.update_into(plain, stream)
            np.subtract(part, mask, out=part)


def _keystreams(keys: Iterable[bytes]) -> list[CipherContext]:
    """What writes the keystream of each key: in counter mode, zeros encrypted."""
    return [Cipher(AES256(key), CTR(bytes(16))).encryptor() for key in keys]


def _check_total(total: NDArray[np.uint32]) -> None:
    if not isinstance(total, np.ndarray) or total.dtype != np.uint32 or total.ndim != 1:
        kind = f"{total.dtype} {list(total.shape)}" if isinstance(total, np.ndarray) else type(total).__name__
        raise ValueError(f"total of {kind}: must be a numpy array of uint32 [size]")
    if not (total.flags.c_contiguous and total.flags.writeable):
        raise ValueError("total: must be contiguous and writable")


def _check_keys(keys: list[bytes]) -> None:
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"key of type {type(key).__name__}: must be bytes")
        if len(key) != KEY_BYTES:
            raise ValueError(f"key of {len(key)} bytes: must be {KEY_BYTES}")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{len(keys)} keys of which {len(set(keys))} are distinct: must be all")
