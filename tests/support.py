"""A Flower network in one process: the real ServerApp and ClientApp code, real messages, no sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.client_app import ClientAppException
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid

import client_app
from pina_flwr import server
from pina_flwr.config import RunConfig, parse, to_dict
from pina_flwr.messages import TRAIN, Task
from pina_flwr.privacy.plan import Shapes, shapes_of
from pina_flwr.privacy.sum_mechanism import open_mechanism, rotation_seed
from pina_flwr.report.metrics_log import RoundRow, read
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR

# Settings of a run of about a second: users and rounds are few, everything else is as in the product.
TINY = {
    "num-users": 14,
    "images-per-user": 5,
    "test-images": 8,
    "sampling-rate": 0.7,
    "t-in": 2,
    "stage1-epochs": 2,
    "t-tr": 2,
    "self-assign-rounds": 1,
    "local-epochs": 1,
    "secure-sum": "trusted",
}
CLASSES, HIDDEN = 10, 64  # of the embedded digits, and of the embedded backbone
RAISED = 2  # Flower's code for an error reply to a message whose handler raised


def tiny(**options: Any) -> RunConfig:
    """A small configuration; keyword `t_tr` sets option `t-tr`."""
    return parse(TINY | {name.replace("_", "-"): value for name, value in options.items()})


Intercept = Callable[[Message, Message], list[Message]]
"""What arrives at the server in place of a reply, given the request and the reply."""


@dataclass
class Exchange:
    """A request, what the node answered, and what arrived of it."""

    request: Message
    reply: Message
    arrived: list[Message]

    @property
    def task(self) -> Task:
        """What the node was asked to do."""
        return Task.from_record(self.request.content)


@dataclass
class LocalGrid(Grid):
    """Nodes that run the ClientApp in this process.

    nodes: how many. intercept: the network's doing. node_configs: node-config by partition where it is not
    the usual one. appears: by partition, at which look a node is there (from 1). exchanges: all so far.
    """

    config: RunConfig
    nodes: int = 1
    intercept: Intercept | None = None
    node_configs: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    appears: Mapping[int, int] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self.contexts = {node_id(i): self._context(i) for i in range(self.nodes)}

    def _context(self, partition: int) -> Context:
        usual = {"partition-id": partition, "num-partitions": self.nodes}
        node_config = self.node_configs.get(partition, usual)
        return Context(1, node_id(partition), node_config, RecordDict(), to_dict(self.config))

    def get_node_ids(self) -> list[int]:
        """The nodes that are there by now."""
        self.looks += 1
        return [node_id(i) for i in range(self.nodes) if self.appears.get(i, 1) <= self.looks]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Deliver, let the nodes work, and return what arrives."""
        arrived: list[Message] = []
        for request in messages:
            assert request.metadata.dst_node_id in self.contexts
            reply = _sent(self._answer(_sent(request)))
            arriving = self.intercept(request, reply) if self.intercept else [reply]
            self.exchanges.append(Exchange(request, reply, arriving))
            arrived += arriving
        return arrived

    def _answer(self, request: Message) -> Message:
        try:
            return client_app.app(request, self.contexts[request.metadata.dst_node_id])
        except Exception as problem:  # as Flower's simulation does
            problem = ClientAppException(str(problem))
            return Message(Error(RAISED, f"{type(problem)}:<'{problem}'>"), reply_to=request)

    def trained(self, step: str = "update", round_: int | None = None) -> list[Exchange]:
        """The exchanges of one step of training, of one round of its stage or of all."""
        trained = [e for e in self.exchanges if e.request.metadata.message_type == TRAIN]
        return [e for e in trained if e.task.step == step and round_ in (None, e.task.round)]

    # Flower asks for these as well; nothing here uses them.
    run = property(lambda self: None)
    set_run = create_message = push_messages = pull_messages = None


class Wire(Grid):
    """A network that hands out prepared replies, one batch a phase, and keeps what was sent."""

    def __init__(self, *phases: list[Message]) -> None:
        self.phases, self.sent = list(phases), list[list[Message]]()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The next batch."""
        self.sent.append(list(messages))
        return self.phases.pop(0)

    run = property(lambda self: None)
    set_run = create_message = push_messages = pull_messages = get_node_ids = None


def node_id(partition: int) -> int:
    """Id of a node; as with Flower, its order says nothing about the partition."""
    return 9_000 - 37 * partition


def _sent(message: Message) -> Message:
    """The message as it comes out at the other end."""
    return message_from_proto(message_to_proto(message))


def run(config: RunConfig, nodes: int = 1, **grid: Any) -> LocalGrid:
    """A whole run; returns the network that it went over."""
    network = LocalGrid(config, nodes, **grid)
    server.run(network, config, "1")
    return network


def rows_of(config: RunConfig) -> list[RoundRow]:
    """The rows of metrics.jsonl."""
    return read(config.output)


def json_of(config: RunConfig, name: str) -> dict[str, Any]:
    """A JSON file of the output folder; refuses what strict JSON has not."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    text = (Path(config.output) / name).read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


def models_sent(network: LocalGrid, round_: int) -> np.ndarray:
    """The cluster models [C, d] that round `round_` of stage 2 started from."""
    return network.trained("update", round_)[0].task.arrays["models"]


def vector_of(message: Message) -> np.ndarray:
    """The protected vector of a reply."""
    (array,) = message.content.array_records[VECTOR].values()
    return array.numpy()


def shapes(config: RunConfig) -> Shapes:
    """Lengths of vectors of a run with the embedded backbone."""
    return shapes_of(config, HIDDEN, CLASSES)


def decoded(network: LocalGrid, step: str, round_: int) -> np.ndarray:
    """The sum of the protected vectors that arrived in a round, in the users' own units, float64 [D]."""
    exchanges, c = network.trained(step, round_), network.config
    offer = exchanges[0].task.offer
    assert offer is not None
    mechanism = open_mechanism(c, step, offer.noise_multiplier, c.num_users, shapes(c))
    vectors = [vector_of(reply).astype(np.float64) for e in exchanges for reply in e.arrived]
    total = np.sum(vectors, axis=0)
    if mechanism.bits:
        total = total.astype(np.int64) % (1 << mechanism.bits)
    return mechanism.decode(total, rotation_seed(c, step, round_))


# What a network, or a node, can do to a reply ---------------------------------------------------------


def lost(request: Message, reply: Message) -> list[Message]:
    """The reply never arrives."""
    return []


def failed(request: Message, reply: Message) -> list[Message]:
    """The node raised an error."""
    return [Message(Error(RAISED, "out of memory"), reply_to=request)]


def refused(request: Message, reply: Message) -> list[Message]:
    """The node refuses to take part."""
    return [Message(RecordDict({REFUSAL: ConfigRecord({"reason": "budget spent"})}), reply_to=request)]


def twice(request: Message, reply: Message) -> list[Message]:
    """The reply arrives twice."""
    return [reply, reply]


def with_content(change: Callable[[RecordDict], RecordDict]) -> Intercept:
    """The node sends something else."""
    return lambda request, reply: [Message(change(reply.content), reply_to=request)]


def with_vector(change: Callable[[np.ndarray], np.ndarray]) -> Intercept:
    """The node sends another vector: uint32 in a private run, float32 otherwise, or what `change` makes."""

    def intercept(request: Message, reply: Message) -> list[Message]:
        content = RecordDict({VECTOR: ArrayRecord([change(vector_of(reply))])})
        return [Message(content, reply_to=request)]

    return intercept


def by_round(faults: Mapping[int, Intercept], nodes: Sequence[int] = (0,)) -> Intercept:
    """A fault for each of some rounds (of both stages, from 1), in training replies of some partitions."""
    hit = {node_id(partition) for partition in nodes}

    def intercept(request: Message, reply: Message) -> list[Message]:
        about = request.metadata
        fault = faults.get(int(about.group_id)) if about.message_type == TRAIN else None
        return fault(request, reply) if fault and about.dst_node_id in hit else [reply]

    return intercept
