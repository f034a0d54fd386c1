"""Values read back from a file have the type and the bounds of their field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from pina_flwr.report.typed import Count, NotNegative, Share, Within, from_values


@dataclass(frozen=True)
class Item:
    share: Share | None = None
    count: Count = 0
    size: NotNegative = 0.0
    index: Annotated[float, Within(-1, 1)] = 0.0
    shares: dict[str, Share | None] | None = None


def test_values_within_bounds_come_back():
    values = {"share": 1.0, "count": 2**53, "size": 1e308, "index": -1.0, "shares": {"a": 0.0, "b": None}}
    assert from_values(Item, values) == Item(1.0, 2**53, 1e308, -1.0, {"a": 0.0, "b": None})


def test_a_mean_of_ones_may_be_off_by_rounding():
    assert from_values(Item, {"share": 1.0000000000000002}).share == 1.0000000000000002


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"share": 1.01}, "share = 1.01: must be at most 1"),
        ({"share": -0.1}, "share = -0.1: must be at least 0"),
        ({"count": -1}, "count = -1: must be at least 0"),
        ({"count": 2**53 + 1}, "count = 9007199254740993: must be at most"),
        ({"size": -1e-3}, "size = -0.001: must be at least 0"),
        ({"index": -2}, "index = -2.0: must be at least -1"),
        ({"shares": {"a": 3}}, "shares = 3.0: must be at most 1"),
        ({"count": True}, "count = True"),
        ({"share": "1"}, "share = '1'"),
    ],
)
def test_others_are_refused_by_name(values, error):
    with pytest.raises(ValueError, match=error):
        from_values(Item, values)
