"""Whoever vanishes or lies, and whenever: a sum is exact or not had, as an independent account of it says.

Examples are the same in every run (profile `same`). To draw new ones for some minutes:

    HYPOTHESIS_PROFILE=search pytest tests/secure_sum/test_secagg_properties.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message
from forgeries import IGNORED, LOST, Forgery, flipped, late
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from sum_trial import Trial, as_it_is, failed, spread, without
from sum_trial import trial as make_trial

from pina_flwr.secure_sum.parameters import agreement
from pina_flwr.secure_sum.session import LARGEST_ID, Rules
from pina_flwr.secure_sum.wire import PHASES, Header

NO_EXPLAINING = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # it takes minutes
COMMON = settings(deadline=None, phases=NO_EXPLAINING, suppress_health_check=list(HealthCheck))
settings.register_profile("same", COMMON, derandomize=True, database=None, max_examples=40)
settings.register_profile("search", COMMON, max_examples=1500)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
MORE = settings(PROFILE, max_examples=3 * PROFILE.max_examples)  # where sums are small

UNSIGNED = tuple(phase for phase in PHASES if phase != "agree")


@dataclass
class Losses:
    """Who vanishes in which phase, and how: the reply does not arrive, is an error, or leaves members out."""

    phase_of: Mapping[int, str]
    how: Mapping[str, str]

    def __call__(self, phase: str, request: Message, reply: Message) -> list[Message]:
        asked = Header.from_record(request.content).members
        lost = [member for member in asked if self.phase_of.get(member) == phase]
        if lost and reply.has_content():
            if len(lost) == len(asked) and self.how[phase] == "silent":
                return []
            if len(lost) == len(asked) and self.how[phase] == "failed":
                return [failed(reply, request)]
            return [without(reply, lost)]
        return [reply]


@dataclass
class Account:
    """What a sum must come to: in which phase it is given up, if at all, and who is lost in each."""

    ended: str = ""
    survivors: frozenset[int] = frozenset()
    lost: dict[str, int] = field(default_factory=dict)


def account(trial: Trial, phase_of: Mapping[int, str]) -> Account:
    """Follow the protocol's description, with the graph that the server told nodes."""
    rules, fewest = trial.rules, max(trial.fewest, 2)
    cohort = {member for own in trial.members.values() for member in own}
    found = Account()

    def left(members: set[int], phase: str) -> set[int]:
        stay = {member for member in members if phase_of.get(member) != phase}
        found.lost[phase] = len(members) - len(stay)
        return stay

    def end(phase: str) -> Account:
        found.ended = phase
        found.lost = {phase: count for phase, count in found.lost.items() if count}
        return found

    advertised = left(cohort, "advertise")
    if len(advertised) < fewest:
        return end("advertise")
    try:
        threshold = rules.parameters(len(advertised)).threshold
    except ValueError:
        return end("advertise")
    signers = agreement(len(advertised), rules.corrupted) if rules.signed else 0

    shared, graph = left(advertised, "share"), trial.graph()

    def helped(helpers: set[int]) -> bool:
        return all(len(helpers & set(graph[member])) >= threshold for member in shared)

    if len(shared) < max(fewest, signers) or not helped(shared):
        return end("share")
    masked = left(shared, "mask")
    found.survivors = frozenset(masked)
    if len(masked) < max(fewest, signers) or not helped(masked):
        return end("mask")
    agreed = left(masked, "agree") if rules.signed else masked
    if len(agreed) < signers:
        return end("agree")
    return end("" if helped(left(agreed, "unmask")) else "unmask")


@st.composite
def rules(draw: st.DrawFn, cohort: int) -> Rules:
    dropout, corrupted = draw(st.sampled_from([0.0, 0.1, 0.2, 0.3])), draw(st.sampled_from([0.0, 0.1, 0.3]))
    signed, given_k = draw(st.booleans()), draw(st.booleans())
    if signed or not given_k:
        return Rules(dropout, corrupted, signed=signed)
    neighbours = 2 * draw(st.integers(1, max(1, min(10, (cohort + 1) // 2))))
    threshold = draw(st.sampled_from([0, *range(neighbours // 2 + 1, neighbours + 1)]))
    return Rules(dropout, corrupted, neighbours, threshold)


@st.composite
def trials(draw: st.DrawFn, cohorts: st.SearchStrategy[int]) -> Trial:
    cohort, size, bits = draw(cohorts), draw(st.integers(1, 300)), draw(st.integers(8, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = rng.permutation(cohort).tolist()
    if draw(st.booleans()):  # ids as large as they may be, and no two in a row
        ids = [LARGEST_ID - 3**7 * member for member in ids]
    top = (1 << bits) - 1
    low = draw(st.sampled_from([0, top]))  # all numbers random, or all as large as they may be
    vectors = {member: rng.integers(low, top + 1, size, np.uint32) for member in ids}
    members = spread(ids, draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)))
    fewest = draw(st.sampled_from([1, 2, cohort // 2, 2 * cohort // 3, cohort - 1]))
    return Trial(draw(rules(cohort)), members, vectors, bits, max(1, fewest))


@st.composite
def losses(draw: st.DrawFn, trial: Trial) -> Losses:
    """Up to a few more than may be lost, each in a phase of its own, and at times a whole node."""
    ids = sorted(trial.vectors)
    phases = draw(st.lists(st.sampled_from(PHASES if trial.rules.signed else UNSIGNED), min_size=1))
    try:
        parameters = trial.rules.parameters(len(ids))
        most = min(parameters.neighbours - parameters.threshold + 2, len(ids))
    except ValueError:
        most = 1
    lost = draw(st.lists(st.sampled_from(ids), max_size=draw(st.integers(0, most)), unique=True))
    phase_of = {member: draw(st.sampled_from(phases)) for member in lost}
    if draw(st.booleans()):
        phase_of |= dict.fromkeys(trial.members[draw(st.sampled_from(sorted(trial.members)))], phases[0])
    how = {phase: draw(st.sampled_from(["silent", "failed", "left out"])) for phase in PHASES}
    return Losses(phase_of, how)


def check(trial: Trial, lost: Losses) -> Account:
    """One sum, compared with the account of it."""
    trial.change = lost
    result = trial.run()
    expected = account(trial, lost.phase_of)
    order = [phase for phase in PHASES if trial.rules.signed or phase != "agree"]
    last = expected.ended or "unmask"
    assert trial.phases() == order[: order.index(last) + 1]  # so nothing was unmasked if it ended before
    assert result.survivors == len(expected.survivors)
    assert result.lost == expected.lost
    assert result.ignored == 0
    if expected.ended:
        assert result.total is None
        assert result.reason
    else:
        assert result.reason == ""
        assert result.total is not None
        assert result.total.dtype == np.int64
        assert np.array_equal(result.total, trial.plain(expected.survivors))
    return expected


@settings(PROFILE)
@given(st.data())
def test_the_sum_is_exact_or_not_had(data: st.DataObject) -> None:
    trial = data.draw(trials(st.integers(3, 60)), label="trial")
    lost = data.draw(losses(trial), label="losses")
    event(f"ended: {check(trial, lost).ended or 'no'}")


@settings(MORE)
@given(st.data())
def test_of_a_few_members(data: st.DataObject) -> None:
    trial = data.draw(trials(st.integers(3, 10)), label="trial")
    lost = data.draw(losses(trial), label="losses")
    event(f"ended: {check(trial, lost).ended or 'no'}")


# Lies -----------------------------------------------------------------------------------------------------

LIES: dict[str, Forgery] = LOST | {kind: forgery for kind, (forgery, _) in IGNORED.items()} | {"late": late}
FLIPS = ("bits flipped", "bits flipped, then the true one")


@dataclass
class Liars:
    """What each node makes of its reply in some phases. places: where bits are flipped."""

    lies: Mapping[tuple[int, str], str]
    places: list[int]
    trial: Trial = field(repr=False)

    def __call__(self, phase: str, request: Message, reply: Message) -> list[Message]:
        kind = self.lies.get((request.metadata.dst_node_id, phase))
        if kind is None or reply.has_error() or not Header.from_record(reply.content).members:
            return [reply]
        if kind not in FLIPS:
            return LIES[kind](self.trial, request, reply)
        changed = [] if (lie := flipped(reply, self.places)) is None else [lie]
        return changed + ([reply] if kind == FLIPS[1] else [])


@settings(MORE)
@given(st.data())
def test_lies_never_count(data: st.DataObject) -> None:
    """Nothing raises, and a sum is that of the members that the server tells nodes have survived."""
    rules = data.draw(st.sampled_from([Rules(0.4), Rules(0.4, neighbours=4), Rules(0.4, signed=True)]))
    trial = make_trial(nodes=4, per=data.draw(st.integers(1, 2)), size=3, rules=rules)
    # A masked vector with bits flipped is another vector, and nobody can tell.
    at = st.tuples(st.sampled_from(sorted(trial.members)), st.sampled_from(PHASES))
    lies = data.draw(st.dictionaries(at, st.sampled_from([*LIES, *FLIPS]), max_size=5), label="lies")
    lies = {at: kind for at, kind in lies.items() if at[1] != "mask" or kind not in FLIPS}
    places = data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=3), label="places")
    trial.change = Liars(lies, places, trial)
    result = trial.run()
    phase = "agree" if rules.signed else "unmask"
    asked = [Header.from_record(one.request.content) for one in trial.passed if one.phase == phase]
    survivors = {member for header in asked for member in header.members}
    event("no sum" if result.total is None else "a sum")
    if result.total is None:
        assert result.reason
    else:
        assert result.survivors == len(survivors) >= 2
        assert np.array_equal(result.total, trial.plain(survivors))
    trial.change = as_it_is
    trial.passed.clear()
    after = trial.run(trial.about(2))
    assert after.total is not None
    assert np.array_equal(after.total, trial.plain(trial.vectors))
