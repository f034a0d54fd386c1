"""The output folder: made, tried and, if so wished, cleared of an earlier run before anything starts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pina_flwr.config import ConfigError
from pina_flwr.report import metrics_log, summary

LOG = "run.log"
"""Everything that the run logged."""
RESULTS = (metrics_log.FILE_NAME, summary.FILE_NAME)
"""Files by which a folder is known to hold results."""
EARLIER = (*RESULTS, LOG, "config.toml", "privacy.json", "metrics.png", "adapters", "backbone")
"""All that a run leaves: what --overwrite removes."""


def prepare(output: Path, *, overwrite: bool) -> None:
    """Make `output` an existing, writable folder without the results of an earlier run.

    Args:
        output: absolute path.
        overwrite: remove earlier results instead of refusing. Only what a run wrote goes.

    Raises:
        ConfigError: a file is in the way, the folder can't be written, or it holds results.
    """
    where = f"output = {str(output)!r}"
    try:
        held = [name for name in RESULTS if _has_content(output / name)]
        if held and not overwrite:
            raise ConfigError(
                f"{where}: already holds results ({held[0]}); give another folder, or --overwrite"
            )
        output.mkdir(parents=True, exist_ok=True)
        if held:
            _clear(output)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(f"{where}: must be a folder that can be written ({error.strerror})") from error


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _clear(output: Path) -> None:
    for path in (output / name for name in EARLIER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
