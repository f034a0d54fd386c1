"""A Flower network in one process with a stopwatch, for whichever protocol is measured.

It tells the time that nodes work from the server's own, counts the bytes of messages, and keeps what a node
had and was sent in each phase, so that this can be done, and timed, again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto

from benchmarks.secure_sum.timing import now
from pina_flwr.secure_sum.local_grid import LocalGrid, over_the_wire


@dataclass(frozen=True)
class Moment:
    """A message that a node was sent, and what it held then."""

    app: ClientApp
    request: Message
    context: Context

    def replay(self) -> float:
        """Seconds that the node takes to answer, once more."""
        context, request = _copied(self.context), over_the_wire(self.request)
        start = now()
        self.app(request, context)
        return now() - start


@dataclass
class Load:
    """What a phase costs all nodes: how many were asked, seconds of their work, bytes they sent and got."""

    asked: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class MeasuredGrid(LocalGrid):
    """Nodes 0, 1, … that run one app.

    phase_of: names the phase that a message belongs to. masking, unmasking: names of two phases. silent:
    nodes that fall silent when they are asked for their masked vector. moments: of the first node asked, by
    phase. loads: by phase. waited: seconds in which the server had nothing to do. Nodes unmask once: asked
    again, the replies are those that they gave.
    """

    phase_of: Callable[[Message], str] = lambda message: message.metadata.message_type
    masking: str = ""
    unmasking: str = ""
    silent: Collection[int] = ()
    moments: dict[str, Moment] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=lambda: defaultdict(Load))
    waited: float = 0.0
    unmasked: list[Message] = field(default_factory=list)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """As Flower's grid: the replies of those nodes that answer."""
        start = now()
        requests = list(messages)
        phase = self.phase_of(requests[0])
        if phase == self.masking:
            requests = [r for r in requests if r.metadata.dst_node_id not in self.silent]
        again = self.unmasked if phase == self.unmasking else []
        replies = again or super().send_and_receive(requests, timeout=timeout)
        if phase == self.unmasking:
            self.unmasked = replies
        self.waited += now() - start
        return replies

    def answer(self, request: Message) -> Message:
        """A node's reply, timed and weighed."""
        phase, context = self.phase_of(request), self.contexts[request.metadata.dst_node_id]
        if phase not in self.moments:
            self.moments[phase] = Moment(self.app, over_the_wire(request), _copied(context))
        load = self.loads[phase]
        load.asked += 1
        load.bytes_down += message_to_proto(request).ByteSize()
        start = now()
        reply = super().answer(request)
        load.seconds += now() - start
        load.bytes_up += message_to_proto(reply).ByteSize()
        return reply


def _copied(context: Context) -> Context:
    """The same with a state of its own; protocols put new records there and leave old ones as they are."""
    state = RecordDict(dict(context.state))
    return Context(context.run_id, context.node_id, context.node_config, state, context.run_config)
