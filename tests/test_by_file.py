"""Tests that are named to run one at a time are there."""

from pathlib import Path

import pytest
from by_file import ONE_AT_A_TIME


@pytest.mark.parametrize("start", ONE_AT_A_TIME)
def test_each_name_is_that_of_a_test(start: str) -> None:
    """Else one that was renamed would go with its file, unnoticed."""
    path, *names = start.removesuffix("::").split("::")
    code = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    assert all(f"class {name}:" in code or f"def {name}(" in code for name in names)
