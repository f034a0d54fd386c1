"""The ideal functionality: a party that everybody trusts adds the vectors. For simulation only.

Clients clip, encode and add their share of the noise exactly as they would for a real protocol; what is
missing is that the server is kept from seeing the single vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from pina_flwr.messages import KEYS, why
from pina_flwr.privacy.policy import REASONS
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR, SumResult, SumRound


class TrustedSum:
    """Adds what nodes sent. If users vanish beyond what the noise is sized for, the round is dropped."""

    def collect(self, grid: Grid, requests: list[Message], about: SumRound, timeout: float) -> list[Message]:
        """One phase; a second one if the noise that survivors added in vain can be removed."""
        replies = list(grid.send_and_receive(requests, timeout=timeout))
        if about.reveal is None:
            return replies
        result = self.add(about, replies)
        if result.total is None:
            return replies
        survivors = [reply.metadata.src_node_id for reply in replies if _is_vector(about, reply)]
        questions = about.reveal(survivors, about.cohort - result.survivors)
        answers = grid.send_and_receive(questions, timeout=timeout) if questions else []
        return replies + [reply for reply in answers if _holds_keys(reply)]  # others keep their noise

    def add(self, about: SumRound, replies: Iterable[Message]) -> SumResult:
        """See `SecureSum.add`; a node that failed, refused or sent something else counts as vanished."""
        total, missing = np.zeros(about.size, np.int64 if about.bits else np.float64), dict(about.members)
        waiting = set(missing)
        problems: Counter[str] = Counter()
        refusals: Counter[str] = Counter()
        revealed = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if _holds_keys(reply):
                revealed.append(reply)
                continue
            if node not in waiting:
                # Of two answers of one node it can't be told which counts, and both would break its bound.
                return SumResult(None, "a node answered twice, or was not asked")
            waiting.remove(node)
            if (reason := refusal_in(reply)) is not None:
                refusals[reason] += missing[node]
            elif reply.has_error():
                problems[f"a node failed: {why(reply)}"] += 1
            elif (vector := protected_vector(reply, about.size, about.bits)) is None:
                problems[f"a node sent something else than {about.size} numbers"] += 1
            else:
                total += vector
                del missing[node]
        survivors = about.cohort - sum(missing.values())
        if survivors < about.fewest:
            reason = _too_few(about, survivors, problems, refusals)
            return SumResult(None, reason, survivors, refusals=refusals)
        # Only what a survivor added can be taken away.
        theirs = [r for r in revealed if r.metadata.src_node_id in about.members.keys() - missing.keys()]
        total = total % (1 << about.bits) if about.bits else total
        return SumResult(total, "", survivors, tuple(theirs), refusals)


def refusal_in(reply: Message) -> str | None:
    """The reason for which a client refuses, or None if the reply is no refusal."""
    if reply.has_error() or set(reply.content) != {REFUSAL} or REFUSAL not in reply.content.config_records:
        return None
    reason = reply.content.config_records[REFUSAL].get("reason")
    return reason if isinstance(reason, str) and reason in REASONS else "no reason that is known"


def protected_vector(reply: Message, size: int, bits: int) -> np.ndarray | None:
    """The vector [size] that a reply holds, or None if it holds anything else or more.

    With `bits` b uint32 below 2^b, without finite float32.
    """
    records = reply.content.array_records
    if set(reply.content) != {VECTOR} or set(records) != {VECTOR} or len(records[VECTOR]) != 1:
        return None
    (array,) = records[VECTOR].values()
    try:
        vector = array.numpy()
    except Exception:  # bytes that are not numpy's format make it raise many kinds
        return None
    kind = np.uint32 if bits else np.float32
    if not isinstance(vector, np.ndarray) or vector.dtype != kind or vector.shape != (size,):
        return None
    good = (vector < 1 << bits).all() if bits else np.isfinite(vector).all()
    return vector if good else None


def _holds_keys(reply: Message) -> bool:
    return not reply.has_error() and set(reply.content) == {KEYS}


def _is_vector(about: SumRound, reply: Message) -> bool:
    return not reply.has_error() and protected_vector(reply, about.size, about.bits) is not None


def _too_few(about: SumRound, survivors: int, problems: Counter[str], refusals: Counter[str]) -> str:
    """Why the round is dropped, in one line."""
    causes = [*problems, *(f"clients refused: {reason}" for reason in refusals)]
    silent = "" if causes else ", the others sent no answer in time"
    because = f" ({'; '.join(causes)})" if causes else silent
    return f"{survivors} of {about.cohort} users survived, {about.fewest} are needed{because}"
