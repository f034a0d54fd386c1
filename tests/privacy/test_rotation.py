import math
import time

import numpy as np
import pytest
from scipy.linalg import hadamard

from pina_flwr.privacy.rotation import padded, rotate, unrotate


def vectors(users: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((users, size))


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (100_000, 131_072)]
)
def test_padded(size: int, expected: int) -> None:
    assert padded(size) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 31, 100, 1000])
def test_is_the_hadamard_matrix_times_signs(size: int) -> None:
    width = padded(size)
    matrix = rotate(np.eye(width), "seed").T  # its columns are images of the unit vectors
    signs = matrix[0] * math.sqrt(width)
    assert np.allclose(np.abs(signs), 1)
    assert np.allclose(matrix, hadamard(width) * signs / math.sqrt(width))
    assert np.allclose(rotate(vectors(3, size), "seed"), vectors(3, size) @ matrix[:, :size].T)


@pytest.mark.parametrize("size", [1, 7, 256, 5000])
def test_keeps_norms_and_sums_and_is_inverted(size: int) -> None:
    plain = vectors(4, size)
    rotated = rotate(plain, ("run", 1, 2))
    assert rotated.shape == (4, padded(size))
    assert np.allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(plain, axis=1), rtol=1e-13)
    assert np.allclose(unrotate(rotated, ("run", 1, 2), size), plain, atol=1e-13)
    assert np.allclose(unrotate(rotated.sum(axis=0), ("run", 1, 2), size), plain.sum(axis=0), atol=1e-13)


def test_signs_are_random() -> None:
    """Each sign is a fair coin, apart from its neighbours and from those of other seeds."""
    one, other = (np.sign(rotate(np.eye(1, 4096, 0), s)[0, 0]) for s in ("a", "b"))
    assert {one, other} <= {1.0, -1.0}
    signs = np.stack([unrotate(np.eye(1, 4096), ("round", r), 4096)[0] * 64 for r in range(20)])
    assert abs(signs.mean()) < 4 / math.sqrt(signs.size)
    assert abs((signs[:, 1:] * signs[:, :-1]).mean()) < 4 / math.sqrt(signs.size)
    assert np.abs(np.corrcoef(signs) - np.eye(20)).max() < 6 / 64


def test_spreads_a_spike_evenly() -> None:
    spike = np.zeros((1, 1000))
    spike[0, 17] = 5.0
    assert np.allclose(np.abs(rotate(spike, 3)), 5 / math.sqrt(1024))


def test_seed_decides() -> None:
    plain = vectors(1, 300)
    seeds = [1, 2, "1", (1, 2), ("1", 2), (12,), ("1, 2",)]
    assert len({rotate(plain, seed).tobytes() for seed in seeds}) == len(seeds)
    assert np.array_equal(rotate(plain, (1, "x")), rotate(plain, (np.int64(1), "x")))
    assert np.array_equal(rotate(plain, 5), rotate(plain, (5,)))


def test_memory_layout_and_precision_do_not_matter() -> None:
    plain = vectors(6, 50)
    expected = rotate(plain, 1)
    assert np.array_equal(rotate(np.asfortranarray(plain), 1), expected)
    assert np.array_equal(rotate(np.repeat(plain, 2, axis=1)[:, ::2], 1), expected)
    assert np.allclose(rotate(plain.astype(np.float32), 1), expected, atol=1e-6)
    assert np.array_equal(unrotate(np.asfortranarray(expected), 1, 50), unrotate(expected, 1, 50))


def test_argument_is_left_alone() -> None:
    for size in (1, 16):
        plain = vectors(2, size)
        rotated = rotate(plain, 1)
        kept = rotated.copy()
        unrotate(rotated, 1, size)
        assert np.array_equal(plain, vectors(2, size))
        assert np.array_equal(rotated, kept)


def test_no_users() -> None:
    assert rotate(np.zeros((0, 5)), 1).shape == (0, 8)


def test_is_fast() -> None:
    plain = vectors(50, 65_536)
    start = time.process_time()
    rotate(plain, 1)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (2, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape|size"):
        rotate(np.zeros(shape), 1)


def test_wrong_padding_is_refused() -> None:
    for width in (5, 7, 16):
        with pytest.raises(ValueError, match="shape"):
            unrotate(np.zeros(width), 1, 5)


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 4), int), np.zeros((2, 4), np.float16), [[1.0]], np.ones((2, 4), bool)]
)
def test_other_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="vectors"):
        rotate(wrong, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1.0, None, (1, 2.5), object(), b"x"])
def test_seeds_of_other_kinds_are_refused(seed: object) -> None:
    with pytest.raises(TypeError, match="seed"):
        rotate(vectors(1, 4), seed)
