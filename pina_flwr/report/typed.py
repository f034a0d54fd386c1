"""Dataclasses from what JSON or TOML files hold, every field's type checked.

What reads files that other versions of the code may have written, or people may have edited, checks them
here, once, so that nothing beyond has to. Fields that the dataclass does not have are ignored (newer code
wrote them), those that are missing get their defaults (older code did).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pina_flwr.privacy.scalars import scalar, short

T = TypeVar("T")
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Within:
    """Least and greatest value of an annotated number, both allowed."""

    least: float
    greatest: float


Share = Annotated[float, Within(0, 1)]
"""An accuracy, a probability."""
NotNegative = Annotated[float, Within(0, float("inf"))]
Seconds = Annotated[float, Within(0, 1e9)]
"""A duration; thirty years are more than any run takes."""
Count = Annotated[int, Within(0, 2**53)]
"""A number of things; a float holds it."""


def from_values(cls: type[T], values: object) -> T:
    """The dataclass with these values by field name.

    Fields may be strings, whole numbers, floats, numbers annotated by `Within`, bools, dataclasses, lists
    and dictionaries of those, and None.

    Raises:
        ValueError: `values` is no dictionary, a field without a default is missing, or one has a wrong type
            or is out of bounds; a number that is not finite has a wrong type, too.
    """
    if not isinstance(values, dict):
        raise ValueError(f"must hold the fields of {cls.__name__}")
    found = {}
    for name, kind, is_needed in _fields(cls):  # type: ignore[arg-type]  # a class is hashable
        if name in values:
            found[name] = _value(name, values[name], kind)
        elif is_needed:
            raise ValueError(f"{name} is missing")
    return cls(**found)


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it has no default, of each field; types take long to work out."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        (f.name, hints[f.name], f.default is f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(cls)
    )


def _value(name: str, value: object, kind: Any) -> Any:
    """The value of a field, which must be of the kind."""
    if dataclasses.is_dataclass(kind):
        return from_values(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is Annotated:
        return _within(name, _value(name, value, kind.__origin__), kind.__metadata__[0])
    if get_origin(kind) in (types.UnionType, typing.Union):  # X | None
        (inner,) = (one for one in get_args(kind) if one is not types.NoneType)
        return None if value is None else _value(name, value, inner)
    if get_origin(kind) is list and isinstance(value, list):
        return [_value(name, item, get_args(kind)[0]) for item in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _value(name, item, get_args(kind)[1]) for key, item in value.items()}
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (str, int, float):
        return scalar(name, value, kind)
    article = {list: "a list", dict: "a table"}.get(get_origin(kind) or kind, "true or false")
    raise ValueError(f"{name}: must be {article}")


def _within(name: str, number: float, bounds: Within) -> float:
    """The number, which must be within the bounds but for rounding: a mean of ones may exceed 1 by that."""
    if number < bounds.least - ROUNDING:
        raise ValueError(f"{name} = {short(number)}: must be at least {bounds.least:g}")
    if number > bounds.greatest + ROUNDING:
        raise ValueError(f"{name} = {short(number)}: must be at most {bounds.greatest:g}")
    return number
