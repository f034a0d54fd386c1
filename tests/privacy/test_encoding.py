import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pina_flwr.config import ConfigError
from pina_flwr.privacy import encoding as module
from pina_flwr.privacy.encoding import (
    MECHANISMS,
    Encoding,
    choose_encoding,
    decode,
    encode,
    excess,
    unwrap,
    wrap,
    wrap_probability,
)
from pina_flwr.privacy.noise import discrete_gaussian, keyed_generator, skellam
from pina_flwr.privacy.rotation import rotate

KEY = bytes(range(32))  # makes all of these tests deterministic
NOISE: dict[str, Callable[..., np.ndarray]] = {"skellam": skellam, "discrete-gaussian": discrete_gaussian}
either = pytest.mark.parametrize("mechanism", MECHANISMS)


def of_norm(norm: float, users: int, size: int) -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal((users, size))
    scaled: np.ndarray = drawn * (norm / np.linalg.norm(drawn, axis=1, keepdims=True))
    return scaled


def generator() -> np.random.Generator:
    return keyed_generator(KEY)


# The encoding and its sensitivity


def test_properties() -> None:
    code = Encoding(size=100_000, clip_norm=2.0, bits=16, scale=500.0)
    assert code.padded == 131_072
    assert code.modulus == 65_536
    by_hand = math.sqrt(1000**2 + 32_768 + math.sqrt(2 * math.log(1e6)) * (1000 + math.sqrt(131_072) / 2))
    assert code.l2 == pytest.approx(by_hand, rel=1e-5)
    assert code.l2 > by_hand
    assert code.l1 == pytest.approx(math.sqrt(131_072) * code.l2)


def test_sensitivities_of_coarse_encodings() -> None:
    """With few, coarse steps the deterministic bound γS + √D is the lower one, and l1 is at most l2²."""
    code = Encoding(size=4, clip_norm=1.0, bits=8, scale=0.5)
    assert code.l2 == pytest.approx(0.5 + 2, rel=1e-5)
    assert code.l1 == pytest.approx(2 * 2.5, rel=1e-5)
    one = Encoding(size=1, clip_norm=1.0, bits=8, scale=1e-6)
    assert one.l1 == pytest.approx(one.l2)
    many = Encoding(size=2**20, clip_norm=1.0, bits=8, scale=1e-6)
    assert many.l2 < math.sqrt(many.padded)
    assert many.l1 == pytest.approx(many.l2**2)


def test_l2_is_the_sensitivity_as_scale_grows() -> None:
    code = Encoding(size=1000, clip_norm=3.0, bits=32, scale=1e6)
    assert code.l2 / code.scale == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size": 0}, "size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": math.nan}, "clip_norm"),
        ({"clip_norm": math.inf}, "clip_norm"),
        ({"scale": -1.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": 1e300}, "scale"),
        ({"bits": 7}, "bits"),
        ({"bits": 33}, "bits"),
        ({"bits": 16.0}, "bits"),
    ],
)
def test_impossible_encodings_are_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Encoding(**({"size": 8, "clip_norm": 1.0, "bits": 16, "scale": 10.0} | change))  # type: ignore[arg-type]


# Encoding


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.5, 3.0, 40.0, 1e4])
@pytest.mark.parametrize("size", [1, 3, 64, 700])
def test_every_row_keeps_the_norm_bound(size: int, scale: float) -> None:
    code = Encoding(size, 1.0, 32, scale)
    encoded = encode(of_norm(1.0, 500, size), code, 1, generator())
    assert encoded.shape == (500, code.padded)
    assert encoded.dtype == np.int64
    assert np.linalg.norm(encoded, axis=1).max() <= code.l2
    assert np.abs(encoded).sum(axis=1).max() <= code.l1


class Unlucky(np.random.Generator):
    """Rounds every number up, for so many tries."""

    def __init__(self, tries: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.tries = tries

    def random(self, size: tuple[int, ...]) -> np.ndarray:  # type: ignore[override]
        self.tries -= 1
        return np.zeros(size) if self.tries >= 0 else super().random(size)


@pytest.mark.parametrize("tries", [0, 1, 3, 1000])
def test_rounding_that_breaks_the_bound_is_done_anew_or_toward_zero(tries: int) -> None:
    code, vectors = Encoding(1024, 1.0, 32, 3.0), of_norm(1.0, 4, 1024)
    vectors[2] = 0  # stays within the bound however it is rounded
    encoded = encode(vectors, code, 1, Unlucky(tries))
    assert np.linalg.norm(encoded, axis=1).max() <= code.l2
    if tries > module.TRIES:
        assert np.array_equal(encoded, np.trunc(3 * rotate(vectors, 1)))
    else:
        assert np.abs(encoded).sum() > 4 * 3  # toward zero nearly all would be zeros


def test_the_bound_would_be_broken_without_the_second_try() -> None:
    """So that the test above tests something: all rounded up, rows are over it."""
    up = np.ceil(3 * rotate(of_norm(1.0, 4, 1024), 1))
    assert np.linalg.norm(up, axis=1).min() > Encoding(1024, 1.0, 32, 3.0).l2


def test_rounding_is_to_a_neighbour() -> None:
    code, vectors = Encoding(500, 1.0, 32, 300.0), of_norm(0.8, 20, 500)
    assert np.abs(encode(vectors, code, 1, generator()) - 300 * rotate(vectors, 1)).max() < 1


@pytest.mark.parametrize("scale", [0.7, 25.0])
def test_unbiased(scale: float) -> None:
    """The mean over many roundings of one vector is the vector: each coordinate within 5 standard errors."""
    code, trials = Encoding(100, 2.0, 32, scale), 20_000
    vector = of_norm(2.0, 1, 100)
    total = encode(np.repeat(vector, trials, axis=0), code, 1, generator()).sum(axis=0)
    mean = decode(wrap(total, 32), code, 1) / trials
    assert np.abs(mean - vector[0]).max() < 5 * 0.5 / scale / math.sqrt(trials)


def test_rounding_error_is_at_most_a_quarter() -> None:
    code, vectors = Encoding(4096, 1.0, 32, 1e4), of_norm(1.0, 50, 4096)
    errors = encode(vectors, code, 1, generator()) - 1e4 * rotate(vectors, 1)
    assert (errors**2).mean() == pytest.approx(1 / 6, rel=0.02)  # p(1 - p) of a uniform fraction p


def test_all_kinds_of_arrays_are_read_alike() -> None:
    plain = of_norm(1.0, 5, 33).astype(np.float32)
    code = Encoding(33, 1.0, 32, 1e3)
    expected = encode(plain, code, 1, generator())
    wide = np.repeat(np.repeat(plain, 2, axis=1), 2, axis=0)
    alike: list[np.ndarray | torch.Tensor] = [
        plain.astype(np.float64),
        np.asfortranarray(plain),
        wide[::2, ::2],
        torch.from_numpy(plain),
        torch.from_numpy(plain).requires_grad_(),
        torch.from_numpy(plain).T.contiguous().T,
    ]
    for vectors in alike:
        assert np.array_equal(encode(vectors, code, 1, generator()), expected)


def test_chunks_do_not_matter_but_for_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, code = of_norm(1.0, 30, 100), Encoding(100, 1.0, 32, 2.0**40)
    whole = encode(vectors, code, 1, generator())
    monkeypatch.setattr(module, "CHUNK_BYTES", 7 * module.BYTES_PER_COORDINATE * code.padded)
    assert np.abs(encode(vectors, code, 1, generator()) - whole).max() <= 1


def test_memory_stays_bounded() -> None:
    vectors, code = np.zeros((64, 2**16), np.float32), Encoding(2**16, 1.0, 32, 1e3)
    tracemalloc.start()
    encoded = encode(vectors, code, 1, generator())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - encoded.nbytes < 80 * 2**20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.00001, 1e30])
def test_vectors_that_are_not_clipped_are_refused(bad: float) -> None:
    vectors = of_norm(1.0, 3, 8)
    vectors[1], vectors[1, 2] = 0, bad
    for wrong in (vectors, vectors.astype(np.float32), torch.from_numpy(vectors)):
        with pytest.raises(ValueError, match="norm"):
            encode(wrong, Encoding(8, 1.0, 16, 10.0), 1, generator())


def test_a_float32_norm_a_little_over_is_let_through_within_the_bound() -> None:
    code = Encoding(8, 1.0, 32, 2.0**45)
    encoded = encode(of_norm(1 + 9e-7, 5, 8), code, 1, generator())
    assert np.linalg.norm(encoded.astype(np.float64), axis=1).max() <= code.l2


@pytest.mark.parametrize("shape", [(8,), (2, 7), (2, 9), (1, 2, 8), (8, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        encode(np.zeros(shape), Encoding(8, 1.0, 16, 10.0), 1, generator())


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 8), np.int64),
        np.zeros((2, 8), np.float16),
        np.zeros((2, 8), complex),
        torch.zeros(2, 8, dtype=torch.bfloat16),
        torch.zeros(2, 8, dtype=torch.int32),
        [[0.0] * 8],
    ],
)
def test_other_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="float"):
        encode(wrong, Encoding(8, 1.0, 16, 10.0), 1, generator())  # type: ignore[arg-type]


# Wrapping and decoding


@pytest.mark.parametrize("bits", [8, 16, 24, 31, 32])
def test_wrap_and_unwrap_are_inverse_within_the_range_and_modular_outside(bits: int) -> None:
    half = 1 << (bits - 1)
    edge = np.array([-half, -half + 1, -1, 0, 1, half - 2, half - 1])
    assert wrap(edge, bits).dtype == np.uint32
    assert np.array_equal(unwrap(wrap(edge, bits), bits), edge)
    for offset in (1 << bits, -(1 << bits), 5 << bits):
        assert np.array_equal(unwrap(wrap(edge + offset, bits), bits), edge)
    assert unwrap(wrap(np.array([half]), bits), bits)[0] == -half
    assert unwrap(wrap(np.array([-half - 1]), bits), bits)[0] == half - 1


def test_sum_survives_modular_addition_exactly() -> None:
    values = np.random.default_rng(1).integers(-40, 40, (50, 1000))
    total = np.zeros(1000, np.uint32)
    for row in values:
        total = (total + wrap(row, 12)) % np.uint32(1 << 12)
    assert np.array_equal(unwrap(total, 12), values.sum(axis=0))


def test_decoded_sum_is_the_sum() -> None:
    code, vectors = Encoding(1000, 1.0, 32, 1e5), of_norm(1.0, 20, 1000)
    encoded = encode(vectors, code, ("run", 3), generator())
    total = wrap(encoded.sum(axis=0), 32)
    decoded = decode(total, code, ("run", 3))
    assert decoded.shape == (1000,)
    assert decoded.dtype == np.float64
    error = np.linalg.norm(decoded - vectors.sum(axis=0))
    assert error < 2 * math.sqrt(20 / 4 * 1024) / 1e5
    assert np.linalg.norm(decode(total, code, ("run", 4)) - vectors.sum(axis=0)) > 1


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_total_may_be_of_any_integer_type_and_layout(dtype: type) -> None:
    code = Encoding(5, 1.0, 16, 10.0)
    total = np.arange(65_000, 65_008)
    expected = decode(total, code, 1)
    assert np.array_equal(decode(total.astype(dtype), code, 1), expected)
    assert np.array_equal(decode(np.repeat(total, 2).astype(dtype)[::2], code, 1), expected)


def test_wrap_refuses_other_types() -> None:
    for wrong in (np.zeros(3), np.zeros(3, np.int32), np.zeros(3, np.uint64), [1, 2], np.array([np.nan])):
        with pytest.raises(TypeError, match="values"):
            wrap(wrong, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bits"):
        wrap(np.zeros(3, np.int64), 33)


def test_unwrap_refuses_what_is_no_residue() -> None:
    for wrong in (np.zeros(3), np.array([True]), [1, 2], np.array([np.nan]), np.array(["a"])):
        with pytest.raises(TypeError, match="total"):
            unwrap(wrong, 16)  # type: ignore[arg-type]
    for outside in (-1, 65_536, 2**40):
        with pytest.raises(ValueError, match="total"):
            unwrap(np.array([0, outside]), 16)
    with pytest.raises(ValueError, match="total"):
        unwrap(np.array([2**64 - 1], np.uint64), 32)
    with pytest.raises(ValueError, match="bits"):
        unwrap(np.zeros(3, np.int64), 4)


@pytest.mark.parametrize("shape", [(5,), (7,), (9,), (1, 8), ()])
def test_total_of_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        decode(np.zeros(shape, np.uint32), Encoding(5, 1.0, 16, 10.0), 1)


# Wrap-around and the choice of an encoding


@either
@pytest.mark.parametrize(("sum_std", "scale"), [(1.0, 34.0), (0.05, 175.0), (6.0, 5.7)])
def test_wrap_probability_bounds_what_is_seen(mechanism: str, sum_std: float, scale: float) -> None:
    """Three clients of one vector, 3,000 rounds of 300 seeds; at b = 8 wrap-around is common enough."""
    code, vectors, clients, rounds = Encoding(256, 1.0, 8, scale), of_norm(1.0, 1, 256), 3, 3000
    bound = wrap_probability(code, sum_std, clients, mechanism)
    draws, wrapped = generator(), 0
    for seed in range(rounds // 10):
        encoded = encode(np.repeat(vectors, 10 * clients, axis=0), code, seed, draws)
        total = encoded.reshape(10, clients, 256).sum(axis=1)
        total += sum(
            NOISE[mechanism](draws, (10, 256), (scale * sum_std) ** 2 / clients) for _ in range(clients)
        )
        wrapped += int((unwrap(wrap(total, 8), 8) != total).any(axis=1).sum())
    assert 0 < wrapped / rounds < bound < 1


@either
def test_wrap_probability_grows_with_all_that_makes_sums_larger(mechanism: str) -> None:
    def bound(scale: float = 900.0, bits: int = 16, std: float = 4.0, clients: int = 100) -> float:
        return wrap_probability(Encoding(1000, 1.0, bits, scale), std, clients, mechanism)

    assert 0 < bound() < min(bound(scale=1000), bound(std=5), bound(clients=110)) < 1
    assert bound(bits=17) < bound() < bound(bits=15) == 1


@pytest.mark.parametrize("variance", [1e-90, 1e-9, 0.1, 1.0, 30.0, 1e4, 1e9])
@pytest.mark.parametrize("smooth", [0.25, 30.0, 1e6])
def test_skellam_exponent_is_the_least_of_all(variance: float, smooth: float) -> None:
    """Against a grid over λ, in the logarithm; and no less than the discrete Gaussian's."""
    exponent = module._chernoff(smooth, variance, 128.0, "skellam")
    grid = np.geomspace(1e-8, 1000, 400_000)
    with np.errstate(over="ignore"):
        values = smooth * grid**2 / 2 + 2 * variance * np.sinh(grid / 2) ** 2 - 128 * grid
    assert exponent == pytest.approx(values.min(), rel=1e-6)
    assert exponent >= module._chernoff(smooth, variance, 128.0, "discrete-gaussian") * (1 + 1e-12)


def test_wrap_probability_without_noise_or_with_next_to_none() -> None:
    code = Encoding(1000, 1.0, 16, 2500.0)
    plain = [wrap_probability(code, std, 100, m) for std in (0.0, 1e-170) for m in MECHANISMS]
    assert plain == pytest.approx([plain[0]] * 4)
    assert 0 < plain[0] < 1


@either
@pytest.mark.parametrize("bits", [12, 16, 20])
def test_choice_is_the_largest_scale_that_fits(mechanism: str, bits: int) -> None:
    for sum_std in (0.5, 1.0, 2.0):
        code = choose_encoding(1000, 1.0, sum_std, 30, bits, mechanism, 1e-3)
        assert (code.size, code.clip_norm, code.bits) == (1000, 1.0, bits)
        assert wrap_probability(code, sum_std, 30, mechanism) <= 1e-3
        larger = Encoding(1000, 1.0, bits, code.scale * 1.00001)
        assert wrap_probability(larger, sum_std, 30, mechanism) > 1e-3


@either
def test_choice_does_not_depend_on_the_unit(mechanism: str) -> None:
    one = choose_encoding(500, 1.0, 3.0, 20, 16, mechanism)
    tiny = choose_encoding(500, 1e-6, 3e-6, 20, 16, mechanism)
    assert one.scale == pytest.approx(tiny.scale * 1e-6, rel=1e-5)


def test_choice_goes_no_finer_than_the_samplers_and_floats() -> None:
    noisy = choose_encoding(1000, 1.0, 5.0, 10, 32)
    assert noisy.scale * 5 == 2**18
    silent = choose_encoding(2**24, 1.0, 0.0, 1, 32)
    assert silent.reach <= 2**50


def test_excess() -> None:
    code = Encoding(1000, 2.0, 16, 50.0)
    assert excess(code, 3.0, 40) == pytest.approx((code.l2 / 100) ** 2 + 40 / (4 * 50**2) / 3**2)
    assert excess(code, 0.0, 40) == pytest.approx(1 + 1024 / (4 * 100**2))


@pytest.mark.parametrize(
    ("bits", "sum_std", "clients"), [(10, 1.0, 100), (8, 1.0, 10**5), (8, 0.0, 10), (13, 0.005, 200)]
)
@either
def test_too_few_bits_are_refused_with_what_would_do(
    bits: int, sum_std: float, clients: int, mechanism: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^bits = {bits}: too small .* would do$") as caught:
        choose_encoding(100_000, 1.0, sum_std, clients, bits, mechanism)
    enough = int(str(caught.value).rsplit("; ", 1)[1].split()[0])
    assert choose_encoding(100_000, 1.0, sum_std, clients, enough, mechanism).bits == enough
    with pytest.raises(ConfigError, match=f"{enough} would do"):
        choose_encoding(100_000, 1.0, sum_std, clients, enough - 1, mechanism)


def test_more_than_32_bits_are_not_offered() -> None:
    with pytest.raises(ConfigError, match=r"^bits = 16: .* and so is 32"):
        choose_encoding(100, 1.0, 1e-6, 10**9, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mechanism": "gaussian"}, "mechanism"),
        ({"sum_std": -1.0}, "sum_std"),
        ({"sum_std": math.nan}, "sum_std"),
        ({"sum_std": math.inf}, "sum_std"),
        ({"clients": 0}, "clients"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": math.nan}, "clip_norm"),
        ({"size": 0}, "size"),
        ({"bits": 4}, "bits"),
        ({"bits": 40}, "bits"),
        ({"wrap": 0.0}, "wrap"),
        ({"wrap": 1.0}, "wrap"),
        ({"wrap": math.nan}, "wrap"),
    ],
)
def test_impossible_demands_are_refused(change: dict[str, float], named: str) -> None:
    demand = {"size": 100, "clip_norm": 1.0, "sum_std": 1.0, "clients": 10, "bits": 16} | change
    with pytest.raises(ValueError, match=named):
        choose_encoding(**demand)


def test_wrap_probability_and_excess_refuse_the_same() -> None:
    code = Encoding(100, 1.0, 16, 10.0)
    for sum_std, clients, mechanism in ((-1.0, 5, "skellam"), (1.0, 0, "skellam"), (1.0, 5, "laplace")):
        with pytest.raises(ValueError, match="must be"):
            wrap_probability(code, sum_std, clients, mechanism)
    with pytest.raises(ValueError, match="sum_std"):
        excess(code, math.nan, 5)


def test_choice_is_fast() -> None:
    """It is made inside a calibration loop."""
    start = time.process_time()
    for k in range(100):
        choose_encoding(100_000, 1.0, 1 + k / 1000, 100, 16)
    assert time.process_time() - start < 1


# The whole way


def settled(size: int, sum_std: float, clients: int, bits: int, mechanism: str) -> tuple[Encoding, float]:
    """An encoding and its noise at equal privacy: the noise grows with l2 / γS, and the room for it too."""
    std = sum_std
    for _ in range(20):
        code = choose_encoding(size, 1.0, std, clients, bits, mechanism)
        std = sum_std * code.l2 / code.scale
    return code, std


@either
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 0.25), (20, 0.05)])
def test_mean_is_nearly_as_accurate_as_with_the_continuous_gaussian(
    mechanism: str, bits: int, tolerance: float
) -> None:
    """100 clients of d = 10^5, z = 1, S = 1: mean squared error against (z·S/100)²; it varies by 0.5 %."""
    clients, size = 100, 100_000
    code, std = settled(size, 1.0, clients, bits, mechanism)
    total, exact, draws = np.zeros(code.padded, np.uint32), np.zeros(size), generator()
    for client in range(clients):
        vector = np.zeros((1, size))
        vector[0, client : client + 4000] = 1 / math.sqrt(4000)  # neighbours agree, so the sum is uneven
        values = encode(vector, code, ("round", 1), draws)[0]
        if client < 10:  # ten shares add up to the noise of all
            values += NOISE[mechanism](draws, code.padded, (code.scale * std) ** 2 / 10)
        total = (total + wrap(values, bits)) & np.uint32(code.modulus - 1)
        exact += vector[0]
    error = ((decode(total, code, ("round", 1)) - exact) / clients) ** 2
    assert 0.98 < error.mean() / (1 / clients) ** 2 < 1 + tolerance
