"""What a run would cost in privacy, without running it: the noise, ε per adversary, and ε over rounds."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.privacy.accountant import epsilon_over_rounds
from pina_flwr.privacy.cohort import participation_cap, planned_rounds
from pina_flwr.privacy.guarantee import Guarantee, Subject, guarantee, tighter
from pina_flwr.privacy.plan import LOCAL, Shapes, plan, release_of, training_step
from pina_flwr.privacy.releases import Release


@dataclass(frozen=True)
class Curve:
    """ε after each number of rounds of stage 2, all of stage 1 before; `inf` where none is finite.

    rounds: 0..T_tr. recipient, server: float64 of the same length.
    """

    rounds: np.ndarray
    recipient: np.ndarray
    server: np.ndarray


@dataclass(frozen=True)
class Forecast:
    """A run's privacy as planned. tighter: of recipient and server by the tighter accountant, if asked."""

    subject: Subject
    held: Guarantee
    curve: Curve
    tighter: tuple[float | None, float | None] | None


def forecast(
    config: RunConfig,
    users: int,
    shapes: Shapes,
    with_tighter: bool = False,
    earlier: tuple[Release, ...] = (),
) -> Forecast:
    """Plan the noise of a run and account for it.

    Args:
        config: the run; `epsilon` is the target, or `noise-multiplier` is given.
        users: |K|.
        shapes: lengths of vectors.
        with_tighter: also ask the tighter accountant, which takes a second or more.
        earlier: what earlier runs released.

    Raises:
        ConfigError: the run is not private, or its budget is out of reach.
    """
    if not config.private:
        raise ConfigError("epsilon = inf: no noise is added, so there is nothing to account for; set epsilon")
    noise = plan(config, users, shapes, earlier)
    subject = Subject(config, noise, users, shapes, earlier)
    held = guarantee(subject)
    figures = None
    if with_tighter:
        sides = (held.recipient, held.server)
        figures = (tighter(sides[0].releases, noise.delta), tighter(sides[1].releases, noise.delta))
    return Forecast(subject, held, _curve(subject), figures)


def write_curve(curve: Curve, path: Path) -> None:
    """The curve as CSV: round of stage 2, ε towards recipients, towards the server ("inf": none is finite).

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "epsilon_recipient", "epsilon_server"])
            writer.writerows(
                zip(curve.rounds.tolist(), curve.recipient.tolist(), curve.server.tolist(), strict=True)
            )
    except OSError as problem:
        raise ConfigError(f"--curve = {str(path)!r}: can't be written ({problem.strerror})") from None


def _curve(subject: Subject) -> Curve:
    config, noise = subject.config, subject.noise
    stage1, stage2 = planned_rounds(config)
    rounds, step = np.arange(stage2 + 1), training_step(config)
    capped = np.minimum(rounds, participation_cap(config, 2))
    sides = []
    for rate, to_server in ((config.sampling_rate, False), (1.0, True)):
        counts = capped if rate == 1 or step in LOCAL else rounds
        one = release_of(config, step, noise.stage2, subject.users, subject.shapes, rate)
        before: list[Release] = subject.releases(stage1, 0, to_server=to_server)
        sides.append(epsilon_over_rounds(one, counts.tolist(), noise.delta, before))
    return Curve(rounds, *sides)
