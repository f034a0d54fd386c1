import itertools
import json
import logging
import math
from typing import Any

import pytest

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.privacy import accountant
from pina_flwr.privacy.guarantee import (
    NoisePlan,
    caveats,
    describe,
    epsilon_so_far,
    guarantee,
    plan,
    planned_rounds,
    released,
)
from pina_flwr.privacy.releases import GaussianRelease, UnprotectedRelease

USERS = 232
Q, T_IN, T_TR = 0.215, 10, 20


def configured(**options: Any) -> RunConfig:
    return parse({name.replace("_", "-"): value for name, value in options.items()})


def epsilon(*releases: GaussianRelease, delta: float = USERS**-1.1) -> float:
    return accountant.epsilon(releases, delta)


def test_stage1_gets_its_share_and_both_stages_the_whole() -> None:
    config = configured(stage1_budget=0.3, epsilon=8.0)
    noise = plan(config, USERS)
    assert noise.delta == pytest.approx(USERS**-1.1)
    alone = GaussianRelease(noise.stage1, Q, T_IN)
    assert 0.99 * 0.3 * 8 < epsilon(alone) <= 0.3 * 8
    both = epsilon(alone, GaussianRelease(noise.stage2, Q, T_TR))
    assert 0.99 * 8 < both <= 8
    assert guarantee(config, noise).recipient.epsilon == both


def test_no_stage1_budget_means_one_noise_multiplier() -> None:
    config = configured(stage1_budget=0.0, epsilon=2.0)
    noise = plan(config, USERS)
    assert noise.stage1 == noise.stage2
    assert 0.99 * 2 < epsilon(GaussianRelease(noise.stage2, Q, T_IN + T_TR)) <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fedavg"},
        {"strategy": "pina-ri"},
        {"strategy": "oracle"},
        {"strategy": "pina", "stage1": "random"},
        {"strategy": "fedavg", "stage1": "sketch"},
    ],
)
def test_without_stage1_the_budget_is_stage2s(options: dict[str, str]) -> None:
    config = configured(**options)
    noise = plan(config, USERS)
    assert planned_rounds(config) == (0, T_TR)
    assert noise.stage1 == 0
    assert 0.99 * 8 < epsilon(GaussianRelease(noise.stage2, Q, T_TR)) <= 8
    held = guarantee(config, noise)
    assert held.recipient.epsilon <= 8 < held.server.epsilon < math.inf
    assert held.sketch is None


def test_server_has_no_amplification_and_sees_all_rounds() -> None:
    config = configured()
    noise = plan(config, USERS)
    expected = epsilon(GaussianRelease(noise.stage1, 1.0, T_IN), GaussianRelease(noise.stage2, 1.0, T_TR))
    assert guarantee(config, noise).server.epsilon == expected


def test_without_amplification_recipient_and_server_agree() -> None:
    config = configured(sampling_rate=1.0)
    held = guarantee(config, plan(config, USERS))
    assert held.recipient == held.server


def test_given_noise_multiplier_wins_over_epsilon() -> None:
    config = configured(noise_multiplier=1.0)
    noise = plan(config, USERS)
    assert (noise.stage1, noise.stage2) == (1.0, 1.0)
    held = guarantee(config, noise)
    assert held.recipient.epsilon == epsilon(GaussianRelease(1.0, Q, T_IN + T_TR))
    assert plan(configured(noise_multiplier=1.0, epsilon=math.inf), USERS) == noise
    assert plan(configured(noise_multiplier=1.0, strategy="fedavg"), USERS).stage1 == 0


@pytest.mark.parametrize("strategy", ["pina", "fedavg", "ifca"])
def test_without_privacy_there_is_no_noise_and_no_epsilon(strategy: str) -> None:
    config = configured(strategy=strategy, epsilon=math.inf)
    noise = plan(config, 1)
    assert noise == NoisePlan(0.0, 0.0, 0.0)
    held = guarantee(config, noise)
    for bound in (held.recipient, held.server):
        assert bound.epsilon == bound.as_paper_counts == math.inf
        assert "No noise" in bound.reason
    assert epsilon_so_far(config, noise, 0, 1) == math.inf
    assert epsilon_so_far(config, noise, 0, 0) == 0


def test_ifca_is_never_private() -> None:
    """`parse` refuses it already; a configuration built otherwise gets no further."""
    config = RunConfig(strategy="ifca", noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="ifca"):
        plan(config, USERS)
    assert guarantee(config, NoisePlan(0.0, 1.0, 1e-5)).recipient.epsilon == math.inf


class TestPaperSketch:
    """Positions have no finite ε; values count as an unamplified Gaussian of one release a round."""

    config = configured(stage1="sketch")

    def test_releases(self) -> None:
        noise = NoisePlan(3.0, 1.0, 1e-5)
        assert released(self.config, noise, T_IN, T_TR, Q) == [
            GaussianRelease(3.0, Q, 1),  # the private mean
            GaussianRelease(3.0, 1.0, T_IN - 1),
            GaussianRelease(1.0, Q, T_TR),
            UnprotectedRelease("A sketch shows which positions it keeps, and no noise hides them.", T_IN - 1),
        ]

    def test_without_a_private_mean_all_rounds_are_sketches(self) -> None:
        config = configured(stage1="sketch", sketch_centre="none")
        assert released(config, NoisePlan(3.0, 1.0, 1e-5), T_IN, 0, Q)[:2] == [
            GaussianRelease(3.0, Q, 0),
            GaussianRelease(3.0, 1.0, T_IN),
        ]

    def test_calibrated_as_the_paper_counts_with_a_strict_infinity(self) -> None:
        noise = plan(self.config, USERS)
        held = guarantee(self.config, noise)
        assert held.recipient.epsilon == held.server.epsilon == math.inf
        assert "positions" in held.recipient.reason
        assert 0.99 * 8 < held.recipient.as_paper_counts <= 8
        alone = epsilon(GaussianRelease(noise.stage1, Q, 1), GaussianRelease(noise.stage1, 1.0, T_IN - 1))
        assert 0.99 * 0.3 * 8 < alone <= 0.3 * 8

    def test_a_single_sketch(self) -> None:
        noise = plan(self.config, USERS)
        sketch = guarantee(self.config, noise).sketch
        assert sketch is not None
        assert sketch.epsilon == math.inf
        assert sketch.as_paper_counts == epsilon(GaussianRelease(noise.stage1, 1.0, 1))

    def test_needs_more_noise_than_secure_sums(self) -> None:
        assert plan(self.config, USERS).stage1 > plan(configured(), USERS).stage1

    def test_so_far(self) -> None:
        noise = plan(self.config, USERS)
        mean_only = epsilon(GaussianRelease(noise.stage1, Q, 1))
        assert epsilon_so_far(self.config, noise, 1, 0) == mean_only
        assert epsilon_so_far(self.config, noise, 2, 0) == math.inf
        assert mean_only < epsilon_so_far(self.config, noise, 2, 0, as_paper_counts=True) < 0.3 * 8


def test_epsilon_so_far_grows_to_the_guarantee() -> None:
    config = configured()
    noise = plan(config, USERS)
    path = [epsilon_so_far(config, noise, t, 0) for t in range(T_IN + 1)]
    path += [epsilon_so_far(config, noise, T_IN, t) for t in range(1, T_TR + 1)]
    assert path[0] == 0
    assert all(a < b for a, b in itertools.pairwise(path))
    assert path[-1] == guarantee(config, noise).recipient.epsilon
    assert guarantee(config, noise, 3, 0).recipient.epsilon == path[3]


def test_delta_under_one_over_users(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan(configured(noise_multiplier=1.0, delta=1e-3), USERS).delta == 1e-3
        assert not caplog.records
        assert plan(configured(noise_multiplier=1.0, delta=0.01), USERS).delta == 0.01
    assert "delta = 0.01" in caplog.text


def test_one_user_must_set_delta() -> None:
    options = {"noise_multiplier": 1.0, "noise_cohort_size": 0, "num_users": 1, "sampling_rate": 1.0}
    with pytest.raises(ConfigError, match="set delta"):
        plan(configured(**options), 1)
    assert plan(configured(**options, delta=1e-5), 1).delta == 1e-5
    with pytest.raises(ValueError, match="users"):
        plan(configured(**options), 0)


def test_noise_cohort_under_the_true_cohort_is_refused() -> None:
    def of(size: int) -> RunConfig:
        return configured(sampling_rate=0.1, noise_multiplier=1.0, noise_cohort_size=size)

    with pytest.raises(ConfigError, match=r"noise-cohort-size = 29.*q·\|K\| = 30"):
        plan(of(29), 300)
    for size in (0, 30, 31):
        assert plan(of(size), 300).stage2 == 1.0
    assert describe(of(30), plan(of(30), 300), 300)["simulated"] is None
    assert describe(of(0), plan(of(0), 300), 300)["simulated"] is None


def test_description_of_a_simulated_cohort() -> None:
    config = configured(sampling_rate=0.1, noise_multiplier=1.0, noise_cohort_size=3000)
    simulated = describe(config, plan(config, 300), 300)["simulated"]
    assert simulated["noise_cohort_size"] == 3000
    assert simulated["expected_cohort"] == pytest.approx(30)
    assert "3000 users a round, not of this run" in simulated["note"]
    assert "100 times less noise" in simulated["note"]
    assert "δ is not under 1 / 30000" in simulated["note"]
    strict = configured(sampling_rate=0.1, noise_multiplier=1.0, noise_cohort_size=3000, delta=1e-6)
    assert "δ" not in describe(strict, plan(strict, 300), 300)["simulated"]["note"]


def test_description_is_json_with_null_for_no_guarantee() -> None:
    for options in (
        {},
        {"stage1": "sketch"},
        {"epsilon": math.inf},
        {"strategy": "ifca", "epsilon": math.inf},
    ):
        config = configured(**options)
        noise = plan(config, USERS)
        held, text = guarantee(config, noise), describe(config, noise, USERS)
        assert json.loads(json.dumps(text, allow_nan=False)) == text
        for name in ("recipient", "server", "sketch"):
            bound = getattr(held, name)
            if bound is None:
                assert text[name] is None
            elif math.isinf(bound.epsilon):
                assert text[name]["epsilon"] is None
                assert text[name]["reason"] == bound.reason != ""
            else:
                assert text[name]["epsilon"] == bound.epsilon
                assert "reason" not in text[name]
    paper = describe(configured(stage1="sketch"), plan(configured(stage1="sketch"), USERS), USERS)
    assert paper["recipient"]["as_paper_counts"] <= 8
    assert "as_paper_counts" not in describe(configured(), plan(configured(), USERS), USERS)["recipient"]


def test_description_names_what_epsilon_does_not_cover() -> None:
    config = configured()
    text = describe(config, plan(config, USERS), USERS)
    assert "opacus" in text["accountant"]
    assert "None" in text["server"]["amplification"]
    assumptions = " ".join(text["assumptions"])
    for word in (
        "ideal functionality",
        "follow the protocol",
        "floating-point",
        "Diagnostics",
        "several users",
    ):
        assert word in assumptions
    quiet = configured(diagnostics=False, deal="disjoint")
    assert not {"Diagnostics", "several"} & set(
        " ".join(describe(quiet, plan(quiet, USERS), USERS)["assumptions"]).split()
    )


def test_loose_figures_are_warned_of_once_and_not_while_calibrating(caplog: pytest.LogCaptureFixture) -> None:
    config = configured(delta=0.999, epsilon=7.9)  # not in the cache of `plan`
    with caplog.at_level(logging.WARNING):
        noise = plan(config, USERS)
        assert "loose" not in caplog.text
        describe(config, noise, USERS)
        guarantee(config, noise)
    (loose,) = [record.getMessage() for record in caplog.records if "loose" in record.getMessage()]
    assert "recipients" in loose


class TestCaveats:
    def of(self, **options: Any) -> list[str]:
        config = configured(**options)
        return caveats(config, plan(config, USERS), USERS)

    def test_borrowed_noise_comes_first_then_delta_then_what_is_trusted(self) -> None:
        said = self.of(delta=0.01)
        for sentence, start in zip(
            said,
            [
                "The noise is that of a cohort of 10,000 users: ε holds for a deployment",
                "δ is not under 1 / 232,",
                "δ is not under 1 / 46512,",
                "The secure sum 'trusted' is an ideal functionality",
                "The server is trusted to follow the protocol",
                "The noise is continuous Gaussian",
                "Diagnostics are logged without noise.",
            ],
            strict=True,
        ):
            assert sentence.startswith(start)

    def test_only_what_applies(self) -> None:
        text = " ".join(self.of(noise_cohort_size=0, delta=1e-6, diagnostics=False))
        assert not any(word in text for word in ("cohort of", "δ", "Diagnostics"))
        assert "positions" in " ".join(self.of(stage1="sketch"))
        assert self.of(epsilon=math.inf) == ["No noise is added."]
