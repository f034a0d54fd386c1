"""Frozen-prefix activations, computed once per image and reused across clusters, epochs and rounds.

With adapters only in the last layers, everything below them is the same for every cluster model and every round.
Activations are kept as bfloat16; an uncached image goes through the same rounding, so the cache changes no result.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig

KEPT_AS = torch.bfloat16
# Options that decide what a user's images look like to the trainable layers; all others leave the cache valid.
DECISIVE = (
    "seed", "dataset", "image_column", "label_column", "user_column", "num_users", "images_per_user", "rotations",
    "deal", "augment", "test_images", "backbone", "image_size", "lora_layers",
)  # fmt: skip


class Activations:
    """A store of activations by key, in memory up to a cap and, if asked, in a folder between runs.

    Args:
        cap_bytes: memory it may take; what does not fit is computed again (or read from the folder) when needed.
        folder: where to keep activations between runs, or None.
    """

    def __init__(self, cap_bytes: int, folder: Path | None = None):
        self._cap, self._folder = cap_bytes, folder
        self._kept: dict[str, Tensor] = {}
        self._bytes = 0

    def get(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """The activations under `key` as bfloat16, from memory, from the folder, or computed."""
        if key in self._kept:
            return self._kept[key]
        path = self._folder / f"{key}.safetensors" if self._folder else None
        if path and path.is_file():
            value = load_file(path)["hidden"]
        else:
            value = compute().to(KEPT_AS).cpu().contiguous()
            if path:
                _write(path, value)
        size = value.numel() * value.element_size()
        if self._bytes + size <= self._cap:
            self._kept[key] = value
            self._bytes += size
        return value


def open_activations(config: RunConfig) -> Activations:
    """The store that `cache-gib` and `cache-dir` ask for; a run with other data or another backbone has its own.

    Raises:
        ConfigError: the folder can't be made or written to.
    """
    folder = None
    if config.cache_dir:
        folder = Path(config.cache_dir).expanduser().absolute() / _fingerprint(config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as problem:
            raise ConfigError(f"cache-dir = {config.cache_dir!r}: can't be written ({problem.strerror})") from None
    return Activations(int(config.cache_gib * 2**30), folder)


def _fingerprint(config: RunConfig) -> str:
    text = "\n".join(f"{name}={getattr(config, name)!r}" for name in DECISIVE)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(path: Path, value: Tensor) -> None:
    """Write under another name and rename: another process may write the same key, or die half-way."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({"hidden": value}, partial)
    partial.replace(path)
