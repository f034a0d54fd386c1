"""The output of `pina audit`: what was audited, the ε claimed, and what the audit found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pina_flwr.canaries import Audit
from pina_flwr.privacy.audit import AuditResult
from pina_flwr.privacy.plan import vector_size
from pina_flwr.report.summary import rounded_up

SCOPE = (
    "Audited: one round of stage 2, from the clients' updates to the decoded sum, with every user a canary.",
    "Not audited: stage 1, amplification by sampling, a real protocol for the secure sum, rounds together.",
    "An audit can refute a claim, never prove it. Each limit is wrong by chance in 1 audit of 20: repeat it.",
    "The Gaussian's limit assumes that the noise is Gaussian.",
)


def show(console: Console, audit: Audit, result: AuditResult, confidence: float) -> None:
    """Print everything."""
    table = Table(title=Text("Audit by canaries"), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for label, value in (*_setting(audit), *_findings(result, confidence)):
        table.add_row(label, value)
    console.print(table)
    for line in SCOPE:
        console.print(Text(f"• {line}"))
    verdict = "The claim stands." if result.holds else "The claim is REFUTED: the mechanism leaks more."
    console.print(Text(verdict, style="bold"))


def _setting(audit: Audit) -> list[tuple[str, str]]:
    c, split = audit.config, audit.split
    bits = f", b = {c.bits}" if c.mechanism != "gaussian" else ""
    vanish, collude = audit.users_of(audit.absent), audit.users_of(audit.colluding)
    return [
        ("mechanism", f"{c.mechanism}{bits}, z = {c.noise_multiplier:.4g}"),
        ("users, rounds", f"{c.num_users:,}, {c.t_tr:,}"),
        ("numbers a user sends", f"{vector_size(c, 'update', audit.shapes):,} before padding"),
        ("users that vanish", f"{vanish:,} of {split.cohort - split.survivors:,} that may"),
        ("users that collude", f"{collude:,} of {split.colluders:,} that may"),
    ]


def _findings(result: AuditResult, confidence: float) -> list[tuple[str, str]]:
    sure = f"with confidence {confidence:g}"
    return [
        ("canaries scored", f"{result.canaries:,}"),
        (f"ε claimed at δ = {result.delta:g}", rounded_up(result.claimed)),
        ("rigorous lower bound on ε", f"{result.bound:.3f}, {sure}"),
        ("ε of a Gaussian that fits", f"{result.estimate:.3f}, at least {result.estimate_low:.3f} {sure}"),
    ]
