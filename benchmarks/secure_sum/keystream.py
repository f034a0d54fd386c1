"""The floor under a masked vector: the bare cipher, and one pass over the vector.

No protocol with masks from AES-256 in counter mode can do with less than the keystream of each mask and one
read and write of the vector. Nothing is added here, and nothing agreed, derived, decrypted or packed.
"""

from __future__ import annotations

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from benchmarks.secure_sum.timing import Taken, now

BLOCK = 2**17  # bytes: stays in a core's cache, which makes the floor as low as it can be
ROOM = 16  # bytes that the cipher may want beyond what it writes


def bare(vector: np.ndarray, masks: int) -> Taken:
    """Keystreams of so many masks as long as the vector, uint32 [size], and a copy of the vector."""
    keys = [os.urandom(32) for _ in range(masks)]
    start = now()
    _expand(keys, vector.nbytes)
    vector.copy()
    return Taken(now() - start)


def _expand(keys: list[bytes], size: int) -> None:
    streams = [Cipher(AES256(key), CTR(bytes(16))).encryptor() for key in keys]
    zeros, stream = memoryview(bytes(BLOCK)), bytearray(BLOCK + ROOM)
    for start in range(0, size, BLOCK):
        plain = zeros[: min(BLOCK, size - start)]
        for keystream in streams:
            keystream.update_into(plain, stream)
