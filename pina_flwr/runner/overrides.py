"""Overrides of the run config: `-c key=value` and `-c file.toml`, in the order given, later ones winning.

The forms are those of `flwr run -c`, and a little more: files and pairs may be mixed, several files may be
given, and a string needs no quotes, because shells remove them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pina_flwr.config import ConfigError, expanded

Scalar = bool | int | float | str

PAIR = re.compile(r"""\s*([\w.-]+)=('[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"]\S*)?(?=\s|$)""")
LARGEST_INT = 2**63 - 1
"""Flower sends whole numbers in 64 bits."""
BUILT_IN = {"dataset": "digits", "backbone": "tiny-vit"}


class _OutOfRange(float):
    """A number written in a file or in a pair that a float can't hold: it became infinite or 0 unasked."""

    text: str


def parse_overrides(items: Iterable[str], defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Merge the arguments of `-c`.

    Args:
        items: each `key=value`, several of them with blanks between, or the path of a TOML file.
        defaults: the app's run config; an unquoted value of an option that is a string stays a string.

    Raises:
        ConfigError: an argument is neither, a file is missing or not TOML, or a number is out of range.
    """
    merged: dict[str, Scalar] = {}
    for item in items:
        if item.endswith(".toml") and not PAIR.match(item):
            merged.update(flatten(read_toml(expanded("-c", item))))
        else:
            pairs = _pairs(item)
            merged.update({key: _in_range(key, _value(text, defaults.get(key))) for key, text in pairs})
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
    for key in ("dataset", "backbone", "cache-dir", "ledger"):
        text = config.get(key)
        if not isinstance(text, str) or text in ("", BUILT_IN.get(key)):
            continue
        path = folder / expanded(key, text)
        if key in ("cache-dir", "ledger") or text.startswith((".", "~")) or path.exists():
            changed[key] = str(path.resolve())
    return changed


def read_toml(path: Path) -> dict[str, Any]:
    """Content of a TOML file.

    Raises:
        ConfigError: the file is missing, can't be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"), parse_float=_float)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; must be a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested tables as one flat dictionary, their keys joined by dots, as Flower does.

    Raises:
        ConfigError: a number is out of range.
    """
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = _in_range(prefix + key, value)
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
        value = tomllib.loads(f"value = {text}", parse_float=_float)["value"]
    except ValueError:  # not TOML, or a whole number of thousands of digits
        return text
    is_scalar = isinstance(value, bool | int | float | str)
    return value if is_scalar and not (isinstance(default, str) and not isinstance(value, str)) else text


def _float(text: str) -> float:
    value = float(text)
    digits = text.lower().split("e")[0]
    overflows = math.isinf(value) and text.lstrip("+-") != "inf"
    if not overflows and (value != 0 or not re.search("[1-9]", digits)):
        return value
    beyond = _OutOfRange(value)
    beyond.text = text
    return beyond


def _in_range(key: str, value: Scalar) -> Scalar:
    """`value`; an infinity must be asked for by name, since epsilon = inf means no noise."""
    if isinstance(value, _OutOfRange):
        raise ConfigError(f"{key} = {value.text}: is out of range; must be 0, inf or from 1e-308 to 1e308")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ConfigError(f"{key}: a whole number must be within ±{LARGEST_INT}")
    return value
