"""The ClientApp: hands each message to the node's side of the method (pina_flwr/client.py).

That module loads torch, which takes seconds. A deployed node starts a process for every message, so it is
imported by those that need it only: most phases of a secure sum don't.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from pina_flwr.config import ConfigError, parse
from pina_flwr.host import open_host
from pina_flwr.messages import CONFIG, Task
from pina_flwr.secure_sum.members import Declined, Side, mount
from pina_flwr.secure_sum.session import Terms

if TYPE_CHECKING:
    from pina_flwr import client

logging.getLogger("flwr").propagate = False  # a library sets up the root logger, which would print all twice
for library in ("huggingface_hub", "httpx"):
    logging.getLogger(library).setLevel(logging.ERROR)

app = ClientApp()


def open_node(context: Context) -> client.Node:
    """The node that the message is for, with its data and its backbone."""
    from pina_flwr import client

    return client.open_node(parse(context.run_config), context.node_config, str(context.run_id))


@app.query("who")
def who(message: Message, context: Context) -> Message:
    """Which users are hosted here; or what is wrong with the configuration, before any training starts."""
    answer: dict[str, ConfigRecordValues]
    try:
        node = open_node(context)
        classes = node.workbench.users.tables.num_classes
        answer = {"users": list(node.users), "partitions": node.partitions, "classes": classes}
    except ConfigError as mistake:
        answer = {"error": str(mistake)}
    return Message(RecordDict({CONFIG: ConfigRecord(answer)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A step of stage 1 or of stage 2."""
    from pina_flwr import client

    node = open_node(context)
    try:
        reply = client.train(node, Task.from_record(message.content), context.state)
    except Exception as problem:
        if node.config.diagnostics:
            raise
        raise _told(problem) from None
    return Message(reply, reply_to=message)


def _told(problem: Exception) -> RuntimeError:
    """What the server may know: Flower sends it an exception's text, which may hold numbers from data."""
    logging.getLogger("flwr").error("training failed", exc_info=problem)
    return RuntimeError(f"training failed ({type(problem).__name__})")


def secagg_side(context: Context) -> Side:
    """What this app brings to SecAgg+: a step's vectors, each user's by itself."""
    host = open_host(parse(context.run_config), context.node_config, str(context.run_id))

    def vectors(request: RecordDict, members: Sequence[int], terms: Terms) -> NDArray[np.uint32]:
        from pina_flwr import client

        node = open_node(context)
        try:
            return client.contribute(node, request, members, terms, context.state)
        except Declined:
            raise
        except Exception as problem:
            if node.config.diagnostics:
                raise
            raise _told(problem) from None

    return Side(host.config.secagg, vectors, host.identity, host.once)


mount(app, secagg_side)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Diagnostics of a simulation."""
    from pina_flwr import client

    node = open_node(context)
    return Message(client.evaluate(node, Task.from_record(message.content), context.state), reply_to=message)
