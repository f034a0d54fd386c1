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


LIGHT = """
import sys
import client_app
from flwr.app import Context, RecordDict
from pina_flwr.config import RunConfig, to_dict
from pina_flwr.secure_sum.members import answer
from pina_flwr.secure_sum.session import Session
from pina_flwr.secure_sum.wire import ADVERTISE, ARRAYS, HEADER, Header, pack

header = Header(Session("1", 1), ADVERTISE, [0], {}).to_record()
content = RecordDict({HEADER: header, ARRAYS: pack({})})
node = {"partition-id": 0, "num-partitions": 4}
context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=to_dict(RunConfig()))
reply = answer(ADVERTISE, content, context, client_app.secagg_side(context))
assert list(Header.from_record(reply).members) == [0]
print(*[name for name in ("torch", "sklearn", "transformers", "datasets") if name in sys.modules])
"""


def test_phases_that_train_nothing_load_no_torch() -> None:
    """A deployed node starts a process for each; torch alone would take them seconds."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
