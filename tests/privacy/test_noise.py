import math
import multiprocessing
import os

import numpy as np
import pytest
import torch
from scipy import stats

from pina_flwr.privacy import noise
from pina_flwr.privacy.noise import gaussian


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
