"""`python -m benchmarks.secure_sum`: how fast the secure sum is, in a minute and a half on two cores."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.secure_sum import cohorts, tables
from benchmarks.secure_sum.comparison import Setting, balanced, compare
from pina_flwr.secure_sum.local_grid import as_task
from pina_flwr.secure_sum.parameters import failures

WIDTH = 140  # of tables, where the terminal does not say
UNLIKELY = 1e-3  # that a sum does not come about

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    size: Annotated[int, typer.Option(min=1, help="d: numbers of a vector.")] = 1_000_000,
    neighbours: Annotated[int, typer.Option(min=2, help="k: neighbours of a client, even.")] = 20,
    clients: Annotated[int, typer.Option(min=4, help="Clients; more than neighbours + 1.")] = 100,
    dropped: Annotated[int, typer.Option(min=0, help="Clients that vanish after sharing keys.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of the server; a client gets five each.")] = 3,
    largest: Annotated[int, typer.Option(min=0, help="Largest cohort, of those up to 1,000.")] = 1000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON in the last line.")
    ] = False,
) -> None:
    """Time Flower's SecAgg+ and ours in turns, on the same numbers, then ours as the cohort grows."""
    if neighbours % 2 or neighbours + 1 >= clients:
        raise typer.BadParameter(f"neighbours = {neighbours}: must be even, and below {clients - 1}")
    if dropped >= clients or failures(balanced(neighbours), clients, dropped / clients, 0.0).stuck > UNLIKELY:
        raise typer.BadParameter(f"dropped = {dropped}: must be fewer, or no sum may come about")
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    with as_task():
        found = compare(Setting(size, neighbours, clients, dropped, repeats))
        console.print(tables.of_comparison(found))
        grown = list(cohorts.measure(largest))
    beyond = cohorts.neighbours_beyond()
    if grown:
        console.print(tables.of_cohorts(grown, beyond))
    if as_json:
        more = {
            "cohorts": [cohort.figures() for cohort in grown],
            "neighbours": {str(c.clients): c.neighbours for c in grown}
            | {str(clients): k for clients, k in beyond.items()},
        }
        print(json.dumps(found.figures() | more))


if __name__ == "__main__":
    app()
