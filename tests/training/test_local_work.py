"""Epochs that differ between users, and FedNova's normalisation by hand."""

import numpy as np
import pytest
import torch

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.seeding import generator
from pina_flwr.training.local_work import effective_steps, epochs_of, normalised

ALL = list(range(6))


def test_all_do_all_epochs_by_default():
    assert epochs_of(RunConfig(), ALL, 1).tolist() == [5] * 6


def test_epochs_are_uniform_and_public():
    config = parse({"local-epochs-least": 2, "local-epochs": 6, "seed": 3})
    draws = torch.stack([epochs_of(config, range(200), round_) for round_ in range(1, 6)])
    counts = torch.bincount(draws.flatten(), minlength=8)
    assert counts[:2].sum() == counts[7:].sum() == 0
    assert (abs(counts[2:7] - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5).all()
    again = generator(3, "epochs", 17, 4).integers(2, 6, endpoint=True)
    assert epochs_of(config, [17], 4).tolist() == [again]  # whatever the company
    assert not torch.equal(draws[0], draws[1])


def test_least_is_at_most_all():
    with pytest.raises(ConfigError, match="local-epochs-least = 6: must be at most local-epochs = 5"):
        parse({"local-epochs-least": 6})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5),
        ({"local-epochs-least": 2}, 3.5),
        ({"batch-size": 10}, 5 * 3),  # 24 images
        ({"batch-size": 10, "augment": 5, "local-epochs": 10, "local-epochs-least": 1}, 5.5 * 12),
        ({"effective-steps": 7.5, "batch-size": 10}, 7.5),
    ],
)
def test_effective_steps(options, expected):
    assert effective_steps(parse(options)) == expected


def test_steps_of_unknown_users_must_be_given():
    natural = {"user-column": "writer_id", "rotations": 1, "images-per-user": 0, "batch-size": 50}
    with pytest.raises(ConfigError, match="strategy 'fednova' needs; set effective-steps"):
        parse(natural | {"strategy": "fednova"})
    given = parse(natural | {"strategy": "fednova", "effective-steps": 20.0})
    assert effective_steps(given) == 20
    assert effective_steps(parse(natural | {"strategy": "fednova", "batch-size": 0})) == 5
    with pytest.raises(ValueError, match="images-per-user = 0"):
        effective_steps(parse(natural))


def test_normalised_by_hand():
    """Two users, of 2 and 8 steps of 0.1 and 0.05 each along axes of their own: mean steps count."""
    updates = torch.tensor([[0.2, 0.0], [0.0, 0.4], [0.0, 0.0]])
    scaled = normalised(updates, torch.tensor([2, 8, 0]), 5.0)
    np.testing.assert_allclose(scaled, [[0.5, 0.0], [0.0, 0.25], [0.0, 0.0]])


class TestInTraining:
    """With workbenches of six users of 5, 3, 8, 1, 6 and 3 images."""

    def updates(self, work, **options):
        models = work.backbone.spec.start()[None]
        return work.train(ALL, models, torch.zeros(6, dtype=torch.int64), 2)[0]

    def test_by_the_steps_that_users_took(self, bench):
        options = {"batch_size": 2, "local_epochs": 2, "clip_norm": 1e6}
        plain = self.updates(bench(strategy="fedavg", **options))
        nova = self.updates(bench(strategy="fednova", **options))
        steps = torch.tensor([2 * -(-size // 2) for size in (5, 3, 8, 1, 6, 3)])
        torch.testing.assert_close(nova, plain * (8 / steps)[:, None])  # 2 epochs of 4 batches are expected

    def test_equals_fedavg_where_all_take_the_expected_steps(self, bench):
        options = {"local_epochs": 3}
        same = self.updates(bench(strategy="fedavg", **options))
        assert torch.equal(self.updates(bench(strategy="fednova", **options)), same)

    def test_users_do_what_their_epochs_say(self, bench):
        mixed = bench(strategy="fedavg", local_epochs=4, local_epochs_least=1)
        epochs = epochs_of(mixed.config, ALL, 2)
        assert len(epochs.unique()) > 1
        updates = self.updates(mixed)
        for user in ALL:
            alone = self.updates(bench(strategy="fedavg", local_epochs=int(epochs[user])))
            torch.testing.assert_close(updates[user], alone[user])

    def test_the_proximal_term_is_fedprox_alone(self, bench):
        plain, other = (self.updates(bench(strategy="fedavg", mu=mu)) for mu in (0.0, 2.0))
        assert torch.equal(plain, other)
        assert torch.equal(self.updates(bench(strategy="fedprox", mu=0.0)), plain)
        held = self.updates(bench(strategy="fedprox", mu=2.0))
        assert (held.norm(dim=1) < plain.norm(dim=1)).all()
