"""From a matrix to its cells: every combination of row, ε and seed, each a run with a full configuration.

All cells are parsed before any of them runs, so that a mistake in the last row does not show after hours.
Options are laid over each other: the app's defaults, presets, [options], `-c`, the row's presets and
options, its ε and seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pina_flwr.compare.matrix import Layer, Matrix, Row, epsilon_name, refuse_set_by_matrix, slug
from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.privacy.cohort import check_secure_sum
from pina_flwr.privacy.plan import Shapes, plan
from pina_flwr.runner.overrides import Scalar, absolute_paths, check_known


@dataclass(frozen=True)
class Cell:
    """One run of the matrix.

    config: all its options. overrides: those of them that the app is started with.
    """

    row: str
    epsilon: float
    seed: int
    config: RunConfig
    overrides: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """Name of its folder."""
        epsilon = epsilon_name(self.epsilon).replace("∞", "inf")
        return f"{slug(self.row)}-eps{epsilon}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, ε = {epsilon_name(self.epsilon)}, seed {self.seed}"


def cells_of(
    matrix: Matrix, defaults: Mapping[str, Scalar], extra: Mapping[str, Scalar], folder: Path
) -> tuple[Cell, ...]:
    """The cells, seed by seed, so that early on there is something of everything.

    Args:
        matrix: what to compare.
        defaults: the app's run config.
        extra: options of the command line, over presets and [options] but under the rows.
        folder: what relative paths in options start from.

    Raises:
        ConfigError: a cell would be no valid run, or none that can be compared.
    """
    try:
        refuse_set_by_matrix(extra)
    except ConfigError as error:
        raise ConfigError(f"-c: {error}") from None
    shared = (*matrix.shared, Layer("-c", extra))
    return tuple(
        _cell(matrix, row, epsilon, seed, shared, defaults, folder)
        for seed in matrix.seeds
        for epsilon in matrix.epsilons
        for row in matrix.rows
        if epsilon in row.epsilons
    )


def _cell(
    matrix: Matrix,
    row: Row,
    epsilon: float,
    seed: int,
    shared: Sequence[Layer],
    defaults: Mapping[str, Scalar],
    folder: Path,
) -> Cell:
    own = Layer(row.where, {"epsilon": epsilon, "seed": seed})
    layers = (*shared, *row.layers, own)
    overrides = {key: value for layer in layers for key, value in layer.options.items() if key != "output"}
    overrides |= absolute_paths({**defaults, **overrides}, folder)
    try:
        config = parse({**defaults, **overrides})
        check_known(overrides, defaults)
        _check_comparable(config)
        _check_protection(config)
    except ConfigError as error:
        place = _where(str(error), layers) or row.where
        of_row = "" if place == row.where else f" (row {row.name!r} of {matrix.path})"
        raise ConfigError(f"{place}: {error}{of_row}") from None
    return Cell(row.name, epsilon, seed, config, overrides)


def _check_comparable(config: RunConfig) -> None:
    rules = [
        (
            config.noise_multiplier == 0,
            f"noise-multiplier = {config.noise_multiplier}: must be 0, since noise follows from epsilons",
        ),
        (config.ledger == "", f"ledger = {config.ledger!r}: must be empty, since cells are no sequel"),
        (config.diagnostics, "diagnostics = false: must be true, since that is what a comparison measures"),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _check_protection(config: RunConfig) -> None:
    """Refuse what a run refuses once it knows its users: in the last row, that would be hours from now.

    Vectors are taken to be of one number, so that nothing is refused that some backbone would allow.
    """
    if config.num_users:
        noise = plan(config, config.num_users, Shapes(1, 1))
        check_secure_sum(config, config.num_users, noise.delta)


def _where(message: str, layers: Sequence[Layer]) -> str | None:
    """Where the option that a message begins with was set last; None if nowhere but in the defaults."""
    found = re.match(r"(?:unknown option )?'?([\w.-]+)", message)
    return next((layer.where for layer in reversed(layers) if found and found[1] in layer.options), None)
