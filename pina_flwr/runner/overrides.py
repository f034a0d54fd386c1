"""Overrides of the run config: `-c key=value` and `-c file.toml`, in the order given, later ones winning.

The forms are those of `flwr run -c`, and a little more: files and pairs may be mixed, several files may be
given, and a string needs no quotes, because shells remove them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pina_flwr.config import ConfigError

Scalar = bool | int | float | str

PAIR = re.compile(r"""\s*([\w.-]+)=('[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"]\S*)?(?=\s|$)""")
BUILT_IN = {"dataset": "digits", "backbone": "tiny-vit"}


def parse_overrides(items: Iterable[str], defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Merge the arguments of `-c`.

    Args:
        items: each `key=value`, several of them with blanks between, or the path of a TOML file.
        defaults: the app's run config; an unquoted value of an option that is a string stays a string.

    Raises:
        ConfigError: an argument is neither, or a file is missing or not TOML.
    """
    merged: dict[str, Scalar] = {}
    for item in items:
        if item.endswith(".toml") and not PAIR.match(item):
            merged.update(flatten(read_toml(Path(item).expanduser())))
        else:
            merged.update({key: _value(text, defaults.get(key)) for key, text in _pairs(item)})
    return merged


def check_known(overrides: Mapping[str, Scalar], defaults: Mapping[str, Scalar]) -> None:
    """Raise `ConfigError` for an option that the app's pyproject.toml lacks: `flwr` could not override it."""
    for key in overrides:
        if key not in defaults:
            raise ConfigError(
                f"{key}: must be listed under [tool.flwr.app.config] of the app's pyproject.toml"
            )


def absolute_paths(config: Mapping[str, Scalar], folder: Path) -> dict[str, Scalar]:
    """The options of `config` that name local paths, made absolute from `folder`.

    The run has another working directory. `dataset` and `backbone` name a path if it exists or looks like
    one (`./x`, `~/x`); else they are the name of something built in or on the Hugging Face Hub.
    """
    changed: dict[str, Scalar] = {}
    for key in ("dataset", "backbone", "cache-dir"):
        text = config.get(key)
        if not isinstance(text, str) or text in ("", BUILT_IN.get(key)):
            continue
        path = folder / Path(text).expanduser()
        if key == "cache-dir" or text.startswith((".", "~")) or path.exists():
            changed[key] = str(path.resolve())
    return changed


def read_toml(path: Path) -> dict[str, Any]:
    """Content of a TOML file.

    Raises:
        ConfigError: the file is missing, can't be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; must be a TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested tables as one flat dictionary, their keys joined by dots, as Flower does."""
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _pairs(item: str) -> list[tuple[str, str]]:
    pairs, position = [], 0
    while item[position:].strip():
        match = PAIR.match(item, position)
        if not match:
            raise ConfigError(
                f"-c {item!r}: must be key=value (quote a value with blanks) or the path of a .toml file"
            )
        pairs.append((match[1], match[2] or ""))
        position = match.end()
    return pairs


def _value(text: str, default: Scalar | None) -> Scalar:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    is_scalar = isinstance(value, bool | int | float | str)
    return value if is_scalar and not (isinstance(default, str) and not isinstance(value, str)) else text
