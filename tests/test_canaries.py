"""The audit of the product as it is, and of builds that are broken in one place: it must tell them apart."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor
from typer.testing import CliRunner

from pina_flwr import canaries, client
from pina_flwr.canaries import Audit, audit_run
from pina_flwr.cli import app as pina
from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.privacy import encoding, noise, sum_mechanism
from pina_flwr.privacy.audit import AuditResult, gaussian_epsilon
from pina_flwr.privacy.policy import Offer
from pina_flwr.privacy.sum_mechanism import Budget, IntegerSum
from pina_flwr.secure_sum.interface import SumResult, SumRound
from pina_flwr.strategies import clustered

Z, DELTA = 1.5, 5e-4
INTEGERS = ("skellam", "discrete-gaussian")
MECHANISMS = (*INTEGERS, "gaussian")
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _known_draws(monkeypatch: Patch) -> None:
    """Coins, noise and keys of a test are ever the same, so that none fails by chance."""
    keys = count(1)

    def generator() -> np.random.Generator:
        return noise.keyed_generator(next(keys).to_bytes(noise.KEY_BYTES, "big"))

    monkeypatch.setattr(noise, "secret_generator", generator)
    monkeypatch.setattr(canaries, "secret_generator", generator)


def options(**values: Any) -> RunConfig:
    """The defaults but for z, that nobody vanishes unless said, and that a trusted party adds."""
    usual = {"noise-multiplier": Z, "dropout-tolerance": 0.0, "secure-sum": "trusted"}
    return parse(usual | {name.replace("_", "-"): value for name, value in values.items()})


def audited(users: int = 250, rounds: int = 10, nodes: int = 5, **values: Any) -> AuditResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canaries, "NODES", nodes)
        return audit_run(options(**values), users, rounds, DELTA)


# Users vanish down to 40 % where 20 % would do: of the noise, 2/5 must stay that was in vain at 100 %.
REMOVABLE = {"dropout_noise": "removable", "dropout_tolerance": 0.8, "users": 60, "rounds": 50}
# Each canary has its slot to itself, and most of its bound is for the count.
ALONE = {"users": 100, "rounds": 40, "nodes": 2, "clusters": 100, "count_share": 0.9, "mechanism": "gaussian"}


class TestProduct:
    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_claim_stands_against_an_audit_with_power(self, mechanism: str) -> None:
        result = audited(250, 66, mechanism=mechanism)
        assert result.holds
        assert result.canaries == 16_500  # few of a round: rounds pool
        assert 2.2 < result.claimed < 2.4
        assert 0.3 * result.claimed < result.bound < 0.8 * result.claimed
        assert 0.75 * result.claimed < result.estimate_low < result.estimate

    @pytest.mark.parametrize(
        "values",
        [
            {"dropout_tolerance": 0.4},
            {"dropout_tolerance": 0.4, "colluding_share": 0.2, "mechanism": "discrete-gaussian"},
            {"dropout_tolerance": 0.2, "colluding_share": 0.4, "mechanism": "gaussian"},
            REMOVABLE,
            REMOVABLE | {"dropout_tolerance": 0.4, "colluding_share": 0.2, "rounds": 40},
            ALONE,
            {"strategy": "fedavg"},
            {"clip_norm": 1e-3, "bits": 14},
        ],
        ids=str,
    )
    def test_no_noise_is_left_over_when_the_server_is_at_its_strongest(self, values: dict[str, Any]) -> None:
        """Neither more noise than claimed nor less, to three standard errors."""
        result = audited(**values)
        assert result.holds
        error = 3 * 2 / math.sqrt(result.canaries)
        low, high = (gaussian_epsilon(1 / Z + gap, DELTA) for gap in (-error, error))
        assert low < result.estimate < high


# Builds that are broken in one place ------------------------------------------------------------------


real_share, real_clip, real_open = Budget.share, client.clip, client.open_mechanism


def halved(patch: Patch) -> None:
    """A standard deviation of σ / 2."""
    patch.setattr(Budget, "share", lambda budget, *who: real_share(budget, *who) / 4)


def twice_the_cohort(patch: Patch) -> None:
    patch.setattr(Budget, "share", lambda budget, users, cohort: real_share(budget, users, 2 * cohort))


def everyone_adds(patch: Patch) -> None:
    """Shares that make σ² if nobody vanishes or colludes."""
    patch.setattr(Budget, "share", lambda budget, users, cohort: users * budget.sum_std**2 / cohort)


def half_a_variance(patch: Patch) -> None:
    """Poisson variables of mean μ/4 for noise of variance μ."""
    patch.setattr(sum_mechanism, "skellam", lambda draws, shape, mu: noise.skellam(draws, shape, mu / 2))


def half_a_multiplier(patch: Patch) -> None:
    def opened(config: RunConfig, step: str, z: float, *rest: Any) -> sum_mechanism.SumMechanism:
        return real_open(config, step, z / 2, *rest)

    patch.setattr(client, "open_mechanism", opened)


def noise_forgotten(patch: Patch) -> None:
    patch.setattr(IntegerSum, "_noise", lambda mechanism, *_: np.zeros(mechanism.size, np.int64))


def clip_skipped(patch: Patch) -> None:
    """Also past the encoder, which would refuse: see below."""
    patch.setattr(client, "clip", lambda vectors, bound: real_clip(vectors, torch.inf))
    patch.setattr(encoding, "_check_norms", lambda rows, clip_norm: None)


def count_outside_the_bound(patch: Patch) -> None:
    """The update is clipped to S instead of S·√(1 - κ²)."""
    patch.setattr(client, "clip", lambda vectors, bound: real_clip(vectors, 1.0))


def nobody_counts_as_vanished(patch: Patch) -> None:
    """Noise that survivors reveal is all that would be in vain if everyone had survived."""
    ask, remove = clustered.ClusteredTraining._ask_to_reveal, clustered.remove_excess

    def ask_for_all(self: clustered.ClusteredTraining, survivors: list[int], vanished: int) -> Sequence[Any]:
        return ask(self, survivors, 0)

    def remove_all(mechanism: IntegerSum, about: SumRound, result: SumResult) -> tuple[np.ndarray, int]:
        return remove(mechanism, about, dataclasses.replace(result, survivors=about.cohort))

    patch.setattr(clustered.ClusteredTraining, "_ask_to_reveal", ask_for_all)
    patch.setattr(clustered, "remove_excess", remove_all)


def half_an_account(patch: Patch) -> None:
    real = canaries.epsilon
    patch.setattr(canaries, "epsilon", lambda releases, delta: real(releases, delta) / 2)


def cases() -> list[Any]:
    found: list[tuple[str, Callable[[Patch], None], dict[str, Any]]] = [
        *(("noise halved", halved, {"mechanism": m}) for m in MECHANISMS),
        *(("clip skipped", clip_skipped, {"mechanism": m}) for m in MECHANISMS),
        *(
            ("noise for twice the cohort", twice_the_cohort, {"mechanism": m, "rounds": 16})
            for m in MECHANISMS
        ),
        ("z halved", half_a_multiplier, {}),
        ("half the variance", half_a_variance, {"rounds": 16}),
        ("noise forgotten", noise_forgotten, {}),
        ("noise for those who vanish", everyone_adds, {"dropout_tolerance": 0.6}),
        ("noise of colluders counted", everyone_adds, {"colluding_share": 0.6}),
        ("too much noise removed", nobody_counts_as_vanished, REMOVABLE),
        ("count outside the bound", count_outside_the_bound, ALONE),
        ("half the ε claimed", half_an_account, {}),
    ]
    return [pytest.param(*case[1:], id=f"{case[0]}-{case[2].get('mechanism', 'skellam')}") for case in found]


class TestBrokenBuilds:
    @pytest.mark.parametrize(("break_it", "values"), cases())
    def test_are_caught(
        self, break_it: Callable[[Patch], None], values: dict[str, Any], monkeypatch: Patch
    ) -> None:
        break_it(monkeypatch)
        assert not audited(**values).holds

    @pytest.mark.parametrize(
        ("break_it", "rounds"), [(halved, 66), (clip_skipped, 6)], ids=["noise halved", "clip skipped"]
    )
    def test_are_caught_whatever_the_noise(
        self, break_it: Callable[[Patch], None], rounds: int, monkeypatch: Patch
    ) -> None:
        break_it(monkeypatch)
        result = audited(250, rounds)
        assert result.bound > result.claimed

    @pytest.mark.parametrize("mechanism", INTEGERS)
    def test_without_the_clip_the_encoder_refuses(self, mechanism: str, monkeypatch: Patch) -> None:
        monkeypatch.setattr(client, "clip", lambda vectors, bound: real_clip(vectors, torch.inf))
        with pytest.raises(ValueError, match="must be clipped to 1"):
            audited(rounds=1, mechanism=mechanism)

    def test_clients_refuse_an_offer_of_less_noise(self, monkeypatch: Patch) -> None:
        def offered(*arguments: Any) -> Offer:
            return dataclasses.replace(real(*arguments), noise_multiplier=Z / 2)

        real = clustered.offer_of
        monkeypatch.setattr(clustered, "offer_of", offered)
        with pytest.raises(RuntimeError, match=r"round 1 was dropped: .*parameters differ"):
            audited(rounds=1)


class TestHarness:
    def test_clipping_and_counting_see_the_canaries(self, monkeypatch: Patch) -> None:
        seen: list[Tensor] = []

        def clip(vectors: Tensor, bound: float) -> tuple[Tensor, Tensor]:
            seen.append(vectors)
            return real_clip(vectors, bound)

        monkeypatch.setattr(client, "clip", clip)
        audited(200, 1, clip_norm=3.0)
        updates = torch.cat(seen)
        heads = updates.isfinite().all(1)
        assert updates.shape == (200, 50)
        assert 60 < heads.sum() < 140
        assert torch.equal(updates[heads].sum(1), torch.full((int(heads.sum()),), 30.0))
        assert updates[~heads].isnan().all()

    @pytest.mark.parametrize(
        ("users", "values", "absent", "colluding", "scored"),
        [
            (100, {}, 0, 0, 100),  # nodes of 10
            (100, {"dropout_tolerance": 0.3, "colluding_share": 0.25}, 30, 20, 50),
            (100, {"dropout_tolerance": 0.3, "dropout_noise": "removable"}, 20, 0, 80),
            (104, {"dropout_tolerance": 0.1}, 10, 0, 94),  # nodes of 10 and 11, and 10 may vanish
            (7, {"dropout_tolerance": 0.3}, 2, 0, 5),
        ],
    )
    def test_as_many_vanish_and_collude_as_may(
        self, users: int, values: dict[str, Any], absent: int, colluding: int, scored: int
    ) -> None:
        audit = Audit.of(options(**values), users, 100)
        assert audit.users_of(audit.absent) == absent
        assert audit.users_of(audit.colluding) == colluding
        assert audit.scored.sum() == scored
        assert not set(audit.absent) & set(audit.colluding)

    def test_a_canary_has_a_coordinate_of_its_own(self) -> None:
        """And a count of its own where there are slots enough."""
        for users, clusters, shared in ((50, 4, True), (30, 30, False)):
            audit = Audit.of(options(clusters=clusters), users, 10)
            size = clusters * audit.shapes.adapter
            rows = np.eye(size + clusters)
            scores = np.stack([audit._scores(row) for row in rows])  # [numbers, users]
            assert ((scores[:size] != 0).sum(0) == 1).all()
            assert ((scores[:size] != 0).sum(1) <= 1).all()
            assert (scores[size:] == 0).all() == shared
            assert np.square(scores).sum(0) == pytest.approx(np.ones(users))

    def test_z_is_that_of_the_run(self) -> None:
        given = parse({"epsilon": 4.0, "stage1-budget": 0.3})
        calibrated = Audit.of(given, 100, 10).config.noise_multiplier
        assert calibrated > Audit.of(parse({"epsilon": 8.0}), 100, 10).config.noise_multiplier > 0.3
        assert Audit.of(options(noise_multiplier=2.5), 100, 10).config.noise_multiplier == 2.5

    def test_of_a_run_with_secagg_the_mechanism_is_audited_without_it(self) -> None:
        """Who adds the vectors is no part of the claim, and the server is given their sum alone."""
        given = parse({"noise-multiplier": Z, "dropout-tolerance": 0.2, "secagg-signed": True})
        assert given.secure_sum == "secagg+"
        found = Audit.of(given, 100, 10)
        trusted = Audit.of(options(dropout_tolerance=0.2), 100, 10)
        assert found.config.secure_sum == "trusted"
        assert found == trusted
        assert found.run(DELTA).holds

    def test_leaves_no_trace(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(TaskIdentity, "_run_id", None)
        audited(100, 1, mechanism="gaussian")
        assert TaskIdentity._run_id is None


NATURAL = {"noise_multiplier": 0.0, "num_users": 0, "user_column": "writer_id", "rotations": 1}


class TestMistakes:
    @pytest.mark.parametrize(
        ("values", "users", "rounds", "delta", "message"),
        [
            (NATURAL, 500, 1, DELTA, "num-users = 0: must be given"),
            ({"noise_multiplier": 0.0, "epsilon": float("inf")}, 500, 1, DELTA, "epsilon = inf: no noise"),
            ({"reproducible_noise": True}, 500, 1, DELTA, "reproducible-noise = true"),
            ({"bits": 8}, 500, 1, DELTA, "bits = 8: too small"),
            ({}, 1, 500, DELTA, "canaries = 1: must be at least 2"),
            ({}, 500, 0, DELTA, "rounds = 0: must be at least 1"),
            ({}, 49, 2, DELTA, "canaries = 49, rounds = 2: leave 98 to score"),
            ({}, 500, 1, 0.0, "delta = 0.0: must be above 0"),
            ({}, 500, 1, float("nan"), "delta = nan: must be above 0"),
        ],
    )
    def test_are_refused_in_one_line(
        self, values: dict[str, Any], users: int, rounds: int, delta: float, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as found:
            audit_run(options(**values), users, rounds, delta)
        assert "\n" not in str(found.value)

    def test_ifca_has_no_sum_to_audit(self) -> None:
        given = parse({"strategy": "ifca"})
        with pytest.raises(ConfigError, match="strategy = 'ifca': users send by themselves"):
            audit_run(given, 500, 1, DELTA)


class TestCommand:
    ARGUMENTS = ("audit", "-c", "noise-multiplier=1.5", "--canaries", "250", "--rounds", "20")

    def test_a_claim_that_stands(self) -> None:
        found = CliRunner().invoke(
            pina, [*self.ARGUMENTS, "-c", "mechanism=gaussian", "-c", "secure-sum=trusted"]
        )
        assert found.exit_code == 0, found.output
        for text in ("gaussian, z = 1.5", "4,500", "25 of 25", "2.32", "Not audited:", "The claim stands."):
            assert text in found.stdout

    def test_a_claim_that_is_refuted(self, monkeypatch: Patch) -> None:
        halved(monkeypatch)
        found = CliRunner().invoke(pina, [*self.ARGUMENTS])
        assert found.exit_code == 1, found.output
        assert "skellam, b = 20" in found.stdout
        assert "REFUTED" in found.stdout

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (["-c", "epsilon=inf"], "epsilon = inf: no noise is added"),
            (["-c", "sed=3"], "unknown option 'sed'; did you mean 'seed'?"),
            (["--delta", "1"], "delta = 1.0: must be above 0 and under 1"),
            (["--canaries", "1"], "canaries = 1: must be at least 2"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments: list[str], error: str) -> None:
        found = CliRunner().invoke(pina, ["audit", *arguments])
        assert found.exit_code == 2
        assert found.stdout == ""
        assert found.stderr.startswith(f"error: {error}")
        assert found.stderr.count("\n") == 1
