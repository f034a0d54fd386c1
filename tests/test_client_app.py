"""What the ClientApp does to its process when it is loaded."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging
logging.basicConfig()
import client_app
logging.getLogger("flwr").warning("once")
logging.getLogger("huggingface_hub.utils._http").warning("Retrying")
logging.getLogger("httpx").info("HTTP Request")
logging.getLogger("other").warning("heard")
"""


def test_lines_are_printed_once_and_libraries_keep_quiet() -> None:
    """In a process of its own, as the root logger has a handler that opacus installs."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = done.stdout + done.stderr
    assert printed.count("once") == 1
    assert printed.count("heard") == 1
    assert "Retrying" not in printed
    assert "HTTP Request" not in printed
