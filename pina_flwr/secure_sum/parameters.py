"""How many neighbours and shares a secure sum takes: k and t for which it is private and comes about.

Bell et al., «Secure Single-Server Aggregation with (Poly)Logarithmic Overhead» (CCS 2020), section 3, call
a graph good if no honest member has too many corrupted neighbours, the honest survivors are connected, and
each member keeps enough neighbours for its shares to be joined. Of n members at most c are corrupted (they
tell the server all they know) and at most D drop out. Which ones must not depend on the order that
`graph.draw` draws. Each member's two secrets, one for if it survives and the other for if it drops, are
shared among its k neighbours with threshold t. Seen from one member, those are k of the n - 1 others drawn
uniformly, so the corrupted among them number X ~ Hypergeometric(n - 1, c, k), and likewise the dropped ones
with D. The paper's three conditions, with the union bound over members, and what we prove about them:

exposed: the server gets both secrets of an honest member u. If it lies about u, a of the honest neighbours
    release shares of the one secret and b others shares of the other, but none releases both; the x
    corrupted ones release both. From a + x >= t, b + x >= t and a + b + x <= k follows x >= 2t - k: at most
    n P(X >= 2t - k). Hence 2t > k, always. (Without lies it takes x >= t, which implies that. The authors'
    own code, Google's fcp/secagg, uses 2t - k for a server that it calls semi-malicious.)

split: the honest survivors are not connected, so that the server sees the sum of each part. Survivors that
    follow each other on the circle are adjacent if fewer than k/2 removed members lie between them. If that
    fails at most once round the circle, the others link all survivors in one path. So a split takes two
    disjoint runs of k/2 removed members with a survivor in either gap between the runs. There are
    n (n - k - 1) / 2 such pairs (n starts of one run; the other, with a place free on both sides, starts at
    one of n - k - 1 places; each pair is counted twice), and all k places of one are removed with
    probability prod_{i<k} (r - i) / (n - i), r = c + D. The product of the two is the bound. It is near
    the truth, as such runs do split the survivors: only splits with several pairs are counted more than
    once. The simpler bound that rules out a single run, n (r/n)^(k/2), takes up to twice the k. Without
    corrupted members a split tells nothing, as the sum is stuck: a survivor next to a run of k/2 dropped
    members has at most k/2 < t neighbours left.

stuck: under t neighbours of some member survive, so that k - t + 1 or more drop out, and the sum is aborted:
    at most n P(Y >= k - t + 1), Y ~ Hypergeometric(n - 1, D, k). If the member itself drops out, only D - 1
    others do, which is less likely.

With fewer corrupted or dropped members than c and D each bound is smaller (every tail grows with the marked
members), so «at most» may be read as «exactly». In a complete graph all three are certain.

Not covered: a server that lies about who dropped to members all over the graph. If enough neighbours of
each neighbour of u believe that that one dropped, and enough of u's that u survived, u's vector is bare. With
k = 22 and t = 12 such lies exist that leave every member t neighbours, though nobody is corrupted (a maximum
flow finds them). Against that stands the agreement on one set of survivors, in a complete graph (`complete`,
`agreement`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np

from pina_flwr.secure_sum.graph import check_degree
from pina_flwr.secure_sum.shamir import MOST_HOLDERS

FAILURE = 2.0**-40
FEW = 10  # members up to which all are neighbours: it costs nothing, and leaves room for losses beyond D


@dataclass(frozen=True)
class Parameters:
    """neighbours: k, with whom each member masks and who hold its shares. threshold: t, shares to join."""

    neighbours: int
    threshold: int


@dataclass(frozen=True)
class Failures:
    """Upper bounds on the probability, over the graph, that a sum goes wrong; see the module's text.

    exposed: somebody's two secrets. split: sums of parts. stuck: no sum. They are at most 1; what is under
    1e-308 may be given as 0.
    """

    exposed: float
    split: float
    stuck: float


def choose(members: int, dropout: float, corrupted: float, failure: float = FAILURE) -> Parameters:
    """The fewest neighbours, and the lowest threshold for them, with which a sum seldom goes wrong.

    exposed + split and stuck are at most `failure` each. Neighbours are even, or all others where no fewer
    do or members are `FEW`. Of several thresholds the lowest leaves the most room for further dropouts.

    Raises:
        ValueError: bad numbers, or so many may drop out or be corrupted that there is no such pair.
    """
    if not 0 < failure < 1:
        raise ValueError(f"failure = {failure}: must be above 0 and below 1")
    everybody = complete(members, dropout, corrupted)
    if members <= FEW:
        return everybody
    n, dropped, colluding = members, *_counts(members, dropout, corrupted)
    k = 2
    while k < min(n - 1, MOST_HOLDERS):
        # A threshold needs 2t - k >= x and k - t + 1 >= y, so there is one if and only if k >= x + 2y - 2.
        # x and y never fall as k grows, so a k below the least that they ask for now can be skipped.
        vanish, collude = n * _tails(n - 1, dropped, k), n * _tails(n - 1, colluding, k)
        y = _first(vanish <= failure)
        if (least := _first(collude <= failure) + 2 * y - 2) > k:
            k = least + least % 2
            continue
        split = _split(n, k, colluding + dropped)
        if split <= failure and (x := _first(collude + split <= failure)) + 2 * y - 2 <= k:
            return Parameters(k, (k + x + 1) // 2)
        k += 2
    if k < n - 1:
        raise ValueError(
            f"dropout = {dropout}, corrupted = {corrupted}: of {n} members each would need over "
            f"{MOST_HOLDERS} neighbours; must be lower"
        )
    return everybody


def complete(members: int, dropout: float, corrupted: float) -> Parameters:
    """k = n - 1 and the lowest threshold for it, with which nobody is exposed while the rates hold.

    2t > k + c, so that nobody is exposed. Nobody is stuck while n - 1 - D >= t others survive, and then n - D
    >= t + 1 >= `agreement`: survivors are enough to agree, too. That holds if c + 2D <= n - 2. Rates that
    sum up to less than 1 (the dropped counted twice) may break that for some n by rounding (of 10 members at
    .3 and .3); there one loss fewer than D is sure to be borne. Nothing else depends on D.

    Raises:
        ValueError: bad numbers, or rates that leave no room for a threshold.
    """
    dropped, colluding = _counts(members, dropout, corrupted)
    rates = f"dropout = {dropout}, corrupted = {corrupted}: of {members} members"
    if colluding > members - 2:
        raise ValueError(
            f"{rates} {colluding} may be corrupted, must be at most {members - 2} (if none drop)"
        )
    most = (members - 2 - colluding) // 2
    if most < dropped and 2 * dropout + corrupted >= 1:
        raise ValueError(
            f"{rates} {dropped} may drop, must be at most {most} while {colluding} are corrupted"
        )
    return Parameters(members - 1, (members - 1 + colluding) // 2 + 1)


def agreement(members: int, corrupted: float) -> int:
    """T, how many of the n members must sign one set of survivors (consistency check, Bonawitz et al. 2017).

    2T > n + c: two sets with T signatures each would have 2T - n > c signers in common, an honest one among
    them, and an honest member signs once. `complete` sees to it that enough members survive.

    Raises:
        ValueError: bad numbers.
    """
    _, colluding = _counts(members, 0.0, corrupted)
    return (members + colluding) // 2 + 1


def failures(parameters: Parameters, members: int, dropout: float, corrupted: float) -> Failures:
    """What may go wrong with the given parameters, and how likely at most.

    Raises:
        ValueError: bad numbers, or parameters that do not go with so many members.
    """
    check(parameters, members)
    dropped, colluding = _counts(members, dropout, corrupted)
    k, t = parameters.neighbours, parameters.threshold
    exposed = members * float(_tails(members - 1, colluding, k)[2 * t - k])
    stuck = members * float(_tails(members - 1, dropped, k)[k - t + 1])
    return Failures(min(1.0, exposed), _split(members, k, colluding + dropped), min(1.0, stuck))


def check(parameters: Parameters, members: int) -> None:
    """Whether parameters make sense for so many members, however many drop out or are corrupted.

    Raises:
        ValueError: neighbours that are neither even nor all others, or a threshold not in (k/2, k].
    """
    k, t = parameters.neighbours, parameters.threshold
    check_degree(members, k)
    if not k < 2 * t <= 2 * k:
        raise ValueError(f"threshold = {t}: must be above half of {k} neighbours and at most {k}")


def _counts(members: int, dropout: float, corrupted: float) -> tuple[int, int]:
    """D and c. The small number makes up for rates like 0.29 that are a little below what they say."""
    if operator.index(members) < 2:
        raise ValueError(f"members = {members}: must be at least 2")
    for name, rate in (("dropout", dropout), ("corrupted", corrupted)):
        if not 0 <= rate < 1:
            raise ValueError(f"{name} = {rate}: must be at least 0 and below 1")
    return math.floor(members * dropout + 1e-9), math.floor(members * corrupted + 1e-9)


def _tails(others: int, marked: int, drawn: int) -> np.ndarray:
    """P(X >= v) for v = 0..drawn + 1, X the marked among `drawn` of the others: float64 [drawn + 2].

    From the ratios of neighbouring probabilities, in log space: to 1e-11 of each value, the smallest too, and
    all at once (scipy's `hypergeom` takes 0.2 ms for each value where n = 100,000).
    """
    fewest, most = max(0, drawn - (others - marked)), min(marked, drawn)
    v = np.arange(fewest, most, dtype=np.float64)
    ratios = (marked - v) * (drawn - v) / ((v + 1) * (others - marked - drawn + v + 1))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    chances = np.exp(logs - logs.max())
    tails = np.zeros(drawn + 2)
    tails[: fewest + 1] = 1.0
    # Summed from the small end, so that no small value drowns.
    tails[fewest + 1 : most + 1] = np.cumsum(chances[::-1])[::-1][1:] / chances.sum()
    return tails


def _split(members: int, neighbours: int, removed: int) -> float:
    """The bound on `split`: pairs of runs times the probability that all members in both are removed."""
    n, k = members, neighbours
    if k == n - 1 or removed < k:
        return 0.0
    if removed >= n:
        return 1.0
    i = np.arange(k)
    log = math.log(n * (n - k - 1) / 2) + float(np.log((removed - i) / (n - i)).sum())
    return math.exp(min(0.0, log))


def _first(allowed: np.ndarray) -> int:
    """The least v from 1 with allowed[v]; the last one is, as its probability is 0."""
    return 1 + int(np.argmax(allowed[1:]))
