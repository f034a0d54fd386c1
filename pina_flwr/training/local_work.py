"""How much local work a user does in a round of stage 2, and FedNova's normalisation of it.

Users differ in the epochs they get done (Li et al. 2020, arXiv 1812.06127: stragglers): each draws a number
uniformly from `local-epochs-least`..`local-epochs`, by seed, user and round. None of it depends on data.

FedNova (Wang et al. 2020, arXiv 2007.07481) takes from each user its mean step Δ_k / τ_k, τ_k being the SGD
steps it took, and moves the model by τ_eff of them. For plain SGD that makes the fixed point independent of
how the work is spread. Any τ_eff does, as it is part of the server's step size. Here it must be public and
the same for all, since users scale before they clip: τ_eff / τ_k · Δ_k. τ_k, which tells how many images a
user has, does not leave it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pina_flwr.config import RunConfig
from pina_flwr.seeding import generator


def epochs_of(config: RunConfig, users: Sequence[int], round_: int) -> Tensor:
    """Local epochs of each user in a round of stage 2, int64 [users]; the same whoever is asked with it."""
    most = config.local_epochs
    least = config.local_epochs_least or most
    draws = [
        int(generator(config.seed, "epochs", user, round_).integers(least, most, endpoint=True))
        for user in users
    ]
    return torch.tensor(draws, dtype=torch.int64)


def effective_steps(config: RunConfig) -> float:
    """τ_eff: the option, or the expected steps of a user with `images-per-user` images, copies included.

    That is the mean number of epochs times the batches of an epoch, one if β = 0. With `user-column`
    `images-per-user` is a cap and users may have fewer; the figure is public in any case.

    Raises:
        ValueError: neither is known; a run's configuration refuses that.
    """
    if config.effective_steps:
        return config.effective_steps
    batches = 1
    if config.batch_size:
        if not config.images_per_user:
            raise ValueError("images-per-user = 0: says nothing about the steps of an epoch")
        batches = math.ceil(config.images_per_user * config.augment / config.batch_size)
    least = config.local_epochs_least or config.local_epochs
    return (least + config.local_epochs) / 2 * batches


def normalised(updates: Tensor, steps: Tensor, effective: float) -> Tensor:
    """τ_eff / τ_k · Δ_k of updates [users, d] after `steps` [users]; a user without a step has no update."""
    return updates * (effective / steps.clamp(min=1).to(updates.dtype))[:, None]
