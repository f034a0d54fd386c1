"""Rotation and augmentation of uint8 images in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

CROP_MARGIN = 8  # a crop shifts by up to an eighth of the side (4 pixels of 32, the usual recipe)


def rotate(images: Tensor, quarter_turns: int) -> Tensor:
    """Rotate [n, channels, height, width] by `quarter_turns` times 90° counter-clockwise."""
    return torch.rot90(images, quarter_turns, dims=(-2, -1))


def crop_and_flip(image: Tensor, rng: np.random.Generator) -> Tensor:
    """One random crop (zero padding, same size) and horizontal flip of [channels, height, width]."""
    height, width = image.shape[-2:]
    up, left = max(1, height // CROP_MARGIN), max(1, width // CROP_MARGIN)
    top, start = int(rng.integers(2 * up + 1)), int(rng.integers(2 * left + 1))
    moved = pad(image, (left, left, up, up))[..., top : top + height, start : start + width]
    return moved.flip(-1) if rng.random() < 0.5 else moved


def enlarge(images: list[Tensor], times: int, rng: np.random.Generator) -> list[Tensor]:
    """The images themselves and then `times - 1` random crop-and-flip copies of each (the paper uses 5)."""
    return images + [crop_and_flip(image, rng) for _ in range(times - 1) for image in images]
