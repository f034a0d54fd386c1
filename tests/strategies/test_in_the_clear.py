"""Flower's strategies over users' own updates: what leaves users, what is made of it, what is said of it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LocalGrid, by_round, json_of, lost, rows_of, run, shapes, with_content

from pina_flwr.client import SKETCHES
from pina_flwr.config import ConfigError, RunConfig, check_updates, parse
from pina_flwr.messages import pack, unpack
from pina_flwr.privacy.ledger import Ledger
from pina_flwr.privacy.releases import UnprotectedRelease
from pina_flwr.strategies.clustered import TrainingFailed

Make = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("bare")
NAMES = ["fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan"]
CLEAR: dict[str, Any] = {"epsilon": math.inf, "secure_sum": "none", "sampling_rate": 1.0, "num_users": 12}
SAID = "No secure sum, no central DP: the server sees every user's update as it is."


def updates_sent(network: LocalGrid, round_: int) -> np.ndarray:
    parts = [unpack(e.reply.content.array_records[SKETCHES]) for e in network.trained("raw-update", round_)]
    return np.concatenate([part["rows"] for part in parts])


def step_made(network: LocalGrid, round_: int = 1) -> np.ndarray:
    before, after = (network.trained("raw-update", t)[0].task.arrays["models"] for t in (round_, round_ + 1))
    return (after - before)[0]


def krum_order(updates: np.ndarray, malicious: int) -> np.ndarray:
    """Users by the sum of squared distances to their n - f - 2 nearest neighbours, the least first."""
    squares = ((updates[:, None] - updates[None]) ** 2).sum(axis=2)
    nearest = np.sort(squares, axis=1)[:, 1 : len(updates) - malicious - 1]
    return np.argsort(nearest.sum(axis=1))


def bulyan(updates: np.ndarray, malicious: int) -> np.ndarray:
    kept = updates[krum_order(updates, malicious)[: len(updates) - 2 * malicious]]
    away = np.abs(kept - np.median(kept, axis=0))
    nearest = np.argsort(away, axis=0)[: len(kept) - 2 * malicious]
    return np.take_along_axis(kept, nearest, axis=0).mean(axis=0)


def by_hand(name: str, updates: np.ndarray) -> np.ndarray:
    """As the papers have it, f = 2 and a quarter trimmed, from twelve updates."""
    updates = updates.astype(np.float64)
    return {
        "fedmedian": lambda: np.median(updates, axis=0),
        "fedtrimmedavg": lambda: np.sort(updates, axis=0)[3:9].mean(axis=0),
        "krum": lambda: updates[krum_order(updates, 2)[0]],
        "multikrum": lambda: updates[krum_order(updates, 2)[:8]].mean(axis=0),
        "bulyan": lambda: bulyan(updates, 2),
    }[name]()


@pytest.mark.parametrize("name", NAMES)
def test_makes_of_the_updates_what_its_paper_says(config: Make, name: str) -> None:
    c = config(**CLEAR, strategy=name, malicious_users=2, trim_share=0.25, clip_norm=1e-6)
    network = run(c, 3)
    updates = updates_sent(network, 1)
    assert (updates.dtype, updates.shape) == (np.float32, (12, shapes(c).adapter))
    assert np.linalg.norm(updates, axis=1).min() > 0.01  # clip-norm clips nothing
    np.testing.assert_allclose(step_made(network), by_hand(name, updates), rtol=1e-4, atol=1e-6)
    first = rows_of(c)[0]
    assert (first.survivors, first.weights, first.noise_std, first.dropped) == (12, [1], 0, None)
    assert (first.bytes_up or 0) > updates.nbytes
    assert first.update_norm_mean == pytest.approx(np.linalg.norm(updates, axis=1).mean(), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_nonsense_of_a_few_moves_little(config: Make, name: str) -> None:
    """The first user's update is a million; the plain mean would follow it."""

    def spoil(content: Any) -> Any:
        rows = unpack(content.array_records[SKETCHES])["rows"].copy()
        rows[0] = 1e6
        return type(content)({SKETCHES: pack({"rows": rows})})

    honest = run(config(**CLEAR, strategy=name))
    attacked = run(config(**CLEAR, strategy=name), intercept=by_round({1: with_content(spoil)}))
    assert np.abs(step_made(attacked)).max() < 3 * np.abs(step_made(honest)).max()


def test_it_says_plainly_what_it_is(config: Make, capsys: pytest.CaptureFixture[str]) -> None:
    c = config(**CLEAR, strategy="krum")
    run(c)
    summary, privacy = json_of(c, "summary.json"), json_of(c, "privacy.json")
    assert summary["epsilon"]["recipient"] is summary["epsilon"]["server"] is None
    assert summary["caveats"] == [SAID]
    assert summary["in_the_clear"] is True
    assert privacy["recipient"]["reason"] == privacy["server"]["reason"] == SAID
    assert privacy["server"]["sees"] == "Every user's update as it is."
    assert privacy["mechanism"] == "None: updates leave the users as they are."
    assert privacy["assumptions"][0] == SAID
    text = " ".join(str(privacy).split())
    assert "secure sum 'trusted'" not in text
    assert "SecAgg" not in text
    printed = " ".join(capsys.readouterr().out.split())
    assert "no secure sum, no central DP" in printed
    assert "at ε =" not in printed
    assert "without privacy: no secure sum, no central DP (ε = ∞)." in printed
    card = (Path(c.output) / "adapters" / "cluster-0" / "README.md").read_text(encoding="utf-8")
    assert f"None (ε = ∞). {SAID}" in card


def test_a_ledger_is_told(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(config(**CLEAR, strategy="fedmedian", ledger=str(path)))
    with Ledger.open(path) as ledger:
        assert set(ledger.releases()) == {UnprotectedRelease(SAID, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"secure-sum": "secagg+"},
            "secure-sum = 'secagg+': strategy 'krum' needs every user's own update; set secure-sum = 'none'",
        ),
        (
            {"secure-sum": "trusted"},
            "secure-sum = 'trusted': strategy 'krum' needs every user's own update; set secure-sum = 'none'",
        ),
        (
            {"strategy": "fedavg"},
            "secure-sum = 'none': is for strategies that need every user's own update, which 'fedavg' does "
            "not; must be 'secagg+' or 'trusted'",
        ),
        (
            {"strategy": "ifca", "epsilon": 8.0},
            "secure-sum = 'none': is for strategies that need every user's own update, which 'ifca' does "
            "not; must be 'secagg+' or 'trusted'",
        ),
        (
            {"epsilon": 8.0},
            "epsilon = 8.0, noise-multiplier = 0.0: strategy 'krum' has no central DP; set epsilon = inf and "
            "noise-multiplier = 0",
        ),
        (
            {"noise-multiplier": 1.0},
            "epsilon = inf, noise-multiplier = 1.0: strategy 'krum' has no central DP; set epsilon = inf and "
            "noise-multiplier = 0",
        ),
        ({"malicious-users": -1}, "malicious-users = -1: must be at least 0"),
        ({"trim-share": 0.5}, "trim-share = 0.5: must be under 0.5"),
        ({"trim-share": math.nan}, "trim-share = nan: must be a finite number"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"strategy": "krum", "epsilon": math.inf, "secure-sum": "none"} | options)
    assert str(raised.value) == message


@pytest.mark.parametrize(("name", "needed"), [("krum", 13), ("multikrum", 13), ("bulyan", 23)])
def test_too_small_a_cohort_is_found_before_training(config: Make, name: str, needed: int) -> None:
    with pytest.raises(ConfigError) as raised:  # by the options alone, as --dry-run does
        config(**CLEAR, strategy=name, malicious_users=5)
    assert str(raised.value) == (
        f"malicious-users = 5: strategy {name!r} then needs {needed} users a round, and q·|K| = 12; must be "
        "fewer, or raise sampling-rate"
    )
    enough = config(**CLEAR | {"num_users": needed}, strategy=name, malicious_users=5)
    run(enough)
    with pytest.raises(ConfigError, match=f"needs {needed} users"):  # users counted in the data
        check_updates(enough, needed - 1)


def test_a_round_with_too_few_updates_is_dropped(config: Make) -> None:
    c = config(**CLEAR, strategy="bulyan", malicious_users=2)
    network = run(c, 3, intercept=by_round({1: lost}))
    first, second = rows_of(c)
    assert first.dropped == "8 updates arrived, 11 are needed"
    assert second.dropped is None
    np.testing.assert_array_equal(step_made(network), 0)
    with pytest.raises(TrainingFailed, match="every round of stage 2 was dropped: 8 updates arrived"):
        run(c, 3, intercept=by_round({1: lost, 2: lost}))


def test_an_update_that_is_not_finite_stays_with_its_user(config: Make) -> None:
    """A step size of 1e30 ruins all of them."""
    c = config(**CLEAR, strategy="fedmedian", learning_rate=1e30, local_epochs=3)
    with pytest.raises(TrainingFailed, match="no update arrived"):
        run(c)


def test_it_takes_a_server_optimiser(config: Make) -> None:
    c = config(**CLEAR, strategy="fedmedian", server_optimizer="momentum", server_lr=0.5)
    network = run(c)
    expected = 0.5 * np.median(updates_sent(network, 1).astype(np.float64), axis=0)
    np.testing.assert_allclose(step_made(network), expected, rtol=1e-4, atol=1e-7)
