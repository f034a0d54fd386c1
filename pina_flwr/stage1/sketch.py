"""The paper's sketch: the few largest entries of ΔB under local differential privacy; k-means on the server.

Paper §3.2, Eq. 5. The noise protects the values of a sketch; which positions were kept is a noiseless
function of the user's data, so this mechanism has no finite ε (the accountant says so).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from pina_flwr.privacy.gaussian_sum import clip
from pina_flwr.privacy.noise import gaussian
from pina_flwr.stage1.directions import unit


def sketch_clip_norm(clip_norm: float, size: int, hidden: int) -> float:
    """Eq. 5: S_in = sqrt(n / h)·S."""
    return clip_norm * math.sqrt(size / hidden)


def keep_largest(deltas: Tensor, size: int) -> Tensor:
    """Keep the n/2 largest positive and n/2 largest negative entries of each row, no other: [users, h]."""
    half = min(size // 2, deltas.shape[1])
    kept = torch.zeros_like(deltas)
    for sign in (1, -1):
        values, where = (sign * deltas).topk(half, dim=1)
        kept.scatter_add_(1, where, sign * values.clamp(min=0))
    return kept


def local_sketches(
    deltas: Tensor, size: int, bound: float, noise_multiplier: float, normalise: bool
) -> Tensor:
    """Sketches as they leave the clients [users, h]: filtered, brought to norm S_in, noised where non-zero.

    bound: S_in. normalise: scale up to it too, rather than only down.
    """
    kept = keep_largest(torch.nan_to_num(deltas, 0.0, 0.0, 0.0), size)
    scaled, _ = clip(bound * unit(kept) if normalise else kept, bound)
    noise = torch.from_numpy(gaussian(tuple(scaled.shape), noise_multiplier * bound))
    return torch.where(kept != 0, scaled + noise, 0)


def cluster_sketches(sketches: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """K-means on all sketches [n, h]; centroids [C, h].

    The order in which sketches arrived does not matter. With fewer distinct ones than clusters the missing
    centroids repeat what there is, or are zero; k-means on such data could not tell them apart either.
    """
    usable = sketches[np.any(sketches != 0, axis=1)]
    usable = usable[np.lexsort(usable.T)]
    distinct = np.unique(usable, axis=0)
    if len(distinct) <= clusters:
        filled = np.zeros((clusters, sketches.shape[1]), dtype=np.float32)
        for c in range(clusters if len(distinct) else 0):
            filled[c] = distinct[c % len(distinct)]
        return filled
    fit = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(usable)
    return fit.cluster_centers_.astype(np.float32)
