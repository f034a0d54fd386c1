"""What was measured, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from benchmarks.secure_sum.cohorts import BITS, SIZE, Cohort
from benchmarks.secure_sum.comparison import Comparison


def of_comparison(found: Comparison) -> Table:
    """Flower's times, ours and the floor, and how many times faster ours are."""
    s = found.setting
    title = f"d = {s.size:,}, k = {s.neighbours}, {s.dropped} of {s.clients} clients dropped; medians"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("client: masked vector", "Flower / it", "server: unmask", "Flower / it"):
        table.add_column(name, justify="right")
    client, server = found.client_flower, found.server_flower
    table.add_row("Flower, floats included", _ms(client.total), "", _ms(server.total), "")
    table.add_row("Flower", _ms(client.integers), "1.0", _ms(server.integers), "1.0")
    for bits, seconds in found.client_ours.items():
        unmask = found.server_ours[bits]
        faster = (f"{client.integers / seconds:.1f}", f"{server.integers / unmask:.1f}")
        table.add_row(f"secagg+, {bits} bits", _ms(seconds), faster[0], _ms(unmask), faster[1])
    floor = f"bare keystream of {s.neighbours + 1} masks, one copy"
    table.add_row(floor, _ms(found.keystream), f"{client.integers / found.keystream:.1f}", "", "")
    return table


def of_cohorts(cohorts: Iterable[Cohort], beyond: Mapping[int, int]) -> Table:
    """Cost of a sum by size of the cohort; a cell of a phase is milliseconds, then bytes up and down."""
    title = f"d = {SIZE:,}, {BITS} bits, a tenth dropped; of one client in each phase: ms, bytes up / down"
    table = Table(title=title, title_justify="left")
    for name in ("clients", "k", "t"):
        table.add_column(name, justify="right")
    rows = list(cohorts)
    phases = list(rows[0].phases) if rows else []
    for name in (*phases, "client in all", "server, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        each = [row.phases[name] for name in phases]
        cells = [_cell(p.seconds, p.bytes_up, p.bytes_down) for p in each]
        sums = (sum(p.seconds for p in each), sum(p.bytes_up for p in each), sum(p.bytes_down for p in each))
        server = f"{1e3 * row.server_seconds:,.0f}"
        table.add_row(
            f"{row.clients:,}", str(row.neighbours), str(row.threshold), *cells, _cell(*sums), server
        )
    for clients, neighbours in beyond.items():
        table.add_row(f"{clients:,}", str(neighbours))
    return table


def _cell(seconds: float, up: float, down: float) -> str:
    return f"{1e3 * seconds:.1f}\n{up:,.0f} / {down:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
