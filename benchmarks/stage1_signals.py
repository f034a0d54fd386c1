"""`python -m benchmarks.stage1_signals`: how well stage 1 can tell users apart, by what it clusters them by.

For ΔB and for the mean of hidden layers: clustering accuracy of k-means without noise, and of DP k-means as
the run's options have it (T_in rounds, its noise, its cohorts), drawn afresh some times. All users take part
in the judgement, each at its nearest centroid. Choose on `test-on = "validation"` and a seed of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from pina_flwr.models.backbone import features_index
from pina_flwr.privacy.clipping import clip
from pina_flwr.privacy.noise import open_entropy
from pina_flwr.privacy.plan import Shapes, plan
from pina_flwr.privacy.sum_mechanism import open_mechanism, rotation_seed
from pina_flwr.report.scores import clustering_accuracy
from pina_flwr.runner.app import find_app, run_config
from pina_flwr.runner.overrides import parse_overrides
from pina_flwr.stage1.directions import directions, unit
from pina_flwr.stage1.dp_kmeans import contributions, nearest
from pina_flwr.stage1.starts import DPKMeans
from pina_flwr.strategies.sampler import Sampler
from pina_flwr.training.workbench import Workbench, open_workbench

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    config: Annotated[list[str], typer.Option("-c", help="As of `pina run`.")],
    layers: Annotated[
        str, typer.Option(help="Blocks whose inputs are averaged, from 1.")
    ] = "1,4,7,8,9,10,12",
    grids: Annotated[str, typer.Option(help="Cells a side.")] = "1,2",
    redraws: Annotated[int, typer.Option(min=0, help="Runs of DP k-means.")] = 10,
) -> None:
    """Print a Markdown table; errors are one line."""
    try:
        defaults = run_config(find_app(None))
        base = parse(defaults | parse_overrides(config, defaults))
        base = replace(base, stage1_signal="update")
        _print(open_workbench(base), _numbers("--layers", layers), _numbers("--grids", grids), redraws)
    except ConfigError as mistake:
        typer.echo(f"error: {mistake}", err=True)
        raise typer.Exit(2) from None


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: must be whole numbers, comma separated") from None


def _print(bench: Workbench, layers: Sequence[int], grids: Sequence[int], redraws: int) -> None:
    print("| signal | numbers | k-means | DP k-means, mean | least |")
    print("|---|---|---|---|---|")
    for name, config, signals in _ways(bench, layers, grids):
        exact, private = _exact(bench, signals), [_private(bench, config, signals) for _ in range(redraws)]
        spread = f"{fmean(private):.3f} | {min(private):.3f}" if private else "– | –"
        print(f"| {name} | {signals.shape[1]:,} | {exact:.3f} | {spread} |", flush=True)


def _ways(
    bench: Workbench, layers: Sequence[int], grids: Sequence[int]
) -> Iterator[tuple[str, RunConfig, Tensor]]:
    """Signals [users, D] with their names and the configurations of runs that have them."""
    yield "ΔB", bench.config, bench.stage1_signals(range(len(bench.users)))
    ways, backbone = list(product(layers, grids)), bench.backbone
    configs = [_with_features(bench.config, layer, grid) for layer, grid in ways]
    indices = [features_index(c, len(backbone.layers), backbone.side) for c in configs]
    found = [_features(bench, user, indices, configs) for user in range(len(bench.users))]
    for i, ((layer, grid), config) in enumerate(zip(ways, configs, strict=True)):
        yield f"input of block {layer}, {grid} × {grid}", config, torch.stack([own[i] for own in found])


def _with_features(config: RunConfig, layer: int, grid: int) -> RunConfig:
    options = {"stage1-signal": "features", "features-layer": layer, "features-grid": grid}
    return parse(to_dict(config) | options)


def _features(
    bench: Workbench, user: int, indices: Sequence[int], configs: Sequence[RunConfig]
) -> list[Tensor]:
    """A user's mean features of each way, by one pass over its images."""
    backbone = bench.backbone
    hidden = backbone.entering(indices, backbone.pixels(bench.users.images(user)))
    ways = zip(hidden, configs, strict=True)
    return [backbone.cell_means(of_layer, config.features_grid).cpu() for of_layer, config in ways]


def _exact(bench: Workbench, signals: Tensor) -> float:
    """Clustering accuracy of k-means on all users' centred directions."""
    points = directions(signals, unit(signals).mean(0).numpy()).numpy()
    fit = KMeans(bench.config.clusters, n_init=10, random_state=bench.config.seed).fit(points)
    return _accuracy(bench, fit.labels_)


def _private(bench: Workbench, config: RunConfig, signals: Tensor) -> float:
    """Clustering accuracy after one stage 1 as a run has it, with its secure sums in this process."""
    start, sampler = DPKMeans(config, signals.shape[1]), Sampler(config, len(signals))
    shapes = replace(bench.backbone.shapes, sketch=signals.shape[1])
    for round_ in range(1, start.rounds + 1):
        question, cohort = start.ask(round_), sampler.cohort(1, round_)
        if question.step == "lloyd":
            centroids = torch.from_numpy(question.arrays["centroids"])
            vectors = contributions(directions(signals[cohort], question.arrays.get("mean")), centroids)
        else:
            vectors = clip(unit(signals[cohort]), 1.0)[0]
        start.receive(round_, _mean(config, shapes, question.step, vectors, len(signals), round_))
    found = start.models().arrays
    centroids = torch.from_numpy(found["centroids"])
    return _accuracy(bench, nearest(directions(signals, found.get("mean")), centroids).numpy())


def _mean(c: RunConfig, shapes: Shapes, step: str, vectors: Tensor, users: int, round_: int) -> np.ndarray:
    """What a secure sum of these vectors makes of them, over the expected cohort."""
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
