"""The output folder: made, tried, locked and, if so wished, cleared of an earlier run before a run starts."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pina_flwr.config import ConfigError
from pina_flwr.report import metrics_log, summary

LOG = "run.log"
"""Everything that the run logged."""
LOCK = ".lock"
"""Held by the run that writes to the folder. The kernel frees it when that process ends; the file stays."""
RESULTS = (metrics_log.FILE_NAME, summary.FILE_NAME)
"""Files by which a folder is known to hold results."""
EARLIER = (
    *RESULTS,
    *(LOG, "config.toml", "privacy.json", "releases.jsonl", "metrics.png", "adapters", "backbone"),
)
"""All that a run leaves: what --overwrite removes."""


@contextlib.contextmanager
def prepared(output: Path, *, overwrite: bool) -> Iterator[None]:
    """`output` as an existing, writable folder without results of an earlier run, ours in the context.

    Args:
        output: absolute path.
        overwrite: remove earlier results instead of refusing. Only what a run wrote goes.

    Raises:
        ConfigError: a file is in the way, the folder can't be written, is in use by another run, or holds
            results.
    """
    with contextlib.ExitStack() as lock:
        _prepare(output, overwrite, lock)
        yield


def _prepare(output: Path, overwrite: bool, lock: contextlib.ExitStack) -> None:
    where = f"output = {str(output)!r}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = lock.enter_context((output / LOCK).open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{where}: in use by another run") from None
        except OSError:
            pass  # a file system without locks
        held = [name for name in RESULTS if _has_content(output / name)]
        if held and not overwrite:
            raise ConfigError(
                f"{where}: already holds results ({held[0]}); give another folder, or --overwrite"
            )
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
