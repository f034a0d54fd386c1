"""Releases as JSON: the mechanism's name and its parameters, read back strictly.

The types known are those of the union `Release`. The name of `DiscreteGaussianRelease` is
"discrete-gaussian", and so on: renaming a class or a field makes older ledgers unreadable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from pina_flwr.privacy.releases import Release
from pina_flwr.privacy.scalars import Scalar, from_flat, to_flat

TYPE = "type"
NAME_BY_CLASS: dict[type, str] = {
    cls: re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__.removesuffix("Release")).lower()
    for cls in get_args(Release)
}
CLASS_BY_NAME: dict[str, type] = {name: cls for cls, name in NAME_BY_CLASS.items()}


def kind_of(release: Release) -> str:
    """The name of a release's mechanism: "gaussian", "unprotected", …

    Raises:
        TypeError: it is none of the types known.
    """
    if type(release) not in NAME_BY_CLASS:
        raise TypeError(f"{type(release).__name__} is no release")
    return NAME_BY_CLASS[type(release)]


def release_to_dict(release: Release) -> dict[str, Scalar]:
    """Mechanism and parameters, ready for JSON.

    Raises:
        TypeError: it is none of the types known.
        ValueError: a field holds what its declared type is not.
    """
    return {TYPE: kind_of(release), **to_flat(release)}


def release_from_dict(values: Mapping[str, object]) -> Release:
    """Inverse of `release_to_dict`.

    Raises:
        ValueError: an unknown mechanism; a parameter unknown, missing, of the wrong type or out of bounds.
    """
    if not isinstance(values, Mapping):
        raise ValueError("a release must be a JSON object")
    name = values.get(TYPE)
    if not isinstance(name, str) or name not in CLASS_BY_NAME:
        raise ValueError(f"{TYPE} = {str(name)[:60]!r}: must be one of {', '.join(CLASS_BY_NAME)}")
    release: Release = from_flat(CLASS_BY_NAME[name], {k: v for k, v in values.items() if k != TYPE})
    return release


def dumps(value: object) -> str:
    """JSON on one line, ASCII, without blanks; floats keep every bit.

    Raises:
        ValueError: a NaN or an infinity.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Strict JSON: no NaN, no infinity by name, no key twice.

    Raises:
        ValueError: it is not that.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
