"""What a run guarantees, and to whom: from its configuration to the noise, and from that to ε per adversary.

User-level DP, adjacency add/remove of one user (zero-out). Three adversaries see different things:

- **recipient**: the models of all rounds, but not who was sampled, so Poisson sampling amplifies secure sums.
- **server**: every secure sum, and who took part. No amplification; the worst case is a user in all rounds.
- **sketch**: one user's sketch of one round, as it leaves the user with stage1 = 'sketch' (local DP).

The paper's sketch hides its values but not which positions it keeps, a noiseless function of the user's data,
so no finite ε holds for it. The paper (arXiv 2604.20596, Section 3.2) counts the values alone, without
amplification. The readings are kept apart: `Bound.epsilon` is strict, `Bound.as_paper_counts` the paper's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.privacy.accountant import epsilon as spent
from pina_flwr.privacy.accountant import is_loose
from pina_flwr.privacy.calibration import calibrate
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease

log = logging.getLogger(__name__)

NO_NOISE = "No noise is added."
POSITIONS = "A sketch shows which positions it keeps, and no noise hides them."
IN_THE_CLEAR = "Each user sends its update and its cluster in the clear."
TRUSTED = "The secure sum 'trusted' is an ideal functionality: nobody sees a single contribution."
FLOATS = "The noise is continuous Gaussian in floats. Attacks on floating-point arithmetic are not covered."
FOLLOWS = (
    "The server is trusted to follow the protocol (it names the cohort, which sets each user's share of the "
    "noise)."
)
LOGS = "Diagnostics are logged without noise. ε covers the models, not these logs."


@dataclass(frozen=True)
class NoisePlan:
    """Noise multiplier z of each stage (σ = z·S in a secure sum, z·S_in in a local sketch; 0: none) and δ."""

    stage1: float
    stage2: float
    delta: float


@dataclass(frozen=True)
class Bound:
    """ε towards one adversary.

    Attributes:
        epsilon: strict; `inf` if there is no finite guarantee.
        as_paper_counts: the same with a sketch's positions taken as free, which is how the paper counts.
        reason: why `epsilon` is infinite; empty if it is finite.
    """

    epsilon: float
    as_paper_counts: float
    reason: str


@dataclass(frozen=True)
class Guarantee:
    """ε per adversary at one δ; `sketch` is None if no sketch leaves a user in the clear."""

    recipient: Bound
    server: Bound
    sketch: Bound | None
    delta: float


def planned_rounds(config: RunConfig) -> tuple[int, int]:
    """Rounds of stage 1 and of stage 2 in which users release something."""
    has_stage1 = config.strategy == "pina" and config.stage1 != "random"
    return (config.t_in if has_stage1 else 0), config.t_tr


@lru_cache(maxsize=16)  # a node asks at every message
def plan(config: RunConfig, users: int) -> NoisePlan:
    """Noise that keeps ε towards recipients within the budget, or the one given; zeros if not private.

    `stage1_budget` s in (0, 1): z1 is the smallest with which stage 1 alone spends at most s·ε at δ, then z2
    the smallest with which both stages spend at most ε. s = 0: one z for both stages. The paper's sketch is
    calibrated as the paper counts, since no z gives a finite strict ε.

    Args:
        config: the run.
        users: |K|, users in the run; the default δ is |K|^-1.1.

    Raises:
        ConfigError: the budget is out of reach, or options contradict the guarantee.
        ValueError: `users` is under 1.
    """
    if users < 1:
        raise ValueError(f"users = {users}: must be at least 1")
    if not config.private:
        return NoisePlan(0.0, 0.0, 0.0)
    if config.strategy == "ifca":
        raise ConfigError("strategy = 'ifca': never private; set epsilon = inf and noise-multiplier = 0")
    delta = _delta(config, users)
    _check_noise_cohort(config, users)
    rounds1, rounds2 = planned_rounds(config)
    if config.noise_multiplier > 0:
        z = config.noise_multiplier
        return NoisePlan(z if rounds1 else 0.0, z, delta)

    def counted(z1: float, z2: float, rounds2: int = rounds2) -> list[Release]:
        noise = NoisePlan(z1, z2, delta)
        return _as_paper_counts(released(config, noise, rounds1, rounds2, config.sampling_rate))

    if not rounds1:
        return NoisePlan(0.0, calibrate(lambda z: counted(0.0, z), config.epsilon, delta), delta)
    if config.stage1_budget == 0:
        z = calibrate(lambda z: counted(z, z), config.epsilon, delta)
        return NoisePlan(z, z, delta)
    z1 = calibrate(lambda z: counted(z, 0.0, 0), config.stage1_budget * config.epsilon, delta)
    z2 = calibrate(lambda z: counted(z1, z), config.epsilon, delta)
    return NoisePlan(z1, z2, delta)


def guarantee(
    config: RunConfig, noise: NoisePlan, stage1_rounds: int | None = None, stage2_rounds: int | None = None
) -> Guarantee:
    """ε per adversary after so many rounds of each stage (None: all that are planned)."""
    planned1, planned2 = planned_rounds(config)
    rounds1 = planned1 if stage1_rounds is None else stage1_rounds
    rounds2 = planned2 if stage2_rounds is None else stage2_rounds
    sketch = None
    if _local_sketches(config, rounds1):
        sketch = _bound([*_gaussian(noise.stage1, 1.0, 1), UnprotectedRelease(POSITIONS, 1)], noise.delta)
    return Guarantee(
        recipient=_bound(released(config, noise, rounds1, rounds2, config.sampling_rate), noise.delta),
        server=_bound(released(config, noise, rounds1, rounds2, 1.0), noise.delta),
        sketch=sketch,
        delta=noise.delta,
    )


def epsilon_so_far(
    config: RunConfig,
    noise: NoisePlan,
    stage1_rounds_done: int,
    stage2_rounds_done: int,
    *,
    as_paper_counts: bool = False,
) -> float:
    """ε towards recipients after so many rounds; strict, or as the paper counts. Cheap: curves are cached."""
    releases = released(config, noise, stage1_rounds_done, stage2_rounds_done, config.sampling_rate)
    return _epsilon(_as_paper_counts(releases) if as_paper_counts else releases, noise.delta)


def released(
    config: RunConfig, noise: NoisePlan, stage1_rounds: int, stage2_rounds: int, sampling_rate: float
) -> list[Release]:
    """All that so many rounds let out about a user who joins each round with probability `sampling_rate`.

    Local sketches count with rate 1 in any case: each is released by itself, in the worst case in all rounds.
    """
    local = _local_sketches(config, stage1_rounds)
    releases = [
        *_gaussian(noise.stage1, sampling_rate, stage1_rounds - local),
        *_gaussian(noise.stage1, 1.0, local),
        *_gaussian(noise.stage2, sampling_rate, stage2_rounds),
    ]
    if local:
        releases.append(UnprotectedRelease(POSITIONS, local))
    if config.strategy == "ifca":
        releases.append(UnprotectedRelease(IN_THE_CLEAR, stage2_rounds))
    return releases


def describe(
    config: RunConfig,
    noise: NoisePlan,
    users: int,
    stage1_rounds: int | None = None,
    stage2_rounds: int | None = None,
) -> dict[str, Any]:
    """The guarantee as plain sentences and numbers, ready for JSON (ε is None where none is finite).

    Keys: `unit`, `adjacency`, `accountant`, `delta`, `noise_multiplier`, `recipient`, `server`, `sketch`,
    `simulated`, `assumptions`. `delta`, `sketch` and `simulated` are None where they do not apply.
    """
    held = guarantee(config, noise, stage1_rounds, stage2_rounds)
    _warn_if_loose(config, noise, stage1_rounds, stage2_rounds)
    sketched = held.sketch is not None
    return {
        "unit": "One user's whole data set.",
        "adjacency": "Add or remove one user (its contribution becomes zero).",
        "accountant": f"RDP, opacus {version('opacus')}, conversion of Balle et al. 2020",
        "delta": noise.delta or None,
        "noise_multiplier": {"stage1": noise.stage1, "stage2": noise.stage2},
        "recipient": _describe_bound(
            held.recipient,
            sees="The models of every round.",
            amplification=f"Poisson sampling of users with q = {config.sampling_rate:g}, in secure sums. "
            "It holds while recipients cannot learn who was sampled.",
            participation="Each user joins each round independently with probability q."
            + (" Worst case for sketches: the user sends one whenever they are sent." if sketched else ""),
        ),
        "server": _describe_bound(
            held.server,
            sees="Every secure sum and who took part in it." + (" Every sketch." if sketched else ""),
            amplification="None: the server draws the sample.",
            participation="Worst case: the user takes part in every round.",
        ),
        "sketch": held.sketch
        and _describe_bound(
            held.sketch,
            sees="One user's sketch of one round.",
            amplification="None: the noise is local.",
            participation="One round.",
        ),
        "simulated": _describe_simulation(config, noise, users),
        "assumptions": _assumptions(config),
    }


def caveats(config: RunConfig, noise: NoisePlan, users: int) -> list[str]:
    """What whoever reads the run's ε must know, most important first: for summary.json and the terminal."""
    reason = guarantee(config, noise).recipient.reason
    sentences = [reason] if reason else []
    if not config.private:
        return sentences
    if _borrows_noise(config, noise, users):
        sentences.insert(
            0,
            f"The noise is that of a cohort of {config.noise_cohort_size:,} users: ε holds for a deployment "
            f"of that size, not for this run, whose rounds had about {config.sampling_rate * users:,.1f} "
            "users.",
        )
    sentences += [*_delta_notes(config, noise, users), TRUSTED, FOLLOWS, FLOATS]
    return [*sentences, LOGS] if config.diagnostics else sentences


def _warn_if_loose(
    config: RunConfig, noise: NoisePlan, stage1_rounds: int | None, stage2_rounds: int | None
) -> None:
    """One warning for the figures reported; those that a calibration tries are nobody's concern."""
    planned1, planned2 = planned_rounds(config)
    rounds1 = planned1 if stage1_rounds is None else stage1_rounds
    rounds2 = planned2 if stage2_rounds is None else stage2_rounds
    towards = {"recipients": config.sampling_rate, "the server": 1.0}
    loose = [
        who
        for who, rate in towards.items()
        if noise.delta
        and is_loose(_as_paper_counts(released(config, noise, rounds1, rounds2, rate)), noise.delta)
    ]
    if loose:
        log.warning(
            "epsilon towards %s is loose: the best Rényi order is the last one tried", " and ".join(loose)
        )


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
    if 0 < config.noise_cohort_size < cohort * (1 - 1e-9):
        raise ConfigError(
            f"noise-cohort-size = {config.noise_cohort_size}: must be at least the expected cohort, "
            f"q·|K| = {cohort:g}, or 0 for the noise of the true cohort"
        )


def _local_sketches(config: RunConfig, stage1_rounds: int) -> int:
    """Of so many rounds of stage 1, those in which each user sends a sketch of its own."""
    if config.strategy != "pina" or config.stage1 != "sketch":
        return 0
    return max(stage1_rounds - (config.sketch_centre == "private"), 0)


def _gaussian(z: float, sampling_rate: float, count: int) -> list[Release]:
    if z == 0:
        return [UnprotectedRelease(NO_NOISE, count)]
    return [GaussianRelease(z, sampling_rate, count)]


def _as_paper_counts(releases: Sequence[Release]) -> list[Release]:
    return [r for r in releases if not (isinstance(r, UnprotectedRelease) and r.reason == POSITIONS)]


def _reasons(releases: Sequence[Release]) -> list[str]:
    """Why there is no finite ε, each reason once."""
    unprotected = (r for r in releases if isinstance(r, UnprotectedRelease) and r.count > 0)
    return list(dict.fromkeys(r.reason for r in unprotected))


def _epsilon(releases: Sequence[Release], delta: float) -> float:
    # Without noise there is no δ to speak of.
    if _reasons(releases):
        return math.inf
    return spent(releases, delta) if any(r.count for r in releases) else 0.0


def _bound(releases: Sequence[Release], delta: float) -> Bound:
    return Bound(
        epsilon=_epsilon(releases, delta),
        as_paper_counts=_epsilon(_as_paper_counts(releases), delta),
        reason=" ".join(_reasons(releases)),
    )


def _describe_bound(bound: Bound, *, sees: str, amplification: str, participation: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "epsilon": _finite(bound.epsilon),
        "sees": sees,
        "amplification": amplification,
        "participation": participation,
    }
    if bound.reason:
        described["reason"] = bound.reason
    if bound.as_paper_counts != bound.epsilon:
        described["as_paper_counts"] = bound.as_paper_counts
    return described


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_simulation(config: RunConfig, noise: NoisePlan, users: int) -> dict[str, Any] | None:
    """What a noise cohort larger than the true one means; None if the noise is that of the run itself."""
    if not _borrows_noise(config, noise, users):
        return None
    size, cohort = config.noise_cohort_size, config.sampling_rate * users
    note = (
        f"ε is that of a deployment with {size} users a round, not of this run. "
        f"This run has {cohort:g} users a round. It adds {size / cohort:.4g} times less noise to each secure "
        "sum than its ε needs."
    )
    note = " ".join([note, *_delta_notes(config, noise, users)])
    return {"noise_cohort_size": size, "expected_cohort": cohort, "note": note}


def _borrows_noise(config: RunConfig, noise: NoisePlan, users: int) -> bool:
    return noise.stage2 > 0 and config.noise_cohort_size > config.sampling_rate * users


def _delta_notes(config: RunConfig, noise: NoisePlan, users: int) -> list[str]:
    """A δ of 1 / n allows a mechanism that publishes the data of one of n users."""
    notes = []
    if noise.delta * users >= 1:
        notes.append(f"δ is not under 1 / {users}, the inverse of the number of users of this run.")
    deployed = config.noise_cohort_size / config.sampling_rate
    if _borrows_noise(config, noise, users) and noise.delta * deployed >= 1:
        notes.append(
            f"δ is not under 1 / {deployed:.0f}, the inverse of the number of users of that deployment."
        )
    return notes


def _assumptions(config: RunConfig) -> list[str]:
    sentences = [
        TRUSTED,
        FOLLOWS,
        FLOATS,
        "The mean divides by the expected cohort q·|K|, a public number.",
    ]
    if config.deal == "every-rotation" and config.rotations > 1 and not config.user_column:
        sentences.append(
            "An image may be dealt to several users. ε covers a user, not all copies of an image."
        )
    if config.diagnostics:
        sentences.append(LOGS)
    return sentences
