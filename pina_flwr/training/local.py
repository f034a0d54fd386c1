"""Local training, side by side: every user its own adapter, one pass over the shared frozen weights.

The loss that is differentiated is the sum over users of each one's mean loss. Users share no trainable
number, so its gradient holds every user's own gradient; the result is that of training one user after the
other. Users may do different amounts of work: one that has done its epochs leaves, and one whose images a
batch has passed takes no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from pina_flwr.models.adapter import AdapterSpec
from pina_flwr.models.backbone import Backbone
from pina_flwr.models.block import Prepared


@dataclass(frozen=True)
class Batch:
    """Ragged users padded to one shape.

    prepared: the adapter-free part of the tail for hidden states [users, images, tokens, h]. targets: class
    probabilities [users, images, classes]. weights: 1 for an image, 0 for padding [users, images].
    """

    prepared: Prepared
    targets: Tensor
    weights: Tensor

    def pick(self, rows: Tensor) -> Batch:
        """The images `rows` [users, β] of each user."""
        users = torch.arange(rows.shape[0], device=rows.device)[:, None]
        return Batch(self.prepared.pick(users, rows), self.targets[users, rows], self.weights[users, rows])

    def of(self, users: Tensor) -> Batch:
        """All images of some users."""
        return Batch(self.prepared.pick(users), self.targets[users], self.weights[users])


class Trained(NamedTuple):
    """vectors: trained adapters [users, d]. steps: τ_k, SGD steps that each user took, int64 [users]."""

    vectors: Tensor
    steps: Tensor


@dataclass(frozen=True)
class LocalSGD:
    """Plain SGD: E epochs, batches of β images (0: all of them), learning rate η.

    mu: μ of the proximal term μ/2·‖w - w_start‖² in every user's objective (FedProx, Li et al. 2020).
    """

    epochs: int
    batch_size: int
    learning_rate: float
    mu: float = 0.0

    def train(
        self,
        backbone: Backbone,
        spec: AdapterSpec,
        start: Tensor,
        batch: Batch,
        orders: list[np.random.Generator],
        epochs: Tensor | None = None,
    ) -> Trained:
        """Train each user's adapter from `start` [users, d].

        orders: one generator a user, for the order of its images. epochs: of each user, int [users]; None if
        all do E.
        """
        vectors, steps = start.clone(), torch.zeros(len(start), dtype=torch.int64, device=start.device)
        wanted = torch.full_like(steps, self.epochs) if epochs is None else epochs.to(start.device)
        users = torch.arange(len(start), device=start.device)  # those at work
        for epoch in range(int(wanted.max()) if len(wanted) else 0):
            if len(left := (epoch < wanted[users]).nonzero()[:, 0]) < len(users):
                users, batch = users[left], batch.of(left)
            for part in self._batches(batch, [orders[user] for user in users.tolist()]):
                before = vectors[users].requires_grad_()
                loss = user_losses(backbone, spec, before, part).sum()
                (gradient,) = torch.autograd.grad(loss, before)
                gradient += self.mu * (before.detach() - start[users])
                has_images = part.weights.sum(1) > 0
                # A choice and no product: 0 times a gradient that is not finite would spoil who has none.
                vectors[users] -= self.learning_rate * gradient.where(has_images[:, None], 0)
                steps[users] += has_images
        return Trained(vectors, steps)

    def _batches(self, batch: Batch, orders: list[np.random.Generator]) -> Iterator[Batch]:
        """One epoch: every user's images in a fresh order, cut into batches; padding comes last."""
        images = batch.weights.shape[1]
        if self.batch_size == 0 or self.batch_size >= images:
            yield batch
            return
        counts = batch.weights.sum(1).long().tolist()
        shuffled = [
            np.concatenate([order.permutation(count), np.arange(count, images)])
            for order, count in zip(orders, counts, strict=True)
        ]
        rows = torch.from_numpy(np.stack(shuffled)).to(batch.weights.device)
        for rows_of_batch in rows.split(self.batch_size, dim=1):
            yield batch.pick(rows_of_batch)


def user_losses(backbone: Backbone, spec: AdapterSpec, vectors: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of each user under its vector, Eq. 6: [users]. A user without images has loss 0.

    vectors: [users, d], or [1, d] for one model that all users are measured under.
    """
    scores = backbone.logits(batch.prepared, spec.unflatten(vectors), spec.lora_scale)
    losses = -(batch.targets * log_softmax(scores, dim=-1)).sum(-1)
    return (losses * batch.weights).sum(1) / batch.weights.sum(1).clamp(min=1)
