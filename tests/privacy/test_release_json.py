import math
from typing import get_args

import pytest

from pina_flwr.privacy.release_json import (
    CLASS_BY_NAME,
    dumps,
    kind_of,
    loads,
    release_from_dict,
    release_to_dict,
)
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

RELEASES: list[Release] = [
    GaussianRelease(0.1 + 0.2, 1.0, 3),
    SkellamRelease(120.5, 17.25, 1e6, 0.215, 1),
    DiscreteGaussianRelease(17.25, 1e6, 10, 1024, 1.0, 2),
    ZcdpRelease(1 / 3, 1),
    UnprotectedRelease("ε is “infinite”\n", 1),
]


def test_every_type_of_release_is_known_by_a_lasting_name() -> None:
    """Ledgers on disk hold these names and keys: a change makes them unreadable."""
    assert {type(release) for release in RELEASES} == set(get_args(Release))
    assert [kind_of(release) for release in RELEASES] == list(CLASS_BY_NAME)
    assert [list(release_to_dict(release)) for release in RELEASES] == [
        ["type", "noise-multiplier", "sampling-rate", "count"],
        ["type", "l1", "l2", "variance", "sampling-rate", "count"],
        ["type", "l2", "variance", "clients", "size", "sampling-rate", "count"],
        ["type", "rho", "count"],
        ["type", "reason", "count"],
    ]
    assert list(CLASS_BY_NAME) == ["gaussian", "skellam", "discrete-gaussian", "zcdp", "unprotected"]


@pytest.mark.parametrize("release", RELEASES, ids=kind_of)
def test_releases_come_back_to_the_last_bit(release: Release) -> None:
    text = dumps(release_to_dict(release))
    assert text.isascii()
    assert "\n" not in text
    assert release_from_dict(loads(text)) == release


GAUSSIAN = {"type": "gaussian", "noise-multiplier": 1.0, "sampling-rate": 1.0, "count": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "laplace"}, "must be one of gaussian"),
        ({"type": ["gaussian"]}, "must be one of gaussian"),
        ({"reason": "x"}, "unknown field 'reason'"),
        ({"noise-multiplier": 0.0}, "must be finite and above 0"),
        ({"noise-multiplier": math.nan}, "must be a finite number"),
        ({"sampling-rate": 1.5}, "at most 1"),
        ({"count": -1}, "at least 0"),
        ({"count": 1.0}, "must be a whole number"),
        ({"count": True}, "must be a whole number"),
    ],
)
def test_what_is_no_release_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        release_from_dict({**GAUSSIAN, **change})


def test_a_missing_parameter_or_type_is_refused() -> None:
    for key in GAUSSIAN:
        with pytest.raises(ValueError, match=key):
            release_from_dict({k: v for k, v in GAUSSIAN.items() if k != key})
    with pytest.raises(ValueError, match="object"):
        release_from_dict([])  # type: ignore[arg-type]


def test_what_is_no_release_has_no_kind() -> None:
    with pytest.raises(TypeError, match="str"):
        kind_of("gaussian")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ['{"a":NaN}', '{"a":Infinity}', '{"a":1,"a":1}', "", "{", '{"a":1} x', "[" * 100_000]
)
def test_json_is_strict(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are the library's
        loads(text)


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps({"a": math.nan})
