"""Constraining sensitivity: every user's vector is brought to l2 norm at most S before noise is added.

Paper (arXiv 2604.20596), Eq. 7. The other half of the mechanism is in `sum_mechanism.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# float32 rounding may lift a clipped norm over the bound by about 1e-7 of it: aim that much lower.
ROUNDING = 1e-6


def clip(vectors: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Scale rows of [users, d] down to l2 norm `bound`; rows that are not finite become zero.

    Returns the vectors and which users were left out that way, bool [users].
    """
    norms = torch.linalg.vector_norm(vectors.double(), dim=1)
    left_out = ~torch.isfinite(norms)
    factors = (bound * (1 - ROUNDING) / norms).clamp(max=1)  # a zero norm gives inf, hence 1
    # In float64: a factor for a huge vector would lose its digits in float32.
    clipped = (vectors.double() * factors[:, None]).to(vectors.dtype)
    return torch.where(left_out[:, None], 0, clipped), left_out
