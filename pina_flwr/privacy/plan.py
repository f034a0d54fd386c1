"""From a run's configuration to its noise, and to what it releases about a user.

Server and clients work out the same plan from the same configuration: a client takes none of it on trust.
With the noise of a larger cohort simulated (`noise-cohort-size` N), ε is that of a deployment with N users a
round, in its own encoding; the run itself adds the noise that such a deployment has on its mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.normality import rule_name
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.calibration import calibrate
from pina_flwr.privacy.cohort import largest_cohort, participation_cap, planned_rounds, shares
from pina_flwr.privacy.encoding import Encoding, choose_encoding
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

log = logging.getLogger(__name__)

NO_NOISE = "No noise is added."
POSITIONS = "A sketch shows which positions it keeps, and no noise hides them."
IN_THE_CLEAR = "No secure sum, no central DP: the server sees every user's update as it is."
REPRODUCIBLE = "The noise is drawn from the run's seed (reproducible-noise): whoever knows it can remove it."

USUAL_NOISE = 30.0  # largest z for which too few bits are the likelier mistake
SHORTEST = 2**12  # numbers of the shortest vector that is encoded
SECURE_SUMS = ("mean", "lloyd", "update")  # steps whose vectors go through the secure sum
LOCAL = ("sketch", "local-update")  # steps in which each user adds noise of its own
UPDATES = ("update", "local-update", "raw-update")  # steps of stage 2, of which a run has one


@dataclass(frozen=True)
class Shapes:
    """Lengths of vectors: `sketch` of what stage 1 clusters users by, `adapter` of a cluster model (d)."""

    sketch: int
    adapter: int


@dataclass(frozen=True)
class NoisePlan:
    """Noise multiplier z of each stage (σ = z·S in a secure sum, z·S_in in a local sketch; 0: none) and δ."""

    stage1: float
    stage2: float
    delta: float

    def of_step(self, step: str) -> float:
        """z of a step."""
        return self.stage1 if stage_of(step) == 1 else self.stage2


def stage_of(step: str) -> int:
    """The stage, 1 or 2, that a step belongs to."""
    return 2 if step in UPDATES else 1


def training_step(config: RunConfig) -> str:
    """The step in which updates of stage 2 leave the users."""
    if config.traits.in_the_clear:
        return "raw-update"
    return "local-update" if config.local_updates else "update"


def shapes_of(config: RunConfig, hidden: int, classes: int) -> Shapes:
    """The shapes without loading a backbone: of one whose hidden size is `hidden`, for so many classes."""
    targets = len(config.lora_targets.split(","))
    factors = 2 if config.lora_train_a else 1
    lora = config.lora_layers * targets * factors * config.lora_rank * hidden
    head = classes * (hidden + 1) if config.train_head else 0
    return Shapes(signal_rows(config) * hidden, lora + head)


def signal_rows(config: RunConfig) -> int:
    """Length of what stage 1 clusters users by, in multiples of the hidden size h.

    r' for ΔB ∈ R^{h×r'}, the cells of the grid for features.
    """
    return config.stage1_rank if config.stage1_signal == "update" else config.features_grid**2


def vector_size(config: RunConfig, step: str, shapes: Shapes) -> int:
    """Length of a user's vector in a step: "mean", "lloyd" or one of `UPDATES`.

    Raises:
        KeyError: another step.
    """
    counts = config.slots if rule_name(config) == "count" else 0
    sizes = {
        "mean": shapes.sketch,
        "lloyd": config.kmeans_restarts * config.clusters * shapes.sketch,
        **dict.fromkeys(UPDATES, config.slots * shapes.adapter + counts),
    }
    return sizes[step]


def clip_norm_of(config: RunConfig, step: str) -> float:
    """S of a step; secure sums of stage 1 add unit vectors."""
    return config.clip_norm if step in UPDATES else 1.0


def rounds_by_step(config: RunConfig, stage1_rounds: int, stage2_rounds: int) -> Mapping[str, int]:
    """So many rounds of each stage, by step; the private mean is the first of stage 1."""
    mean = min(stage1_rounds, 1) if config.sketch_centre == "private" else 0
    rest = "sketch" if config.stage1 == "sketch" else "lloyd"
    return {"mean": mean, rest: stage1_rounds - mean, training_step(config): stage2_rounds}


def local_sketches(config: RunConfig, stage1_rounds: int) -> int:
    """Of so many rounds of stage 1, those in which each user sends a sketch of its own."""
    if config.traits.start != "stage1" or config.stage1 != "sketch":
        return 0
    return rounds_by_step(config, stage1_rounds, 0)["sketch"]


@lru_cache(maxsize=16)  # a node asks at every message
def plan(config: RunConfig, users: int, shapes: Shapes, earlier: tuple[Release, ...] = ()) -> NoisePlan:
    """Noise that keeps ε towards recipients within the budget, or the one given; zeros if not private.

    `stage1_budget` s in (0, 1): z1 is the smallest with which stage 1 alone spends at most s·ε at δ, then z2
    the smallest with which both stages spend at most ε. s = 0: one z for both stages. The paper's sketch is
    calibrated as the paper counts, since no z gives a finite strict ε.

    Args:
        config: the run.
        users: |K|, users in the run; the default δ is |K|^-1.1.
        shapes: lengths of vectors, which rounding to integers depends on.
        earlier: what earlier runs released, which counts against ε.

    Raises:
        ConfigError: the budget is out of reach, or options contradict the guarantee.
        ValueError: `users` is under 1.
    """
    if users < 1:
        raise ValueError(f"users = {users}: must be at least 1")
    if not config.private:
        return NoisePlan(0.0, 0.0, 0.0)
    delta = _delta(config, users)
    _check_noise_cohort(config, users)
    rounds = planned_rounds(config)
    found = _calibrated(config, users, shapes, earlier, delta)
    try:
        released(config, found, users, shapes, *rounds)
    except ConfigError as problem:  # the noise can't be encoded
        if config.noise_multiplier > 0 and not 0.1 <= config.noise_multiplier <= USUAL_NOISE:
            raise ConfigError(f"noise-multiplier = {config.noise_multiplier:g}: {problem}") from None
        if max(found.stage1, found.stage2) > USUAL_NOISE:
            raise ConfigError(
                f"epsilon = {config.epsilon:g}: needs more noise than bits = {config.bits} can carry; raise "
                "one of them"
            ) from None
        raise
    return found


def _calibrated(
    config: RunConfig, users: int, shapes: Shapes, earlier: tuple[Release, ...], delta: float
) -> NoisePlan:
    rounds1, rounds2 = planned_rounds(config)
    if config.noise_multiplier > 0:
        z = config.noise_multiplier
        return NoisePlan(z if rounds1 else 0.0, z, delta)

    def counted(z1: float, z2: float, rounds2: int = rounds2) -> list[Release]:
        noise = NoisePlan(z1, z2, delta)
        try:
            rate = config.sampling_rate
            now = _noised(config, noise, users, shapes, (rounds1, rounds2), rate, capped=rate == 1)
        except ConfigError:  # little noise drowns in rounding, much leaves too few bits: look the other way
            return [] if max(z1, z2) > 1 else [UnprotectedRelease(NO_NOISE, 1)]
        return as_paper_counts([*earlier, *now])

    left = config.epsilon - _spent(config, earlier, delta)
    if not rounds1:
        return NoisePlan(0.0, calibrate(lambda z: counted(0.0, z), config.epsilon, delta), delta)
    if config.stage1_budget == 0:
        z = calibrate(lambda z: counted(z, z), config.epsilon, delta)
        return NoisePlan(z, z, delta)
    budget1 = config.epsilon - (1 - config.stage1_budget) * left
    z1 = calibrate(lambda z: counted(z, 0.0, 0), budget1, delta)
    if earlier:  # ε adds up to less than its parts, but clients, who don't know them, expect as much noise
        z1 = max(z1, _calibrated(config, users, shapes, (), delta).stage1)
    return NoisePlan(z1, calibrate(lambda z: counted(z1, z), config.epsilon, delta), delta)


def released(
    config: RunConfig,
    noise: NoisePlan,
    users: int,
    shapes: Shapes,
    stage1_rounds: int,
    stage2_rounds: int,
    *,
    to_server: bool = False,
) -> list[Release]:
    """All that so many rounds let out about a user, as recipients of the models or as the server sees it.

    Recipients don't know who was sampled, so sampling amplifies secure sums. The server does: for it nothing
    is amplified, and a user takes part in a step as often as `participation-cap` allows in its stage. Local
    sketches and updates are never amplified, each is released by itself: the cap holds for recipients as
    well.
    """
    rounds = (stage1_rounds, stage2_rounds)
    rate = 1.0 if to_server else config.sampling_rate
    # Without sampling, recipients see no more than the server does, and the cap protects from both.
    releases = _noised(config, noise, users, shapes, rounds, rate, capped=rate == 1)
    if config.reproducible_noise:
        releases.append(UnprotectedRelease(REPRODUCIBLE, sum(rounds)))
    return releases


def as_paper_counts(releases: list[Release]) -> list[Release]:
    """The releases less what the paper takes as free: the positions that its sketch keeps."""
    return [r for r in releases if not (isinstance(r, UnprotectedRelease) and r.reason == POSITIONS)]


def release_of(
    config: RunConfig, step: str, z: float, users: int, shapes: Shapes, sampling_rate: float, count: int = 1
) -> list[Release]:
    """What `count` rounds of a step release about a user who joins each with probability `sampling_rate`."""
    if count == 0:
        return []
    if step == "raw-update":
        return [UnprotectedRelease(IN_THE_CLEAR, count)]
    if z == 0:
        return [UnprotectedRelease(NO_NOISE, count)]
    if step in LOCAL:
        return _local(config, step, z, count)
    if config.mechanism == "gaussian":
        return [GaussianRelease(z, sampling_rate, count)]
    if config.simulated_cohort:  # a deployment of so many users that its cohorts are of that size
        users = round(config.simulated_cohort / config.sampling_rate)
    clients = largest_cohort(users, config.sampling_rate)
    code = encoding_of(config, step, z * clip_norm_of(config, step), clients, shapes)
    variance = (code.scale * z * code.clip_norm) ** 2
    if config.mechanism == "skellam":
        return [SkellamRelease(code.l1, code.l2, variance, sampling_rate, count)]
    honest = shares(config, clients).honest
    return [DiscreteGaussianRelease(code.l2, variance, honest, code.padded, sampling_rate, count)]


def charged(
    config: RunConfig, step: str, z: float, users: int, shapes: Shapes, sampling_rate: float
) -> list[Release]:
    """What ledgers enter for one round of a step."""
    releases = release_of(config, step, z, users, shapes, sampling_rate)
    return [*releases, UnprotectedRelease(REPRODUCIBLE, 1)] if config.reproducible_noise else releases


def encoding_of(config: RunConfig, step: str, sum_std: float, clients: int, shapes: Shapes) -> Encoding:
    """The integer encoding of a step's vectors when the sum of `clients` of them carries noise of `sum_std`.

    It leaves room for the noise in excess of `sum_std` when nobody vanishes. Short vectors count as padded
    with zeros: the rotation spreads them over more numbers, each of which needs fewer bits.

    Raises:
        ConfigError: `bits` is too small.
    """
    spare = 1 - config.dropout_tolerance - config.colluding_share
    size = max(vector_size(config, step, shapes), SHORTEST)
    return choose_encoding(
        size, clip_norm_of(config, step), sum_std / math.sqrt(spare), clients, config.bits, config.mechanism
    )


def _noised(
    config: RunConfig,
    noise: NoisePlan,
    users: int,
    shapes: Shapes,
    rounds: tuple[int, int],
    sampling_rate: float,
    *,
    capped: bool = False,
) -> list[Release]:
    """What so many rounds of each stage release; with `capped`, about a user that the cap holds back.

    The cap is on a stage and is counted for each of its steps, since which of them a user joins is chance.
    """
    releases = []
    for step, count in rounds_by_step(config, *rounds).items():
        if capped or step in LOCAL:
            count = min(count, participation_cap(config, stage_of(step)))
        z = noise.of_step(step)
        releases += release_of(config, step, z, users, shapes, sampling_rate, count)
    return releases


def _local(config: RunConfig, step: str, z: float, count: int) -> list[Release]:
    """What a user releases with noise of its own: 1/(2z²)-zCDP, be it an update or any kind of sketch.

    Of the paper's sketch that holds for the values alone.
    """
    values: list[Release] = [ZcdpRelease(1 / (2 * z * z), count)]
    bare = step == "sketch" and config.sketch == "paper"
    return [*values, UnprotectedRelease(POSITIONS, count)] if bare else values


def _spent(config: RunConfig, earlier: tuple[Release, ...], delta: float) -> float:
    """ε of earlier runs; nothing may be left over to spend."""
    spent = epsilon(as_paper_counts(list(earlier)), delta)
    if math.isinf(spent):
        raise ConfigError(
            f"epsilon = {config.epsilon:g}: the ledger says that earlier runs spent all there is, as "
            "they were not private; must name another ledger"
        )
    if spent >= config.epsilon:
        raise ConfigError(
            f"epsilon = {config.epsilon:g}: the ledger says that earlier runs spent {spent:.4g}; must be more"
        )
    return spent


def _delta(config: RunConfig, users: int) -> float:
    if config.delta == 0:
        if users == 1:
            raise ConfigError("delta = 0: its default, |K|^-1.1, is 1 with one user; set delta, e.g. 1e-5")
        return float(users**-1.1)
    if config.delta * users >= 1:
        log.warning("delta = %g: should be under 1 / |K| = %g", config.delta, 1 / users)
    return config.delta


def _check_noise_cohort(config: RunConfig, users: int) -> None:
    """Less than the true cohort would add more noise than ε pays for: safe, but never what was meant."""
    cohort = config.sampling_rate * users
    if 0 < config.simulated_cohort < cohort * (1 - 1e-9):
        raise ConfigError(
            f"noise-cohort-size = {config.noise_cohort_size}: must be at least the expected cohort, "
            f"q·|K| = {cohort:g}, or 0 for the noise of the true cohort"
        )
    if config.simulated_cohort > cohort * (1 + 1e-9) and config.ledger:
        raise ConfigError(
            f"noise-cohort-size = {config.noise_cohort_size}: simulates more noise than there is, which no "
            "ledger that lasts may count; set 0, or leave ledger out"
        )
