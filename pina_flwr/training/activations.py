"""Frozen-prefix activations, computed once per image and reused across clusters, epochs and rounds.

With adapters only in the last layers, everything below them is the same for every cluster model and every
round. Activations are kept as bfloat16; an uncached image goes through the same rounding, so the cache
changes no result.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.models.backbone import EMBEDDED

log = logging.getLogger(__name__)
KEPT_AS = torch.bfloat16
# Options that decide what the trainable layers see of a user's images; all others leave the cache valid.
DECISIVE = (
    "seed", "dataset", "image_column", "label_column", "user_column", "num_users", "images_per_user",
    "rotations", "group_shares", "deal", "augment", "test_on", "test_images", "backbone", "image_size",
    "lora_layers",
)  # fmt: skip


class Activations:
    """A store of activations by key, in memory up to a cap and, if asked, in a folder between runs.

    Args:
        cap_bytes: memory it may take; what does not fit is computed again (or read from the folder).
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
        value = self._read(key)
        if value is None:
            value = compute().to(KEPT_AS).cpu().contiguous()
            self._write(key, value)
        size = value.numel() * value.element_size()
        if self._bytes + size <= self._cap:
            self._kept[key] = value
            self._bytes += size
        return value

    def _read(self, key: str) -> Tensor | None:
        """What the folder has under `key`; None if it has nothing, or a damaged file."""
        if self._folder is None:
            return None
        try:
            with safe_open(self._folder / f"{key}.safetensors", "pt") as file:
                value, notes = file.get_tensor("hidden"), file.metadata() or {}
        except (OSError, SafetensorError):
            return None
        return value if notes.get("checksum") == _checksum(value) else None

    def _write(self, key: str, value: Tensor) -> None:
        """Write under another name and rename: another process may write the same key, or die half-way."""
        if self._folder is None:
            return
        partial = self._folder / f".{key}.{os.getpid()}"
        try:
            save_file({"hidden": value}, partial, {"checksum": _checksum(value)})
            partial.replace(self._folder / f"{key}.safetensors")
        except (OSError, SafetensorError) as problem:  # a full disk is no reason to lose a run
            partial.unlink(missing_ok=True)
            log.warning("cache-dir: going on without, %s can't be written (%s)", self._folder, problem)
            self._folder = None


def open_activations(config: RunConfig) -> Activations:
    """The store that `cache-gib` and `cache-dir` ask for; a run with other data or another backbone has its
    own.

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
            raise ConfigError(
                f"cache-dir = {config.cache_dir!r}: can't be written ({problem.strerror})"
            ) from None
    return Activations(int(config.cache_gib * 2**30), folder)


def _fingerprint(config: RunConfig) -> str:
    lines = [f"{name}={getattr(config, name)!r}" for name in DECISIVE]
    lines += [_state_of(config.dataset), _state_of(config.backbone)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _state_of(name: str) -> str:
    """Names, sizes and times of a local folder's files: changed data or weights have other activations."""
    folder = Path(name).expanduser()
    if name == EMBEDDED:
        from pina_flwr.models import tiny_vit

        folder = tiny_vit.WEIGHTS
    files = sorted(folder.rglob("*")) if folder.is_dir() else [folder] * folder.is_file()
    stats = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    return "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)


def _checksum(value: Tensor) -> str:
    return f"{zlib.crc32(value.view(torch.uint8).numpy().data):08x} {value.dtype} {tuple(value.shape)}"
