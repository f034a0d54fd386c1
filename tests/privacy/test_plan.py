"""From options to noise and releases: calibration against the accountant, releases against the mechanisms."""

import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import save_model

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.models.backbone import load_backbone
from pina_flwr.privacy import accountant
from pina_flwr.privacy.cohort import largest_cohort, participation_cap
from pina_flwr.privacy.encoding import excess
from pina_flwr.privacy.plan import (
    NO_NOISE,
    POSITIONS,
    REPRODUCIBLE,
    SECURE_SUMS,
    NoisePlan,
    Shapes,
    as_paper_counts,
    clip_norm_of,
    encoding_of,
    local_sketches,
    plan,
    release_of,
    released,
    rounds_by_step,
    shapes_of,
    vector_size,
)
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)
from pina_flwr.privacy.sum_mechanism import IntegerSum, open_mechanism

USERS = 232
Q, T_IN, T_TR = 0.215, 10, 20
SHAPES = Shapes(256, 1674)  # of tiny-vit
DELTA = USERS**-1.1
MECHANISMS = ["skellam", "discrete-gaussian", "gaussian"]


def configured(**options: Any) -> RunConfig:
    usual = {"secure_sum": "trusted"}  # which adds vectors of every mechanism
    return parse({name.replace("_", "-"): value for name, value in (usual | options).items()})


def planned(config: RunConfig, *earlier: Release) -> NoisePlan:
    return plan(config, USERS, SHAPES, earlier)


def epsilon(*releases: Release, delta: float = DELTA) -> float:
    return accountant.epsilon(releases, delta)


def of_recipients(
    config: RunConfig, noise: NoisePlan, rounds: tuple[int, int] = (T_IN, T_TR)
) -> list[Release]:
    return released(config, noise, USERS, SHAPES, *rounds)


def of_server(config: RunConfig, noise: NoisePlan) -> list[Release]:
    return released(config, noise, USERS, SHAPES, T_IN, T_TR, to_server=True)


# Lengths of vectors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_rank": 1, "stage1_rank": 1},
        {"lora_rank": 7, "stage1_rank": 3, "lora_targets": "q, k,v,o"},
        {"lora_targets": "v", "lora_layers": 3},
        {"lora_train_a": False, "lora_layers": 2},
        {"train_head": False},
        {"stage1_signal": "features"},
        {"stage1_signal": "features", "features_grid": 1, "stage1_rank": 3},
        {"lora_train_a": False, "train_head": False, "lora_targets": "o,v"},
        {"strategy": "fedavg", "lora_targets": "q"},
    ],
    ids=str,
)
def test_shapes_are_those_of_a_loaded_backbone(options: dict[str, Any], tmp_path: Path) -> None:
    config = configured(**options)
    assert shapes_of(config, 64, 10) == load_backbone(config, 10).shapes
    narrow = replace(config, backbone=save_model("vit", tmp_path))
    assert shapes_of(narrow, 16, 3) == load_backbone(narrow, 3).shapes


def test_vector_sizes() -> None:
    c = configured(clusters=3, kmeans_restarts=5, normality="paper")
    sizes = [vector_size(c, step, Shapes(8, 20)) for step in SECURE_SUMS]
    assert sizes == [8, 5 * 3 * 8, 3 * 20]
    counted = configured(clusters=3, normality="count")
    assert vector_size(counted, "update", Shapes(8, 20)) == 3 * 20 + 3
    assert vector_size(configured(strategy="fedavg"), "update", Shapes(8, 20)) == 20
    with pytest.raises(KeyError):
        vector_size(c, "sketch", Shapes(8, 20))


def test_stage_1_adds_unit_vectors() -> None:
    c = configured(clip_norm=0.3)
    assert [clip_norm_of(c, step) for step in SECURE_SUMS] == [1.0, 1.0, 0.3]


def test_rounds_by_step() -> None:
    assert rounds_by_step(configured(), 10, 20) == {"mean": 1, "lloyd": 9, "update": 20}
    assert rounds_by_step(configured(), 0, 3) == {"mean": 0, "lloyd": 0, "update": 3}
    uncentred = configured(stage1="sketch", sketch_centre="none")
    assert rounds_by_step(uncentred, 10, 0) == {"mean": 0, "sketch": 10, "update": 0}


def test_local_sketches() -> None:
    assert local_sketches(configured(stage1="sketch"), 10) == 9
    assert local_sketches(configured(stage1="sketch", sketch_centre="none"), 10) == 10
    assert local_sketches(configured(), 10) == 0
    assert local_sketches(configured(stage1="sketch", strategy="fedavg"), 10) == 0


# Calibration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("cohort", [0, 10_000])
@pytest.mark.parametrize("target", [0.7, 2.0, 8.0])
def test_the_budget_is_kept_and_used(mechanism: str, cohort: int, target: float) -> None:
    config = configured(mechanism=mechanism, noise_cohort_size=cohort, epsilon=target)
    noise = planned(config)
    assert noise.delta == pytest.approx(DELTA)
    assert 0.99 * target < epsilon(*of_recipients(config, noise)) <= target
    alone = of_recipients(config, noise, (T_IN, 0))
    assert 0.99 * 0.3 * target < epsilon(*alone) <= 0.3 * target


def test_releases_of_the_gaussian_mechanism() -> None:
    """The textbook case, written out."""
    config = configured(mechanism="gaussian")
    noise = planned(config)
    assert 0.99 * 0.3 * 8 < epsilon(GaussianRelease(noise.stage1, Q, T_IN)) <= 0.3 * 8
    both = epsilon(GaussianRelease(noise.stage1, Q, T_IN), GaussianRelease(noise.stage2, Q, T_TR))
    assert 0.99 * 8 < both <= 8
    assert both == epsilon(*of_recipients(config, noise))
    assert of_server(configured(mechanism="gaussian", participation_cap=T_TR), noise) == [
        GaussianRelease(noise.stage1, 1.0, 1),  # the private mean
        GaussianRelease(noise.stage1, 1.0, T_IN - 1),
        GaussianRelease(noise.stage2, 1.0, T_TR),
    ]


def test_integers_cost_little_at_20_bits() -> None:
    """z is that of continuous noise up to a few percent, and never less than an RDP bound of it needs."""
    gaussian = planned(configured(mechanism="gaussian", epsilon=2.0))
    for mechanism in ("skellam", "discrete-gaussian"):
        noise = planned(configured(mechanism=mechanism, epsilon=2.0))
        assert gaussian.stage1 * 0.999 < noise.stage1 < 1.03 * gaussian.stage1
        assert gaussian.stage2 * 0.999 < noise.stage2 < 1.03 * gaussian.stage2


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_stage1_budget_means_one_noise_multiplier(mechanism: str) -> None:
    config = configured(stage1_budget=0.0, epsilon=2.0, mechanism=mechanism)
    noise = planned(config)
    assert noise.stage1 == noise.stage2
    assert 0.99 * 2 < epsilon(*of_recipients(config, noise)) <= 2


def test_more_of_the_budget_is_less_noise() -> None:
    plans = [planned(configured(stage1_budget=s)) for s in (0.1, 0.3, 0.6, 0.9)]
    assert all(a.stage1 > b.stage1 and a.stage2 < b.stage2 for a, b in itertools.pairwise(plans))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fedavg"},
        {"strategy": "pina-ri"},
        {"strategy": "oracle"},
        {"strategy": "pina", "stage1": "random"},
        {"strategy": "fedavg", "stage1": "sketch"},
    ],
)
def test_without_stage1_the_budget_is_stage2s(options: dict[str, str]) -> None:
    config = configured(**options)
    noise = planned(config)
    assert noise.stage1 == 0
    assert 0.99 * 8 < epsilon(*of_recipients(config, noise, (0, T_TR))) <= 8


def test_given_noise_multiplier_wins_over_epsilon() -> None:
    noise = planned(configured(noise_multiplier=1.3))
    assert (noise.stage1, noise.stage2) == (1.3, 1.3)
    assert planned(configured(noise_multiplier=1.3, epsilon=math.inf)) == noise
    assert planned(configured(noise_multiplier=1.3, strategy="fedavg")).stage1 == 0


@pytest.mark.parametrize("strategy", ["pina", "fedavg", "ifca"])
def test_without_privacy_there_is_no_noise(strategy: str) -> None:
    config = configured(strategy=strategy, epsilon=math.inf)
    assert plan(config, 1, SHAPES) == NoisePlan(0.0, 0.0, 0.0)
    assert UnprotectedRelease(NO_NOISE, T_TR) in of_recipients(config, NoisePlan(0.0, 0.0, 0.0))


class TestLocalUpdates:
    """IFCA under local DP: a user's releases of its own, at most as many as the cap, seen alike by all."""

    @pytest.mark.parametrize(("cap", "count"), [(0, None), (3, 3), (T_TR + 5, T_TR)])
    def test_releases(self, cap: int, count: int | None) -> None:
        config = configured(strategy="ifca", noise_multiplier=2.0, participation_cap=cap)
        count = participation_cap(config, 2) if count is None else count
        noise = planned(config)
        assert noise == NoisePlan(0.0, 2.0, noise.delta)
        assert of_recipients(config, noise, (0, T_TR)) == [ZcdpRelease(1 / 8, count)]
        assert released(config, noise, USERS, SHAPES, 0, T_TR, to_server=True) == [ZcdpRelease(1 / 8, count)]

    @pytest.mark.parametrize("target", [2.0, 8.0])
    def test_calibrated_by_hand(self, target: float) -> None:
        """`count` Gaussian releases are one of ρ = count / (2z²); ε by the conversion of Balle et al."""
        config = configured(strategy="ifca", epsilon=target)
        noise, count = planned(config), participation_cap(config, 2)

        def by_hand(z: float) -> float:
            orders = 1 + np.geomspace(1e-3, 1e4, 20_000)
            rho = count / (2 * z * z)
            terms = np.log1p(-1 / orders) - (np.log(noise.delta) + np.log(orders)) / (orders - 1)
            return float((orders * rho + terms).min())

        assert target * (1 - 1e-3) < by_hand(noise.stage2) <= target * (1 + 1e-6)
        assert by_hand(noise.stage2 * 0.995) > target
        whole = ZcdpRelease(1 / (2 * noise.stage2**2), count)
        assert epsilon(whole, delta=noise.delta) == pytest.approx(by_hand(noise.stage2), rel=1e-3)

    def test_what_secure_sums_need_is_not_asked_for(self) -> None:
        small = configured(strategy="ifca", noise_cohort_size=1, bits=8, ledger="x")
        assert planned(small) == planned(configured(strategy="ifca"))

    def test_without_privacy_it_is_a_secure_sum(self) -> None:
        config = configured(strategy="ifca", epsilon=math.inf)
        assert rounds_by_step(config, 0, T_TR)["update"] == T_TR
        assert "local-update" in rounds_by_step(configured(strategy="ifca"), 0, T_TR)


def test_of_step() -> None:
    noise = NoisePlan(1.0, 2.0, 1e-5)
    assert [noise.of_step(step) for step in ("mean", "lloyd", "sketch", "update")] == [1, 1, 1, 2]
    assert [noise.of_step(step) for step in ("local-update", "raw-update")] == [2, 2]


class TestEarlierRuns:
    """What the server's ledger says was released before counts against ε."""

    earlier = (GaussianRelease(2.0, Q, 10), ZcdpRelease(0.01, 2))

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    @pytest.mark.parametrize("share", [0.3, 0.0])
    def test_count(self, mechanism: str, share: float) -> None:
        config = configured(mechanism=mechanism, stage1_budget=share)
        noise, fresh = planned(config, *self.earlier), planned(config)
        assert (
            noise.stage2 > fresh.stage2
        )  # stage 1 alone may get more: ε of several releases is under its sum
        together = epsilon(*self.earlier, *of_recipients(config, noise))
        assert 0.99 * 8 < together <= 8

    def test_stage1_gets_its_share_of_what_is_left(self) -> None:
        config = configured()
        noise, before = planned(config, *self.earlier), epsilon(*self.earlier)
        after = epsilon(*self.earlier, *of_recipients(config, noise, (T_IN, 0)))
        assert 0 < (after - before) / (8 - before) <= 0.3
        # Clients, who don't know what was released before, expect at least the noise of a first run.
        assert noise.stage1 >= planned(config).stage1

    @pytest.mark.parametrize(
        "earlier", [GaussianRelease(0.3, 1.0, 50), UnprotectedRelease(NO_NOISE, 1)], ids=["too much", "all"]
    )
    def test_that_spent_everything(self, earlier: Release) -> None:
        with pytest.raises(ConfigError, match=r"epsilon.*earlier runs spent"):
            planned(configured(), earlier)
        assert planned(configured(epsilon=1e4), GaussianRelease(0.3, 1.0, 50)).stage2 > 0

    def test_do_not_change_noise_that_is_given(self) -> None:
        assert planned(configured(noise_multiplier=1.0), *self.earlier).stage2 == 1.0


# Integers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"epsilon": 2.0}, {"noise_multiplier": 2.0}])
@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
def test_too_few_bits_are_refused_with_what_would_do(options: dict[str, float], mechanism: str) -> None:
    few = {"mechanism": mechanism, "strategy": "fedavg", "noise_cohort_size": 0, **options}
    with pytest.raises(ConfigError, match=r"^bits = 8: too small for .*; (\d+) would do$") as refused:
        planned(configured(**few, bits=8))
    enough = int(str(refused.value).split("; ")[1].split()[0])
    assert 8 < enough < 20
    for bits in (enough, enough + 4):
        assert planned(configured(**few, bits=bits)).stage2 > 1


@pytest.mark.parametrize(
    ("bits", "target"), [(10, 8.0), (11, 0.5), (11, 2.0), (11, 8.0), (12, 2.0), (13, 0.5)]
)
def test_bits_are_refused_only_if_no_noise_would_do(bits: int, target: float) -> None:
    """Little noise drowns in the rounding, much of it leaves no steps: between them there may be a z."""
    config = configured(strategy="fedavg", noise_cohort_size=0, epsilon=target, bits=bits)

    def works(z: float) -> bool:
        try:
            return epsilon(*release_of(config, "update", z, USERS, SHAPES, Q, T_TR)) <= target
        except ConfigError:
            return False

    if any(works(z) for z in (2 ** (k / 8) for k in range(-16, 40))):
        assert 0 < epsilon(*of_recipients(config, planned(config), (0, T_TR))) <= target
    else:
        with pytest.raises(ConfigError, match="bits"):
            planned(config)


def test_the_encoding_has_room_for_the_noise_in_excess() -> None:
    """When nobody vanishes, the sum carries 1 / (1 - θ - c) times the variance that it needs."""
    tight = encoding_of(configured(dropout_tolerance=0.0), "update", 1.0, 90, SHAPES)
    roomy = encoding_of(configured(dropout_tolerance=0.5, colluding_share=0.25), "update", 1.0, 90, SHAPES)
    assert roomy.scale < tight.scale
    assert roomy == encoding_of(configured(dropout_tolerance=0.0), "update", 2.0, 90, SHAPES)
    assert excess(roomy, 2.0, 90) < 1.01


def summed(config: RunConfig, step: str) -> tuple[float, float]:
    """l2 sensitivity and promised variance of the integers that a run of 500 users adds up at z = 1.5."""
    running = open_mechanism(config, step, 1.5, 500, SHAPES)
    assert isinstance(running, IntegerSum)
    return running.encoding.l2, (running.encoding.scale * running.budget.sum_std) ** 2


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
@pytest.mark.parametrize("step", SECURE_SUMS)
@pytest.mark.parametrize("bits", [14, 20])
def test_epsilon_is_that_of_the_integers_that_are_summed(mechanism: str, step: str, bits: int) -> None:
    config = configured(mechanism=mechanism, bits=bits, clip_norm=0.7, sampling_rate=0.1, noise_cohort_size=0)
    (release,) = release_of(config, step, 1.5, 500, SHAPES, Q, 3)
    assert isinstance(release, SkellamRelease | DiscreteGaussianRelease)
    assert (release.l2, release.variance) == pytest.approx(summed(config, step), rel=1e-12)
    assert (release.sampling_rate, release.count) == (Q, 3)
    code = encoding_of(config, step, 1.5 * clip_norm_of(config, step), largest_cohort(500, 0.1), SHAPES)
    if isinstance(release, SkellamRelease):
        assert release.l1 == code.l1
    else:
        assert release.size == code.padded
        assert release.clients >= math.ceil(50 * 0.9)


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
def test_a_noise_cohort_of_the_true_size_borrows_nothing(mechanism: str) -> None:
    """Its ε has to be that of this run's integers, which have room for the largest cohort, not for q·|K|."""
    config = configured(mechanism=mechanism, bits=14, sampling_rate=0.1, noise_cohort_size=50)
    (release,) = release_of(config, "update", 1.5, 500, SHAPES, Q)
    assert isinstance(release, SkellamRelease | DiscreteGaussianRelease)
    assert (release.l2, release.variance) == pytest.approx(summed(config, "update"), rel=1e-12)


# A simulated cohort -----------------------------------------------------------------------------------


def test_noise_cohort_under_the_true_cohort_is_refused() -> None:
    def of(size: int) -> RunConfig:
        return configured(sampling_rate=0.1, noise_multiplier=1.0, noise_cohort_size=size)

    with pytest.raises(ConfigError, match=r"noise-cohort-size = 29.*q·\|K\| = 30"):
        plan(of(29), 300, SHAPES)
    for size in (0, 30, 31):
        assert plan(of(size), 300, SHAPES).stage2 == 1.0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_simulated_cohort_needs_the_noise_of_its_deployment(mechanism: str) -> None:
    few = configured(mechanism=mechanism, noise_cohort_size=1_000, delta=1e-5, sampling_rate=0.1)
    many = configured(mechanism=mechanism, noise_cohort_size=0, delta=1e-5, sampling_rate=0.1)
    simulated, deployed = plan(few, USERS, SHAPES), plan(many, 10_000, SHAPES)
    assert simulated.stage1 == pytest.approx(deployed.stage1, rel=2e-3)
    assert simulated.stage2 == pytest.approx(deployed.stage2, rel=2e-3)


# Towards whom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_participation_cap_helps_against_the_server_only(mechanism: str) -> None:
    configs = [configured(mechanism=mechanism, participation_cap=cap) for cap in (1, 3, 10, T_TR)]
    plans = [planned(config) for config in configs]
    assert len(set(plans)) == 1
    assert len({tuple(of_recipients(c, plans[0])) for c in configs}) == 1
    spent = [epsilon(*of_server(c, plans[0])) for c in configs]
    assert all(a < b for a, b in itertools.pairwise(spent))
    usual = configured(mechanism=mechanism)
    assert participation_cap(usual, 2) in range(4, T_TR)
    assert spent[1] < epsilon(*of_server(usual, plans[0])) < spent[3]


def test_the_server_has_no_amplification() -> None:
    seen = of_server(configured(), planned(configured()))
    assert all(release.sampling_rate == 1 for release in seen if not isinstance(release, UnprotectedRelease))
    everything = configured(sampling_rate=1.0, noise_cohort_size=0)
    noise = planned(everything)
    assert of_server(everything, noise) == of_recipients(everything, noise)


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "skellam"},
        {"mechanism": "discrete-gaussian", "bits": 14, "noise_cohort_size": 0},
        {"stage1": "sketch", "sketch": "projection"},
        {"stage1": "sketch", "sketch": "paper"},
        {"stage1": "sketch", "sketch": "coordinates", "sketch_centre": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("cap", [0, 1, 2, 12])
def test_the_server_is_bounded_by_the_worst_rounds_to_be_in(options: dict[str, Any], cap: int) -> None:
    """Whichever rounds of stage 1 a user is in, up to the cap: those of the mean, or only others."""
    config = configured(noise_multiplier=1.0, participation_cap=cap, **options)
    bound = epsilon(*of_server(config, planned(config)))
    in_stage1, in_stage2 = participation_cap(config, 1), participation_cap(config, 2)
    steps = rounds_by_step(config, T_IN, T_TR)
    (rest,) = set(steps) - {"mean", "update"}
    for means in range(min(steps["mean"], in_stage1) + 1):
        counts = {"mean": means, rest: min(in_stage1 - means, steps[rest]), "update": in_stage2}
        seen = [r for s, n in counts.items() for r in release_of(config, s, 1.0, USERS, SHAPES, 1.0, n)]
        assert epsilon(*seen) <= bound


# Sketches ---------------------------------------------------------------------------------------------


class TestSketches:
    @pytest.mark.parametrize("kind", ["projection", "coordinates", "private-support"])
    def test_that_protect_everything(self, kind: str) -> None:
        config = configured(stage1="sketch", sketch=kind, participation_cap=3)
        assert release_of(config, "sketch", 2.0, USERS, SHAPES, Q, 3) == [ZcdpRelease(1 / 8, 3)]
        noise = planned(config)
        seen = of_recipients(config, noise)
        assert seen[1] == ZcdpRelease(1 / (2 * noise.stage1**2), 3)  # the cap holds, and nothing is amplified
        assert 0.99 * 8 < epsilon(*seen) <= 8

    def test_of_the_paper_show_positions(self) -> None:
        config = configured(stage1="sketch", sketch="paper", participation_cap=T_IN)
        noise = planned(config)
        seen = of_recipients(config, noise)
        assert seen[1:3] == [
            ZcdpRelease(1 / (2 * noise.stage1**2), T_IN - 1),
            UnprotectedRelease(POSITIONS, T_IN - 1),
        ]
        assert epsilon(*seen) == math.inf
        assert 0.99 * 8 < epsilon(*as_paper_counts(seen)) <= 8
        alone = as_paper_counts(of_recipients(config, noise, (T_IN, 0)))
        assert 0.99 * 0.3 * 8 < epsilon(*alone) <= 0.3 * 8

    def test_need_more_noise_than_secure_sums(self) -> None:
        assert (
            planned(configured(stage1="sketch", participation_cap=T_IN)).stage1 > planned(configured()).stage1
        )

    def test_so_far(self) -> None:
        config = configured(stage1="sketch", participation_cap=3, sketch_centre="none")
        counts = [of_recipients(config, NoisePlan(1.0, 1.0, 1e-5), (t, 0)) for t in range(6)]
        assert [sum(r.count for r in seen) for seen in counts] == [0, 1, 2, 3, 3, 3]


def test_reproducible_noise_protects_nobody() -> None:
    config = configured(reproducible_noise=True)
    noise = planned(config)
    assert noise == planned(configured())
    for seen in (of_recipients(config, noise), of_server(config, noise)):
        (unprotected,) = [r for r in seen if isinstance(r, UnprotectedRelease)]
        assert unprotected.reason == REPRODUCIBLE
        assert unprotected.count > 0
        assert epsilon(*as_paper_counts(seen)) == math.inf
    assert not any(r.count for r in of_recipients(config, noise, (0, 0)))


# δ ----------------------------------------------------------------------------------------------------


def test_delta_under_one_over_users(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert planned(configured(noise_multiplier=1.0, delta=1e-3)).delta == 1e-3
        assert not caplog.records
        assert planned(configured(noise_multiplier=1.0, delta=0.01)).delta == 0.01
    assert "delta = 0.01" in caplog.text


def test_one_user_must_set_delta() -> None:
    options = {"noise_multiplier": 1.0, "noise_cohort_size": 0, "num_users": 1, "sampling_rate": 1.0}
    with pytest.raises(ConfigError, match="set delta"):
        plan(configured(**options), 1, SHAPES)
    assert plan(configured(**options, delta=1e-5), 1, SHAPES).delta == 1e-5
    with pytest.raises(ValueError, match="users"):
        plan(configured(**options), 0, SHAPES)
