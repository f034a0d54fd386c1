"""`python -m benchmarks.stage1_signals`: how well stage 1 can tell users apart, by what it clusters them by.

For ΔB and for the mean of hidden layers: clustering accuracy of k-means without noise, and of DP k-means as
the run's options have it (T_in rounds, its noise, its cohorts), drawn afresh some times. All users take part
in the judgement, each at its nearest centroid. Choose on `test-on = "validation"` and a seed of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
import typer
from sklearn.cluster import KMeans
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig, parse, to_dict
from pina_flwr.privacy.clipping import clip
from pina_flwr.privacy.noise import open_entropy
from pina_flwr.privacy.plan import plan
from pina_flwr.privacy.sum_mechanism import open_mechanism, rotation_seed
from pina_flwr.report.scores import clustering_accuracy
from pina_flwr.runner.app import find_app, run_config
from pina_flwr.runner.overrides import parse_overrides
from pina_flwr.stage1.directions import centred, unit
from pina_flwr.stage1.dp_kmeans import contributions, nearest
from pina_flwr.stage1.starts import DPKMeans
from pina_flwr.strategies.sampler import Sampler
from pina_flwr.training.workbench import Workbench, open_workbench

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    config: Annotated[list[str], typer.Option("-c", help="As of `pina run`.")],
    layers: Annotated[str, typer.Option(help="Blocks whose inputs are averaged, from 1.")] = "4,8,9,12",
    grids: Annotated[str, typer.Option(help="Cells a side.")] = "1,2",
    redraws: Annotated[int, typer.Option(min=1, help="Runs of DP k-means.")] = 10,
) -> None:
    """Print a Markdown table; errors are one line."""
    try:
        defaults = run_config(find_app(None))
        base = parse(defaults | parse_overrides(config, defaults))
        _print(list(_ways(base, _numbers("--layers", layers), _numbers("--grids", grids))), redraws)
    except ConfigError as mistake:
        typer.echo(f"error: {mistake}", err=True)
        raise typer.Exit(2) from None


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: must be whole numbers, comma separated") from None


def _ways(base: RunConfig, layers: Sequence[int], grids: Sequence[int]) -> Iterator[tuple[str, RunConfig]]:
    yield "ΔB", replace(base, stage1_signal="update")
    for layer, grid in product(layers, grids):
        options = {"stage1-signal": "features", "features-layer": layer, "features-grid": grid}
        yield f"input of block {layer}, {grid} × {grid}", parse(to_dict(base) | options)


def _print(ways: Sequence[tuple[str, RunConfig]], redraws: int) -> None:
    print("| signal | numbers | k-means | DP k-means, mean | least |")
    print("|---|---|---|---|---|")
    for name, config in ways:
        bench = open_workbench(config)
        signals = bench.stage1_signals(range(len(bench.users)))
        exact, private = _exact(bench, signals), [_private(bench, signals) for _ in range(redraws)]
        figures = f"{exact:.3f} | {fmean(private):.3f} | {min(private):.3f}"
        print(f"| {name} | {signals.shape[1]:,} | {figures} |", flush=True)


def _exact(bench: Workbench, signals: Tensor) -> float:
    """Clustering accuracy of k-means on all users' centred directions."""
    directions = unit(centred(signals, unit(signals).mean(0))).numpy()
    fit = KMeans(bench.config.clusters, n_init=10, random_state=bench.config.seed).fit(directions)
    return _accuracy(bench, fit.labels_)


def _private(bench: Workbench, signals: Tensor) -> float:
    """Clustering accuracy after one stage 1 as a run has it, with its secure sums in this process."""
    start, sampler = DPKMeans(bench.config, signals.shape[1]), Sampler(bench.config, len(signals))
    for round_ in range(1, start.rounds + 1):
        question, cohort = start.ask(round_), sampler.cohort(1, round_)
        if question.step == "lloyd":
            centroids = torch.from_numpy(question.arrays["centroids"])
            vectors = contributions(_directions(signals[cohort], question.arrays), centroids)
        else:
            vectors = clip(unit(signals[cohort]), 1.0)[0]
        start.receive(round_, _mean(bench, question.step, vectors, round_))
    found = start.models().arrays
    centroids = torch.from_numpy(found["centroids"])
    return _accuracy(bench, nearest(_directions(signals, found), centroids).numpy())


def _directions(signals: Tensor, arrays: Mapping[str, np.ndarray]) -> Tensor:
    mean = arrays.get("mean")
    return unit(centred(signals, None if mean is None else torch.from_numpy(mean)))


def _mean(bench: Workbench, step: str, vectors: Tensor, round_: int) -> np.ndarray:
    """What a secure sum of these vectors makes of them, over the expected cohort."""
    c, users, shapes = bench.config, len(bench.users), bench.backbone.shapes
    mechanism = open_mechanism(c, step, plan(c, users, shapes).stage1, users, shapes)
    seed, entropy = rotation_seed(c, step, round_), open_entropy(c, step, round_)
    total = mechanism.protect(vectors, len(vectors), seed, entropy)
    return mechanism.decode(total, seed) / (c.sampling_rate * users)


def _accuracy(bench: Workbench, choices: np.ndarray) -> float:
    groups = bench.users.groups
    if groups is None:
        raise ConfigError("user-column: groups are unknown, so nothing can be said of clusters")
    return clustering_accuracy(groups, choices)


if __name__ == "__main__":
    app()
