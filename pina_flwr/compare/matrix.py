"""The matrix file: what to compare, on what, how often.

    presets = ["fmnist-small.toml"]   # run-config files, relative to this one; later ones win
    seeds = [1, 2, 3]
    epsilons = [2.0, 8.0]             # may hold inf
    rounds-to = 0.95                  # clustering accuracy whose first round is reported

    [options]                         # further run-config options of all cells
    evaluate-every = 1

    [[row]]
    name = "FedAvg"
    strategy = "fedavg"               # and any other run-config options of the row

    [[row]]
    name = "IFCA, no privacy"
    epsilons = [inf]                  # of this row, in place of those above
    strategy = "ifca"

    [[row]]
    name = "PINA, literal rules"
    presets = ["paper.toml"]          # of this row, over all of the above

`read_matrix` checks the file's form; whether its options make a run is found in `grid`, for every cell.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pina_flwr.config import ConfigError, RunConfig, expanded, key_of
from pina_flwr.runner.overrides import Scalar, flatten, read_toml

KEYS = ("presets", "seeds", "epsilons", "rounds-to", "options", "row")
OWN_OF_ROW = ("name", "presets", "epsilons")
SET_BY_MATRIX = {"seed": "seeds", "epsilon": "epsilons", "output": "--output"}
"""Options that differ between cells by construction, and what sets them."""
ROUNDS_TO = 0.95
LONGEST_NAME = 60
"""Characters of a row's name, part of a folder's."""


@dataclass(frozen=True)
class Layer:
    """Options that come from one place, and how an error names the place."""

    where: str
    options: Mapping[str, Scalar]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    where: how an error names it. layers: its presets and its options, later layers winning. epsilons: those
    at which it is run, ascending.
    """

    name: str
    where: str
    layers: tuple[Layer, ...]
    epsilons: tuple[float, ...]


@dataclass(frozen=True)
class Matrix:
    """What a matrix file says.

    shared: options of all cells, presets first, later layers winning. rounds_to: clustering accuracy whose
    first round is reported.
    """

    path: Path
    shared: tuple[Layer, ...]
    seeds: tuple[int, ...]
    rounds_to: float
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def epsilons(self) -> tuple[float, ...]:
        """Every ε of any row, ascending."""
        return tuple(sorted({epsilon for row in self.rows for epsilon in row.epsilons}))


def read_matrix(path: Path) -> Matrix:
    """The matrix in a TOML file.

    Raises:
        ConfigError: the file or a preset can't be read, or says something that a matrix does not have.
    """
    table = read_toml(path)
    try:
        return _matrix(path, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def refuse_set_by_matrix(options: Mapping[str, Scalar]) -> None:
    """Raise `ConfigError` if options meant for several cells set what must differ between them."""
    for key, setter in SET_BY_MATRIX.items():
        if key in options:
            raise ConfigError(f"{key} = {options[key]!r}: must be left out, since {setter} sets it")


def slug(name: str) -> str:
    """A row's name as part of a folder's: lower case, Latin letters and digits, hyphens between."""
    plain = unicodedata.normalize("NFKD", name).lower()
    return re.sub("[^a-z0-9]+", "-", re.sub("[\u0300-\u036f]", "", plain)).strip("-")


def _matrix(path: Path, table: Mapping[str, Any]) -> Matrix:
    _check_keys(table)
    options = table.get("options", {})
    if not isinstance(options, dict):
        raise ConfigError(f"options = {options!r}: must be a table, [options]")
    general = Layer(f"{path}, [options]", flatten(options))
    _named("[options]", _check_options, general.options)
    presets = _presets(path, table.get("presets", []))
    epsilons = _epsilons(table["epsilons"]) if "epsilons" in table else ()
    rows = _rows(path, table.get("row"), epsilons)
    return Matrix(path, (*presets, general), _seeds(table.get("seeds")), _rounds_to(table), rows)


def _check_keys(table: Mapping[str, Any]) -> None:
    options = [key_of(field.name) for field in dataclasses.fields(RunConfig)]
    for key in table:
        near = difflib.get_close_matches(key, KEYS, n=1)
        if key in options and key not in SET_BY_MATRIX and not near:
            raise ConfigError(f"{key}: is an option of runs; must be under [options] or in a [[row]]")
        if key not in KEYS:
            hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(KEYS)}"
            raise ConfigError(f"unknown key {key!r}; {hint}")


def _check_options(options: Mapping[str, Scalar]) -> None:
    for key in ("presets", "seeds", "epsilons", "rounds-to"):
        if key in options:
            raise ConfigError(f"{key}: must be above the first table of the file, as it is no option of runs")
    refuse_set_by_matrix(options)


def _presets(path: Path, names: Any) -> tuple[Layer, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'presets = {names!r}: must be a list of files, as in ["fmnist-small.toml"]')
    files = [path.parent / expanded("presets", name) for name in names]
    return tuple(Layer(str(file), _named("presets", _read_preset, file)) for file in files)


def _read_preset(file: Path) -> dict[str, Scalar]:
    return flatten(read_toml(file))


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = _distinct("seeds", value, "whole numbers from 0, as in [1, 2, 3]", _is_seed)
    return tuple(seeds)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _epsilons(value: Any) -> tuple[float, ...]:
    found = _distinct("epsilons", value, "numbers above 0, as in [2.0, 8.0, inf]", _is_epsilon)
    return tuple(sorted(float(epsilon) for epsilon in found))


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _distinct(key: str, value: Any, right: str, accepts: Callable[[Any], bool]) -> Sequence[Any]:
    """A list of accepted values, none of them twice."""
    if value is None:
        raise ConfigError(f"{key}: is missing; must be a list of {right}")
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{key} = {value!r}: must be a list of {right}")
    for place, item in enumerate(value):
        flatten({key: item})  # is it in range?
        if not accepts(item):
            raise ConfigError(f"{key}: {item!r} is in the list; must be {right}")
        if item in value[:place]:
            raise ConfigError(f"{key}: {item!r} is in the list twice; must be there once")
    return value


def _rounds_to(table: Mapping[str, Any]) -> float:
    value = table.get("rounds-to", ROUNDS_TO)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"rounds-to = {value!r}: must be above 0 and at most 1, as in {ROUNDS_TO}")
    return float(value)


def _rows(path: Path, tables: Any, epsilons: tuple[float, ...]) -> tuple[Row, ...]:
    is_list = isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)
    if not is_list:
        raise ConfigError("row: must be one or more tables, [[row]], each with a name")
    rows: list[Row] = []
    for number, table in enumerate(tables, start=1):
        row = _named(f"[[row]] {number}", _row, path, table, epsilons)
        same = next((other.name for other in rows if slug(other.name) == slug(row.name)), None)
        if same is not None:
            raise ConfigError(f"[[row]] {number}: name = {row.name!r}: must differ from {same!r} in letters "
                              "or digits, since folders are named by it")  # fmt: skip
        rows.append(row)
    return tuple(rows)


def _row(path: Path, table: Mapping[str, Any], epsilons: tuple[float, ...]) -> Row:
    name = table.get("name")
    if name is None:
        raise ConfigError('name: is missing; must be text, as in name = "FedAvg"')
    if not isinstance(name, str) or not _is_name(name):
        raise ConfigError(
            f"name = {name!r}: must be text of at most {LONGEST_NAME} characters, with a Latin letter or "
            "digit and without _ in front"
        )
    own = _epsilons(table["epsilons"]) if "epsilons" in table else epsilons
    if not own:
        raise ConfigError("epsilons: is missing; must be given in the row or above the first table")
    options = flatten({key: value for key, value in table.items() if key not in OWN_OF_ROW})
    _check_options(options)
    where = f"{path}, row {name!r}"
    return Row(name, where, (*_presets(path, table.get("presets", [])), Layer(where, options)), own)


def _is_name(text: str) -> bool:
    """Fit for a folder, a line of a table, and the legend of a plot, which leaves out what begins with _."""
    fits = len(text) <= LONGEST_NAME and text.isprintable() and text == text.strip()
    return fits and bool(slug(text)) and not text.startswith("_")


def _named(where: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """`read(*arguments)`, any error beginning with where it is."""
    try:
        return read(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def epsilon_name(epsilon: float) -> str:
    """ε as people write it: 2, 0.5, ∞."""
    return "∞" if math.isinf(epsilon) else repr(epsilon).removesuffix(".0")
