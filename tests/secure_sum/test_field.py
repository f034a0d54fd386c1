import numpy as np
import pytest

from pina_flwr.secure_sum import field

ALL = np.arange(2**16, dtype=np.uint32).astype(np.uint16)


def times(a: int, b: int) -> int:
    """The product by long multiplication and long division of polynomials, one pair at a time."""
    product = 0
    for i in range(16):
        product ^= (a << i) * (b >> i & 1)
    for degree in range(30, 15, -1):
        product ^= (field.POLYNOMIAL << degree - 16) * (product >> degree & 1)
    return product


def test_x_generates_all_elements_but_0() -> None:
    # Then each of them has an inverse, so the polynomial is irreducible, and primitive.
    power, seen = 1, set()
    for _ in range(2**16 - 1):
        seen.add(power)
        power <<= 1
        power ^= field.POLYNOMIAL * (power >> 16)
    assert power == 1
    assert seen == set(range(1, 2**16))


def test_multiplies_as_by_hand() -> None:
    generator = np.random.default_rng(1)
    a, b = generator.integers(0, 2**16, (2, 2000)).astype(np.uint16)
    a[:3], b[:3] = [0, 0, 2**16 - 1], [0, 5, 2**16 - 1]
    assert field.multiply(a, b).tolist() == [times(int(x), int(y)) for x, y in zip(a, b, strict=True)]


def test_times_0_and_1() -> None:
    assert not field.multiply(ALL, np.zeros(1, np.uint16)).any()
    assert not field.multiply(np.zeros(1, np.uint16), ALL).any()
    np.testing.assert_array_equal(field.multiply(ALL, np.ones(1, np.uint16)), ALL)


def test_every_element_but_0_has_an_inverse() -> None:
    inverses = field.EXP[field.ORDER - field.log(ALL[1:])]
    assert (field.multiply(ALL[1:], inverses) == 1).all()


def test_distributes_over_sums() -> None:
    a, b, c = np.random.default_rng(2).integers(0, 2**16, (3, 2**14)).astype(np.uint16)
    together = field.multiply(a, b ^ c)
    np.testing.assert_array_equal(together, field.multiply(a, b) ^ field.multiply(a, c))


def test_shapes_broadcast() -> None:
    product = field.multiply(ALL[:6].reshape(2, 1, 3), ALL[:4].reshape(4, 1))
    assert product.shape == (2, 4, 3)
    assert product.dtype == np.uint16
    assert product[1, 3, 2] == times(5, 3)


@pytest.mark.parametrize(
    "other", [ALL.astype(np.int64), ALL.astype(">u2"), ALL.astype(np.float32), 7, [1, 2]]
)
def test_refuses_other_types(other: object) -> None:
    with pytest.raises(TypeError, match="must be a numpy array of uint16"):
        field.multiply(ALL, other)  # type: ignore[arg-type]
