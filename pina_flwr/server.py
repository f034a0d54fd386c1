"""One run from the server's side: find the nodes, run the strategy, leave everything in the output folder."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.superlink.grid import HttpGrid
from rich.console import Console

from pina_flwr.config import ConfigError, RunConfig, parse, to_dict
from pina_flwr.models.backbone import load_backbone
from pina_flwr.models.export import save_adapters
from pina_flwr.privacy.guarantee import describe, plan
from pina_flwr.report.metrics_log import strict_json
from pina_flwr.report.plot import plot
from pina_flwr.report.summary import print_summary, sentence, write_summary
from pina_flwr.secure_sum.interface import open_secure_sum
from pina_flwr.strategies import STRATEGIES
from pina_flwr.strategies.clustered import ClusteredTraining, TrainingFailed, models_of
from pina_flwr.strategies.hosts import discover
from pina_flwr.strategies.recorder import Recorder

log = logging.getLogger("flwr")
WIDTH = 100  # columns of the summary, which goes through a log without a terminal


def main(grid: Grid, values: Mapping[str, Any]) -> None:
    """Run what the run config says; a user's mistake ends the run as failed with one line.

    Raises:
        ConfigError: the configuration is wrong. Flower marks a run as failed only if the ServerApp raises.
    """
    log.propagate = False  # a library sets up the root logger, which would print every line again
    log.addFilter(_without_traceback)
    try:
        run(grid, parse(values))
    except ConfigError as mistake:
        log.error("error: %s", mistake)
        raise


def _without_traceback(record: logging.LogRecord) -> bool:
    """A reason in one line needs no traceback; Flower would print one."""
    if record.exc_info and isinstance(record.exc_info[1], ConfigError | TrainingFailed):
        record.exc_info = None
    return True


def run(grid: Grid, config: RunConfig) -> None:
    """Train and leave results in `config.output`.

    Raises:
        ConfigError: found before training starts.
        TrainingFailed: training can't go on, or came to nothing; the models so far are saved.
    """
    began = time.monotonic()
    refuse_deployment(grid, config)
    folder = open_folder(config)
    hosts = discover(grid, config.round_timeout)
    backbone = load_backbone(config, hosts.num_classes)
    noise = plan(config, len(hosts))
    write_json(folder / "privacy.json", describe(config, noise, len(hosts)))
    recorder = Recorder(config, noise, folder, hosts)
    strategy = STRATEGIES[config.strategy](
        config, backbone, hosts, noise, open_secure_sum(config.secure_sum), recorder.note
    )
    recorder.announce(strategy.rounds)
    try:
        result = strategy.start(grid, timeout=config.round_timeout)
    except TrainingFailed as failure:
        save_adapters(config, backbone, models_of(failure.models), folder / "adapters")
        raise
    finish(config, strategy, result, recorder, folder, time.monotonic() - began)


def refuse_deployment(grid: Grid, config: RunConfig) -> None:
    """An ideal functionality protects nobody from a real server.

    Raises:
        ConfigError: the nodes are real ones, and `secure-sum` names no real protocol.
    """
    if isinstance(grid, HttpGrid) and config.secure_sum == "trusted":
        raise ConfigError(
            "secure-sum = 'trusted': exists in simulation only, and no real protocol is there yet"
        )


def open_folder(config: RunConfig) -> Path:
    """Make the output folder and write the resolved configuration into it.

    What an earlier run concluded there goes: a summary says that its run finished.

    Raises:
        ConfigError: it can't be made or written to.
    """
    folder = Path(config.output).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "summary.json").is_file():
            (folder / "summary.json").unlink()
            shutil.rmtree(folder / "adapters", ignore_errors=True)
        (folder / "config.toml").write_text(tomli_w.dumps(to_dict(config)), encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"output = {config.output!r}: can't be written ({problem.strerror})") from None
    return folder


def finish(
    config: RunConfig,
    strategy: ClusteredTraining,
    result: Result,
    recorder: Recorder,
    folder: Path,
    seconds: float,
) -> None:
    """Write adapters, plot and summary, and print the table and the closing sentence."""
    save_adapters(config, strategy.backbone, models_of(result.arrays), folder / "adapters")
    summary = recorder.summary(seconds, strategy.clusters)
    plot(recorder.rows, folder / "metrics.png", f"{config.strategy} on {config.dataset}")
    write_summary(folder, summary)
    console = Console(width=WIDTH)
    print_summary(console, summary, recorder.rows, folder)
    classes = strategy.hosts.num_classes
    console.print(sentence(summary, 1 / classes), markup=False, highlight=False)


def write_json(path: Path, value: Any) -> None:
    """Indented strict JSON (no NaN, no infinity)."""
    path.write_text(strict_json(value, indent=2) + "\n", encoding="utf-8")
