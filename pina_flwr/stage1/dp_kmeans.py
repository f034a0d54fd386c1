"""DP k-means through the secure sum: no sketch of any single user leaves in the clear.

Spherical Lloyd iterations on unit vectors. In each, a sampled user adds its vector to the slot of the
nearest centroid, once for each of R restarts that run side by side; only the noisy sums leave. A user's
contribution over all restarts has l2 norm at most 1 (R unit vectors, each scaled by 1/√R), so one iteration
is one Gaussian release with sensitivity 1. Which restart is best is read off the sums already released, at
no further cost. Every iteration is composed by the accountant. Centroids keep a decaying memory of earlier
sums (mini-batch k-means, Sculley 2010): each iteration sees another cohort, and what was released can be
used again freely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pina_flwr.privacy.clipping import clip
from pina_flwr.stage1.directions import unit


def nearest(directions: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid with the largest inner product: [users], for [users, h] and [C, h]."""
    return (directions @ centroids.mT).argmax(dim=-1)


def contributions(directions: Tensor, centroids: Tensor) -> Tensor:
    """Each user's contribution to one iteration [users, R·C·h], of l2 norm at most 1.

    directions: unit (or zero) vectors [users, h]. centroids: [R, C, h].
    """
    restarts, clusters, size = centroids.shape
    users = torch.arange(len(directions))
    slots = torch.zeros(len(directions), restarts, clusters, size)
    for r in range(restarts):
        slots[users, r, nearest(directions, centroids[r])] = directions / restarts**0.5
    return clip(slots.flatten(1), 1.0)[0]  # against rounding


def update(sums: Tensor) -> Tensor:
    """New centroids from the noisy sums: directions of [R, C, h]."""
    return unit(sums)


def best_restart(sums: Tensor) -> int:
    """The restart with the largest objective of spherical k-means, Σ_c ‖sum_c‖, of noisy sums [R, C, h]."""
    return int(torch.linalg.vector_norm(sums, dim=2).sum(dim=1).argmax())
