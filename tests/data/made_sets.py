"""Small labelled image sets in the form that the hub has them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from PIL import Image


def draw(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random pixels, uint8 [count, *shape]."""
    return np.random.default_rng(seed).integers(256, size=(count, *shape), dtype=np.uint8)


def encoded(picture: Image.Image, form: str = "PNG") -> dict[str, Any]:
    """A picture as the hub's parquet files hold it."""
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return {"bytes": buffer.getvalue(), "path": None}


def table(
    images: Sequence[Any], labels: Sequence[Any], image: str = "image", label: str = "label", /, **more: Any
) -> datasets.Dataset:
    """A data set with an image column, and a label column of classes when the labels are small integers."""
    columns = {
        image: [encoded(Image.fromarray(i)) if isinstance(i, np.ndarray) else i for i in images],
        label: list(labels),
        **more,
    }
    built = datasets.Dataset.from_dict(columns)
    if isinstance(labels[0], int | np.integer):
        built = built.cast_column(label, datasets.ClassLabel(num_classes=max(10, int(max(labels)) + 1)))
    return built.cast_column(image, datasets.Image())
