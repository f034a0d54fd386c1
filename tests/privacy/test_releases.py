import dataclasses
import math

import pytest

from pina_flwr.privacy.releases import GaussianRelease, UnprotectedRelease


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan, math.inf])
def test_noise_multiplier_must_be_positive_and_finite(z: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianRelease(z, 0.5, 1)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, math.nan])
def test_sampling_rate_must_be_a_positive_probability(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling_rate"):
        GaussianRelease(1.0, rate, 1)


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_count_must_be_a_natural_number(count: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="count"):
        GaussianRelease(1.0, 0.5, count)  # type: ignore[arg-type]
    with pytest.raises(error, match="count"):
        UnprotectedRelease("why", count)  # type: ignore[arg-type]


def test_releases_are_values() -> None:
    release = GaussianRelease(1.0, 1.0, 0)
    assert release == GaussianRelease(1.0, 1.0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        release.count = 5  # type: ignore[misc]
