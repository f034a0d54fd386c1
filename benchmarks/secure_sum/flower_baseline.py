"""Flower's own SecAgg+, timed: the installed `secaggplus_mod` and `SecAggPlusWorkflow`, not a copy of them.

Clients run the real mod in this process, and the real workflow takes them through setup, sharing of keys and
masked vectors. Then two things are timed, again and again: one client's masked-vector stage, from the state
and the message that it had, and the workflow's unmask stage. Flower also turns floats into integers and back
in these stages, which our layer leaves to its caller, so that time is measured on its own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow

from benchmarks.secure_sum.measured_grid import MeasuredGrid
from benchmarks.secure_sum.timing import Stopwatch, Taken, now, watching

# Both modules are hidden by the function or class of the same name that their package exports.
MOD: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
WORKFLOW: Any = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")

# What the mod and the workflow do to floats, before masks go on and after they are off.
CLIENT_FLOATS = ("parameters_to_ndarrays", "parameters_multiply", "quantize")
SERVER_FLOATS = ("dequantize", "ndarrays_to_parameters")

CONFIGS, STAGE, MASKING, UNMASKING = "secaggplus_configs", "stage", "collect_masked_vectors", "unmask"
EXAMPLES, MOST_EXAMPLES = 100, 1000  # of each client, and what the workflow takes for the largest weight


class Everyone(FedAvg):
    """Asks every node and keeps the average that the workflow hands over, without averaging anew."""

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__()
        self.nodes = list(nodes)
        self.average = Parameters([], "")

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        """Fit instructions, with no model in them; of a proxy the workflow wants the node's id only."""
        return [(SimpleNamespace(node_id=node), FitIns(parameters, {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Every result holds the average by now."""
        self.average = results[0][1].parameters
        return None, {}


class FlowerRound:
    """A round of Flower's SecAgg+ up to its unmask stage.

    vector: float32 [size] that every client sends. neighbours: k; Flower counts a client among its own
    holders of shares, so its `num_shares` is k + 1. dropped: clients that share keys and send no vector.
    """

    def __init__(self, vector: np.ndarray, clients: int, neighbours: int, dropped: int) -> None:
        self.vector = vector
        self.trained = ndarrays_to_parameters([vector])
        self.training = Stopwatch()
        app = cast(ClientApp, self._answer)  # the mod with as little around it as there can be
        self.grid = MeasuredGrid(
            app, clients, phase_of=_stage_of, masking=MASKING, unmasking=UNMASKING, silent=range(dropped)
        )
        self.strategy = Everyone(range(clients))
        shares = neighbours + 1
        self.workflow = SecAggPlusWorkflow(shares, shares // 2 + 1, max_weight=MOST_EXAMPLES)
        self.context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), strategy=self.strategy)
        self.context.state.config_records["config"] = ConfigRecord({"current_round": 1})
        self.context.state.array_records["parameters"] = ArrayRecord()
        self.state = WORKFLOW.WorkflowState()
        flow = self.workflow
        for stage in (flow.setup_stage, flow.share_keys_stage, flow.collect_masked_vectors_stage):
            self._go_through(stage, self.state)

    def masked_vector(self) -> Taken:
        """One client's masked-vector stage, from message to reply, without its training."""
        self.training.seconds = 0.0
        with watching(MOD, *CLIENT_FLOATS) as floats:
            total = self.grid.moments[MASKING].replay()
        return Taken(total - self.training.seconds, floats.seconds)

    def unmask(self) -> Taken:
        """The server's unmask stage, without the time that clients take to answer."""
        neighbours = {node: set(near) for node, near in self.state.nid_to_neighbours.items()}
        fresh = {"nid_to_neighbours": neighbours, "active_node_ids": set(self.state.active_node_ids)}
        state = WORKFLOW.WorkflowState(**(vars(self.state) | fresh))  # the stage uses its state up
        self.grid.waited = 0.0
        with watching(WORKFLOW, *SERVER_FLOATS) as floats:
            start = now()
            self._go_through(self.workflow.unmask_stage, state)
            total = now() - start
        self._check()
        return Taken(total - self.grid.waited, floats.seconds)

    def quantised(self) -> np.ndarray:
        """The vector as the mod quantises it before it adds masks: int32 [size], from 0."""
        weighted = MOD.parameters_multiply([self.vector], EXAMPLES / MOST_EXAMPLES)
        (numbers,) = MOD.quantize(weighted, self.workflow.clipping_range, self.workflow.quantization_range)
        return cast(np.ndarray, numbers)

    def _answer(self, request: Message, context: Context) -> Message:
        return cast(Message, MOD.secaggplus_mod(request, context, self.training.wrap(self._train)))

    def _train(self, request: Message, _: Context) -> Message:
        result = FitRes(Status(Code.OK, ""), self.trained, EXAMPLES, {})
        return Message(fitres_to_recorddict(result, keep_input=True), reply_to=request)

    def _go_through(self, stage: Any, state: Any) -> None:
        with _quietly():
            if not stage(self.grid, self.context, state):
                raise RuntimeError(f"Flower's SecAgg+ gave up at its {stage.__name__}")

    def _check(self) -> None:
        """Whether the average is what it must be, each client's share of it rounded to its grid."""
        (average,) = parameters_to_ndarrays(self.strategy.average)
        step = 2 * self.workflow.clipping_range / self.workflow.quantization_range
        error = np.abs(average - self.vector).max()
        if not error <= 2 * step * MOST_EXAMPLES / EXAMPLES:
            raise RuntimeError(f"Flower's SecAgg+ is off by {error}")


def _stage_of(message: Message) -> str:
    return str(message.content.config_records[CONFIGS][STAGE])


@contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
