"""Seeded streams: alike for whoever asks for the same purpose, unrelated otherwise."""

import numpy as np
import pytest
import torch

from pina_flwr.seeding import generator, normal


def numbers(*key, count=50):
    return generator(*key).integers(2**32, size=count)


def test_same_purpose_same_stream_whatever_was_drawn_before():
    first = numbers(1, "cohort", 3)
    generator(1, "cohort", 4).random(100)
    np.random.default_rng().random(10)
    torch.rand(3)
    assert np.array_equal(numbers(1, "cohort", 3), first)


def test_stream_is_the_same_in_every_process_and_release():
    assert generator(1, "cohort", 3).integers(1000, size=4).tolist() == [393, 166, 25, 743]


@pytest.mark.parametrize("other", [(2, "cohort", 3), (1, "order", 3), (1, "cohort", 4), (1, "cohort"), (1,)])
def test_another_seed_or_purpose_is_another_stream(other):
    assert not np.any(numbers(1, "cohort", 3) == numbers(*other))


def test_normal_has_the_asked_shape_type_and_spread():
    draw = normal(7, "head", shape=(40, 50), std=0.1)
    assert draw.shape == (40, 50)
    assert draw.dtype == torch.float32
    assert abs(draw.mean().item()) < 0.01
    assert draw.std().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(draw, normal(7, "head", shape=(40, 50), std=0.1))
    assert not torch.equal(draw, normal(8, "head", shape=(40, 50), std=0.1))
    assert normal(7, "head", shape=(3,), std=0.0).tolist() == [0, 0, 0]
