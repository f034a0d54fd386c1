"""Flat dataclasses as dictionaries of scalars and back, strictly: for what crosses a file or a network.

Every field is a string, a whole number or a finite number. Keys are those of the run config (`sampling_rate`
→ "sampling-rate"). Nothing is guessed or filled in: a key too many or too few, `true` for 1, NaN, an infinity
and a number that no float holds are errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pina_flwr.config import key_of

Scalar = str | int | float
T = TypeVar("T")

NAMES: dict[type, str] = {str: "a string", int: "a whole number", float: "a finite number"}
_kinds: dict[type, dict[str, tuple[str, type]]] = {}  # working them out takes longer than reading a line


def scalar(key: str, value: object, kind: type) -> Scalar:
    """`value` as a `kind` (str, int or float); a whole number may stand for a float.

    Raises:
        ValueError: it is of another type (a bool is no number), or a number that is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise _wrong(key, value, kind)
    if kind is not float:
        return kind(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise _wrong(key, value, kind) from None
    if not math.isfinite(number):
        raise _wrong(key, value, kind)
    return number


def kinds(cls: type) -> dict[str, tuple[str, type]]:
    """Field name and type of a flat dataclass by key.

    Raises:
        TypeError: a field is no scalar.
    """
    if cls not in _kinds:
        _kinds[cls] = _find_kinds(cls)
    return _kinds[cls]


def _find_kinds(cls: Any) -> dict[str, tuple[str, type]]:
    hints = get_type_hints(cls)
    found = {key_of(f.name): (f.name, hints[f.name]) for f in dataclasses.fields(cls)}
    for name, kind in found.values():
        if kind not in NAMES:
            raise TypeError(f"{cls.__name__}.{name}: {kind} is no scalar")
    return found


def to_flat(item: Any) -> dict[str, Scalar]:
    """A flat dataclass as scalars by key.

    Raises:
        ValueError: a field holds what its declared type is not.
    """
    return {key: scalar(key, getattr(item, name), kind) for key, (name, kind) in kinds(type(item)).items()}


def from_flat(cls: type[T], values: Mapping[str, object]) -> T:
    """The dataclass of which these are the scalars; `from_flat(type(x), to_flat(x)) == x`.

    Raises:
        ValueError: a key is unknown or missing, a value has a wrong type, or `cls` refuses it.
    """
    known = kinds(cls)
    for key in values:
        if key not in known:
            raise ValueError(f"unknown field {short(key)}")
    for key in known:
        if key not in values:
            raise ValueError(f"field {key!r} is missing")
    return cls(**{name: scalar(key, values[key], kind) for key, (name, kind) in known.items()})


def _wrong(key: str, value: object, kind: type) -> ValueError:
    return ValueError(f"{key} = {short(value)}: must be {NAMES[kind]}")


def short(value: object) -> str:
    """A value for an error message; a whole number may be too long to print at all."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "a huge whole number"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
