"""Removing noise that survivors added in vain (XNoise, Jiang et al. 2024), once it is known who survived.

Every survivor's noise was sized for the most that may vanish. Those who vanished are fewer, so the
components beyond them are drawn again from the keys that nodes reveal, and subtracted. A node that does not
reveal keeps its noise in the sum: more noise than needed, never less.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Message

from pina_flwr.messages import KEYS
from pina_flwr.privacy.noise import KEY_BYTES
from pina_flwr.privacy.sum_mechanism import IntegerSum
from pina_flwr.secure_sum.interface import SumResult, SumRound


def remove_excess(mechanism: IntegerSum, about: SumRound, result: SumResult) -> tuple[np.ndarray, int]:
    """The sum mod 2^b without the noise that nodes revealed, and of how many users it is still there."""
    assert result.total is not None
    total, excess = result.total.astype(np.int64), result.survivors
    vanished = about.cohort - result.survivors
    waiting = dict(about.members)
    for reply in result.revealed:
        users = waiting.pop(reply.metadata.src_node_id, 0)
        keys = _keys_in(reply, about.cohort - about.fewest - vanished)
        if not users or not keys:
            continue
        for dropped, key in enumerate(keys, vanished + 1):
            total -= mechanism.component(key, users, about.cohort, dropped)
        excess -= users
    return total % (1 << mechanism.bits), excess


def _keys_in(reply: Message, count: int) -> list[bytes]:
    """The keys of `count` components that a reply holds; none if it holds anything else."""
    record = reply.content.config_records.get(KEYS)
    keys = record.get("keys") if record is not None else None
    if not isinstance(keys, list) or len(keys) != count:
        return []
    found = [key for key in keys if isinstance(key, bytes) and len(key) == KEY_BYTES]
    return found if len(found) == count else []
