"""Training side by side equals training one by one, and plain SGD on transformers' model under PEFT."""

import numpy as np
import pytest
import torch
from tiny_models import PeftTwin
from torch.nn.functional import cross_entropy, one_hot

from pina_flwr.config import parse
from pina_flwr.models import tiny_vit
from pina_flwr.models.backbone import load_backbone
from pina_flwr.seeding import generator
from pina_flwr.training.local import Batch, LocalSGD, user_losses

SIZES = (5, 2, 7, 1)
OPTIONS = [
    {"lora-targets": "q,v"},
    {"lora-targets": "q,k,v,o", "lora-layers": 2},
    {"lora-targets": "q,k,v,o", "lora-layers": 3, "lora-train-a": False},
    {"lora-targets": "v", "train-head": False},
    {"lora-targets": "k,v", "lora-layers": 2, "lora-train-a": False, "train-head": False},
]


@pytest.fixture(params=OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def backbone(request):
    return load_backbone(parse(request.param), 10)


def private_data(backbone):
    """Pixels [n, 1, 8, 8] and labels [n] of users of unequal size."""
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn((size, 1, 8, 8), generator=draw), torch.randint(10, (size,), generator=draw))
        for size in SIZES
    ]


def side_by_side(backbone, data, garbage=0.0):
    """The users' data as one batch; padding is filled with `garbage`."""
    longest = max(len(labels) for _, labels in data)
    hidden, targets = (
        torch.full((len(data), longest, 17, 64), garbage),
        torch.full((len(data), longest, 10), 0.1),
    )
    weights = torch.zeros(len(data), longest)
    for user, (pixels, labels) in enumerate(data):
        n = len(labels)
        hidden[user, :n], targets[user, :n] = backbone.prefix(pixels), one_hot(labels, 10).float()
        weights[user, :n] = 1
    return Batch(backbone.prepare(hidden), targets, weights)


def orders(count):
    return [generator(3, "order", user) for user in range(count)]


def starts(backbone):
    noise = torch.randn((len(SIZES), backbone.spec.size), generator=torch.Generator().manual_seed(2))
    return backbone.spec.start() + 0.1 * noise


def assert_same_training(ours, theirs, start, within):
    """The difference is small against the way that training went."""
    way = (theirs - start).norm()
    assert way > 0.05
    assert (ours - theirs).norm() < within * way


@pytest.mark.parametrize("batch_size", [0, 3, 100])
def test_side_by_side_equals_one_by_one(backbone, batch_size):
    data, start = private_data(backbone), starts(backbone)
    sgd = LocalSGD(epochs=2, batch_size=batch_size, learning_rate=0.2)
    together, steps = sgd.train(
        backbone, backbone.spec, start, side_by_side(backbone, data), orders(len(SIZES))
    )
    assert not together.requires_grad
    for user in range(len(SIZES)):
        alone = side_by_side(backbone, data[user : user + 1])
        one, taken = sgd.train(
            backbone, backbone.spec, start[user : user + 1], alone, orders(len(SIZES))[user : user + 1]
        )
        assert taken[0] == steps[user] == 2 * (1 if batch_size == 0 else -(-SIZES[user] // batch_size))
        assert_same_training(together[user], one[0], start[user], within=1e-4)


@pytest.mark.parametrize("batch_size", [0, 3])
def test_equals_plain_sgd_on_the_peft_model(backbone, batch_size):
    """The whole model from pixels on, one user, torch's optimiser, the same batches."""
    data, start = private_data(backbone), starts(backbone)
    sgd = LocalSGD(epochs=2, batch_size=batch_size, learning_rate=0.2)
    ours, _ = sgd.train(backbone, backbone.spec, start, side_by_side(backbone, data), orders(len(SIZES)))
    for user in (0, 2):
        twin = PeftTwin(tiny_vit.load(10), backbone, backbone.spec, start[user])
        optimiser = torch.optim.SGD(twin.parameters(), lr=0.2)
        pixels, labels = data[user]
        order = orders(len(SIZES))[user]
        for _ in range(2):
            rows = (
                torch.from_numpy(order.permutation(len(labels))) if batch_size else torch.arange(len(labels))
            )
            for part in rows.split(batch_size or len(labels)):
                optimiser.zero_grad()
                cross_entropy(twin.logits(pixels[part]), labels[part]).backward()
                optimiser.step()
        assert_same_training(ours[user], twin.vector(), start[user], within=1e-4)


@pytest.fixture(scope="module")
def plain():
    return load_backbone(parse({"head-std": 0.3}), 10)


def test_padding_counts_for_nothing(plain):
    data, start = private_data(plain), starts(plain)
    for batch_size in (0, 2):
        sgd = LocalSGD(epochs=2, batch_size=batch_size, learning_rate=0.2)
        results = [
            sgd.train(
                plain, plain.spec, start, side_by_side(plain, data, garbage), orders(len(SIZES))
            ).vectors
            for garbage in (0.0, 3.0)
        ]
        torch.testing.assert_close(*results)


def test_start_is_left_alone(plain):
    start = starts(plain)
    before = start.clone()
    LocalSGD(1, 0, 0.5).train(plain, plain.spec, start, side_by_side(plain, private_data(plain)), orders(4))
    assert torch.equal(start, before)


def test_every_epoch_sees_every_image_once(plain):
    batch = side_by_side(plain, private_data(plain))
    marked = Batch(batch.prepared, torch.arange(7.0)[None, :, None].expand(4, 7, 10), batch.weights)
    sgd, streams = LocalSGD(1, 2, 0.1), orders(len(SIZES))
    epochs = []
    for _ in range(3):
        parts = list(sgd._batches(marked, streams))
        assert [part.weights.shape[1] for part in parts] == [2, 2, 2, 1]
        rows = torch.cat([part.targets[..., 0] for part in parts], dim=1)
        real = torch.cat([part.weights for part in parts], dim=1).bool()
        for user, size in enumerate(SIZES):
            assert sorted(rows[user][real[user]].tolist()) == list(range(size))
            assert real[user][:size].all()  # padding comes last: batches of a user alone are the same
        epochs.append(rows[2].tolist())
    assert len({tuple(rows) for rows in epochs}) == 3


def test_losses_are_mean_cross_entropies(plain):
    data, vectors = private_data(plain), starts(plain)
    losses = user_losses(plain, plain.spec, vectors, side_by_side(plain, data))
    for user, (pixels, labels) in enumerate(data):
        twin = PeftTwin(tiny_vit.load(10), plain, plain.spec, vectors[user])
        torch.testing.assert_close(losses[user], cross_entropy(twin.logits(pixels), labels).detach())


def test_one_model_for_all_users(plain):
    batch, vector = side_by_side(plain, private_data(plain)), starts(plain)[:1]
    shared = user_losses(plain, plain.spec, vector, batch)
    assert shared.shape == (4,)
    torch.testing.assert_close(shared, user_losses(plain, plain.spec, vector.expand(4, -1), batch))


def test_uniform_targets(plain):
    (pixels, _), *_ = private_data(plain)
    hidden = plain.prefix(pixels)[None]
    batch = Batch(plain.prepare(hidden), torch.full((1, 5, 10), 0.1), torch.ones(1, 5))
    vector = starts(plain)[:1]
    scores = plain.logits(batch.prepared, plain.spec.unflatten(vector), plain.spec.lora_scale)[0]
    expected = cross_entropy(scores, torch.full((5, 10), 0.1))
    torch.testing.assert_close(user_losses(plain, plain.spec, vector, batch)[0], expected)


def test_user_without_images_stays_where_it_starts(plain):
    data, start = private_data(plain), starts(plain)
    batch = side_by_side(plain, data)
    batch.weights[1] = 0
    assert user_losses(plain, plain.spec, start, batch)[1] == 0
    for batch_size in (0, 2):
        trained = (
            LocalSGD(2, batch_size, 0.3, mu=1.0).train(plain, plain.spec, start, batch, orders(4)).vectors
        )
        assert torch.equal(trained[1], start[1])
        assert torch.isfinite(trained).all()


def test_a_diverging_user_spoils_no_other(plain):
    """NaN in one user's data stays with that user."""
    data, start = private_data(plain), starts(plain)
    good = side_by_side(plain, data)
    bad = side_by_side(plain, [(data[0][0] * np.nan, data[0][1]), *data[1:]])
    sgd = LocalSGD(2, 0, 0.3)
    expected, trained = (
        sgd.train(plain, plain.spec, start, batch, orders(4)).vectors for batch in (good, bad)
    )
    assert torch.isnan(trained[0]).any()
    torch.testing.assert_close(trained[1:], expected[1:])


def test_proximal_term_against_autograd(plain):
    """Three steps on loss + μ/2·‖w - w_start‖², differentiated as a whole."""
    data, start, mu, rate = private_data(plain), starts(plain), 0.7, 0.2
    batch = side_by_side(plain, data)
    ours, _ = LocalSGD(3, 0, rate, mu).train(plain, plain.spec, start, batch, orders(4))
    vectors = start.clone()
    for _ in range(3):
        vectors = vectors.detach().requires_grad_(True)
        proximal = mu / 2 * ((vectors - start) ** 2).sum(dim=1)
        (user_losses(plain, plain.spec, vectors, batch) + proximal).sum().backward()
        vectors = vectors.detach() - rate * vectors.grad
    torch.testing.assert_close(ours - start, vectors - start, rtol=1e-4, atol=1e-6)
    free, _ = LocalSGD(3, 0, rate).train(plain, plain.spec, start, batch, orders(4))
    assert ((ours - start).norm(dim=1) < 0.95 * (free - start).norm(dim=1)).all()


@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_epochs_of_each_user(plain, batch_size, mu):
    """Users that stop earlier than others train as they would alone."""
    data, start, epochs = private_data(plain), starts(plain), torch.tensor([3, 1, 2, 0])
    sgd = LocalSGD(7, batch_size, 0.2, mu)
    together = sgd.train(plain, plain.spec, start, side_by_side(plain, data), orders(4), epochs)
    batches = [1 if batch_size == 0 else -(-size // batch_size) for size in SIZES]
    assert together.steps.tolist() == [int(e) * b for e, b in zip(epochs, batches, strict=True)]
    for user, count in enumerate(epochs.tolist()):
        part = slice(user, user + 1)
        alone = LocalSGD(count, batch_size, 0.2, mu).train(
            plain, plain.spec, start[part], side_by_side(plain, data[part]), orders(4)[part]
        )
        torch.testing.assert_close(together.vectors[user], alone.vectors[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(together.vectors[3], start[3])


def test_who_is_done_is_not_spoilt_by_a_gradient_that_is_not_finite(plain):
    """A user stops; a step later its own loss is NaN, since its images are: it keeps what it has."""
    data, start = private_data(plain), starts(plain)
    good = side_by_side(plain, data)
    bad = side_by_side(plain, [(data[0][0] * np.nan, data[0][1]), *data[1:]])
    epochs = torch.tensor([0, 1, 1, 1])
    trained = LocalSGD(1, 0, 0.2).train(plain, plain.spec, start, bad, orders(4), epochs)
    expected = LocalSGD(1, 0, 0.2).train(plain, plain.spec, start, good, orders(4), epochs)
    assert torch.equal(trained.vectors[0], start[0])
    torch.testing.assert_close(trained.vectors, expected.vectors)
