import hashlib
import os
import tracemalloc
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.typing import NDArray
from scipy import stats

from pina_flwr.secure_sum import masks
from pina_flwr.secure_sum.keys import derive
from pina_flwr.secure_sum.masks import add_masks, expand

KEY = bytes(range(32))
SIZES = [1, 3, 4, 5, masks.BLOCK - 1, masks.BLOCK, masks.BLOCK + 1, 2 * masks.BLOCK + 7]


def counter_mode(key: bytes, counter: int, count: int) -> bytes:
    """A keystream by the definition: the counter's values, encrypted one by one."""
    blocks = b"".join((counter + i).to_bytes(16, "big") for i in range(-(-count // 16)))
    return Cipher(AES256(key), ECB()).encryptor().update(blocks)[:count]


def fresh(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def noise(size: int) -> NDArray[np.uint32]:
    return np.random.default_rng(size).integers(0, 2**32, size, dtype=np.uint32)


class TestExpand:
    def test_known_answers(self) -> None:
        # Computed with pycryptodome.
        assert expand(KEY, 16).astype("<u4").tobytes().hex() == (
            "f29000b62a499fd0a9f39a6add2e7780f05d76ae4ab99fe5a6f69b3148c2363d"
            "0ebcb5deb52c83bd08a8a935182c9199d24356532881602f809eb383c5ff5d56"
        )
        assert int(expand(KEY, 1)[0]) == 0xB60090F2
        assert hashlib.sha256(expand(KEY, 100_003).astype("<u4").tobytes()).hexdigest() == (
            "8c3fbd14d14340336eb31b8491a1406b9201c446fc2bc7ff268a332af6e3d630"
        )

    def test_known_answer_from_the_secret_on(self) -> None:
        # HKDF and AES computed with pycryptodome; the secret is the one of RFC 7748, section 6.1.
        secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
        session = bytes.fromhex("0300000072756e0700000000000000")
        key = derive(secret, "pair mask", session, 5, 2**63 - 1)
        assert expand(key, 8).astype("<u4").tobytes().hex() == (
            "627589cb740bc250af0e396613bbf2512987d69d853bcb23b3cf35c856710fbe"
        )

    def test_is_counter_mode_as_nist_has_it(self) -> None:
        # SP 800-38A, F.5.5: what the keystream below has to be is known from there.
        key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
        plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
        sealed = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
        start = int.from_bytes(range(0xF0, 0x100), "big")
        stream = counter_mode(key, start, 32)
        assert bytes(a ^ b for a, b in zip(plain, stream, strict=True)) == sealed
        for size in SIZES:
            assert expand(key, size).astype("<u4").tobytes() == counter_mode(key, 0, 4 * size)

    def test_gives_uint32(self) -> None:
        assert expand(KEY, 5).dtype == np.uint32
        assert expand(KEY, 0).shape == (0,)

    def test_uses_each_bit_of_the_key(self) -> None:
        flipped = [(int.from_bytes(KEY, "big") ^ 1 << bit).to_bytes(32, "big") for bit in range(256)]
        assert len({expand(key, 4).tobytes() for key in [KEY, *flipped]}) == 257

    def test_is_uniform(self) -> None:
        mask = expand(os.urandom(32), 2**18)
        for low in (0, 11, 22):
            counts = np.bincount(mask >> low & 1023, minlength=1024)
            assert stats.chisquare(counts).pvalue > 1e-8

    def test_refuses_a_negative_size(self) -> None:
        with pytest.raises(ValueError, match="size = -1: must be at least 0"):
            expand(KEY, -1)


class TestAddMasks:
    @pytest.mark.parametrize("size", SIZES)
    def test_adds_and_subtracts(self, size: int) -> None:
        vector, plus, minus = noise(size), fresh(4), fresh(3)
        total = vector.copy()
        add_masks(total, plus, minus)
        expected = vector.astype(object)
        for key in plus:
            expected = expected + expand(key, size)
        for key in minus:
            expected = expected - expand(key, size)
        np.testing.assert_array_equal(total, (expected % 2**32).astype(np.uint32))

    def test_what_one_adds_the_other_takes_away(self) -> None:
        vector, keys = noise(100_000), fresh(5)
        total = vector.copy()
        add_masks(total, keys, [])
        assert (total != vector).mean() > 0.99
        add_masks(total, [], keys)
        np.testing.assert_array_equal(total, vector)

    @pytest.mark.parametrize("bits", range(8, 33))
    def test_low_bits_are_the_sum_with_fewer_bits(self, bits: int) -> None:
        modulus, size = 2**bits, 1000
        vector, plus, minus = noise(size) % np.uint64(modulus), fresh(2), fresh(2)
        total = vector.astype(np.uint32)
        add_masks(total, plus, minus)
        expected = vector.astype(np.int64)
        for key in plus:
            expected = (expected + expand(key, size) % np.uint64(modulus).astype(np.int64)) % modulus
        for key in minus:
            expected = (expected - expand(key, size) % np.uint64(modulus).astype(np.int64)) % modulus
        np.testing.assert_array_equal(total & (modulus - 1), expected)

    def test_leaves_the_vector_without_keys(self) -> None:
        total = noise(100)
        add_masks(total, [], [])
        np.testing.assert_array_equal(total, noise(100))

    def test_takes_any_iterable_of_keys(self) -> None:
        keys = fresh(3)
        listed, given = noise(100), noise(100)
        add_masks(listed, keys[:2], keys[2:])
        add_masks(given, iter(keys[:2]), iter(keys[2:]))  # type: ignore[arg-type]
        np.testing.assert_array_equal(given, listed)

    def test_makes_no_vector_for_a_mask(self) -> None:
        total, keys = noise(10**6), fresh(3)
        add_masks(total, keys, [])
        tracemalloc.start()
        add_masks(total, keys, [])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < total.nbytes / 8

    def test_fills_part_of_a_larger_array(self) -> None:
        whole, keys = np.zeros(300, np.uint32), fresh(1)
        add_masks(whole[100:200], keys, [])
        np.testing.assert_array_equal(whole[100:200], expand(keys[0], 100))
        assert not whole[:100].any()
        assert not whole[200:].any()

    @pytest.mark.parametrize(
        ("plus", "minus"),
        [([KEY, KEY], []), ([], [KEY, KEY]), ([KEY], [KEY]), ([KEY, bytes(32)], [bytes(32)])],
    )
    def test_refuses_a_key_twice(self, plus: list[bytes], minus: list[bytes]) -> None:
        total = noise(10)
        with pytest.raises(ValueError, match="are distinct: must be all"):
            add_masks(total, plus, minus)
        np.testing.assert_array_equal(total, noise(10))

    @pytest.mark.parametrize("length", [0, 16, 24, 31, 33, 64])
    def test_refuses_keys_of_other_lengths(self, length: int) -> None:
        for plus, minus in (([KEY, bytes(length)], []), ([KEY], [bytes(length)])):
            total = noise(10)
            with pytest.raises(ValueError, match=f"key of {length} bytes: must be 32"):
                add_masks(total, plus, minus)
            np.testing.assert_array_equal(total, noise(10))

    @pytest.mark.parametrize("key", [KEY.hex(), bytearray(KEY), None, 7])
    def test_refuses_keys_of_other_types(self, key: Any) -> None:
        with pytest.raises(TypeError, match="must be bytes"):
            add_masks(noise(10), [key], [])

    def test_refuses_one_key_for_a_list(self) -> None:
        with pytest.raises(TypeError, match="key of type int: must be bytes"):
            add_masks(noise(10), KEY, [])  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "total",
        [
            np.zeros(10, np.int32),
            np.zeros(10, np.uint64),
            np.zeros(10, np.float32),
            np.zeros(10, ">u4"),
            np.zeros((2, 5), np.uint32),
            [0] * 10,
            bytearray(40),
        ],
    )
    def test_refuses_other_vectors(self, total: Any) -> None:
        with pytest.raises(ValueError, match=r"must be a numpy array of uint32 \[size\]"):
            add_masks(total, [KEY], [])

    def test_refuses_vectors_that_are_spread_out_or_read_only(self) -> None:
        fixed = np.zeros(10, np.uint32)
        fixed.flags.writeable = False
        for total in (np.zeros(20, np.uint32)[::2], np.zeros(10, np.uint32)[::-1], fixed):
            with pytest.raises(ValueError, match="must be contiguous and writable"):
                add_masks(total, [KEY], [])
