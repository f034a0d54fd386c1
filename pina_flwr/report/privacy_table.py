"""The output of `pina privacy`: a run's noise, ε per adversary, and ε over rounds, as tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.privacy.cohort import participation_cap, planned_rounds
from pina_flwr.privacy.forecast import Curve, Forecast, forecast, write_curve
from pina_flwr.privacy.guarantee import accountants, caveats
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.plan import shapes_of
from pina_flwr.privacy.releases import Release
from pina_flwr.report.summary import rounded_up

HIDDEN_SIZES = {"tiny-vit": 64}
VIT_SMALL = 384
ROWS = 11  # of the curve


def show(
    console: Console,
    config: RunConfig,
    hidden: int | None,
    classes: int,
    curve_file: Path | None,
    with_tighter: bool,
) -> None:
    """Print everything, and write the curve if a file is named.

    Raises:
        ConfigError: the run can't be accounted for, or the file can't be written.
    """
    if config.num_users == 0:
        raise ConfigError("num-users = 0: must be given here, since no data set is loaded; e.g. 3500")
    shapes = shapes_of(config, hidden or HIDDEN_SIZES.get(config.backbone, VIT_SMALL), classes)
    found = forecast(config, config.num_users, shapes, with_tighter, _earlier(config))
    if curve_file is not None:
        write_curve(found.curve, curve_file)
    console.print(_noise(found))
    console.print(_adversaries(found))
    console.print(_rounds(found.curve))
    for caveat in caveats(found.subject):
        console.print(Text(f"• {caveat}"))
    for name, accountant in accountants(config).items():
        if name == "epsilon" or with_tighter:
            console.print(Text(f"• {name}: {accountant}."))


def _earlier(config: RunConfig) -> tuple[Release, ...]:
    """What the ledger that lasts holds, if there is one yet."""
    path = Path(config.ledger).expanduser()
    if not config.ledger or not path.exists():
        return ()
    with Ledger.open(path) as ledger:
        return tuple(ledger.releases())


def _noise(found: Forecast) -> Table:
    config, noise = found.subject.config, found.subject.noise
    table = Table(title=Text(f"{config.strategy}, {found.subject.users:,} users"), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    cohort = config.simulated_cohort or config.sampling_rate * found.subject.users
    rounds = planned_rounds(config)
    for label, value in (
        ("mechanism", _mechanism(config)),
        ("rounds of stage 1, stage 2", f"{rounds[0]}, {rounds[1]}"),
        ("noise multiplier z, stage 1, stage 2", f"{noise.stage1:.4g}, {noise.stage2:.4g}"),
        (
            "whose noise it is",
            "each user's own" if config.local_updates else f"a cohort's, {cohort:,.0f} users",
        ),
        ("δ", f"{noise.delta:.3g}"),
    ):
        table.add_row(label, value)
    return table


def _mechanism(config: RunConfig) -> str:
    if config.local_updates:
        return "gaussian, local"
    return config.mechanism + ("" if config.mechanism == "gaussian" else f", b = {config.bits}")


def _adversaries(found: Forecast) -> Table:
    config, held = found.subject.config, found.held
    table = Table("adversary", "ε", *(["tighter"] if found.tighter else []), "counted on")
    figures = found.tighter or (None, None)
    caps = "+".join(str(participation_cap(config, stage)) for stage in (1, 2))
    unamplified = f"no amplification, at most {caps} rounds a user"
    sampled = f"q = {config.sampling_rate:g}, unknown to them"
    rows = [
        ("model recipients", held.recipient, figures[0], unamplified if config.local_updates else sampled),
        ("the server", held.server, figures[1], unamplified),
    ]
    if held.sketch is not None:
        rows.append(("reader of one sketch", held.sketch, None, "local noise"))
    for who, bound, figure, basis in rows:
        shown = [] if not found.tighter else ["–" if figure is None else rounded_up(figure)]
        table.add_row(who, rounded_up(bound.epsilon), *shown, basis)
    return table


def _rounds(curve: Curve) -> Table:
    table = Table("round of stage 2", "ε, recipients", "ε, server")
    last = len(curve.rounds) - 1
    for i in np.unique(np.linspace(0, last, min(ROWS, last + 1)).round().astype(int)):
        table.add_row(f"{curve.rounds[i]:,}", rounded_up(curve.recipient[i]), rounded_up(curve.server[i]))
    return table
