"""Users of the embedded digits: who holds what, under which rotation."""

from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pina_flwr.config import ConfigError, parse
from pina_flwr.data.users import Users, load_users


def users_of(**options):
    options = {"sampling_rate": 1.0} | options  # so that one user is enough
    return load_users(parse({key.replace("_", "-"): value for key, value in options.items()}))


@pytest.mark.parametrize("deal", ["every-rotation", "disjoint"])
@pytest.mark.parametrize("rotations", [1, 2, 4])
def test_deal(deal, rotations):
    users = users_of(deal=deal, rotations=rotations, num_users=49, images_per_user=24, clusters=rotations)
    assert len(users) == 49
    assert users.groups.tolist() == [user % rotations for user in range(49)]
    for user, rows in enumerate(users.rows):
        assert len(set(rows.tolist())) == len(rows) == 24
        assert users.labels(user).dtype == torch.int64
        assert users.labels(user).tolist() == users.tables.train.labels[rows].tolist()
    decks = rotations if deal == "every-rotation" else 1
    for deck in range(decks):
        held = np.concatenate([rows for user, rows in enumerate(users.rows) if user % decks == deck])
        assert len(set(held.tolist())) == len(held)


@pytest.mark.parametrize("deal", ["every-rotation", "disjoint"])
def test_groups_of_unequal_size(deal):
    users = users_of(deal=deal, num_users=50, images_per_user=10, group_shares="70,10,10,10")
    assert np.bincount(users.groups).tolist() == [35, 5, 5, 5]
    for part in (users.groups[:25], users.groups[25:]):  # mixed: whoever comes first is no other kind of user
        assert np.bincount(part, minlength=4).min() >= 2
    decks = [0] * 50 if deal == "disjoint" else users.groups
    for deck in set(decks):
        held = np.concatenate([rows for rows, own in zip(users.rows, decks, strict=True) if own == deck])
        assert len(set(held.tolist())) == len(held)


def test_shares_need_not_add_up_to_100():
    assert np.bincount(
        users_of(num_users=8, group_shares="1.5,.5", rotations=2, clusters=2).groups
    ).tolist() == [6, 2]


def test_a_group_without_users():
    with pytest.raises(
        ConfigError, match=r"^group-shares = '97,1,1,1': leave a group without users at num-users = 9$"
    ):
        users_of(num_users=9, sampling_rate=0.5, group_shares="97,1,1,1")


def test_every_rotation_deals_each_image_once_in_every_rotation():
    users = users_of(num_users=4 * 58, images_per_user=24)
    held = Counter(np.concatenate(users.rows).tolist())
    assert set(held.values()) <= {1, 2, 3, 4}
    assert sum(held.values()) == 4 * 58 * 24
    assert len(held) > 58 * 24  # the four decks are shuffled apart


def test_test_images_are_no_training_images():
    users = users_of(rotations=1, num_users=1, images_per_user=1400)
    train, test = users.images(0).flatten(1), users.test_images(0).flatten(1)
    assert (len(train), len(test)) == (1400, 397)
    both = np.concatenate([train.numpy(), test.numpy()])
    whole = np.round(load_digits().data * (255 / 16)).astype(np.uint8)
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole))


@pytest.mark.parametrize(("rotations", "turns"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_rotations_are_exact(rotations, turns):
    users = users_of(rotations=rotations, num_users=8, images_per_user=5, test_images=30)
    assert users.test_groups == rotations
    for user in range(8):
        group = users.test_group_of(user)
        assert group == user % rotations
        upright = torch.stack(users.tables.train.images(users.rows[user].tolist()))
        assert torch.equal(users.images(user), torch.rot90(upright, turns[group], (2, 3)))
        assert users.images(user).dtype == torch.uint8
    for group in range(rotations):
        assert torch.equal(users.test_images(group), torch.rot90(users.test_images(0), turns[group], (2, 3)))
        assert torch.equal(users.test_labels(group), users.test_labels(0))


def test_parts_of_the_test_images_make_the_whole():
    users = users_of(num_users=4, test_images=50)
    whole, labels = users.test_images(1), users.test_labels(1)
    assert len(whole) == len(labels) == 50
    for parts in (1, 3, 7):
        seen = torch.zeros(50, dtype=torch.int64)
        for part in range(parts):
            assert torch.equal(users.test_images(1, part, parts), whole[part::parts])
            assert torch.equal(users.test_labels(1, part, parts), labels[part::parts])
            seen[part::parts] += 1
        assert seen.tolist() == [1] * 50


def test_augmentation_multiplies_each_user_by_five():
    plain = users_of(num_users=8, images_per_user=6)
    larger = users_of(num_users=8, images_per_user=6, augment=5)
    for user in range(8):
        images = larger.images(user)
        assert images.shape == (30, 1, 8, 8)
        assert torch.equal(images[:6], plain.images(user))
        assert torch.equal(larger.labels(user), plain.labels(user).repeat(5))
        assert torch.equal(larger.images(user), images)
        assert not torch.equal(images[6:12], images[12:18])
    assert torch.equal(larger.test_images(0), plain.test_images(0))


def test_augmentation_differs_between_users_and_seeds():
    config = parse(
        {
            "sampling-rate": 1.0,
            "num-users": 4,
            "images-per-user": 6,
            "augment": 5,
            "rotations": 1,
            "clusters": 1,
        }
    )
    users = load_users(config)
    same_rows = Users(config, users.tables, [users.rows[0]] * 4, users.groups)
    assert torch.equal(same_rows.images(0)[:6], same_rows.images(1)[:6])
    assert not torch.equal(same_rows.images(0)[6:], same_rows.images(1)[6:])
    reseeded = Users(parse({"seed": 2, "augment": 5, "rotations": 1}), users.tables, users.rows, users.groups)
    assert torch.equal(users.images(0)[:6], reseeded.images(0)[:6])
    assert not torch.equal(users.images(0)[6:], reseeded.images(0)[6:])


def test_rotation_comes_after_augmentation():
    """A user's copies are those of the upright images, turned: the crop does not depend on the group."""
    upright = users_of(num_users=4, images_per_user=6, augment=3, rotations=1, clusters=1)
    turned = Users(
        parse({"augment": 3, "rotations": 4}), upright.tables, upright.rows, np.array([3, 1, 2, 0], dtype=int)
    )
    for user, group in enumerate([3, 1, 2, 0]):
        assert torch.equal(turned.images(user), torch.rot90(upright.images(user), group, (2, 3)))


def test_the_seed_decides_everything():
    a, b, c = users_of(num_users=8), users_of(num_users=8), users_of(num_users=8, seed=2)
    assert all(np.array_equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))
    assert torch.equal(a.test_images(0), b.test_images(0))
    assert torch.equal(a.images(3), b.images(3))
    assert not np.array_equal(a.rows[0], c.rows[0])
    assert not torch.equal(a.test_images(0), c.test_images(0))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"deal": "disjoint", "images_per_user": 24}, 58),
        ({"deal": "every-rotation", "images_per_user": 24}, 232),
        ({"deal": "every-rotation", "images_per_user": 24, "rotations": 2}, 116),
        ({"deal": "disjoint", "images_per_user": 1400}, 1),
        ({"images_per_user": 24, "group_shares": "58,2,2,2"}, 64),
    ],
)
def test_too_many_users(options, most):
    assert len(users_of(num_users=most, **options)) == most
    with pytest.raises(
        ConfigError, match=rf"^num-users = {most + 1}: 1400 .* {most} users .*images-per-user"
    ) as error:
        users_of(num_users=most + 1, **options)
    assert "\n" not in str(error.value)


def test_more_images_per_user_than_there_are():
    with pytest.raises(ConfigError, match=r"^images-per-user = 1401: the data set has 1400 training images$"):
        users_of(num_users=1, images_per_user=1401)


@pytest.mark.parametrize("deal", ["every-rotation", "disjoint"])
@pytest.mark.parametrize("count", [10**12, 2**63 - 1])
@pytest.mark.parametrize("shares", ["", "4,3,2,1"])
def test_absurd_numbers_are_refused_before_memory_is_taken(deal, count, shares):
    with pytest.raises(ConfigError, match=f"^num-users = {count}: "):
        users_of(num_users=count, deal=deal, group_shares=shares)
    with pytest.raises(ConfigError, match=f"^images-per-user = {count}: "):
        users_of(num_users=count, images_per_user=count, deal=deal, group_shares=shares)


@pytest.mark.parametrize("key", ["user-column", "image-column", "label-column"])
def test_digits_have_no_columns(key):
    with pytest.raises(ConfigError, match=f"^{key} = 'x': dataset 'digits' has no such column"):
        load_users(parse({key: "x", "rotations": 1}))
