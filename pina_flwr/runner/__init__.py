"""Running an app with `flwr run` on a private SuperLink: `pina run` without the terminal.

`flwr run .` on its own leaves daemons behind, returns 0 when the ServerApp failed, and may execute the code
of whichever app started the daemons. Here each run has a SuperLink of its own in a neutral folder, its true
outcome is asked for, and nothing is left but the output folder.
"""

from pina_flwr.runner.run import RunResult, run

__all__ = ["RunResult", "run"]
