"""The ideal functionality: a party that everybody trusts adds the vectors. For simulation only.

Clients clip and add their share of the noise exactly as they would for a real protocol; what is missing is
that the server is kept from seeing the single vectors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from pina_flwr.messages import why
from pina_flwr.secure_sum.interface import VECTOR, SumResult


class TrustedSum:
    """Adds what all nodes sent. One missing or malformed vector drops the round: noise would be too small."""

    def collect(self, grid: Grid, requests: list[Message], timeout: float) -> list[Message]:
        """One phase: send the requests, return the replies."""
        return list(grid.send_and_receive(requests, timeout=timeout))

    def add(self, asked: set[int], replies: Iterable[Message], size: int) -> SumResult:
        """See `SecureSum.add`; every node that was asked must have answered once."""
        total, missing = np.zeros(size), set(asked)
        for reply in replies:
            if reply.has_error():
                return SumResult(None, f"a node failed: {why(reply)}")
            vector = protected_vector(reply, size)
            if vector is None:
                return SumResult(None, f"a node sent something else than {size} finite numbers")
            if reply.metadata.src_node_id not in missing:
                return SumResult(None, "a node answered twice, or was not asked")
            missing.remove(reply.metadata.src_node_id)
            total += vector
        if missing:
            return SumResult(None, f"{len(missing)} of {len(asked)} nodes sent no answer in time")
        return SumResult(total)


def protected_vector(reply: Message, size: int) -> np.ndarray | None:
    """The finite float32 vector [size] that a reply holds, or None if it holds anything else or more."""
    records = reply.content.array_records
    if set(reply.content) != {VECTOR} or set(records) != {VECTOR} or len(records[VECTOR]) != 1:
        return None
    (array,) = records[VECTOR].values()
    try:
        vector = array.numpy()
    except Exception:  # bytes that are not numpy's format make it raise many kinds
        return None
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (size,):
        return None
    return vector if np.isfinite(vector).all() else None
