"""FedAvgM and FedAdam against their papers' formulas, by cluster; and what a whole run does with them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import by_round, json_of, lost, models_sent, rows_of, run

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.strategies.server_optimizer import ServerOptimizer

Make = Callable[..., RunConfig]
RNG = np.random.default_rng(5)
C, D, ROUNDS = 3, 40, 6
START = RNG.normal(size=(C, D)).astype(np.float32)
MEANS = RNG.normal(size=(ROUNDS, C, D))
WEIGHTS = RNG.uniform(0.5, 3, size=(ROUNDS, C))
RATES = [0.5, 0.5, 0.1, 0.1, 0.1, 0.1]


def moved(options: dict[str, Any], weights: np.ndarray = WEIGHTS) -> np.ndarray:
    """The models after every round, float32 [rounds, C, d]."""
    optimizer, models, found = ServerOptimizer(parse(options), C, D), START, []
    for means, factors, rate in zip(MEANS, weights, RATES, strict=True):
        models = optimizer.step(models, means, factors, rate)
        assert models.dtype == np.float32
        found.append(models)
    return np.array(found)


def test_plain_steps_are_those_of_before_to_the_bit() -> None:
    models = START
    for found, means, factors, rate in zip(moved({}), MEANS, WEIGHTS, RATES, strict=True):
        models = (models + rate * factors[:, None] * means).astype(np.float32)
        np.testing.assert_array_equal(found, models)


def test_momentum_is_fedavgm() -> None:
    velocity, models, expected = np.zeros((C, D)), START.astype(np.float64), []
    for means, factors, rate in zip(MEANS, WEIGHTS, RATES, strict=True):
        velocity = 0.7 * velocity + factors[:, None] * means
        models = models + rate * velocity
        expected.append(models)
    found = moved({"server-optimizer": "momentum", "server-momentum": 0.7})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_adam_is_fedadam_with_the_bias_corrected() -> None:
    b1, b2, tau = 0.8, 0.95, 0.02
    first, second, models, expected = np.zeros((C, D)), np.zeros((C, D)), START.astype(np.float64), []
    for t, (means, factors, rate) in enumerate(zip(MEANS, WEIGHTS, RATES, strict=True), start=1):
        step = factors[:, None] * means
        first, second = b1 * first + (1 - b1) * step, b2 * second + (1 - b2) * step**2
        models = models + rate * (first / (1 - b1**t)) / (np.sqrt(second / (1 - b2**t)) + tau)
        expected.append(models)
    options = {"server-momentum": b1, "server-beta2": b2, "server-tau": tau}
    np.testing.assert_allclose(moved({"server-optimizer": "adam"} | options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_cluster_of_factor_zero_is_left_out_with_its_state(optimizer: str) -> None:
    """As if it had had no such round; the others go on as ever."""
    weights = WEIGHTS.copy()
    weights[2, 1] = 0
    options = {"server-optimizer": optimizer}
    found, usual = moved(options, weights), moved(options)
    np.testing.assert_array_equal(found[2, 1], found[1, 1])
    np.testing.assert_array_equal(found[:, [0, 2]], usual[:, [0, 2]])
    fresh, models = ServerOptimizer(parse(options), C, D), START
    for t in (0, 1, 3, 4, 5):
        models = fresh.step(models, MEANS[t], WEIGHTS[t], RATES[t])
    np.testing.assert_array_equal(found[5, 1], models[1])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_without_any_signal_nothing_moves(optimizer: str) -> None:
    found = ServerOptimizer(parse({"server-optimizer": optimizer}), C, D).step(
        START, MEANS[0], np.zeros(C), 1.0
    )
    np.testing.assert_array_equal(found, START)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server-optimizer": "yogi"}, "server-optimizer = 'yogi': must be one of sgd, momentum, adam"),
        ({"server-momentum": 1.0}, "server-momentum = 1.0: must be under 1"),
        ({"server-momentum": -0.1}, "server-momentum = -0.1: must be at least 0"),
        ({"server-momentum": math.nan}, "server-momentum = nan: must be a finite number"),
        ({"server-beta2": 1.5}, "server-beta2 = 1.5: must be under 1"),
        ({"server-beta2": math.nan}, "server-beta2 = nan: must be a finite number"),
        ({"server-tau": 0.0}, "server-tau = 0.0: must be above 0"),
        ({"server-tau": math.inf}, "server-tau = inf: must be a finite number"),
    ],
)
def test_constants_out_of_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(options)
    assert str(raised.value) == message


@pytest.mark.usefixtures("bare")
class TestRuns:
    """Through the ServerApp; without noise two runs differ by the optimiser alone."""

    def models(self, config: Make, **options: Any) -> list[np.ndarray]:
        network = run(config(epsilon=math.inf, diagnostics=False, t_tr=4, **options))
        return [models_sent(network, t) for t in (1, 2, 3, 4)]

    def test_the_second_step_keeps_the_first_ones_momentum(self, config: Make) -> None:
        """And FedAvg, whose plain steps have rate 1, takes the server learning rates."""
        rates = {"server_lr_no": 0.5, "server_lr": 0.25, "t_no": 1}
        options = {"strategy": "fedavg", "server_optimizer": "momentum"} | rates
        one, two, three, _ = self.models(config, **options, server_momentum=0.0)
        a, b, c, _ = self.models(config, **options, server_momentum=0.9)
        np.testing.assert_array_equal([one, two], [a, b])
        carried = 0.25 * 0.9 * (two - one) / 0.5
        np.testing.assert_allclose(c - three, carried, atol=1e-6)
        assert np.abs(carried).max() > 1e-3

    @pytest.mark.parametrize(
        ("strategy", "optimizer"), [("pina", "momentum"), ("ifca", "adam"), ("fedprox", "adam")]
    )
    def test_is_an_option_of_all_that_costs_no_privacy(
        self, config: Make, strategy: str, optimizer: str
    ) -> None:
        options = {"strategy": strategy, "epsilon": 8.0, "diagnostics": False, "secure_sum": "secagg+"}
        found = []
        for chosen in ("sgd", optimizer):
            c = config(**options, t_tr=1, sampling_rate=1.0, server_optimizer=chosen, server_lr=0.01)
            run(c)
            found.append(json_of(c, "summary.json"))
            assert not any(row.dropped for row in rows_of(c))
        for key in ("epsilon", "delta", "noise_multiplier"):
            assert found[0][key] == found[1][key]

    def test_a_round_that_is_dropped_moves_nothing(self, config: Make) -> None:
        """Momentum alone would carry the models on."""
        options = {"strategy": "fedavg", "server_optimizer": "momentum", "server_lr": 0.01}
        c = config(epsilon=math.inf, diagnostics=False, t_tr=4, **options)
        network = run(c, intercept=by_round({2: lost}))
        assert [bool(row.dropped) for row in rows_of(c)] == [False, True, False, False]
        second, third, fourth = (models_sent(network, t) for t in (2, 3, 4))
        np.testing.assert_array_equal(second, third)
        assert np.abs(fourth - third).max() > 1e-4
