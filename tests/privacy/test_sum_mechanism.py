"""Nodes protect, the server decodes: what is left is the true sum, and noise of the promised size."""

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.privacy.cohort import shares
from pina_flwr.privacy.encoding import unwrap
from pina_flwr.privacy.noise import KEY_BYTES, OSEntropy, open_entropy
from pina_flwr.privacy.plan import Shapes
from pina_flwr.privacy.sum_mechanism import (
    Budget,
    FloatSum,
    IntegerSum,
    SumMechanism,
    component_key,
    open_mechanism,
    rotation_seed,
)

TINY_P = 1e-8  # how rarely a statistical test may fail by chance
SIZE = 12_000
SPREAD = (12, 1, 7, 4)  # users of each node
COHORT = sum(SPREAD)
SEED = (1, "rotation", "mean", 1)
INTEGERS = ["skellam", "discrete-gaussian"]
MECHANISMS = [*INTEGERS, "gaussian"]


def configured(**options: Any) -> RunConfig:
    usual = {"num_users": COHORT, "sampling_rate": 1.0, "noise_cohort_size": 0, "bits": 24}
    usual |= {"secure_sum": "trusted"}
    return parse({name.replace("_", "-"): value for name, value in (usual | options).items()})


def opened(z: float = 1.5, size: int = SIZE, **options: Any) -> SumMechanism:
    """The mechanism of the private mean, whose vectors have norm 1 at most."""
    return open_mechanism(configured(**options), "mean", z, COHORT, Shapes(size, 1))


def unit_vectors(users: int, size: int = SIZE) -> Tensor:
    rows = torch.randn(users, size, generator=torch.Generator().manual_seed(users))
    return (1 - 1e-6) * rows / rows.norm(dim=1, keepdim=True)


def summed(mechanism: SumMechanism, nodes: Sequence[np.ndarray]) -> np.ndarray:
    """What the server decodes of the nodes' protected vectors."""
    if mechanism.bits:
        total = np.sum([node.astype(np.int64) for node in nodes], axis=0) % (1 << mechanism.bits)
    else:
        total = np.sum(nodes, axis=0, dtype=np.float64)
    return mechanism.decode(total, SEED)


def noise_of(mechanism: SumMechanism, spread: Sequence[int], cohort: int = COHORT) -> np.ndarray:
    """The noise on the sum when nodes with so many users each answer, float64 [SIZE]."""
    vectors = unit_vectors(sum(spread))
    parts = vectors.split(list(spread))
    nodes = [mechanism.protect(part, cohort, SEED, OSEntropy(), os.urandom(KEY_BYTES)) for part in parts]
    return summed(mechanism, nodes) - vectors.double().sum(dim=0).numpy()


def within(noise: np.ndarray, std: float) -> bool:
    """Whether noise is N(0, std²): by its variance and by its distribution function."""
    energy = (noise**2).sum() / std**2
    low, high = stats.chi2.ppf([TINY_P / 2, 1 - TINY_P / 2], noise.size)
    return bool(low < energy < high and stats.kstest(noise / std, "norm").pvalue > TINY_P)


# How much noise there is ------------------------------------------------------------------------------


def test_sigma_is_z_times_s() -> None:
    c = configured(clip_norm=0.5)
    for step, bound in (("mean", 1.0), ("lloyd", 1.0), ("update", 0.5)):
        budget = open_mechanism(c, step, 3.0, COHORT, Shapes(64, 80)).budget
        assert budget.sum_std == pytest.approx(3.0 * bound)
        assert budget.expected_cohort == COHORT


def test_noise_of_a_larger_cohort() -> None:
    """The noise on the mean is that of N users: z·S / N, whatever the true cohort."""
    few = opened(3.0, noise_cohort_size=1_000, dropout_tolerance=0.0, sampling_rate=0.5).budget
    assert few.expected_cohort == COHORT / 2
    assert few.sum_std / few.expected_cohort == pytest.approx(3.0 / 1_000)
    assert few.mean_std(12, 12, 0) == pytest.approx(3.0 / 1_000)
    same, none = (opened(3.0, noise_cohort_size=size).budget for size in (COHORT, 0))
    assert same.sum_std == pytest.approx(none.sum_std)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("spread", [SPREAD, (COHORT,), (1,) * COHORT])
def test_the_sum_carries_the_noise_promised(mechanism: str, spread: tuple[int, ...]) -> None:
    """Nobody vanishes: σ² / (1 - θ - c), however users are spread over nodes."""
    found = opened(mechanism=mechanism, dropout_tolerance=0.25, colluding_share=0.15)
    noise, std = noise_of(found, spread), 1.5 / math.sqrt(0.6)
    assert within(noise, std)
    assert std == pytest.approx(found.budget.mean_std(COHORT, COHORT, COHORT) * COHORT, rel=1e-9)
    assert not within(noise, 1.1 * std)  # the test would see a tenth
    assert not within(noise, 0.9 * std)
    assert not within(noise, 1.5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_fewest_survivors_leave_just_enough(mechanism: str) -> None:
    found = opened(mechanism=mechanism, dropout_tolerance=0.5)
    noise = noise_of(found, SPREAD[:1])  # 12 of 24
    assert within(noise, found.budget.sum_std)
    assert found.budget.mean_std(COHORT, 12, 12) * COHORT == pytest.approx(found.budget.sum_std)


@pytest.mark.parametrize("theta", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("colluding", [0.0, 0.1, 0.33])
def test_honest_survivors_always_add_enough(theta: float, colluding: float) -> None:
    """And all together the same in a cohort of any size, which amplification by sampling asks for."""
    config = configured(dropout_tolerance=theta, colluding_share=colluding)
    budget = Budget(config, 2.0, 50.0)
    for cohort in range(1, 120):
        assert budget.share(shares(config, cohort).honest, cohort) >= 4.0 * (1 - 1e-9)
        assert budget.share(cohort, cohort) == pytest.approx(4.0 / (1 - theta - colluding))


def test_colluders_that_tell_their_noise_leave_enough() -> None:
    """Three of 24 collude and a half vanish: the nine honest ones that are left carry σ²."""
    found = opened(dropout_tolerance=0.5, colluding_share=0.125)
    assert within(noise_of(found, (2, 7)), found.budget.sum_std)


def test_shares_are_in_proportion_to_users() -> None:
    budget = Budget(configured(), 2.0, 24.0)
    assert sum(budget.share(users, COHORT) for users in SPREAD) == pytest.approx(budget.share(24, 24))
    assert budget.share(12, COHORT) == pytest.approx(12 * budget.share(1, COHORT))


@pytest.mark.parametrize(("users", "cohort"), [(0, 5), (-1, 5), (6, 5), (0, 0), (1, 0)])
def test_a_share_that_cannot_be_is_refused(users: int, cohort: int) -> None:
    with pytest.raises(ValueError, match="noise share"):
        Budget(configured(), 1.0, 5.0).share(users, cohort)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_nothing_is_protected_with_a_share_that_cannot_be(mechanism: str) -> None:
    found = opened(mechanism=mechanism, size=32)
    for users, cohort in ((3, 2), (0, 2), (1, 0)):
        with pytest.raises(ValueError, match="noise share"):
            found.protect(unit_vectors(users, 32), cohort, SEED, OSEntropy())


def test_no_honest_survivor_no_round() -> None:
    budget = Budget(configured(dropout_tolerance=0.5, colluding_share=0.4), 1.0, 10.0)
    assert budget.needed(10, 5) == 1.0
    with pytest.raises(ValueError, match="nobody's noise is secret"):
        budget.needed(10, 6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("z", [math.nan, math.inf])
def test_a_noise_multiplier_that_cannot_be_is_refused(mechanism: str, z: float) -> None:
    with pytest.raises(ValueError, match="std"):
        opened(z, mechanism=mechanism, size=32).protect(unit_vectors(1, 32), 1, SEED, OSEntropy())


def test_without_noise_there_is_none() -> None:
    found = opened(0.0, size=50)
    assert isinstance(found, FloatSum)
    assert found.budget.mean_std(24, 20, 24) == 0
    assert np.abs(noise_of_small(found)).max() < 1e-6


@pytest.mark.parametrize("mechanism", INTEGERS)
def test_without_noise_a_sum_of_integers_adds_what_rounding_leaves(mechanism: str) -> None:
    """SecAgg+ adds integers only; a vector of each user by itself, or of a node, decodes to the same sum."""
    found = opened(0.0, size=50, mechanism=mechanism, secure_sum="secagg+")
    assert isinstance(found, IntegerSum)
    assert found.budget.mean_std(24, 20, 24) == 0
    step, vectors = 1 / found.encoding.scale, unit_vectors(3, 50)
    assert step < 0.01
    for parts in ([vectors], vectors.split(1)):
        sent = [found.protect(part, 3, SEED, OSEntropy()) for part in parts]
        error = summed(found, sent) - vectors.sum(dim=0).numpy()
        assert 0 < np.linalg.norm(error) < 3 * step * math.sqrt(found.size)  # each number is under 1 off


def noise_of_small(mechanism: SumMechanism) -> np.ndarray:
    vectors = unit_vectors(3, 50)
    return summed(mechanism, [mechanism.protect(vectors, 3, SEED, OSEntropy())]) - vectors.sum(dim=0).numpy()


# What leaves a node -----------------------------------------------------------------------------------


def test_on_the_wire() -> None:
    vectors = unit_vectors(3, 50)
    floats = opened(mechanism="gaussian", size=50)
    sent = floats.protect(vectors, COHORT, SEED, OSEntropy())
    assert (sent.dtype, sent.shape, floats.size, floats.bits) == (np.float32, (50,), 50, 0)
    for mechanism in INTEGERS:
        integers = opened(mechanism=mechanism, size=50, bits=18)
        sent = integers.protect(vectors, COHORT, SEED, OSEntropy())
        assert (sent.dtype, sent.shape, integers.size, integers.bits) == (np.uint32, (4096,), 4096, 18)
        assert sent.max() < 2**18
        assert integers.decode(sent, SEED).shape == (50,)


@pytest.mark.parametrize("step", ["mean", "lloyd", "update"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_step_is_decoded_to_its_length(step: str, mechanism: str) -> None:
    config, shapes = configured(mechanism=mechanism, clusters=2, kmeans_restarts=3), Shapes(20, 31)
    found = open_mechanism(config, step, 1.0, COHORT, shapes)
    width = {"mean": 20, "lloyd": 3 * 2 * 20, "update": 2 * 31 + 2}[step]
    sent = found.protect(unit_vectors(4, width), COHORT, SEED, OSEntropy())
    assert sent.shape == (found.size,)
    assert found.decode(sent, SEED).shape == (width,)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_noise_repeats(mechanism: str) -> None:
    found, vectors = opened(mechanism=mechanism, size=256), unit_vectors(3, 256)
    first, second = (found.protect(vectors, COHORT, SEED, OSEntropy()) for _ in range(2))
    assert (first != second).mean() > 0.9
    debugged = open_entropy(configured(reproducible_noise=True), "mean", 1, 0)
    third, fourth = (found.protect(vectors, COHORT, SEED, debugged) for _ in range(2))
    assert np.array_equal(third, fourth)


def test_no_two_places_of_a_run_share_noise_even_when_it_is_reproducible() -> None:
    """One stream used twice would cancel noise, or tell it."""
    config, found, nothing = configured(reproducible_noise=True), opened(size=64), torch.zeros(1, 64)
    places = [(s, t, node) for s in ("mean", "update") for t in (1, 2, 12, 21) for node in (0, 1, 2, 12)]
    sent = sorted(
        found.protect(nothing, COHORT, SEED, open_entropy(config, *place)).tobytes() for place in places
    )
    assert all(a != b for a, b in pairwise(sent))


@pytest.mark.parametrize("mechanism", INTEGERS)
@pytest.mark.parametrize("bad", [1.01, math.nan, math.inf])
def test_a_vector_over_its_bound_never_leaves(mechanism: str, bad: float) -> None:
    vectors = unit_vectors(3, 50)
    vectors[1] *= bad
    with pytest.raises(ValueError, match="norm"):
        opened(mechanism=mechanism, size=50).protect(vectors, COHORT, SEED, OSEntropy())


@pytest.mark.parametrize("mechanism", INTEGERS)
def test_vectors_of_another_shape_or_kind_never_leave(mechanism: str) -> None:
    found = opened(mechanism=mechanism, size=50)
    for vectors in (unit_vectors(3, 49), unit_vectors(3, 51), unit_vectors(3, 50)[None]):
        with pytest.raises(ValueError, match="shape"):
            found.protect(vectors, COHORT, SEED, OSEntropy())
    with pytest.raises(TypeError, match="int64"):
        found.protect(torch.zeros(3, 50, dtype=torch.int64), COHORT, SEED, OSEntropy())


@pytest.mark.parametrize("mechanism", INTEGERS)
def test_memory_order_does_not_matter(mechanism: str) -> None:
    found, vectors = opened(mechanism=mechanism, size=50), unit_vectors(3, 50)
    debugged = open_entropy(configured(reproducible_noise=True), "mean", 1, 0)
    upright = found.protect(vectors, COHORT, SEED, debugged)
    transposed = found.protect(vectors.T.contiguous().T, COHORT, SEED, debugged)
    assert np.array_equal(upright, transposed)


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "skellam"},
        {"mechanism": "skellam", "dropout_noise": "removable", "dropout_tolerance": 0.2},
        {"mechanism": "discrete-gaussian"},
        {"mechanism": "skellam", "bits": 13},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", ["mean", "update"])
def test_one_user_changes_the_integers_by_its_sensitivity_at_most(options: dict[str, Any], step: str) -> None:
    """With its vector zeroed, and the same draws: integers of norm `encoding.l2` at most."""
    config = configured(**options, clip_norm=0.3, reproducible_noise=True, strategy="fedavg")
    size, bound = (100, 1.0) if step == "mean" else (700, 0.3)
    found = open_mechanism(config, step, 2.0, COHORT, Shapes(100, 700))
    assert isinstance(found, IntegerSum)
    entropy, vectors, key = open_entropy(config, step, 1, 0), bound * unit_vectors(20, size), bytes(range(32))
    everybody = found.protect(vectors, COHORT, SEED, entropy, key)
    for user in (0, 7, 15, 16, 19):
        without = vectors.clone()
        without[user] = 0
        others = found.protect(without, COHORT, SEED, entropy, key)
        change = unwrap((everybody.astype(np.int64) - others) % (1 << found.bits), found.bits)
        norm = np.linalg.norm(change.astype(float))
        assert 0.9 * found.encoding.scale * bound < norm <= found.encoding.l2
        assert np.abs(change).sum() <= found.encoding.l1


def test_one_user_changes_floats_by_its_norm() -> None:
    found, vectors = opened(mechanism="gaussian", size=300), unit_vectors(5, 300)
    entropy = open_entropy(configured(reproducible_noise=True), "mean", 1, 0)
    without = vectors.clone()
    without[2] = 0
    sent = [found.protect(v, COHORT, SEED, entropy).astype(float) for v in (vectors, without)]
    assert np.linalg.norm(sent[0] - sent[1]) == pytest.approx(1, rel=1e-3)


def test_too_few_bits() -> None:
    with pytest.raises(ConfigError, match="bits = 8"):
        opened(bits=8)


# Noise that can be removed ----------------------------------------------------------------------------


def test_removable_noise_is_that_which_is_provisioned_at_the_most_that_may_vanish() -> None:
    found = opened(dropout_noise="removable", dropout_tolerance=0.5)
    assert within(noise_of(found, SPREAD[:1]), found.budget.sum_std)
    assert within(noise_of(found, SPREAD), found.budget.sum_std / math.sqrt(0.5))


def test_components_add_up() -> None:
    """Part 0 to part v together are what each of the survivors has to add when v vanish."""
    config = configured(dropout_noise="removable", dropout_tolerance=0.5, colluding_share=0.2)
    found = open_mechanism(config, "mean", 1.5, COHORT, Shapes(SIZE, 1))
    assert isinstance(found, IntegerSum)
    for vanished in (1, 5, 12):
        added = [found.component(component_key(bytes(32), k), 3, COHORT, k) for k in range(1, vanished + 1)]
        variance = 3 * (found.budget.needed(COHORT, vanished) - found.budget.needed(COHORT, 0))
        assert within(np.sum(added, axis=0) / found.encoding.scale, math.sqrt(variance))
    honest = 24 * (1 - Fraction(1, 5))  # not rounded: the noise in all is the same for every cohort
    assert found.budget.needed(COHORT, 0) == pytest.approx(1.5**2 / float(honest))


def test_mean_std_tells_how_much_of_it_is_left() -> None:
    budget = opened(dropout_noise="removable", dropout_tolerance=0.5).budget
    all_removed, none_removed = budget.mean_std(24, 20, 0), budget.mean_std(24, 20, 20)
    assert all_removed * 24 == pytest.approx(budget.sum_std)
    assert none_removed * 24 == pytest.approx(budget.sum_std * math.sqrt(20 / 12))
    assert all_removed < budget.mean_std(24, 20, 7) < none_removed
    assert budget.mean_std(24, 12, 0) == budget.mean_std(24, 12, 12)  # at the most that may vanish


def test_component_keys() -> None:
    keys = [component_key(key, k) for key in (bytes(32), bytes(range(32))) for k in (1, 2, 3, 256)]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys)) == 8
    assert component_key(bytes(32), 1) == keys[0]
    for short in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="key of"):
            component_key(short, 1)


def test_removable_noise_needs_a_key() -> None:
    found = opened(dropout_noise="removable", dropout_tolerance=0.2, size=32)
    with pytest.raises(ValueError, match="key"):
        found.protect(unit_vectors(1, 32), COHORT, SEED, OSEntropy())


# The rotation -----------------------------------------------------------------------------------------


def test_every_round_of_a_step_is_rotated_afresh() -> None:
    seeds = [rotation_seed(c, step, t) for c in (configured(), configured(seed=2)) for step, t in STEPS]
    assert len(set(seeds)) == 6
    found, vectors = opened(0.01, size=50), unit_vectors(1, 50)
    sent = found.protect(vectors, 1, seeds[0], OSEntropy())
    right, wrong = (np.linalg.norm(found.decode(sent, seed) - vectors[0].numpy()) for seed in seeds[:2])
    assert right < 0.2 < 0.5 < wrong


STEPS = [("mean", 1), ("update", 1), ("update", 2)]
