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
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig, parse, to_dict
from pina_flwr.models.backbone import load_backbone
from pina_flwr.models.export import base_of, save_adapters
from pina_flwr.privacy.cohort import check_secure_sum
from pina_flwr.privacy.guarantee import Subject, describe
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.plan import plan
from pina_flwr.report.metrics_log import strict_json
from pina_flwr.report.model_card import write_cards
from pina_flwr.report.plot import plot
from pina_flwr.report.summary import print_summary, sentence, write_summary
from pina_flwr.secure_sum.interface import open_secure_sum
from pina_flwr.strategies import strategy_class
from pina_flwr.strategies.clustered import ClusteredTraining, TrainingFailed, models_of
from pina_flwr.strategies.hosts import discover
from pina_flwr.strategies.recorder import Recorder

log = logging.getLogger("flwr")
RELEASES = "releases.jsonl"  # the ledger of one run, in its output folder
LEAST_TIMEOUT = 80  # seconds for a round of real nodes
WIDTH = 100  # columns of the summary, which goes through a log without a terminal


def main(grid: Grid, values: Mapping[str, Any], run_id: int) -> None:
    """Run what the run config says; a user's mistake ends the run as failed with one line.

    Raises:
        ConfigError: the configuration is wrong. Flower marks a run as failed only if the ServerApp raises.
        TrainingFailed: training came to nothing.
    """
    log.propagate = False  # a library sets up the root logger, which would print every line again
    log.addFilter(_without_traceback)
    try:
        run(grid, parse(values), str(run_id))
    except ConfigError as mistake:
        log.error("error: %s", mistake)
        raise
    except TrainingFailed as failure:
        log.error("training failed: %s", failure)
        raise


def _without_traceback(record: logging.LogRecord) -> bool:
    """A reason in one line needs no traceback; Flower would print one."""
    if record.exc_info and isinstance(record.exc_info[1], ConfigError | TrainingFailed):
        record.exc_info = None
    return True


def run(grid: Grid, config: RunConfig, run_id: str) -> None:
    """Train and leave results in `config.output`.

    run_id: Flower's id of the run, by which clients tell its rounds from those of other runs.

    Raises:
        ConfigError: found before training starts.
        TrainingFailed: training can't go on, or came to nothing; the models so far are saved.
    """
    began = time.monotonic()
    refuse_deployment(grid, config)
    if config.ledger:  # one that can't be used must not cost the results of an earlier run
        Ledger.open(Path(config.ledger).expanduser().absolute()).close()
    folder = open_folder(config)
    hosts = discover(grid, config.round_timeout)
    backbone = load_backbone(config, hosts.num_classes)
    path = Path(config.ledger).expanduser().absolute() if config.ledger else folder / RELEASES
    with Ledger.open(path) as ledger:
        earlier = tuple(ledger.releases())
        noise = plan(config, len(hosts), backbone.shapes, earlier)
        check_secure_sum(config, len(hosts), noise.delta)
        subject = Subject(config, noise, len(hosts), backbone.shapes, earlier)
        write_json(folder / "privacy.json", describe(subject))
        recorder = Recorder(subject, folder)
        summed = config.secure_sum != "none"
        secure_sum = open_secure_sum(config.secure_sum, config.secagg) if summed else None
        strategy = strategy_class(config.strategy)(
            config, backbone, hosts, noise, secure_sum, ledger, run_id, recorder.note
        )
        recorder.announce(strategy.rounds)
        try:
            result = strategy.start(grid, timeout=config.round_timeout)
        except TrainingFailed as failure:
            save_models(subject, strategy, models_of(failure.models), folder / "adapters")
            raise
    finish(subject, strategy, result, recorder, folder, time.monotonic() - began)


def refuse_deployment(grid: Grid, config: RunConfig) -> None:
    """What simulates or only debugs protects nobody from a real server.

    Raises:
        ConfigError: the nodes are real ones, and an option is for simulation only.
    """
    if not isinstance(grid, HttpGrid):
        return
    cohort = config.sampling_rate * config.num_users
    rules = [
        (not config.diagnostics, "diagnostics = true: nodes would tell what ε does not cover; set false"),
        (not config.reproducible_noise, "reproducible-noise = true: protects nobody; set false"),
        (
            config.simulated_cohort <= cohort,
            f"noise-cohort-size = {config.noise_cohort_size}: simulates the noise of more users than there "
            "are; set 0",
        ),
        (
            bool(config.ledger) or not config.private,
            "ledger = '': must name a file that lasts, to count what earlier runs released",
        ),
        (
            config.round_timeout >= LEAST_TIMEOUT,
            f"round-timeout = {config.round_timeout:g}: leaves {config.round_timeout / 8:g} s for a phase of "
            f"the secure sum, in which nodes start a process; must be at least {LEAST_TIMEOUT}",
        ),
        (
            config.secure_sum != "trusted",
            "secure-sum = 'trusted': exists in simulation only; set 'secagg+'",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(f"{message} (the nodes are real)")


def open_folder(config: RunConfig) -> Path:
    """Make the output folder and write the resolved configuration into it.

    What an earlier run concluded there goes: a summary says that its run finished.

    Raises:
        ConfigError: it can't be made or written to.
    """
    folder = Path(config.output).expanduser().absolute()
    if config.ledger and Path(config.ledger).expanduser().resolve() == (folder / RELEASES).resolve():
        raise ConfigError(f"ledger = {config.ledger!r}: is the run's own and goes with it; name another file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RELEASES).unlink(missing_ok=True)
        if (folder / "summary.json").is_file():
            (folder / "summary.json").unlink()
            shutil.rmtree(folder / "adapters", ignore_errors=True)
        (folder / "config.toml").write_text(tomli_w.dumps(to_dict(config)), encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"output = {config.output!r}: can't be written ({problem.strerror})") from None
    return folder


def save_models(subject: Subject, strategy: ClusteredTraining, models: Tensor, folder: Path) -> None:
    """Write one adapter a cluster, each with its model card."""
    folders = save_adapters(subject.config, strategy.backbone, models, folder)
    write_cards(subject, folders, base_of(subject.config, folder))


def finish(
    subject: Subject,
    strategy: ClusteredTraining,
    result: Result,
    recorder: Recorder,
    folder: Path,
    seconds: float,
) -> None:
    """Write adapters, plot and summary, and print the table and the closing sentence."""
    config = subject.config
    save_models(subject, strategy, models_of(result.arrays), folder / "adapters")
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
