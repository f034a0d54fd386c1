"""Rotation and augmentation against numpy and against every crop there is."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from pina_flwr.data.augmentation import crop_and_flip, enlarge, rotate


def picture(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 256, size=shape, dtype=np.uint8))


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (3, 3, 4, 6)])
def test_rotation_is_exact(turns, shape):
    images = picture(*shape)
    assert np.array_equal(rotate(images, turns).numpy(), np.rot90(images.numpy(), turns, axes=(2, 3)))
    assert torch.equal(rotate(rotate(images, turns), 4 - turns % 4), images)


@pytest.mark.parametrize(
    ("shape", "margins"), [((1, 8, 8), (1, 1)), ((3, 16, 32), (2, 4)), ((1, 3, 3), (1, 1))]
)
def test_each_copy_is_a_shifted_and_perhaps_mirrored_image_and_all_occur(shape, margins):
    image = picture(*shape)
    height, width = shape[1:]
    up, left = margins
    wide = pad(image, (left, left, up, up))
    shifted = [
        wide[:, top : top + height, start : start + width]
        for top in range(2 * up + 1)
        for start in range(2 * left + 1)
    ]
    possible = {crop.numpy().tobytes() for crop in shifted} | {
        crop.flip(-1).numpy().tobytes() for crop in shifted
    }
    rng = np.random.default_rng(1)
    drawn = [crop_and_flip(image, rng) for _ in range(15 * len(possible))]
    assert all(copy.shape == image.shape and copy.dtype == torch.uint8 for copy in drawn)
    assert {copy.numpy().tobytes() for copy in drawn} == possible


def test_enlarged_set_starts_with_the_images_themselves():
    images = [picture(1, 8, 8, seed=i) for i in range(3)]
    larger = enlarge(images, 5, np.random.default_rng(0))
    assert len(larger) == 15
    assert all(a is b for a, b in zip(larger, images, strict=False))
    again = enlarge(images, 5, np.random.default_rng(0))
    assert all(torch.equal(a, b) for a, b in zip(larger, again, strict=True))
    assert enlarge(images, 1, np.random.default_rng(0)) == images


def test_copies_keep_the_order_of_their_images():
    images = [torch.full((1, 8, 8), i + 1, dtype=torch.uint8) for i in range(4)]
    assert [copy.max().item() for copy in enlarge(images, 3, np.random.default_rng(2))] == [1, 2, 3, 4] * 3
