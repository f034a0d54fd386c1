"""The ServerApp: validates the configuration and runs the strategy that it names (pina_flwr/server.py)."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pina_flwr import server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run."""
    server.main(grid, context.run_config, context.run_id)
