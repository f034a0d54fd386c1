from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pina_flwr.secure_sum.packing import pack, packed_size, unpack

SIZES = [1, 2, 31, 32, 33, 64, 95, 1000, 4097]


def numbers(size: int, bits: int, seed: int = 1) -> NDArray[np.uint32]:
    values = np.random.default_rng(seed).integers(0, 2**bits, size, dtype=np.uint64).astype(np.uint32)
    values[0], values[-1] = 0, 2**bits - 1
    return values


def by_hand(values: NDArray[np.uint32], bits: int) -> bytes:
    """The layout that the module describes, a column after the other as one large integer."""
    columns = -(-values.size // 32)
    matrix = np.pad(values, (0, 32 * columns - values.size)).reshape(32, columns)
    strings = [sum(int(number) << row * bits for row, number in enumerate(column)) for column in matrix.T]
    words = [[string >> 32 * word & 2**32 - 1 for string in strings] for word in range(bits)]
    return b"".join(word.to_bytes(4, "little") for row in words for word in row)


@pytest.mark.parametrize("bits", range(8, 33))
class TestEachWidth:
    def test_unpack_undoes_pack(self, bits: int) -> None:
        for size in SIZES:
            values = numbers(size, bits)
            packed = pack(values, bits)
            assert packed.dtype == np.uint8
            assert packed.shape == (packed_size(size, bits),)
            unpacked = unpack(packed, bits, size)
            assert unpacked.dtype == np.uint32
            np.testing.assert_array_equal(unpacked, values)

    def test_layout_is_as_described(self, bits: int) -> None:
        for size in (1, 33, 200):
            values = numbers(size, bits)
            assert pack(values, bits).tobytes() == by_hand(values, bits)

    def test_takes_no_more_than_128_bytes_over(self, bits: int) -> None:
        for size in (*SIZES, 999_999, 10**6):
            assert 0 <= packed_size(size, bits) - -(-size * bits // 8) < 128

    def test_each_flipped_bit_changes_a_number_or_is_refused(self, bits: int) -> None:
        values = numbers(33, bits)
        packed = pack(values, bits)
        refused = 0
        for bit in range(8 * packed.size):
            flipped = packed.copy()
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                unpacked = unpack(flipped, bits, 33)
            except ValueError:
                refused += 1
            else:
                assert (unpacked != values).sum() == 1
        assert refused == 31 * bits


def test_refuses_numbers_after_the_last() -> None:
    packed = pack(numbers(33, 20), 20)
    packed[-1] = 1
    with pytest.raises(ValueError, match=r"packed of uint8 \[160\]: must be zero after 33 numbers"):
        unpack(packed, 20, 33)


@pytest.mark.parametrize("bits", range(8, 32))
def test_refuses_to_pack_what_is_too_large(bits: int) -> None:
    values = numbers(100, bits)
    values[57] = 2**bits
    with pytest.raises(ValueError, match=rf"values up to {2**bits}: must be below 2\^{bits}"):
        pack(values, bits)


def test_known_answer() -> None:
    assert pack(np.array([0x12345, 0xABCDE, 0x6789F], np.uint32), 20).tobytes().hex() == (
        # Number 0 in bits 0 to 19, number 1 in bits 20 to 39, number 2 in bits 40 to 59; 20 words in all.
        "4523e1cd" + "ab9f7806" + "00" * 72
    )


def test_takes_numbers_laid_out_otherwise() -> None:
    values = numbers(300, 20)
    np.testing.assert_array_equal(pack(values[::3], 20), pack(values[::3].copy(), 20))


def test_reads_bytes_as_they_come() -> None:
    values = numbers(300, 20)
    message = b"abc" + pack(values, 20).tobytes()
    unpacked = unpack(np.frombuffer(message, np.uint8)[3:], 20, 300)  # read-only, at an odd address
    np.testing.assert_array_equal(unpacked, values)
    unpacked += 1  # the caller's own


@pytest.mark.parametrize("bits", [-1, 0, 7, 33, 64])
def test_refuses_other_widths(bits: int) -> None:
    for call in (
        lambda: packed_size(3, bits),
        lambda: pack(np.zeros(3, np.uint32), bits),
        lambda: unpack(np.zeros(3, np.uint8), bits, 3),
    ):
        with pytest.raises(ValueError, match=f"bits = {bits}: must be from 8 to 32"):
            call()


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_no_numbers(size: int) -> None:
    for call in (lambda: packed_size(size, 20), lambda: unpack(np.zeros(0, np.uint8), 20, size)):
        with pytest.raises(ValueError, match=f"size = {size}: must be at least 1"):
            call()
    with pytest.raises(ValueError, match="size = 0"):
        pack(np.zeros(0, np.uint32), 20)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(3, np.int32),
        np.zeros(3, np.int64),
        np.zeros(3, np.float32),
        np.zeros(3, ">u4"),
        np.zeros((3, 1), np.uint32),
        np.uint32(3),
        [1, 2, 3],
        None,
    ],
)
def test_refuses_to_pack_other_arrays(values: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a numpy array of uint32 \[size\]"):
        pack(values, 20)


@pytest.mark.parametrize(
    "packed",
    [
        np.zeros(79, np.uint8),
        np.zeros(81, np.uint8),
        np.zeros((1, 80), np.uint8),
        np.zeros(80, np.int8),
        np.zeros(20, np.uint32),
        bytes(80),
        None,
    ],
)
def test_refuses_to_unpack_other_arrays(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a numpy array of uint8 \[80\]"):
        unpack(packed, 20, 3)
