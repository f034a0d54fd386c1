"""Digits users of unequal size."""

from __future__ import annotations

from typing import Any

from pina_flwr.config import RunConfig, parse
from pina_flwr.data.users import Users

SIZES = (5, 3, 8, 1, 6, 3)


def configure(**options: Any) -> RunConfig:
    """Six users, everything small."""
    small = {"num-users": 6, "images-per-user": 8, "test-images": 20, "local-epochs": 2, "stage1-epochs": 2}
    return parse(small | {key.replace("_", "-"): value for key, value in options.items()})


def ragged(users: Users) -> Users:
    """The same users, each with only some of its images."""
    rows = [rows[:size] for rows, size in zip(users.rows, SIZES, strict=True)]
    return Users(users.config, users.tables, rows, users.groups)
