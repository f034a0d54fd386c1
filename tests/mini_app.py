"""A Flower app of a few lines, for tests of `pina run` that need a real `flwr`."""

from pathlib import Path

PYPROJECT = """
[project]
name = "mini"
version = "1.0.0"
description = "For tests"
license = "Apache-2.0"
dependencies = ["flwr[simulation]"]

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
dataset = "digits"
output = "results"
seed = 1
epsilon = 8.0
"""

SERVER_APP = """
import json, logging, time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()
log = logging.getLogger("flwr")


@app.main()
def main(grid, context):
    config = dict(context.run_config)
    log.info("mode %s", config["dataset"])
    if config["dataset"] == "mistake":
        log.error("error: dataset = 'mistake': must be another")
        raise ValueError("traceback that nobody should see")
    if config["dataset"] == "bug":
        raise RuntimeError("the reason")
    while config["dataset"] == "endless":
        time.sleep(0.1)
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    queries = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes[:1]]
    (reply,) = grid.send_and_receive(queries)
    folder = Path(config["output"])
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "rounds": 1, "stage": 1}) + "\\n")
    client = dict(reply.content["client"])
    (folder / "summary.json").write_text(json.dumps({"config": config, "client": client}))
"""

CLIENT_APP = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    facts = {{"code": "{code}", "cwd": os.listdir(), "nodes": context.node_config["num-partitions"]}}
    return Message(RecordDict({{"client": ConfigRecord(facts)}}), reply_to=message)
"""


def write_app(folder: Path, code: str = "mini") -> Path:
    """Write the app into `folder`; its client reports `code`, and the option dataset chooses what happens."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (folder / "server_app.py").write_text(SERVER_APP, encoding="utf-8")
    (folder / "client_app.py").write_text(CLIENT_APP.format(code=code), encoding="utf-8")
    return folder
