"""Our SecAgg+, timed as Flower's is: all of a node's work from message to reply, and the server's last phase.

Members run the layer's ClientApp in this process, one a node, and its server takes them through all phases.
Then one member's masked-vector phase and the server's unmask phase are timed, again and again, from what they
had. Flower's mod keeps no record of what it has answered, so ours keeps none outside of its context either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.secure_sum.measured_grid import MeasuredGrid
from benchmarks.secure_sum.timing import Taken, now, replaced
from pina_flwr.secure_sum import secagg_plus
from pina_flwr.secure_sum.interface import SumRound
from pina_flwr.secure_sum.members import Side, mount
from pina_flwr.secure_sum.secagg_plus import SecAggPlus
from pina_flwr.secure_sum.session import Rules, Session
from pina_flwr.secure_sum.wire import MASK, UNMASK, kind_of

TIMEOUT = 3600.0


class OurRound:
    """A whole sum; two of its parts can then be timed.

    vector: uint32 [size] below 2^bits that every member sends. dropped: members that share keys and send no
    vector. server_seconds: of the whole sum.

    Raises:
        RuntimeError: the sum is wrong.
    """

    def __init__(self, vector: np.ndarray, bits: int, clients: int, rules: Rules, dropped: int) -> None:
        masking, unmasking = kind_of(MASK), kind_of(UNMASK)
        self.grid = MeasuredGrid(
            _app(rules, vector), clients, masking=masking, unmasking=unmasking, silent=range(dropped)
        )
        nodes = range(clients)
        kept = clients - dropped
        about = SumRound(Session("1", 1), len(vector), bits, {node: [node] for node in nodes}, kept)
        requests = [
            Message(content=RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes
        ]
        self.last: tuple[Any, ...] = ()  # what the server has when it begins to unmask
        start = now()
        with replaced(secagg_plus, _unmask=self._noting(secagg_plus._unmask)):
            result = SecAggPlus(rules).run(self.grid, requests, about, TIMEOUT)
        self.server_seconds = now() - start - self.grid.waited
        if result.total is None or ((result.total - vector.astype(np.int64) * kept) % (1 << bits)).any():
            raise RuntimeError(f"our sum is wrong: {result.reason}")

    def _noting(self, unmask: Any) -> Any:
        def noted(members: Any, total: np.ndarray, *rest: Any) -> None:
            self.last = (members, total.copy(), *rest)
            unmask(members, total, *rest)

        return noted

    def masked_vector(self) -> Taken:
        """One member's masked-vector phase, from message to reply."""
        return Taken(self.grid.moments[kind_of(MASK)].replay())

    def unmask(self) -> Taken:
        """The server's unmask phase, without the time that members take to answer."""
        members, total, *rest = self.last
        total = total.copy()
        self.grid.waited = 0.0
        start = now()
        secagg_plus._unmask(members, total, *rest)
        return Taken(now() - start - self.grid.waited)


def _app(rules: Rules, vector: np.ndarray) -> ClientApp:
    app = ClientApp()
    mount(app, lambda _: Side(rules, lambda request, members, terms: vector[np.newaxis]))
    return app
