"""The ideal functionality: a party that everybody trusts adds the vectors. For simulation only.

Clients clip, encode and add their share of the noise exactly as they would for a real protocol; what is
missing is that the server is kept from seeing the single vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from pina_flwr.secure_sum.interface import REFUSAL, VECTOR, SumResult, SumRound
from pina_flwr.secure_sum.wire import Arrays, Malformed, bytes_of, why


class TrustedSum:
    """Adds what nodes sent. If members vanish beyond what is allowed, the round is dropped."""

    def run(self, grid: Grid, requests: Sequence[Message], about: SumRound, timeout: float) -> SumResult:
        """See `SecureSum.run`: one phase, and a second one for noise that survivors added in vain."""
        replies = list(grid.send_and_receive(requests, timeout=timeout)) if requests else []
        result = self.add(about, replies)
        result = replace(result, bytes_down=bytes_of(requests), bytes_up=bytes_of(replies))
        if about.reveal is None or result.total is None:
            return result
        survivors = {
            reply.metadata.src_node_id: about.members[reply.metadata.src_node_id]
            for reply in replies
            if _is_vector(about, reply)
        }
        questions = about.reveal(survivors, about.cohort - result.survivors)
        answers = list(grid.send_and_receive(questions, timeout=timeout)) if questions else []
        # Only what a survivor added can be taken away, and it stays where a node does not answer.
        revealed = tuple(r for r in answers if not r.has_error() and r.metadata.src_node_id in survivors)
        down, up = result.bytes_down + bytes_of(questions), result.bytes_up + bytes_of(answers)
        return replace(result, revealed=revealed, bytes_down=down, bytes_up=up)

    def add(self, about: SumRound, replies: Iterable[Message]) -> SumResult:
        """The sum; a node that failed, refused or sent something else counts as vanished."""
        total, missing = np.zeros(about.size, np.int64 if about.bits else np.float64), dict(about.members)
        waiting = set(missing)
        problems: Counter[str] = Counter()
        refusals: Counter[str] = Counter()
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in waiting:
                # Of two answers of one node it can't be told which counts, and both would break its bound.
                return SumResult(None, "a node answered twice, or was not asked")
            waiting.remove(node)
            if (reason := refusal_in(reply, about.reasons)) is not None:
                refusals[reason] += len(missing[node])
            elif reply.has_error():
                problems[f"a node failed: {why(reply)}"] += 1
            elif (vector := protected_vector(reply, about.size, about.bits)) is None:
                problems[f"a node sent something else than {about.size} numbers"] += 1
            else:
                total += vector
                del missing[node]
        survivors = about.cohort - sum(map(len, missing.values()))
        if survivors < about.fewest:
            reason = _too_few(about, survivors, problems, refusals)
            return SumResult(None, reason, survivors, refusals=refusals)
        total = total % (1 << about.bits) if about.bits else total
        return SumResult(total, "", survivors, refusals=refusals)


def refusal_in(reply: Message, known: Collection[str]) -> str | None:
    """The reason, of those known, for which a client refuses, or None if the reply is no refusal."""
    if reply.has_error() or set(reply.content) != {REFUSAL} or REFUSAL not in reply.content.config_records:
        return None
    reason = reply.content.config_records[REFUSAL].get("reason")
    return reason if isinstance(reason, str) and reason in known else "no reason that is known"


def protected_vector(reply: Message, size: int, bits: int) -> np.ndarray | None:
    """The vector [size] that a reply holds, or None if it holds anything else or more.

    With `bits` b uint32 below 2^b, without finite float32.
    """
    if set(reply.content) != {VECTOR} or VECTOR not in reply.content.array_records:
        return None
    arrays = Arrays(reply.content.array_records[VECTOR])
    if len(arrays.record) != 1:
        return None
    try:
        vector = arrays.read(next(iter(arrays.record)), np.uint32 if bits else np.float32, (size,))
    except Malformed:
        return None
    good = (vector < 1 << bits).all() if bits else np.isfinite(vector).all()
    return vector if good else None


def _is_vector(about: SumRound, reply: Message) -> bool:
    return not reply.has_error() and protected_vector(reply, about.size, about.bits) is not None


def _too_few(about: SumRound, survivors: int, problems: Counter[str], refusals: Counter[str]) -> str:
    """Why the round is dropped, in one line."""
    causes = [*problems, *(f"clients refused: {reason}" for reason in refusals)]
    silent = "" if causes else ", the others sent no answer in time"
    because = f" ({'; '.join(causes)})" if causes else silent
    return f"{survivors} of {about.cohort} members survived, {about.fewest} are needed{because}"
