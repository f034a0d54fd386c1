"""Seeds for data order and initialisation. Noise and keys never come from here: see `privacy.noise`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def _digest(seed: int, purpose: tuple[object, ...]) -> int:
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def generator(seed: int, *purpose: object) -> np.random.Generator:
    """A numpy generator for one purpose of one run, e.g. `generator(seed, "cohort", round)`.

    Independent of how users are spread over nodes: whoever asks for the same purpose gets the same stream.
    """
    return np.random.default_rng(_digest(seed, purpose))


def normal(seed: int, *purpose: object, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """A float32 tensor of N(0, std²) that all parties derive alike from the seed."""
    import torch  # here, since what only counts privacy is to start fast

    draw = generator(seed, *purpose).standard_normal(shape)
    return torch.from_numpy(draw * std).to(torch.float32)
