import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pina_flwr.config import ConfigError, RunConfig, key_of, parse, to_dict
from pina_flwr.privacy.policy import Policy, load_policy
from pina_flwr.secure_sum.session import Rules

FIELDS = dataclasses.fields(RunConfig)
INTS = [key_of(f.name) for f in FIELDS if type(f.default) is int]
STRINGS = [key_of(f.name) for f in FIELDS if isinstance(f.default, str)]
FLOATS = [key_of(f.name) for f in FIELDS if isinstance(f.default, float)]
NATURAL = {"user-column": "writer_id", "rotations": 1}
TRUSTED = {"secure-sum": "trusted"}
NO_SHARES = ("1,1,1", "1,1,1,1,1", "1,1,1,0", "1,1,1,x", "1,1,1,nan", "1,1,1,inf", ",", "1,1,1,-1")
PER_ROTATION = "must be a number above 0 for each of rotations = 4, comma separated"


def mistake(**options: Any) -> str:
    """The message with which these options are refused; always one line."""
    with pytest.raises(ConfigError) as raised:
        parse({name.replace("_", "-"): value for name, value in options.items()})
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    return message


def out_of_bounds() -> list[Any]:
    """For every bound of every option the nearest value beyond it."""
    cases = []
    for f in FIELDS:
        kind, bounds = type(f.default), f.metadata
        step = (lambda x, to: x + to) if kind is int else (lambda x, to: math.nextafter(x, x + to))
        if bounds["low"] is not None:
            cases.append((f.name, step(kind(bounds["low"]), -1), f"must be at least {bounds['low']:g}"))
        if bounds["above"] is not None:
            cases.append((f.name, kind(bounds["above"]), f"must be above {bounds['above']:g}"))
        if bounds["high"] is not None:
            cases.append((f.name, step(kind(bounds["high"]), 1), f"must be at most {bounds['high']:g}"))
        if bounds["choices"]:
            cases.append((f.name, "nonsense", f"must be one of {', '.join(bounds['choices'])}"))
    return cases


def wrong_types() -> list[Any]:
    wrong = {
        int: (True, 1.0, "1", None),
        float: (True, "1.0", None),
        bool: (1, 0.0, "true", None),
        str: (1, True, 1.0, None),
    }
    return [(f.name, value) for f in FIELDS for value in wrong[type(f.default)]]


def test_the_apps_defaults_are_these() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    shown = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    defaults = to_dict(RunConfig())
    assert {key: (type(value), value) for key, value in shown.items()} == {
        key: (type(value), value) for key, value in defaults.items()
    }


def test_the_defaults_are_valid() -> None:
    assert parse({}) == RunConfig()
    assert parse(to_dict(RunConfig())) == RunConfig()


CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(  # of one run; what `pina compare` takes is tested with it
    path for path in CONF.glob("*.toml") if path.stem != "policy" and "[[row]]" not in path.read_text()
)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_presets_are_valid(preset: Path) -> None:
    values = tomllib.loads(preset.read_text(encoding="utf-8"))
    assert to_dict(parse(values)).items() >= values.items()


def test_the_policy_shows_its_defaults() -> None:
    """A file of a node, not of a run; all that is in it but the budget is what it would be without."""
    policy = load_policy(CONF / "policy.toml")
    assert policy == Policy(policy.max_epsilon, policy.delta)
    shown = tomllib.loads((CONF / "policy.toml").read_text(encoding="utf-8"))
    assert set(shown) == {key_of(f.name) for f in dataclasses.fields(Policy)}


def test_the_paper_preset_reads_the_paper_literally() -> None:
    (preset,) = [preset for preset in PRESETS if preset.stem == "paper"]
    config = parse(tomllib.loads(preset.read_text(encoding="utf-8")))
    assert (config.stage1, config.sketch_size, config.stage1_rank) == ("sketch", 4, 1)
    assert (config.sketch_centre, config.sketch_scale, config.sketch_target) == ("none", "clip", "labels")
    assert config.sketch == "paper"
    assert (config.centroid_norm, config.self_assign_rounds, config.stage1_budget) == (0, 0, 0)
    assert (config.normality, config.normality_threshold) == ("paper", 0.99)
    assert (config.server_lr_no, config.server_lr) == (config.clusters, config.clusters**2)


def test_round_trip() -> None:
    config = parse(
        {"strategy": "fedavg", "epsilon": math.inf, "seed": 7, "diagnostics": False, "dataset": "x"}
    )
    assert parse(to_dict(config)) == config


def test_every_option_is_documented() -> None:
    for f in FIELDS:
        assert len(f.metadata["doc"]) > 5, f.name


def test_a_whole_number_is_a_number() -> None:
    config = parse({"epsilon": 2, "learning-rate": 1})
    assert config.epsilon == 2.0
    assert all(isinstance(value, float) for value in (config.epsilon, config.learning_rate))


@pytest.mark.parametrize(("name", "value", "right"), out_of_bounds())
def test_bounds(name: str, value: Any, right: str) -> None:
    assert mistake(**{name: value}) == f"{key_of(name)} = {value!r}: {right}"


@pytest.mark.parametrize(("name", "value"), wrong_types())
def test_types(name: str, value: Any) -> None:
    right = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    kind = type(getattr(RunConfig(), name))
    assert mistake(**{name: value}) == f"{key_of(name)} = {value!r}: must be {right[kind]}"


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_epsilon_may_be_infinite(key: str, value: float) -> None:
    if key == "epsilon" and value == math.inf:
        assert not parse({key: value}).private
        return
    message = mistake(**{key: value})
    assert message.startswith(f"{key} = {value!r}: must be ")


@pytest.mark.parametrize("key", INTS + FLOATS + STRINGS + ["train-head"])
@pytest.mark.parametrize("value", [2**63, -(2**63), 10**400, 10**5000], ids=lambda v: f"{v.bit_length()}bits")
def test_whole_numbers_fit_64_bits(key: str, value: int) -> None:
    assert mistake(**{key: value}) == f"{key}: a whole number must be within ±9223372036854775807"


@pytest.mark.parametrize("key", [key for key in FLOATS if key != "epsilon"])
@pytest.mark.parametrize("value", [3.5e38, -1e300, 1.7e308])
def test_numbers_fit_float32(key: str, value: float) -> None:
    assert mistake(**{key: value}) == f"{key} = {value!r}: must be within ±3.4e+38"


@pytest.mark.parametrize("key", STRINGS)
def test_strings_have_no_nul(key: str) -> None:
    assert mistake(**{key: "a\0b"}) == f"{key} = 'a\\x00b': must have no NUL character"


@pytest.mark.parametrize("key", ["output", "dataset", "backbone"])
@pytest.mark.parametrize("value", ["", " ", "\t\n"])
def test_names_are_not_empty(key: str, value: str) -> None:
    assert mistake(**{key: value}) == f"{key} = {value!r}: must not be empty"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache-gib", 1e7),
        ("round-timeout", 1e8),
        ("image-size", 5000),
        ("kmeans-restarts", 10**9),
        ("clusters", 10**9),
        ("lora-rank", 10**9),
        ("stage1-rank", 10**9),
        ("augment", 10**9),
        ("clip-norm", 1e13),
        ("clip-norm", 1e-13),
        ("noise-multiplier", 1e7),
        ("noise-multiplier", 1e-7),
    ],
)
def test_what_would_exhaust_memory_or_arithmetic(key: str, value: Any) -> None:
    assert mistake(**{key: value}).startswith(f"{key} = {value!r}: must be ")


@pytest.mark.parametrize("users", [1, 3, 49, 107, 10**6])
def test_one_expected_user_is_enough(users: int) -> None:
    assert parse({"num-users": users, "sampling-rate": 1 / users}).num_users == users


@pytest.mark.parametrize("start", [{"stage1": "random"}, {"strategy": "pina-ri"}, {"strategy": "ifca"}, {}])
def test_models_that_would_start_identical(start: dict[str, Any]) -> None:
    assert mistake(lora_targets="q", epsilon=math.inf, **start) == (
        "lora-targets = 'q': must include v, the projection in which models start apart"
    )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lerning-rate", "unknown option 'lerning-rate'; did you mean 'learning-rate'?"),
        ("num_users", "unknown option 'num_users'; did you mean 'num-users'?"),
        ("zzzzzz", "unknown option 'zzzzzz'"),
    ],
)
def test_unknown_options(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({key: 1})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotations": 3}, "rotations = 3: must be 1, 2 or 4"),
        ({"rotations": 0}, "rotations = 0: must be 1, 2 or 4"),
        (
            {"lora_targets": "q,x"},
            "lora-targets = 'q,x': must be some of q, k, v, o, comma separated, each once",
        ),
        (
            {"lora_targets": "v,v"},
            "lora-targets = 'v,v': must be some of q, k, v, o, comma separated, each once",
        ),
        ({"lora_targets": ""}, "lora-targets = '': must be some of q, k, v, o, comma separated, each once"),
        (
            {"lora_targets": "q, k", "stage1": "sketch"},
            "lora-targets = 'q, k': must include v, the projection in which models start apart",
        ),
        (
            {"noise_multiplier": 1.0, "epsilon": 2.0},
            "noise-multiplier = 1.0: sets the noise itself, so epsilon = 2.0 would be ignored; "
            "leave one of them out",
        ),
        (
            {"sampling_rate": 1e-9, "num_users": 20},
            "sampling-rate = 1e-09: means 2e-08 users a round with num-users = 20; "
            "must be at least 1 / num-users",
        ),
        ({"delta": 1.0}, "delta = 1.0: must be under 1"),
        ({"stage1_budget": 1.0}, "stage1-budget = 1.0: must be under 1"),
        ({"count_share": 1.0}, "count-share = 1.0: must be under 1"),
        ({"kmeans_memory": 1.0}, "kmeans-memory = 1.0: must be under 1"),
        ({"stage1_rank": 3, "lora_rank": 2}, "stage1-rank = 3: must be at most lora-rank = 2"),
        (
            {"stage1_signal": "features", "self_assign_rounds": 0},
            "self-assign-rounds = 0: with stage1-signal = 'features' models start alike and part only where "
            "users take the nearest centroid first; must be at least 1",
        ),
        *(({"group_shares": shares}, f"group-shares = {shares!r}: {PER_ROTATION}") for shares in NO_SHARES),
        ({"t_no": 21, "t_tr": 20}, "t-no = 21: must be at most t-tr = 20"),
        *(
            (
                {"t_no": 3, "normality": other},
                f"t-no = 3: has no effect with normality = {other!r}, Eq. 8 belongs to 'paper' and "
                "'paper-no-zeroing'; set one of them, or t-no = 0",
            )
            for other in ("count", "energy", "none")
        ),
        (
            {"sketch_size": 3, "sketch": "paper"},
            "sketch-size = 3: must be even (half largest, half smallest)",
        ),
        (
            {"sketch_size": 3, "sketch": "private-support"},
            "sketch-size = 3: must be even (half largest, half smallest)",
        ),
        (
            {"dropout_tolerance": 0.6, "colluding_share": 0.4},
            "dropout-tolerance = 0.6, colluding-share = 0.4: must add up to at most 0.99",
        ),
        (
            {"dropout_noise": "removable", "mechanism": "gaussian"},
            "dropout-noise = 'removable': needs mechanism = 'skellam', which can be split",
        ),
        (
            {"dropout_noise": "removable", "mechanism": "discrete-gaussian"},
            "dropout-noise = 'removable': needs mechanism = 'skellam', which can be split",
        ),
        (
            {"local_epochs": 4, "local_epochs_least": 5},
            "local-epochs-least = 5: must be at most local-epochs = 4",
        ),
        (
            {"strategy": "fedprox", "mu": 10.0, "learning_rate": 0.2},
            "mu = 10.0: with learning-rate = 0.2 the proximal term alone makes training diverge; must be "
            "under 2 / learning-rate",
        ),
        (
            {"t_in": 1, "stage1": "dp-kmeans", "sketch_centre": "private"},
            "t-in = 1: stage1 = 'dp-kmeans' with sketch-centre = 'private' needs at least 2",
        ),
        (
            {"t_in": 0, "stage1": "sketch", "sketch_centre": "none"},
            "t-in = 0: stage1 = 'sketch' with sketch-centre = 'none' needs at least 1",
        ),
        ({"num_users": 0}, "num-users = 0: must be at least 1"),
        ({"images_per_user": 0}, "images-per-user = 0: must be at least 1"),
        (
            {"user_column": "writer_id", "rotations": 4},
            "rotations = 4: with user-column the groups are natural; set rotations = 1",
        ),
        (
            {"strategy": "oracle", "clusters": 1, "user_column": "writer_id", "rotations": 1},
            "strategy = 'oracle': needs true groups, which a split by user-column does not have",
        ),
        (
            {"strategy": "oracle", "rotations": 2, "clusters": 4},
            "clusters = 4: strategy 'oracle' needs as many as rotations = 2",
        ),
        (
            {"mechanism": "gaussian"},
            "mechanism = 'gaussian': is not of integers, which secure-sum = 'secagg+' adds; "
            "set secure-sum = 'trusted', in simulation",
        ),
        *(
            (
                {"dropout_tolerance": dropout, "colluding_share": colluding},
                f"dropout-tolerance = {dropout}, colluding-share = {colluding}: twice the first plus the "
                "second must be under 1, or SecAgg+ has no safe threshold",
            )
            for dropout, colluding in [(0.5, 0.0), (0.4, 0.2), (0.1, 0.8), (0.9, 0.0)]
        ),
        ({"secagg_neighbours": 7}, "secagg-neighbours = 7: must be even (0: derived)"),
        ({"secagg_threshold": 5}, "secagg-threshold = 5: must be 0 (derived) unless neighbours are given"),
        (
            {"secagg_neighbours": 10, "secagg_threshold": 5},
            "secagg-threshold = 5: must be above half of neighbours = 10, and at most 10",
        ),
        (
            {"secagg_neighbours": 10, "secagg_threshold": 11},
            "secagg-threshold = 11: must be above half of neighbours = 10, and at most 10",
        ),
        (
            {"secagg_signed": True, "secagg_neighbours": 10},
            "secagg-neighbours = 10: signed sums have all members as neighbours; set 0",
        ),
        (
            {"secagg_signed": True, "secure_sum": "trusted"},
            "secagg-signed = true: signs what secure-sum = 'trusted' does not have; set 'secagg+'",
        ),
        (
            {"secagg_neighbours": 7} | {"secure_sum": "trusted"},
            "secagg-neighbours = 7: must be even (0: derived)",
        ),
        (
            {"secagg_neighbours": 4, "secagg_threshold": 1, "secure_sum": "trusted"},
            "secagg-threshold = 1: must be above half of neighbours = 4, and at most 4",
        ),
        (
            {"secagg_signed": True, "strategy": "ifca"},
            "secagg-signed = true: with strategy 'ifca' vectors leave one by one; set false",
        ),
        ({"secagg_neighbours": 65536}, "secagg-neighbours = 65536: must be at most 65534"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    assert mistake(**options) == message


@pytest.mark.parametrize(
    "options",
    [
        {"sampling-rate": 1.0},
        {"sampling-rate": 1e-9, "num-users": 0} | NATURAL,
        {"noise-multiplier": 1.0, "epsilon": 8.0},
        {"noise-multiplier": 1e-6},
        {"normality-threshold": 1.0},
        {"t-no": 20, "t-tr": 20, "normality": "paper"},
        {"t-no": 3, "normality": "paper-no-zeroing"},
        {"t-no": 3, "normality": "count", "server-lr-no": 2.0},
        {"t-no": 3, "strategy": "fedavg"},
        {"stage1-rank": 4, "lora-rank": 4},
        {"count-share": 0.999},
        {"lora-targets": "v"},
        {"lora-targets": "q, k, v, o"},
        {"lora-targets": "q", "strategy": "oracle"},
        {"lora-targets": "q", "strategy": "fedavg"},
        {"strategy": "ifca", "epsilon": math.inf} | TRUSTED,
        {"strategy": "ifca", "epsilon": math.inf},
        {"strategy": "ifca"},
        {"strategy": "ifca", "mechanism": "gaussian"},
        {"strategy": "ifca", "epsilon": math.inf, "noise-multiplier": 1.0},
        {"strategy": "fedavg", "mu": 10.0},
        {"t-in": 2},
        {"t-in": 1, "sketch-centre": "none"},
        {"t-in": 0, "stage1": "random"},
        {"t-in": 0, "strategy": "pina-ri"},
        {"num-users": 0, "images-per-user": 0} | NATURAL,
        {"strategy": "oracle", "rotations": 2, "clusters": 2},
        {"noise-cohort-size": 0},
        {"sketch-size": 3, "sketch": "projection"},
        {"sketch-size": 3, "sketch": "coordinates"},
        {"dropout-tolerance": 0.5, "colluding-share": 0.49} | TRUSTED,
        {"dropout-tolerance": 0.49, "colluding-share": 0.01},
        {"dropout-tolerance": 0.0, "colluding-share": 0.99},
        {"dropout-tolerance": 0.0, "colluding-share": 0.0},
        {"dropout-noise": "removable"},
        {"mechanism": "gaussian", "bits": 32} | TRUSTED,
        {"secagg-neighbours": 10},
        {"secagg-neighbours": 10, "secagg-threshold": 6},
        {"secagg-neighbours": 10, "secagg-threshold": 10},
        {"secagg-signed": True},
        {"seed": 2**63 - 1},
    ],
)
def test_values_at_the_edge(options: dict[str, Any]) -> None:
    assert to_dict(parse(options)).items() >= options.items()


@pytest.mark.parametrize(
    ("options", "private"),
    [({}, True), ({"epsilon": math.inf}, False), ({"epsilon": math.inf, "noise-multiplier": 0.5}, True)],
)
def test_private_is_what_adds_noise(options: dict[str, Any], private: bool) -> None:
    assert parse(options).private is private


def test_the_rules_of_secagg_are_those_of_the_run() -> None:
    given = {"dropout-tolerance": 0.2, "colluding-share": 0.1, "secagg-neighbours": 12, "secagg-threshold": 8}
    assert parse(given).secagg == Rules(0.2, 0.1, 12, 8)
    assert parse({"secagg-signed": True}).secagg == Rules(0.1, 0.0, signed=True)


def test_slots() -> None:
    assert parse({"clusters": 3}).slots == 3
    assert parse({"clusters": 3, "strategy": "fedavg"}).slots == 1


@pytest.mark.parametrize(
    ("options", "local", "simulated"),
    [
        ({}, False, 10_000),
        ({"epsilon": math.inf}, False, 0),
        ({"strategy": "ifca"}, True, 0),
        ({"strategy": "ifca", "epsilon": math.inf, "noise-multiplier": 2.0}, True, 0),
        ({"strategy": "ifca", "epsilon": math.inf}, False, 0),
    ],
)
def test_noise_of_each_user_or_of_a_cohort(options: dict[str, Any], local: bool, simulated: int) -> None:
    config = parse(options)
    assert (config.local_updates, config.simulated_cohort) == (local, simulated)
