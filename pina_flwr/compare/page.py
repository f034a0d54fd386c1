"""The page of a comparison: tables, figures, and what they rest on, cell by cell, as Markdown.

The configuration is told once: what all cells share in full, then how rows differ.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import tomli_w

from pina_flwr.compare.cells import NAMED, PLACES, State
from pina_flwr.compare.figures import Figure3
from pina_flwr.compare.made_with import MadeWith
from pina_flwr.compare.matrix import SET_BY_MATRIX, Matrix, epsilon_name
from pina_flwr.compare.results import CellResult, Comparison
from pina_flwr.compare.table import escaped
from pina_flwr.config import to_dict
from pina_flwr.report.summary import known_as

LABELS = {
    "app": "app",
    "commit": "git commit",
    "code": "SHA-256 of its code",
    "python": "Python",
    "torch": "torch",
    "flwr": "flwr",
    "numpy": "numpy",
    "machine": "machine",
    "cpus": "CPUs",
    "gpus": "GPUs",
}


def page(
    comparison: Comparison, results: Sequence[CellResult], tables: str, figures: Sequence[Figure3]
) -> str:
    """The page. tables: Markdown of the tables; figures: those that were drawn."""
    matrix = comparison.matrix
    sections = [
        [f"# {matrix.name}", "", _standing(results)],
        [tables],
        [f"![{figure.title} over rounds]({figure.name}.png)" for figure in figures],
        ["## Configuration", "", *_configuration(matrix, results)],
        ["## Versions and machine", "", *_versions(results)],
        ["## Cells", "", *_cells(results)],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _standing(results: Sequence[CellResult]) -> str:
    counts = Counter(result.status.state for result in results)
    rest = [f"{counts[state]} {state.value}" for state in State if counts[state] and state is not State.DONE]
    return (
        f"{counts[State.DONE]} of {len(results)} cells are done" + "".join(f", {text}" for text in rest) + "."
    )


def _configuration(matrix: Matrix, results: Sequence[CellResult]) -> list[str]:
    options = [(result.cell.row, _options(result)) for result in results]
    first = options[0][1]
    shared = {key: value for key, value in first.items() if all(own[key] == value for _, own in options)}
    files = ", ".join(f"`{layer.where}`" for layer in matrix.shared[:-1]) or "none"
    return [
        f"Presets of all rows: {files}; matrix: `{matrix.path}`. Seeds: {', '.join(map(str, matrix.seeds))}. "
        f"ε: {', '.join(map(epsilon_name, matrix.epsilons))}.",
        "",
        "The rows differ in:",
        "",
        *_differences(dict(options), shared),
        "",
        "All share:",
        "",
        "```toml",
        tomli_w.dumps(shared).rstrip(),
        "```",
    ]


def _options(result: CellResult) -> dict[str, Any]:
    """What the page tells of a cell's options."""
    options = to_dict(result.cell.config)
    options |= {key: known_as(options[key]) for key in NAMED}
    return {key: value for key, value in options.items() if key not in {*SET_BY_MATRIX, *PLACES}}


def _differences(rows: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> list[str]:
    """What each row has that not all rows have alike."""
    own = {
        name: {key: value for key, value in options.items() if key not in shared}
        for name, options in rows.items()
    }
    return [f"- **{escaped(name)}**: {_inline(options)}" for name, options in own.items()]


def _inline(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{tomli_w.dumps({key: value}).strip()}`" for key, value in options.items()) or "–"


def _versions(results: Sequence[CellResult]) -> list[str]:
    found = _distinct_versions(results)
    if not found:
        return ["No cell is done."]
    names = [LABELS[field.name] for field in dataclasses.fields(MadeWith)]
    values = [[str(value or "–") for value in dataclasses.asdict(versions).values()] for versions in found]
    head = ["", *(str(number) for number in range(1, len(found) + 1))]
    rows = [head, ["---"] * len(head), *map(list, zip(names, *values, strict=True))]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if len(found) == 1:
        return lines
    warning = (
        f"**The cells were computed with {len(found)} sets of versions**, numbered here and in the list of "
        "cells. For results of one version only, compare into an empty folder."
    )
    return [warning, "", *lines]


def _cells(results: Sequence[CellResult]) -> list[str]:
    found = [_without_commit(versions) for versions in _distinct_versions(results)]
    head = ["cell", "ε", "seed", "wall time", "accuracy", "versions", "state"]
    rows = [head, ["---"] * len(head)]
    for result in results:
        run, cell = result.run, result.cell
        seconds = "–" if run is None else str(timedelta(seconds=round(run.summary.seconds)))
        accuracy = "–" if run is None or run.summary.accuracy is None else f"{run.summary.accuracy:.3f}"
        versions = "–" if run is None else str(found.index(_without_commit(run.made_with)) + 1)
        place = [escaped(cell.row), epsilon_name(cell.epsilon), str(cell.seed)]
        rows.append([*place, seconds, accuracy, versions, escaped(str(result.status))])
    total = sum(result.run.summary.seconds for result in results if result.run is not None)
    return [
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"Wall time is without the start of Flower; {timedelta(seconds=round(total))} in all.",
    ]


def _distinct_versions(results: Sequence[CellResult]) -> list[MadeWith]:
    """Sets of versions that may give other results; commits with equal code go together."""
    commits: dict[MadeWith, list[str]] = {}
    for result in results:
        if result.run is not None:
            commits.setdefault(_without_commit(result.run.made_with), []).append(result.run.made_with.commit)
    return [
        dataclasses.replace(versions, commit=", ".join(filter(None, dict.fromkeys(names))))
        for versions, names in commits.items()
    ]


def _without_commit(versions: MadeWith) -> MadeWith:
    return dataclasses.replace(versions, commit="")
