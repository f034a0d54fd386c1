import itertools
import json
import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from pina_flwr.config import RunConfig, parse
from pina_flwr.privacy import accountant
from pina_flwr.privacy.guarantee import (
    Bound,
    Subject,
    caveats,
    describe,
    epsilon_so_far,
    guarantee,
)
from pina_flwr.privacy.plan import POSITIONS, Shapes, plan
from pina_flwr.privacy.releases import (
    DiscreteGaussianRelease,
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

USERS = 232
Q, T_IN, T_TR = 0.215, 10, 20
SHAPES = Shapes(256, 1674)  # of tiny-vit
GAUSSIAN: dict[str, Any] = {"mechanism": "gaussian"}
MECHANISMS = ["skellam", "discrete-gaussian", "gaussian"]
WITHOUT_STAGE1: list[dict[str, Any]] = [
    {"strategy": "fedavg"},
    {"strategy": "pina-ri"},
    {"strategy": "oracle"},
    {"strategy": "pina", "stage1": "random"},
    {"strategy": "fedavg", "stage1": "sketch"},
]


def configured(**options: Any) -> RunConfig:
    usual = {"secure_sum": "trusted"}  # which adds vectors of every mechanism
    return parse({name.replace("_", "-"): value for name, value in (usual | options).items()})


def subject(users: int = USERS, earlier: tuple[Release, ...] = (), **options: Any) -> Subject:
    config = configured(**options)
    return Subject(config, plan(config, users, SHAPES, earlier), users, SHAPES, earlier)


def epsilon(*releases: Release, delta: float = USERS**-1.1) -> float:
    return accountant.epsilon(releases, delta)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_recipients_get_the_epsilon_that_was_asked_for(mechanism: str) -> None:
    held = guarantee(subject(mechanism=mechanism))
    assert held.delta == pytest.approx(USERS**-1.1)
    assert 0.99 * 8 < held.recipient.epsilon <= 8 < held.server.epsilon < math.inf
    assert held.sketch is None
    for bound in (held.recipient, held.server):
        assert bound.epsilon == bound.as_paper_counts == epsilon(*bound.releases)
        assert bound.reason == ""


def test_figures_of_the_gaussian_mechanism() -> None:
    """Written out: sampled towards recipients, unsampled and up to the cap towards the server."""
    about = subject(**GAUSSIAN, participation_cap=T_TR)
    z1, z2 = about.noise.stage1, about.noise.stage2
    held = guarantee(about)
    assert held.recipient.epsilon == epsilon(GaussianRelease(z1, Q, T_IN), GaussianRelease(z2, Q, T_TR))
    assert held.server.epsilon == epsilon(GaussianRelease(z1, 1.0, T_IN), GaussianRelease(z2, 1.0, T_TR))
    capped = guarantee(replace(about, config=replace(about.config, participation_cap=3)))
    assert capped.recipient == held.recipient
    of_updates = GaussianRelease(z2, 1.0, 3)
    least, most = (epsilon(GaussianRelease(z1, 1.0, n), of_updates) for n in (3, 4))
    assert least <= capped.server.epsilon <= most  # the round of the mean may come on top


@pytest.mark.parametrize("options", WITHOUT_STAGE1, ids=str)
def test_without_stage1_the_budget_is_stage2s(options: dict[str, Any]) -> None:
    held = guarantee(subject(**options))
    assert 0.99 * 8 < held.recipient.epsilon <= 8 < held.server.epsilon < math.inf
    assert held.sketch is None


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_without_amplification_recipient_and_server_agree(mechanism: str) -> None:
    held = guarantee(subject(sampling_rate=1.0, mechanism=mechanism))
    assert held.recipient == held.server


def test_given_noise_multiplier() -> None:
    held = guarantee(subject(noise_multiplier=1.0, **GAUSSIAN))
    assert held.recipient.epsilon == epsilon(GaussianRelease(1.0, Q, T_IN + T_TR))


@pytest.mark.parametrize("strategy", ["pina", "fedavg", "ifca"])
def test_without_privacy_there_is_no_epsilon(strategy: str) -> None:
    about = subject(users=1, strategy=strategy, epsilon=math.inf)
    held = guarantee(about)
    for bound in (held.recipient, held.server):
        assert bound.epsilon == bound.as_paper_counts == math.inf
        assert "No noise" in bound.reason
    assert epsilon_so_far(about, 0, 1) == math.inf
    assert epsilon_so_far(about, 0, 0) == 0


def test_under_local_dp_recipients_are_told_what_the_server_is() -> None:
    about = subject(strategy="ifca", secure_sum="secagg+", participation_cap=7)
    held, text = guarantee(about), describe(about)
    assert held.recipient == held.server
    assert held.recipient.releases == (ZcdpRelease(1 / (2 * about.noise.stage2**2), 7),)
    assert 0.99 * 8 < held.recipient.epsilon <= 8
    assert held.sketch is None
    assert epsilon_so_far(about, 0, 7) == held.recipient.epsilon
    assert epsilon_so_far(about, 0, 6) < held.recipient.epsilon
    for side in ("recipient", "server"):
        assert text[side]["amplification"] == "None: the noise is local."
        assert "7 of 20 rounds of training" in text[side]["participation"]
    assert "noisy update" in text["server"]["sees"]
    assert "each user" in text["mechanism"]
    assert text["dropout"] is text["simulated"] is None
    assert text["recipient"]["tighter"] < held.recipient.epsilon
    said = caveats(about)
    assert "noise-cohort-size does not apply" in said[0]
    assert not any("SecAgg+" in sentence or "colluding" in sentence for sentence in said)


def test_normalised_updates_are_said_to_be_so() -> None:
    plain, nova = (describe(subject(strategy=s)) for s in ("fedavg", "fednova"))
    (more,) = set(nova["assumptions"]) - set(plain["assumptions"])
    assert "before they clip" in more
    assert nova["recipient"] == plain["recipient"]
    assert nova["server"] == plain["server"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_reproducible_noise_has_no_epsilon(mechanism: str) -> None:
    about = subject(mechanism=mechanism, reproducible_noise=True)
    held = guarantee(about)
    for bound in (held.recipient, held.server):
        assert bound.epsilon == bound.as_paper_counts == math.inf
        assert "reproducible-noise" in bound.reason
    assert epsilon_so_far(about, 1, 0) == math.inf
    assert "reproducible-noise" in caveats(about)[1]
    assert describe(about)["recipient"]["epsilon"] is None


class TestPaperSketch:
    """Positions have no finite ε; values count as an unamplified Gaussian of one release a round."""

    about = subject(stage1="sketch", sketch="paper", participation_cap=T_IN, **GAUSSIAN)

    def test_strict_infinity_towards_all_and_the_budget_as_the_paper_counts(self) -> None:
        held = guarantee(self.about)
        assert held.sketch is not None
        for bound in (held.recipient, held.server, held.sketch):
            assert bound.epsilon == math.inf
            assert bound.reason == POSITIONS
        assert 0.99 * 8 < held.recipient.as_paper_counts <= 8
        z1, z2 = self.about.noise.stage1, self.about.noise.stage2
        assert held.recipient.as_paper_counts == epsilon(
            GaussianRelease(z1, Q, 1),  # the private mean
            ZcdpRelease(1 / (2 * z1**2), T_IN - 1),
            GaussianRelease(z2, Q, T_TR),
        )

    def test_a_single_sketch(self) -> None:
        sketch = guarantee(self.about).sketch
        assert sketch is not None
        assert sketch.as_paper_counts == epsilon(ZcdpRelease(1 / (2 * self.about.noise.stage1**2), 1))

    def test_towards_the_server_also_if_a_user_sends_it_once(self) -> None:
        """Whoever sends a sketch need not have been in the round of the mean."""
        options: dict[str, Any]
        for options in ({}, {"participation_cap": 1}, {"sketch_centre": "none"}):
            held = guarantee(subject(stage1="sketch", sketch="paper", **options))
            assert held.server.epsilon == math.inf
            assert POSITIONS in held.server.reason

    def test_so_far(self) -> None:
        mean_only = epsilon(GaussianRelease(self.about.noise.stage1, Q, 1))
        assert epsilon_so_far(self.about, 1, 0) == mean_only
        assert epsilon_so_far(self.about, 2, 0) == math.inf


@pytest.mark.parametrize("kind", ["projection", "coordinates", "private-support"])
def test_sketches_with_a_guarantee(kind: str) -> None:
    about = subject(stage1="sketch", sketch=kind)
    held = guarantee(about)
    assert held.sketch is not None
    for bound in (held.recipient, held.server, held.sketch):
        assert bound.epsilon == bound.as_paper_counts < math.inf
        assert bound.reason == ""
    assert 0.99 * 8 < held.recipient.epsilon <= 8
    assert held.sketch.epsilon == epsilon(ZcdpRelease(1 / (2 * about.noise.stage1**2), 1))
    assert held.sketch.epsilon < 0.3 * 8  # part of stage 1's share
    assert epsilon_so_far(about, T_IN, 0) < 0.3 * 8


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("stage1", ["dp-kmeans", "sketch"])
def test_epsilon_so_far_grows_to_the_guarantee(mechanism: str, stage1: str) -> None:
    about = subject(mechanism=mechanism, stage1=stage1, t_in=4, t_tr=4)
    path = [epsilon_so_far(about, t, 0) for t in range(5)]
    path += [epsilon_so_far(about, 4, t) for t in range(1, 5)]
    assert path[0] == 0
    if stage1 == "dp-kmeans":
        assert all(a < b for a, b in itertools.pairwise(path))
    assert path == sorted(path)
    assert path[-1] == guarantee(about).recipient.epsilon


class TestEarlierRuns:
    """A ledger holds releases of any mechanism; all of them count, the server's without amplification."""

    earlier = (
        SkellamRelease(1e4, 1e3, 4e6, Q, 6),
        DiscreteGaussianRelease(1e3, 4e6, 50, 4096, Q, 2),
        GaussianRelease(2.0, Q, 5),
        ZcdpRelease(0.01, 2),
    )

    def test_count_towards_both(self) -> None:
        about, alone = subject(earlier=self.earlier), subject()
        held = guarantee(about)
        assert 0.99 * 8 < held.recipient.epsilon <= 8
        assert held.recipient.epsilon == epsilon(*self.earlier, *alone_releases(about))
        unsampled = [r if isinstance(r, ZcdpRelease) else replace(r, sampling_rate=1.0) for r in self.earlier]
        assert held.server.epsilon == epsilon(*unsampled, *alone_releases(about, to_server=True))
        assert guarantee(alone).sketch == held.sketch is None
        assert epsilon_so_far(about, 0, 0) == epsilon(*self.earlier)

    def test_without_a_guarantee_spoil_everything_after(self) -> None:
        about = replace(subject(), earlier=(UnprotectedRelease(POSITIONS, 1),))
        held = guarantee(about)
        assert held.recipient.epsilon == held.server.epsilon == epsilon_so_far(about, 0, 0) == math.inf
        assert held.recipient.as_paper_counts <= 8
        assert held.recipient.reason == POSITIONS

    def test_are_counted_in_the_report(self) -> None:
        about = subject(strategy="fedavg", t_tr=2)
        assert describe(about)["earlier_releases"] is None
        assert describe(replace(about, earlier=self.earlier[2:]))["earlier_releases"] == 7


def alone_releases(about: Subject, *, to_server: bool = False) -> list[Release]:
    """What the run itself releases in all of its rounds."""
    return replace(about, earlier=()).releases(T_IN, T_TR, to_server=to_server)


# The report -------------------------------------------------------------------------------------------


def test_description_of_a_simulated_cohort() -> None:
    options: dict[str, Any] = {
        "strategy": "fedavg",
        "t_tr": 2,
        "sampling_rate": 0.1,
        "noise_multiplier": 1.0,
        "noise_cohort_size": 3000,
    }
    simulated = describe(subject(users=300, **options))["simulated"]
    assert simulated["noise_cohort_size"] == 3000
    assert simulated["expected_cohort"] == pytest.approx(30)
    assert "3000 users a round, not of this run" in simulated["note"]
    assert "100 times less noise" in simulated["note"]
    assert "δ is not under 1 / 30000" in simulated["note"]
    assert "δ" not in describe(subject(users=300, **options, delta=1e-6))["simulated"]["note"]
    for size in (0, 30):
        assert describe(subject(users=300, **options | {"noise_cohort_size": size}))["simulated"] is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mechanism": "discrete-gaussian"},
        GAUSSIAN,
        {"stage1": "sketch"},
        {"stage1": "sketch", "sketch": "paper"},
        {"reproducible_noise": True},
        {"epsilon": math.inf},
        {"strategy": "ifca", "epsilon": math.inf},
    ],
    ids=str,
)
def test_description_is_json_with_null_for_no_guarantee(options: dict[str, Any]) -> None:
    about = subject(**options)
    held, text = guarantee(about), describe(about)
    assert json.loads(json.dumps(text, allow_nan=False)) == text
    for name in ("recipient", "server", "sketch"):
        bound: Bound | None = getattr(held, name)
        if bound is None:
            assert text[name] is None
            continue
        if math.isinf(bound.epsilon):
            assert text[name]["epsilon"] is None
            assert text[name]["tighter"] is None
            assert text[name]["reason"] == bound.reason != ""
        else:
            assert text[name]["epsilon"] == bound.epsilon
            assert "reason" not in text[name]
        differs = bound.as_paper_counts != bound.epsilon
        assert text[name].get("as_paper_counts") == (bound.as_paper_counts if differs else None)


def test_the_tighter_accountant_stands_beside() -> None:
    """Numerical composition of the same Gaussian mechanism: a little under RDP's ε, and never over it."""
    text = describe(subject(**GAUSSIAN))
    for name in ("recipient", "server"):
        assert 0.8 * text[name]["epsilon"] < text[name]["tighter"] < text[name]["epsilon"]
    assert "dp-accounting" in text["accountants"]["tighter"]
    assert "guaranteed" not in text["accountants"]["tighter"]
    integers = describe(subject())
    assert "not guaranteed" in integers["accountants"]["tighter"]
    assert 0.8 * integers["recipient"]["epsilon"] < integers["recipient"]["tighter"] < 8


def test_description_names_mechanism_and_dropout() -> None:
    text = describe(subject(bits=18, dropout_tolerance=0.2, colluding_share=0.05))
    assert "Skellam" in text["mechanism"]
    assert "2^18" in text["mechanism"]
    assert "20% of a cohort" in text["dropout"]
    assert "5% collude" in text["dropout"]
    assert "more noise than ε needs" in text["dropout"]
    assert "removed" in describe(subject(dropout_noise="removable"))["dropout"]
    assert "discrete Gaussian" in describe(subject(mechanism="discrete-gaussian"))["mechanism"]
    floats = describe(subject(**GAUSSIAN))
    assert "floats" in floats["mechanism"]
    assert "opacus" in floats["accountants"]["epsilon"]
    assert describe(subject(epsilon=math.inf))["dropout"] is None
    capped = describe(subject(t_in=4, participation_cap=7))["server"]["participation"]
    assert "1 of 1 rounds of the private mean, 3 of 3 rounds of k-means, 7 of 20 rounds of training" in capped


def test_description_names_what_epsilon_does_not_cover() -> None:
    text = describe(subject(**GAUSSIAN))
    assert "None" in text["server"]["amplification"]
    assumptions = " ".join(text["assumptions"])
    for word in (
        "ideal functionality",
        "follows the protocol",
        "floating-point",
        "Diagnostics",
        "several users",
        "colluding-share = 0",
    ):
        assert word in assumptions
    quiet = " ".join(
        describe(subject(diagnostics=False, deal="disjoint", colluding_share=0.1))["assumptions"]
    )
    for word in ("Diagnostics", "several", "floating-point", "colluding-share = 0"):
        assert word not in quiet
    assert "At most 10% of a cohort" in quiet


def test_loose_figures_are_warned_of_once_and_not_while_calibrating(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        about = subject(delta=0.999, epsilon=7.9)  # not in the cache of `plan`
        assert "loose" not in caplog.text
        describe(about)
        guarantee(about)
    (loose,) = [record.getMessage() for record in caplog.records if "loose" in record.getMessage()]
    assert "recipients" in loose


class TestCaveats:
    def of(self, **options: Any) -> list[str]:
        return caveats(subject(**options))

    def test_borrowed_noise_comes_first_then_delta_then_what_is_trusted(self) -> None:
        said = self.of(delta=0.01, noise_multiplier=1.0, **GAUSSIAN)
        for sentence, start in zip(
            said,
            [
                "The noise is that of a cohort of 10,000 users: ε holds for a deployment",
                "δ is not under 1 / 232,",
                "δ is not under 1 / 46512,",
                "The secure sum 'trusted' is an ideal functionality",
                "The server is semi-honest",
                "No client tells the server its share",
                "The noise is continuous Gaussian",
                "Diagnostics are logged without noise.",
            ],
            strict=True,
        ):
            assert sentence.startswith(start)

    def test_only_what_applies(self) -> None:
        text = " ".join(self.of(noise_cohort_size=0, delta=1e-6, diagnostics=False))
        assert not any(word in text for word in ("cohort of", "δ", "Diagnostics", "continuous"))
        assert "positions" in " ".join(self.of(stage1="sketch", sketch="paper"))
        assert "positions" not in " ".join(self.of(stage1="sketch"))
        assert self.of(epsilon=math.inf) == ["No noise is added."]
