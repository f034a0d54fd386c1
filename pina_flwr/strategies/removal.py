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
        most = len(waiting.pop(reply.metadata.src_node_id, ()))
        for users, keys in _groups_in(reply, most, about.cohort - about.fewest - vanished):
            for dropped, key in enumerate(keys, vanished + 1):
                total -= mechanism.component(key, users, about.cohort, dropped)
            excess -= users
    return total % (1 << mechanism.bits), excess


def _groups_in(reply: Message, most: int, count: int) -> list[tuple[int, list[bytes]]]:
    """How many users added noise together, and the keys of its `count` components, for each such group.

    None if the reply holds anything else, or more users than were asked.
    """
    record = reply.content.config_records.get(KEYS)
    if record is None or set(reply.content) != {KEYS}:
        return []
    users, keys = record.get("users"), record.get("keys")
    if not isinstance(users, list) or not isinstance(keys, list) or len(keys) != count * len(users):
        return []
    sizes = [size for size in users if type(size) is int and size >= 1]
    found = [key for key in keys if isinstance(key, bytes) and len(key) == KEY_BYTES]
    if len(sizes) < len(users) or len(found) < len(keys) or sum(sizes) > most or not count:
        return []
    return [(size, found[i * count : (i + 1) * count]) for i, size in enumerate(sizes)]
