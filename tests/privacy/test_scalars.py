import math
from dataclasses import dataclass

import numpy as np
import pytest

from pina_flwr.privacy.scalars import from_flat, kinds, scalar, to_flat


@dataclass(frozen=True)
class Sample:
    name: str
    how_many: int
    sampling_rate: float

    def __post_init__(self) -> None:
        if self.how_many > 9:
            raise ValueError("too many")


SAMPLE = Sample("x", 3, 0.1 + 0.2)
VALUES = {"name": "x", "how-many": 3, "sampling-rate": 0.1 + 0.2}


def test_a_flat_dataclass_becomes_scalars_and_comes_back() -> None:
    assert to_flat(SAMPLE) == VALUES
    assert from_flat(Sample, VALUES) == SAMPLE


def test_numpy_floats_and_whole_numbers_become_floats() -> None:
    flat = to_flat(Sample("x", 3, np.float64(0.5)))
    assert type(flat["sampling-rate"]) is float
    assert type(from_flat(Sample, {**VALUES, "sampling-rate": 1}).sampling_rate) is float


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 1}, "name = 1: must be a string"),
        ({"how-many": True}, "how-many = True: must be a whole number"),
        ({"how-many": 3.0}, "how-many = 3.0: must be a whole number"),
        ({"how-many": "3"}, "must be a whole number"),
        ({"how-many": None}, "must be a whole number"),
        ({"how-many": 10}, "too many"),
        ({"sampling-rate": math.nan}, "sampling-rate = nan: must be a finite number"),
        ({"sampling-rate": math.inf}, "sampling-rate = inf: must be a finite number"),
        ({"sampling-rate": False}, "must be a finite number"),
        ({"sampling-rate": 10**400}, "a huge whole number: must be a finite number"),
        ({"sampling_rate": 0.5}, "unknown field 'sampling_rate'"),
        ({"x" * 99: 0.5}, "unknown field 'x"),
    ],
)
def test_nothing_is_guessed(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_flat(Sample, {**VALUES, **change})


@pytest.mark.parametrize("key", VALUES)
def test_nothing_is_filled_in(key: str) -> None:
    with pytest.raises(ValueError, match=f"field '{key}' is missing"):
        from_flat(Sample, {k: v for k, v in VALUES.items() if k != key})


def test_a_field_that_is_no_scalar_is_refused() -> None:
    @dataclass
    class Deep:
        items: list

    with pytest.raises(TypeError, match="items"):
        kinds(Deep)


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(ValueError, match="must be a whole number") as problem:
        scalar("key", "x" * 10_000, int)
    assert len(str(problem.value)) < 120
