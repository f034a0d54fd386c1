"""A Flower network in one process, to try out, test and measure apps that use the layer.

Messages and ClientApps are real. Every message, and what a node keeps from one to the next, passes through
Flower's wire format, as if each met a new process; there are no sockets, and no processes.

    with as_task():
        grid = LocalGrid(app, nodes=10)
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TASK = ("_task_id", "_run_id", "_node_id")
RAISED = 2  # Flower's code for an error reply to a message whose handler raised

Network = Callable[[Message, Message], Iterable[Message]]
"""What arrives at the server, given a request and its reply: a network that loses, repeats or forges."""


@dataclass
class LocalGrid(Grid):
    """Nodes that run one ClientApp in this process, one after the other.

    app: of all nodes. nodes: how many; their ids are 0, 1, …. network: what becomes of replies.
    """

    app: ClientApp
    nodes: int
    network: Network = field(default=lambda request, reply: [reply])
    contexts: dict[int, Context] = field(init=False)

    def __post_init__(self) -> None:
        self.contexts = {i: self._context(i) for i in range(self.nodes)}

    def _context(self, node: int) -> Context:
        return Context(1, node, {"partition-id": node, "num-partitions": self.nodes}, RecordDict(), {})

    def get_node_ids(self) -> list[int]:
        """Ids of all nodes."""
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Deliver, let the nodes work, and return what arrives. Nothing is ever late."""
        arrived: list[Message] = []
        for request in messages:
            arrived += self.network(request, over_the_wire(self.answer(over_the_wire(request))))
        return arrived

    def answer(self, request: Message) -> Message:
        """A node's reply."""
        try:
            node = request.metadata.dst_node_id
            self.contexts[node] = context_from_proto(context_to_proto(self.contexts[node]))
            return self.app(request, self.contexts[node])
        except Exception as problem:  # as Flower does: an app's exception becomes an error reply
            return Message(Error(RAISED, f"{type(problem).__name__}: {problem}"), reply_to=request)

    # Flower asks for these as well; nothing here uses them.
    run = property(lambda self: None)
    set_run = create_message = push_messages = pull_messages = None  # type: ignore[assignment]


@contextmanager
def as_task() -> Iterator[None]:
    """A task's identity, which Flower sets before it calls an app, and without which no message is made."""
    before = {name: getattr(TaskIdentity, name) for name in TASK}
    try:
        for name in TASK:
            setattr(TaskIdentity, name, 1)
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def over_the_wire(message: Message) -> Message:
    """The message as it comes out at the other end."""
    return message_from_proto(message_to_proto(message))
