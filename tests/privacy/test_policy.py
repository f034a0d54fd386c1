"""Everything that a client refuses, and what it lets through."""

import math
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from pina_flwr.config import ConfigError
from pina_flwr.privacy import policy as module
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.policy import MECHANISMS, REASONS, Offer, Policy, Refusal, check, load_policy
from pina_flwr.privacy.release_json import CLASS_BY_NAME
from pina_flwr.privacy.releases import (
    GaussianRelease,
    Release,
    SkellamRelease,
    UnprotectedRelease,
    ZcdpRelease,
)

OFFER = Offer("skellam", 1.0, 0.5, 100, 90, 10, 20, 0.1, "run-1", 2, 3)
RELEASE = SkellamRelease(1e4, 1e3, 1e6, 1.0, 1)  # z = 1, nearly Gaussian
POLICY = Policy(8.0, 1e-5)
TIGHT = Policy(
    8.0,
    1e-5,
    max_rounds=3,
    min_noise_multiplier=0.8,
    min_cohort=50,
    max_cohort=150,
    min_survivors=60,
    min_survivor_share=0.7,
    min_colluder_share=0.05,
    min_clip_norm=0.1,
    max_clip_norm=1.0,
    max_sampling_rate=0.2,
)


# The offer --------------------------------------------------------------------------------------------


def test_an_offer_travels_as_a_config_record() -> None:
    content = RecordDict({"offer": ConfigRecord(OFFER.to_dict())})
    arrived = recorddict_from_proto(recorddict_to_proto(content))
    assert Offer.from_dict(arrived.config_records["offer"]) == OFFER
    assert set(OFFER.to_dict()) >= {"noise-multiplier", "sampling-rate", "stage", "round"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mechanism", ""),
        ("mechanism", "Skellam\n"),
        ("mechanism", 3),
        ("noise-multiplier", math.nan),
        ("noise-multiplier", math.inf),
        ("noise-multiplier", -1.0),
        ("noise-multiplier", "1"),
        ("clip-norm", 0.0),
        ("clip-norm", math.nan),
        ("clip-norm", math.inf),
        ("cohort", 0),
        ("cohort", 2**31),
        ("cohort", 100.0),
        ("cohort", True),
        ("survivors", 0),
        ("survivors", 101),
        ("colluders", -1),
        ("colluders", 90),
        ("bits", -1),
        ("bits", 65),
        ("sampling-rate", 0.0),
        ("sampling-rate", 1.1),
        ("sampling-rate", math.nan),
        ("run", ""),
        ("stage", 0),
        ("round", 0),
        ("round", 1.5),
        ("more", 1),
    ],
)
def test_an_offer_that_makes_no_sense_is_no_offer(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        Offer.from_dict({**OFFER.to_dict(), key: value})


@pytest.mark.parametrize("key", OFFER.to_dict())
def test_an_offer_lacks_nothing(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Offer.from_dict({k: v for k, v in OFFER.to_dict().items() if k != key})


def test_no_noise_can_be_offered() -> None:
    assert Offer.from_dict({**OFFER.to_dict(), "noise-multiplier": 0.0}).noise_multiplier == 0


# Refusals ---------------------------------------------------------------------------------------------


def reason_of(
    offer: Offer = OFFER,
    release: Release = RELEASE,
    policy: Policy = POLICY,
    spent: tuple[Release, ...] = (),
    rounds: int = 0,
) -> str:
    """Why a round is refused; empty if it is not."""
    try:
        check(offer, release, policy, spent, rounds)
    except Refusal as refusal:
        return refusal.reason
    return ""


def test_a_good_offer_is_accepted() -> None:
    assert reason_of() == ""
    assert reason_of(policy=TIGHT) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"noise_multiplier": 0.79}, "noise under the policy"),
        ({"noise_multiplier": 0.0}, "noise under the policy"),
        ({"mechanism": "gaussian"}, "mechanism not accepted"),
        ({"mechanism": "unheard-of"}, "mechanism not accepted"),
        ({"clip_norm": 0.09}, "clip norm outside the policy"),
        ({"clip_norm": 1.01}, "clip norm outside the policy"),
        ({"cohort": 49, "survivors": 49}, "cohort outside the policy"),
        ({"cohort": 151, "survivors": 151}, "cohort outside the policy"),
        ({"survivors": 69}, "too few survivors allowed"),
        ({"cohort": 60, "survivors": 59}, "too few survivors allowed"),
        ({"colluders": 4}, "too few colluders allowed for"),
        ({"sampling_rate": 0.21}, "sampling rate outside the policy"),
    ],
    ids=str,
)
def test_each_limit_is_kept(change: dict[str, object], reason: str) -> None:
    assert reason_of(replace(OFFER, **change), policy=TIGHT) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 0.8},
        {"clip_norm": 0.1},
        {"clip_norm": 1.0},
        {"cohort": 150, "survivors": 105},
        {"survivors": 70},
        {"colluders": 5},
        {"sampling_rate": 0.2},
    ],
    ids=str,
)
def test_each_limit_itself_is_accepted(change: dict[str, object]) -> None:
    assert reason_of(replace(OFFER, **change), policy=TIGHT) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "fewest"), [(0.1, 3), (0.3, 9), (0.7, 21), (0.9, 27)])
def test_a_share_of_the_cohort_is_exact(share: float, fewest: int) -> None:
    """0.1 · 30 is above 3 in floats: the share is found by division."""
    policy = replace(POLICY, min_survivors=1, min_survivor_share=share)
    offer = replace(OFFER, cohort=30, survivors=fewest, colluders=0)
    assert reason_of(offer, policy=policy) == ""
    assert reason_of(replace(offer, survivors=fewest - 1), policy=policy) == "too few survivors allowed"


def test_no_noise_is_refused_by_every_policy() -> None:
    loosest = Policy(1e300, 0.1, min_noise_multiplier=5e-324, mechanisms=MECHANISMS)
    offer = replace(OFFER, noise_multiplier=0.0)
    for release in (RELEASE, UnprotectedRelease("no noise", 1)):
        assert reason_of(offer, release, loosest) == "noise under the policy"
    assert reason_of(OFFER, UnprotectedRelease("no noise", 1), loosest) == "mechanism not accepted"


def test_rounds_are_counted() -> None:
    assert reason_of(policy=TIGHT, rounds=2) == ""
    assert reason_of(policy=TIGHT, rounds=3) == "too many rounds"
    assert reason_of(policy=TIGHT, rounds=-1) == "too many rounds"


def test_a_server_that_samples_one_user_every_time_is_stopped() -> None:
    """By ε alone, just where the accountant says."""
    spent: list[Release] = []
    for _ in range(100):
        if reason_of(spent=tuple(spent)):
            break
        spent.append(RELEASE)
    assert reason_of(spent=tuple(spent)) == "budget spent"
    assert epsilon([replace(RELEASE, count=len(spent))], POLICY.delta) <= POLICY.max_epsilon
    assert epsilon([replace(RELEASE, count=len(spent) + 1)], POLICY.delta) > POLICY.max_epsilon
    assert 1 < len(spent) < 10


def test_other_mechanisms_and_earlier_runs_count() -> None:
    spent = (GaussianRelease(1.0, 1.0, 2), ZcdpRelease(0.5, 1))
    assert epsilon([*spent, RELEASE], POLICY.delta) > POLICY.max_epsilon > epsilon([RELEASE], POLICY.delta)
    assert reason_of(spent=spent) == "budget spent"


def test_sampling_amplifies_nothing_towards_the_server() -> None:
    rare = replace(RELEASE, sampling_rate=0.001, count=50)
    assert epsilon([rare], POLICY.delta) < POLICY.max_epsilon
    assert reason_of(release=rare) == "budget spent"
    assert reason_of(spent=(rare,)) == "budget spent"


def test_what_was_unprotected_before_leaves_no_budget() -> None:
    assert reason_of(spent=(UnprotectedRelease("no noise", 1),)) == "budget spent"


@pytest.mark.parametrize(
    "name", ["noise_multiplier", "clip_norm", "cohort", "survivors", "colluders", "sampling_rate"]
)
def test_nan_in_an_offer_is_refused(name: str) -> None:
    """No such offer can be made; should one be, every comparison fails closed."""
    offer = replace(OFFER)
    object.__setattr__(offer, name, math.nan)
    assert reason_of(offer) in REASONS


def test_nan_anywhere_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(rounds=math.nan) == "too many rounds"  # type: ignore[arg-type]
    for name in ("max_epsilon", "min_noise_multiplier", "max_rounds", "min_cohort", "max_clip_norm"):
        policy = replace(POLICY)
        object.__setattr__(policy, name, math.nan)
        assert reason_of(policy=policy) in REASONS
    monkeypatch.setattr(module, "_epsilon", lambda releases, delta: math.nan)
    assert reason_of() == "budget spent"


def test_an_unknown_release_is_an_error() -> None:
    odd = type("Odd", (), {"count": 1})()
    with pytest.raises(TypeError, match="Odd is no release"):
        check(OFFER, odd, POLICY, [], 0)


def test_a_release_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="count"):
        check(OFFER, replace(RELEASE, count=0), POLICY, [], 0)


def test_reasons_are_fixed_phrases() -> None:
    assert all(re.fullmatch(r"[a-z' ]{5,40}", reason) for reason in REASONS)
    assert len(set(REASONS)) == len(REASONS)
    for reason in REASONS:
        assert Refusal(reason).reason == str(Refusal(reason)) == reason
        assert pickle.loads(pickle.dumps(Refusal(reason))).reason == reason
    for other in ("", "budget spent: 7.3 of 8", "Budget spent"):
        with pytest.raises(ValueError, match="no reason") as problem:
            Refusal(other)
        assert not isinstance(problem.value, Refusal)


def test_checking_many_users_alike_is_fast() -> None:
    check(OFFER, RELEASE, POLICY, [RELEASE], 1)
    start = time.process_time()
    for _ in range(2500):
        check(OFFER, RELEASE, POLICY, [RELEASE], 1)
    assert time.process_time() - start < 2  # measured: 0.04 s


# The file ---------------------------------------------------------------------------------------------


def test_the_example_holds_the_defaults() -> None:
    example = Path(__file__).parents[2] / "conf" / "policy.toml"
    assert load_policy(example) == Policy(8.0, 1e-5)
    written = re.findall(r"^([a-z-]+) =", example.read_text(encoding="utf-8"), re.MULTILINE)
    assert written == [name.replace("_", "-") for name in Policy.__dataclass_fields__]


def test_every_mechanism_with_noise_can_be_accepted() -> None:
    assert {*MECHANISMS, "unprotected"} == set(CLASS_BY_NAME)


def test_two_options_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('max-epsilon = 2\ndelta = 1e-6\nmechanisms = ["gaussian"]\n')
    policy = load_policy(str(path))
    assert policy == Policy(2.0, 1e-6, mechanisms=("gaussian",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "max-epsilon: must be given"),
        ("max-epsilon = 8", "delta: must be given"),
        ("delta = 1e-5", "max-epsilon: must be given"),
        ("max-epsilom = 8", "unknown option 'max-epsilom'; did you mean 'max-epsilon'?"),
        ("zzz = 8", "unknown option 'zzz'"),
        ("max_epsilon = 8", "did you mean 'max-epsilon'?"),
        ("max-epsilon = nan", "max-epsilon = nan: must be a finite number"),
        ("max-epsilon = inf", "max-epsilon = inf: must be a finite number"),
        ("max-epsilon = 1e999", "must be a finite number"),
        ("max-epsilon = 0", "max-epsilon = 0: must be above 0"),
        ("max-epsilon = -1.0", "must be above 0"),
        ('max-epsilon = "8"', "max-epsilon = '8': must be a finite number"),
        ("max-epsilon = true", "must be a finite number"),
        ("delta = 0.0", "delta = 0.0: must be above 0"),
        ("delta = 1e-999", "must be above 0"),
        ("delta = 0.2", "delta = 0.2: must be at most 0.1"),
        ("max-rounds = 0", "must be at least 1"),
        ("max-rounds = 3.0", "must be a whole number"),
        ("min-noise-multiplier = 0", "must be above 0"),
        ("min-noise-multiplier = nan", "must be a finite number"),
        ("min-cohort = 0", "must be at least 1"),
        ("min-cohort = 20000", "min-cohort = 20000: must be at most max-cohort = 10000"),
        ("max-cohort = 9999999999", "must be at most"),
        ("min-survivor-share = 1.1", "must be at most 1"),
        ("min-colluder-share = -0.1", "must be at least 0"),
        ("max-clip-norm = 1e-7", "min-clip-norm = 1e-06: must be at most max-clip-norm"),
        ("max-sampling-rate = 0.0", "must be above 0"),
        ('mechanisms = "skellam"', "mechanisms = skellam: must be a list of some of skellam"),
        ("mechanisms = []", "must be a list"),
        ("mechanisms = [1]", "must be a list"),
        ('mechanisms = ["unprotected"]', "must be a list of some of"),
        ("[max-epsilon]\nx = 1", "must be a finite number"),
        ("max-epsilon = ", "is not valid TOML"),
        ("max-epsilon = 8\nmax-epsilon = 9", "is not valid TOML"),
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    given = "" if "must be given" in words else "max-epsilon = 8\ndelta = 1e-5\n"
    key = text.partition("=")[0].strip().strip("[").partition("]")[0]
    kept = "".join(line + "\n" for line in given.splitlines() if not line.startswith(f"{key} ="))
    path.write_text(kept + text)
    with pytest.raises(ConfigError, match=re.escape(words)) as problem:
        load_policy(path)
    assert str(problem.value).startswith(f"{path}: ")
    assert "\n" not in str(problem.value)


def test_a_policy_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="must be a policy file"):
            load_policy(path)
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_policy(tmp_path / "x.toml")


def test_a_policy_in_code_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="delta"):
        Policy(8.0, math.nan)
    with pytest.raises(ConfigError, match="mechanisms"):
        Policy(8.0, 1e-5, mechanisms=["skellam"])  # type: ignore[arg-type]
