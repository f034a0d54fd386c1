import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from pina_flwr.config import RunConfig
from pina_flwr.privacy import noise
from pina_flwr.privacy.noise import (
    Entropy,
    OSEntropy,
    SeededEntropy,
    discrete_gaussian,
    gaussian,
    keyed_generator,
    open_entropy,
    skellam,
)

KEY = bytes(range(32))  # makes the tests of integer noise deterministic


# Each statistic leaves its bounds by chance in under one of 10^8 runs.
def test_moments_and_shape() -> None:
    n = 400_000
    sample = gaussian((2, n // 2), 3.0).astype(np.float64).ravel() / 3.0
    assert abs(sample.mean()) < 6 / math.sqrt(n)
    assert abs(sample.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs(stats.skew(sample)) < 6 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(sample)) < 6 * math.sqrt(24 / n)


def test_is_normal() -> None:
    sample = gaussian(200_000, 0.5, np.float64)
    assert stats.kstest(sample, "norm", args=(0, 0.5)).pvalue > 1e-8


def test_tails_are_there() -> None:
    n = 1_000_000
    sample = np.abs(gaussian(n, 1.0))
    for bound in (2.0, 3.0, 4.0):
        expected = n * math.erfc(bound / math.sqrt(2))
        assert abs((sample > bound).sum() - expected) < 6 * math.sqrt(expected)


def test_coordinates_are_uncorrelated() -> None:
    n = 400_000
    sample = gaussian(n, 1.0).astype(np.float64)
    for lag in (1, 2, 16):
        assert abs(np.mean(sample[lag:] * sample[:-lag])) < 6 / math.sqrt(n)


def test_calls_never_repeat_whatever_is_seeded() -> None:
    draws = []
    for _ in range(50):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        draws.append(gaussian(4, 1.0).tobytes())
    assert len(set(draws)) == 50


def draw_into(queue: "multiprocessing.Queue[bytes]") -> None:
    queue.put(gaussian(8, 1.0).tobytes())


def test_forked_workers_do_not_share_a_stream() -> None:
    gaussian(8, 1.0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=draw_into, args=(queue,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    draws = {queue.get(timeout=20) for _ in workers} | {gaussian(8, 1.0).tobytes()}
    for worker in workers:
        worker.join()
    assert len(draws) == 4


def test_every_byte_of_the_key_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator is a function of 32 bytes of OS entropy and of nothing else, with no byte left out."""
    keys = [bytes(32), *(bytes(32 - i - 1) + b"\x80" + bytes(i) for i in range(32))]
    draws = []
    for key in keys:

        def entropy(size: int, key: bytes = key) -> bytes:
            return key[:size]

        monkeypatch.setattr(os, "urandom", entropy)
        draws.append(gaussian(4, 1.0).tobytes())
    assert len(set(draws)) == len(keys)
    assert noise.KEY_BYTES * 8 == 256


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype(dtype: type) -> None:
    assert gaussian((3, 5), 1.0, dtype).dtype == dtype
    assert gaussian((3, 5), 1.0, dtype).shape == (3, 5)
    assert gaussian((0,), 1.0, dtype).shape == (0,)


def test_zero_gives_zeros() -> None:
    zeros = gaussian((3, 2), 0.0)
    assert zeros.dtype == np.float32
    assert not zeros.any()


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf, -math.inf, 1e-45, 1e38])
def test_std_that_cannot_be_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="std"):
        gaussian(3, std)


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.complex128])
def test_other_dtypes_are_refused(dtype: type) -> None:
    with pytest.raises(ValueError, match="dtype"):
        gaussian(3, 1.0, dtype)


def test_a_generator_given_is_used() -> None:
    one, same = (gaussian(8, 2.0, generator=keyed_generator(KEY)) for _ in range(2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, gaussian(8, 2.0))


def test_keyed_generator_is_a_function_of_its_key() -> None:
    one, same, other = (skellam(keyed_generator(key), 100, 50.0) for key in (KEY, KEY, bytes(32)))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), "0" * 32, 5])
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises((ValueError, TypeError), match="key"):
        keyed_generator(key)  # type: ignore[arg-type]


def draws_of(entropy: Entropy, *purpose: object) -> bytes:
    return entropy.generator(*purpose).bytes(16)


def test_os_entropy_never_repeats() -> None:
    assert len({draws_of(OSEntropy(), "noise", 1) for _ in range(20)}) == 20


def test_seeded_entropy_is_set_by_seed_scope_and_purpose() -> None:
    assert draws_of(SeededEntropy(1), "noise", 2) == draws_of(SeededEntropy(1), "noise", 2)
    assert draws_of(SeededEntropy(1), "noise", 2) == draws_of(SeededEntropy(1), "noise", np.int64(2))
    others = [
        draws_of(SeededEntropy(1), "noise", 2),
        draws_of(SeededEntropy(2), "noise", 2),
        draws_of(SeededEntropy(1), "noise", 3),
        draws_of(SeededEntropy(1), "noise", 2, 0),
        draws_of(SeededEntropy(1), "noise/2"),
        draws_of(SeededEntropy(1), 'noise", "2'),
        draws_of(SeededEntropy(1, ("round", 1)), "noise", 2),
    ]
    assert len(set(others)) == len(others)


def test_entropy_is_the_systems_unless_reproducible_noise_is_set() -> None:
    assert open_entropy(RunConfig(), "step", 1) == OSEntropy()
    config = replace(RunConfig(seed=7), reproducible_noise=True)
    assert open_entropy(config, "step", 1) == SeededEntropy(7, ("step", 1))


def gaussian_pmf(support: np.ndarray, variance: float) -> np.ndarray:
    weights = np.exp(-(support**2) / (2 * variance))
    mass: np.ndarray = weights / weights.sum()
    return mass


def skellam_pmf(support: np.ndarray, variance: float) -> np.ndarray:
    mass: np.ndarray = stats.skellam.pmf(support, variance / 2, variance / 2)
    return mass


SAMPLERS = {skellam: skellam_pmf, discrete_gaussian: gaussian_pmf}
either = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.__name__)


@either
@pytest.mark.parametrize("variance", [0.3, 1.0, 2.7, 20.0, 19.9**2])
def test_integer_noise_has_its_distribution(sampler: Callable[..., np.ndarray], variance: float) -> None:
    """χ² test of the counts against the exact probabilities, tails pooled."""
    n = 300_000
    edge = math.ceil(12 * math.sqrt(variance)) + 10
    support = np.arange(-edge, edge + 1)
    expected = n * SAMPLERS[sampler](support, variance)
    counts = np.bincount(sampler(keyed_generator(KEY), n, variance) + edge, minlength=support.size)
    usual = expected > 20
    seen, hoped = (np.append(x[usual], x[~usual].sum()) for x in (counts, expected))
    statistic = ((seen - hoped) ** 2 / hoped).sum()
    assert 1e-3 < stats.chi2.sf(statistic, seen.size - 1) < 1 - 1e-3


@either
@pytest.mark.parametrize("variance", [1e3, 1e7, 1e12])
def test_moments_of_integer_noise(sampler: Callable[..., np.ndarray], variance: float) -> None:
    n = 200_000
    sample = sampler(keyed_generator(KEY), (2, n // 2), variance).ravel() / math.sqrt(variance)
    assert abs(sample.mean()) < 4 / math.sqrt(n)
    assert abs((sample**2).mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs(stats.skew(sample)) < 4 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(sample)) < 4 * math.sqrt(24 / n) + 1 / variance
    if variance > 1e5:  # fine enough to pass for continuous
        assert stats.kstest(sample, "norm").pvalue > 1e-3


def test_skellam_draws_are_not_gaussian_at_small_variance() -> None:
    """Excess kurtosis 1 / variance, which sets Skellam noise apart from discrete Gaussian noise."""
    sample = skellam(keyed_generator(KEY), 400_000, 0.5)
    assert stats.kurtosis(sample) == pytest.approx(2, abs=0.1)


def test_discrete_gaussian_of_tiny_variance_is_all_zeros_and_skellam_is_not() -> None:
    """P(±1) of N_Z(0, 0.01) is e^-50, that of Sk(0.01) is 0.01."""
    assert not discrete_gaussian(keyed_generator(KEY), 100_000, 0.01).any()
    assert np.abs(skellam(keyed_generator(KEY), 100_000, 0.01)).sum() == pytest.approx(1000, abs=150)


@either
def test_shares_sum_up_to_the_variance_asked(sampler: Callable[..., np.ndarray]) -> None:
    generator, n = keyed_generator(KEY), 20_000
    total = sum(sampler(generator, n, 700.0 / 40) for _ in range(40))
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], n)
    assert low < (np.asarray(total, dtype=np.float64) ** 2).sum() / 700 < high


@either
def test_integer_noise_is_independent_across_batches(sampler: Callable[..., np.ndarray]) -> None:
    n = noise.BATCH + 40_000
    sample = sampler(keyed_generator(KEY), n, 9.0).astype(np.float64)
    for lag in (1, 7, noise.BATCH):
        pairs = sample[lag:] * sample[:-lag] / 9
        assert abs(pairs.mean()) < 4 / math.sqrt(pairs.size)


@either
@pytest.mark.parametrize("shape", [(), 3, (2, 0), (4, 5)])
def test_integer_noise_shape_and_zero(sampler: Callable[..., np.ndarray], shape: tuple[int, ...]) -> None:
    drawn, zeros = (sampler(keyed_generator(KEY), shape, variance) for variance in (1e6, 0.0))
    assert drawn.shape == zeros.shape == np.zeros(shape).shape
    assert drawn.dtype == zeros.dtype == np.int64
    assert not zeros.any()
    assert drawn.all()


@either
@pytest.mark.parametrize("variance", [-1.0, math.nan, math.inf, -math.inf, 1e-10, 2.0**41, 1e19])
def test_variance_that_cannot_be_is_refused(sampler: Callable[..., np.ndarray], variance: float) -> None:
    with pytest.raises(ValueError, match="variance"):
        sampler(keyed_generator(KEY), 3, variance)
