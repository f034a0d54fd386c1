"""What a run guarantees, and to whom: ε per adversary, with everything it rests on.

User-level DP, adjacency add/remove of one user (zero-out). Three adversaries see different things:

- **recipient**: the models of all rounds, but not who was sampled, so Poisson sampling amplifies secure sums.
- **server**: every secure sum, and who took part. No amplification; the worst case is a user who takes part
  as often as the participation cap allows.
- **sketch**: one user's sketch of one round, as it leaves the user with stage1 = 'sketch' (local DP).

Where users send their updates under local DP (strategy 'ifca' with privacy) nothing is amplified, and
recipients are counted like the server: each release is a user's own, at most as many as the cap allows.

The paper's sketch hides its values but not which positions it keeps, a noiseless function of the user's data,
so no finite ε holds for it. The paper (arXiv 2604.20596, Section 3.2) counts the values alone, without
amplification. The readings are kept apart: `Bound.epsilon` is strict, `Bound.as_paper_counts` the paper's.

`Bound.tighter` is the figure of a tighter accountant, numerical composition of privacy loss distributions.
None is known for Skellam or discrete Gaussian noise in many dimensions: there it is that of continuous
Gaussian noise with the same ratio to the sensitivity, said to be so, and no part of the guarantee.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pina_flwr.config import RunConfig
from pina_flwr.privacy.accountant import epsilon as spent
from pina_flwr.privacy.accountant import is_loose
from pina_flwr.privacy.cohort import participation_cap, planned_rounds
from pina_flwr.privacy.plan import (
    IN_THE_CLEAR,
    NoisePlan,
    Shapes,
    as_paper_counts,
    local_sketches,
    release_of,
    released,
    rounds_by_step,
    stage_of,
)
from pina_flwr.privacy.releases import GaussianRelease, Release, UnprotectedRelease, unamplified
from pina_flwr.privacy.tight import gaussian_counterpart, tight_epsilon

log = logging.getLogger(__name__)

SECURE_SUM = {
    "trusted": "The secure sum 'trusted' is an ideal functionality: nobody sees a single contribution.",
    "secagg+": "SecAgg+ hides single contributions from a server that follows the protocol; against one that "
    "swaps keys or lies about who survived, it takes signed sums (secagg-signed).",
    "signed": "SecAgg+ with signed keys and survivors hides single contributions from a malicious server.",
}
FLOATS = "The noise is continuous Gaussian in floats. Attacks on floating-point arithmetic are not covered."
FOLLOWS = (
    "The server is semi-honest: it follows the protocol. Clients check the parameters of every round, but "
    "neither who was sampled nor that the cohort is as large as the server says."
)
SIGNED = (
    "Clients check the parameters of every round, and by signatures who takes part and survives, but not how "
    "the cohort was sampled."
)
LOCAL_UPDATES = (
    "Each user adds noise to its own update and cluster (local DP) and sends them without a secure sum: "
    "nothing is amplified, and noise-cohort-size does not apply."
)
COUNTED = (
    "Clients check the parameters of every round and count their own releases; the server is not trusted."
)
OWN_STEPS = (
    "Users divide an update by the local steps it took before they clip it. That number does not leave them."
)
LOGS = "Diagnostics are logged without noise. ε covers the models, not these logs."


@dataclass(frozen=True)
class Bound:
    """ε towards one adversary.

    Attributes:
        epsilon: strict; `inf` if there is no finite guarantee.
        as_paper_counts: the same with a sketch's positions taken as free, which is how the paper counts.
        reason: why `epsilon` is infinite; empty if it is finite.
        releases: what it is about.
    """

    epsilon: float
    as_paper_counts: float
    reason: str
    releases: tuple[Release, ...] = ()


@dataclass(frozen=True)
class Guarantee:
    """ε per adversary at one δ; `sketch` is None if no sketch leaves a user in the clear."""

    recipient: Bound
    server: Bound
    sketch: Bound | None
    delta: float


@dataclass(frozen=True)
class Subject:
    """What a guarantee is about: a run, its noise, |K|, the lengths of its vectors, and earlier releases."""

    config: RunConfig
    noise: NoisePlan
    users: int
    shapes: Shapes
    earlier: tuple[Release, ...] = ()

    def releases(self, stage1_rounds: int, stage2_rounds: int, *, to_server: bool = False) -> list[Release]:
        """All that is released after so many rounds, earlier runs included."""
        now = released(
            self.config,
            self.noise,
            self.users,
            self.shapes,
            stage1_rounds,
            stage2_rounds,
            to_server=to_server,
        )
        return [*(unamplified(r) if to_server else r for r in self.earlier), *now]


def guarantee(subject: Subject) -> Guarantee:
    """ε per adversary after all rounds that are planned."""
    config, noise = subject.config, subject.noise
    rounds = planned_rounds(config)
    sketch = None
    if local_sketches(config, rounds[0]):
        one = release_of(config, "sketch", noise.stage1, subject.users, subject.shapes, 1.0)
        sketch = _bound(one, noise.delta)
    return Guarantee(
        recipient=_bound(subject.releases(*rounds), noise.delta),
        server=_bound(subject.releases(*rounds, to_server=True), noise.delta),
        sketch=sketch,
        delta=noise.delta,
    )


def epsilon_so_far(subject: Subject, stage1_rounds: int, stage2_rounds: int) -> float:
    """Strict ε towards recipients after so many rounds. Cheap: curves are cached."""
    return _epsilon(subject.releases(stage1_rounds, stage2_rounds), subject.noise.delta)


def describe(subject: Subject) -> dict[str, Any]:
    """The guarantee as plain sentences and numbers, ready for JSON (ε is None where none is finite).

    Keys: `unit`, `adjacency`, `accountants`, `delta`, `mechanism`, `noise_multiplier`, `recipient`, `server`,
    `sketch`, `dropout`, `simulated`, `earlier_releases`, `assumptions`; None where one does not apply.
    """
    config, noise, held = subject.config, subject.noise, guarantee(subject)
    _warn_if_loose(held)
    sketched, local = held.sketch is not None, config.local_updates
    return {
        "unit": "One user's whole data set.",
        "adjacency": "Add or remove one user (its contribution becomes zero).",
        "accountants": accountants(config),
        "delta": noise.delta or None,
        "mechanism": _mechanism(config),
        "noise_multiplier": {"stage1": noise.stage1, "stage2": noise.stage2},
        "recipient": _describe_bound(
            held.recipient,
            noise.delta,
            sees="The models of every round.",
            amplification=_amplification(config),
            participation="Each user joins each round independently with probability q."
            + (" Worst case for sketches: the user sends one whenever they are sent." if sketched else "")
            + (
                f" Worst case for local noise: the user takes part in {_worst_case(config)}." if local else ""
            ),
        ),
        "server": _describe_bound(
            held.server,
            noise.delta,
            sees=_seen_by_server(config, sketched),
            amplification="None: the noise is local." if local else "None: the server draws the sample.",
            participation=f"Worst case that clients allow: the user takes part in {_worst_case(config)}.",
        ),
        "sketch": held.sketch
        and _describe_bound(
            held.sketch,
            noise.delta,
            sees="One user's sketch of one round.",
            amplification="None: the noise is local.",
            participation="One round.",
        ),
        "dropout": _describe_dropout(config) if config.private and not local else None,
        "simulated": _describe_simulation(subject),
        "earlier_releases": sum(r.count for r in subject.earlier) or None,
        "assumptions": _assumptions(config),
    }


def caveats(subject: Subject) -> list[str]:
    """What whoever reads the run's ε must know, most important first: for summary.json and the terminal."""
    config = subject.config
    reason = guarantee(subject).recipient.reason
    sentences = [reason] if reason else []
    if not config.private:
        return sentences
    if _borrows_noise(subject):
        sentences.insert(
            0,
            f"The noise is that of a cohort of {config.noise_cohort_size:,} users: ε holds for a deployment "
            f"of that size, not for this run, whose rounds had about "
            f"{config.sampling_rate * subject.users:,.1f} users.",
        )
    return [*sentences, *_delta_notes(subject), *_trust(config)]


def _trust(config: RunConfig) -> list[str]:
    logs = [LOGS] if config.diagnostics else []
    if config.traits.in_the_clear:
        return [IN_THE_CLEAR]
    if config.local_updates:
        return [LOCAL_UPDATES, COUNTED, FLOATS, *logs]
    signed = config.secagg_signed and config.secure_sum == "secagg+"
    sentences = [SECURE_SUM["signed" if signed else config.secure_sum], SIGNED if signed else FOLLOWS]
    if config.colluding_share == 0:
        sentences.append("No client tells the server its share of the noise (colluding-share = 0).")
    else:
        sentences.append(
            f"At most {config.colluding_share:.0%} of a cohort tell the server their share of the noise."
        )
    if config.mechanism == "gaussian":
        sentences.append(FLOATS)
    return [*sentences, *logs]


def accountants(config: RunConfig) -> dict[str, str]:
    """What `epsilon` and `tighter` were computed with."""
    kind = "local" if config.local_updates else config.mechanism
    curve = {
        "local": "Gaussian noise of each user by itself, Bun and Steinke 2016, no amplification",
        "gaussian": f"sampled Gaussian by opacus {version('opacus')}",
        "skellam": "Skellam by Agarwal et al. 2021, Poisson sampling by Zhu and Wang 2019",
        "discrete-gaussian": "sums of discrete Gaussians by Kairouz et al. 2021, Poisson sampling by Zhu and "
        "Wang 2019",
    }[kind]
    own = "the same mechanism" if kind in ("local", "gaussian") else (
        "continuous Gaussian noise with the same ratio to the sensitivity: no PLD is known for these "
        "integers, so the figure is for comparison and not guaranteed"
    )  # fmt: skip
    return {
        "epsilon": f"RDP ({curve}), conversion of Balle et al. 2020",
        "tighter": f"PLD, dp-accounting {version('dp-accounting')}, of {own}",
    }


def _mechanism(config: RunConfig) -> str:
    if config.traits.in_the_clear:
        return "None: updates leave the users as they are."
    if not config.private:
        return "No noise on a sum of floats."
    if config.local_updates:
        return "Continuous Gaussian noise of each user on a vector of floats of its own."
    if config.mechanism == "gaussian":
        return "Continuous Gaussian noise on a sum of floats."
    kind = "Skellam" if config.mechanism == "skellam" else "discrete Gaussian"
    return (
        f"{kind} noise on a sum of integers mod 2^{config.bits}: randomised Hadamard rotation, clipping, "
        "conditional stochastic rounding."
    )


def _worst_case(config: RunConfig) -> str:
    """How often the server may see a user, step by step."""
    names = {"mean": "the private mean", "lloyd": "k-means", "sketch": "sketches"}
    parts = []
    for step, count in rounds_by_step(config, *planned_rounds(config)).items():
        most = min(count, participation_cap(config, stage_of(step)))
        parts += [f"{most} of {count} rounds of {names.get(step, 'training')}"] if count else []
    return ", ".join(parts)


def _amplification(config: RunConfig) -> str:
    if config.traits.in_the_clear:
        return "None: there is no noise."
    if config.local_updates:
        return "None: the noise is local."
    return (
        f"Poisson sampling of users with q = {config.sampling_rate:g}, in secure sums. It holds while "
        "recipients cannot learn who was sampled."
    )


def _seen_by_server(config: RunConfig, sketched: bool) -> str:
    if config.traits.in_the_clear:
        return "Every user's update as it is."
    if config.local_updates:
        return "Every user's noisy update, and who took part."
    return "Every secure sum and who took part in it." + (" Every sketch." if sketched else "")


def _describe_dropout(config: RunConfig) -> str:
    kept = (
        "what they added in vain is removed"
        if config.dropout_noise == "removable"
        else "otherwise the sum carries more noise than ε needs"
    )
    return (
        f"Each share of the noise is sized for the case that {config.dropout_tolerance:.0%} of a cohort "
        f"vanish and {config.colluding_share:.0%} collude; {kept}. A round that more users leave is dropped, "
        "and counted as spent. Amplification is proven for rounds in which the noise in all does not depend "
        "on who was sampled: those that nobody leaves or, without colluders, whose excess is removed."
    )


def _describe_bound(
    bound: Bound, delta: float, *, sees: str, amplification: str, participation: str
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "epsilon": _finite(bound.epsilon),
        "tighter": tighter(bound.releases, delta),
        "sees": sees,
        "amplification": amplification,
        "participation": participation,
    }
    if bound.reason:
        described["reason"] = bound.reason
    if bound.as_paper_counts != bound.epsilon:
        described["as_paper_counts"] = _finite(bound.as_paper_counts)
    return described


@lru_cache(maxsize=256)
def tighter(releases: tuple[Release, ...], delta: float) -> float | None:
    """The tighter accountant's figure, None where no finite one is known or nothing is released."""
    if not any(r.count for r in releases) or _reasons(releases):
        return None
    own = [r if isinstance(r, GaussianRelease) else gaussian_counterpart(r) for r in releases if r.count]
    return _finite(tight_epsilon(own, delta))


def _warn_if_loose(held: Guarantee) -> None:
    """One warning for the figures reported; those that a calibration tries are nobody's concern."""
    towards = {"recipients": held.recipient, "the server": held.server}
    loose = [
        who
        for who, bound in towards.items()
        if held.delta and is_loose(as_paper_counts(list(bound.releases)), held.delta)
    ]
    if loose:
        log.warning(
            "epsilon towards %s is loose: the best Rényi order is the last one tried", " and ".join(loose)
        )


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
        as_paper_counts=_epsilon(as_paper_counts(list(releases)), delta),
        reason=" ".join(_reasons(releases)),
        releases=tuple(releases),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_simulation(subject: Subject) -> dict[str, Any] | None:
    """What a noise cohort larger than the true one means; None if the noise is that of the run itself."""
    if not _borrows_noise(subject):
        return None
    size, cohort = subject.config.noise_cohort_size, subject.config.sampling_rate * subject.users
    note = (
        f"ε is that of a deployment with {size} users a round, not of this run. "
        f"This run has {cohort:g} users a round. It adds {size / cohort:.4g} times less noise to each secure "
        "sum than its ε needs."
    )
    note = " ".join([note, *_delta_notes(subject)])
    return {"noise_cohort_size": size, "expected_cohort": cohort, "note": note}


def _borrows_noise(subject: Subject) -> bool:
    c = subject.config
    return subject.noise.stage2 > 0 and c.simulated_cohort > c.sampling_rate * subject.users


def _delta_notes(subject: Subject) -> list[str]:
    """A δ of 1 / n allows a mechanism that publishes the data of one of n users."""
    notes, delta = [], subject.noise.delta
    if delta * subject.users >= 1:
        notes.append(f"δ is not under 1 / {subject.users}, the inverse of the number of users of this run.")
    deployed = subject.config.noise_cohort_size / subject.config.sampling_rate
    if _borrows_noise(subject) and delta * deployed >= 1:
        notes.append(
            f"δ is not under 1 / {deployed:.0f}, the inverse of the number of users of that deployment."
        )
    return notes


def _assumptions(config: RunConfig) -> list[str]:
    sentences = _trust(config)
    if not config.traits.in_the_clear:
        sentences.append("The mean divides by the expected cohort q·|K|, a public number.")
    if config.deal == "every-rotation" and config.rotations > 1 and not config.user_column:
        sentences.append(
            "An image may be dealt to several users. ε covers a user, not all copies of an image."
        )
    if config.traits.normalised:
        sentences.append(OWN_STEPS)
    return sentences
