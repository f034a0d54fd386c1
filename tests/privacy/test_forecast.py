"""What a run would cost, against the accountant asked directly."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from pina_flwr.config import ConfigError, parse
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.forecast import forecast, write_curve
from pina_flwr.privacy.guarantee import Subject, guarantee
from pina_flwr.privacy.plan import plan, shapes_of

USERS = 1000
OPTIONS = {"num-users": USERS, "noise-cohort-size": 0, "sampling-rate": 0.1, "secure-sum": "trusted"}


def planned(**options):
    config = parse(OPTIONS | {name.replace("_", "-"): value for name, value in options.items()})
    shapes = shapes_of(config, 64, 10)
    return config, shapes


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian", "gaussian"])
def test_the_curve_ends_at_the_guarantee_and_never_falls(mechanism):
    config, shapes = planned(mechanism=mechanism, epsilon=4.0, t_tr=30)
    found = forecast(config, USERS, shapes)
    subject = Subject(config, plan(config, USERS, shapes), USERS, shapes)
    held = guarantee(subject)
    assert found.curve.rounds.tolist() == list(range(31))
    assert found.curve.recipient[-1] == pytest.approx(held.recipient.epsilon, rel=1e-2)
    assert found.curve.recipient[-1] >= held.recipient.epsilon * (1 - 1e-9)
    assert found.curve.server[-1] == pytest.approx(held.server.epsilon, rel=1e-2)
    assert (np.diff(found.curve.recipient) >= 0).all()
    assert (np.diff(found.curve.server) >= 0).all()


def test_every_point_is_the_epsilon_of_that_many_rounds():
    config, shapes = planned(epsilon=4.0, t_tr=20)
    found = forecast(config, USERS, shapes)
    for rounds in (0, 1, 7, 20):
        exact = epsilon(found.subject.releases(10, rounds), found.subject.noise.delta)
        assert exact * (1 - 1e-9) <= found.curve.recipient[rounds] <= exact * 1.011


def test_the_server_learns_nothing_more_once_the_cap_is_reached():
    config, shapes = planned(t_tr=20, participation_cap=3)
    server = forecast(config, USERS, shapes).curve.server
    assert server[2] < server[3]
    assert (server[3:] == server[3]).all()


def test_without_sampling_the_cap_holds_for_recipients_too():
    config, shapes = planned(t_tr=20, participation_cap=3, sampling_rate=1.0)
    found = forecast(config, USERS, shapes)
    assert found.curve.recipient[-1] == pytest.approx(found.held.recipient.epsilon, rel=1e-2)
    assert found.curve.recipient.tolist() == found.curve.server.tolist()


def test_without_noise_there_is_nothing_to_account_for():
    config, shapes = planned(epsilon=math.inf)
    with pytest.raises(ConfigError, match="epsilon = inf"):
        forecast(config, USERS, shapes)


def test_a_budget_out_of_reach_is_one_line():
    config, shapes = planned(epsilon=1e-9)
    with pytest.raises(ConfigError, match="epsilon = 1e-09"):
        forecast(config, USERS, shapes)


def test_the_curve_as_csv(tmp_path):
    config, shapes = planned(t_tr=5)
    curve = forecast(config, USERS, shapes).curve
    write_curve(curve, tmp_path / "curve.csv")
    with (tmp_path / "curve.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == list(range(6))
    assert [float(row["epsilon_recipient"]) for row in rows] == curve.recipient.tolist()
    assert [float(row["epsilon_server"]) for row in rows] == curve.server.tolist()


def test_a_curve_that_cannot_be_written_is_one_line(tmp_path):
    config, shapes = planned(t_tr=5)
    with pytest.raises(ConfigError, match="--curve"):
        write_curve(forecast(config, USERS, shapes).curve, tmp_path / "none" / "curve.csv")
