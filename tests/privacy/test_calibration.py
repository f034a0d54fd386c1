import math

import pytest

from pina_flwr.config import ConfigError
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.calibration import LARGEST_Z, SMALLEST_Z, calibrate
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease


@pytest.mark.parametrize(("target", "delta"), [(0.5, 1e-5), (2.0, 2.5e-3), (8.0, 1e-5)])
@pytest.mark.parametrize(("q", "count"), [(0.215, 20), (0.01, 1000), (1.0, 8)])
def test_result_is_within_budget_and_the_smallest(target: float, q: float, count: int, delta: float) -> None:
    def releases(z: float) -> list[Release]:
        return [GaussianRelease(z, q, count)]

    z = calibrate(releases, target, delta)
    assert epsilon(releases(z), delta) <= target
    assert epsilon(releases(z / 1.001), delta) > target


def test_two_stages_within_a_joint_budget() -> None:
    first = GaussianRelease(1.6, 0.215, 8)
    z = calibrate(lambda z: [first, GaussianRelease(z, 0.215, 20)], 8.0, 1e-5)
    assert epsilon([first, GaussianRelease(z, 0.215, 20)], 1e-5) <= 8.0
    assert epsilon([first, GaussianRelease(z / 1.001, 0.215, 20)], 1e-5) > 8.0
    assert z > calibrate(lambda z: [GaussianRelease(z, 0.215, 20)], 8.0, 1e-5)


def test_tolerance_is_kept() -> None:
    fine = calibrate(lambda z: [GaussianRelease(z, 1.0, 10)], 3.0, 1e-5, tolerance=1e-7)
    coarse = calibrate(lambda z: [GaussianRelease(z, 1.0, 10)], 3.0, 1e-5, tolerance=0.05)
    assert fine <= coarse <= 1.05 * fine


def test_out_of_reach_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match=r"epsilon = 8: out of reach at delta = 1e-05"):
        calibrate(lambda z: [GaussianRelease(z, 1.0, 1), UnprotectedRelease("positions", 1)], 8.0, 1e-5)
    with pytest.raises(ConfigError, match="epsilon"):
        calibrate(lambda z: [GaussianRelease(1.0, 1.0, 1)], 0.5, 1e-5)


def test_never_asks_for_noise_beyond_its_bounds() -> None:
    asked: list[float] = []

    def releases(z: float) -> list[Release]:
        asked.append(z)
        return [] if len(asked) < 100 else [GaussianRelease(z, 1.0, 1)]

    assert calibrate(releases, 1.0, 1e-5) == SMALLEST_Z
    with pytest.raises(ConfigError):
        calibrate(lambda z: asked.append(z) or [UnprotectedRelease("why", 1)], 1.0, 1e-5)  # type: ignore[func-returns-value]
    assert SMALLEST_Z <= min(asked) < max(asked) <= LARGEST_Z


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_target_must_be_positive_and_finite(target: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        calibrate(lambda z: [GaussianRelease(z, 1.0, 1)], target, 1e-5)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan, math.inf])
def test_tolerance_must_be_positive(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        calibrate(lambda z: [GaussianRelease(z, 1.0, 1)], 1.0, 1e-5, tolerance=tolerance)
