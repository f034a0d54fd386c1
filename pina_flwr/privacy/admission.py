"""What a client checks before anything of its users is used: a server can't be the only one who counts.

The server offers the parameters of a round. The client works out from the run's configuration what
they have to be, refuses a round that is stale or one too many, asks its own policy, and charges the round to
its ledger. Only then does it train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.privacy.cohort import largest_cohort, participation_cap, planned_rounds, shares
from pina_flwr.privacy.plan import (
    LOCAL,
    UPDATES,
    NoisePlan,
    charged,
    clip_norm_of,
    rounds_by_step,
    stage_of,
)
from pina_flwr.privacy.policy import Offer, Refusal, check
from pina_flwr.privacy.releases import Release, UnprotectedRelease
from pina_flwr.privacy.user_ledger import UserLedger

if TYPE_CHECKING:
    from pina_flwr.client import Node
    from pina_flwr.messages import Task

MOST_NOISE = 1e6  # z
SAME = 1e-6  # relative: plans may differ that much between machines


def offer_of(config: RunConfig, noise: NoisePlan, step: str, round_: int, cohort: int, run: str) -> Offer:
    """The parameters of a round, as the server offers them and as a client expects them."""
    split = shares(config, cohort)
    return Offer(
        mechanism="zcdp" if step in LOCAL else config.mechanism,  # a user's own noise is continuous
        noise_multiplier=noise.of_step(step),
        clip_norm=clip_norm_of(config, step),
        cohort=cohort,
        survivors=split.survivors,
        colluders=split.colluders,
        bits=config.bits,
        sampling_rate=config.sampling_rate,
        run=run,
        stage=stage_of(step),
        round=round_,
    )


def admit(node: Node, task: Task, ledger: UserLedger) -> None:
    """Check what a task would have the users release, and charge it.

    Steps that the run has not are refused: a vector leaves as the run says. A run without privacy is else
    let through, unless the node has a policy; a ledger that lasts enters it.

    Raises:
        Refusal: nothing of the users may be used.
    """
    planned = rounds_by_step(node.config, *planned_rounds(node.config))
    if task.offer is None or not planned.get(task.step):
        raise Refusal("parameters differ from the run's")
    if not node.config.private and node.policy is None and not node.ledger:
        return
    _compare(node, task, task.offer)
    release = _release(node, task, task.offer)
    cap = participation_cap(node.config, task.offer.stage)
    for user in task.users:
        if node.config.private and ledger.taken(user, node.run, task.offer.stage) >= cap:
            raise Refusal("too many rounds")
        if node.policy:
            check(task.offer, release, node.policy, ledger.spent(user), ledger.rounds(user))
    ledger.charge(task.users, node.run, task.offer.stage, task.offer.round, release)


def check_arrays(node: Node, task: Task) -> None:
    """Refuse arrays of another shape, type or number than the step has: one user must stay one vector.

    Raises:
        Refusal: "parameters differ from the run's".
    """
    c, h = node.config, node.shapes.sketch
    needed: dict[str, tuple[int, ...]] = {}
    if task.step == "lloyd":
        needed = {"centroids": (c.kmeans_restarts, c.clusters, h)}
    elif task.step in UPDATES:
        needed = {"models": (c.slots, node.shapes.adapter)}
        needed |= {"centroids": (c.clusters, h)} if task.choose == "nearest" else {}
        ways = ("group",) if c.traits.knows_groups else ("loss", "nearest")
        if c.slots > 1 and task.choose not in ways:
            raise Refusal("parameters differ from the run's")
    allowed = needed if task.step == "mean" else needed | {"mean": (h,)}
    named = set(needed) <= set(task.arrays) <= set(allowed)
    if not named or not all(_is_plain(array, allowed[name]) for name, array in task.arrays.items()):
        raise Refusal("parameters differ from the run's")


def _is_plain(array: np.ndarray, shape: tuple[int, ...]) -> bool:
    return array.dtype == np.float32 and array.shape == shape and bool(np.isfinite(array).all())


def _compare(node: Node, task: Task, offer: Offer) -> None:
    """Refuse what is not the run's own plan."""
    config, users = node.config, len(node.workbench.users)
    rounds = planned_rounds(config)
    if task.step == "mean" and task.round != 1:
        raise Refusal("too many rounds")
    if not 1 <= task.round <= rounds[stage_of(task.step) - 1]:
        raise Refusal("too many rounds")
    if not 1 <= offer.cohort <= largest_cohort(users, config.sampling_rate):
        raise Refusal("cohort outside the policy")
    expected = offer_of(config, node.plan, task.step, task.round, offer.cohort, node.run)
    least = expected.noise_multiplier * (1 - SAME)
    enough = least <= offer.noise_multiplier <= max(least, MOST_NOISE)  # more is welcome
    if not enough or _without_noise(offer) != _without_noise(expected) or len(task.users) > offer.cohort:
        raise Refusal("parameters differ from the run's")
    # A simulated cohort's noise is less than the run's own ε needs: nothing that lasts may count on it.
    if (node.policy or node.ledger) and config.simulated_cohort:
        raise Refusal("noise under the policy")


def _without_noise(offer: Offer) -> tuple[object, ...]:
    return tuple(value for key, value in offer.to_dict().items() if key != "noise-multiplier")


def _release(node: Node, task: Task, offer: Offer) -> Release:
    """What the round releases about one user, in the server's view: without amplification."""
    z, users = offer.noise_multiplier, len(node.workbench.users)
    try:
        found = charged(node.config, task.step, z, users, node.shapes, 1.0)
    except ConfigError:  # noise that can't be encoded
        raise Refusal("parameters differ from the run's") from None
    unprotected = [release for release in found if isinstance(release, UnprotectedRelease)]
    return (unprotected or found)[0]
