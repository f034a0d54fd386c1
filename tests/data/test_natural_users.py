"""A split by writer, on a small set of FEMNIST's schema (hub id flwrlabs/femnist): only a train split."""

import datasets
import numpy as np
import pytest
import torch
from made_sets import draw, encoded
from PIL import Image

from pina_flwr.config import ConfigError, parse
from pina_flwr.data.users import load_users

WRITERS = {"f0001_41": 20, "f0002_09": 1, "f0003_30": 7, "f0004_11": 2, "f0010_02": 13}
NAMES = [*"0123456789", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def rows():
    """Images in a random order of writers; the first two pixels of an image give its row away."""
    rng = np.random.default_rng(0)
    writers = rng.permutation(np.repeat(list(WRITERS), list(WRITERS.values()))).tolist()
    pixels = draw(len(writers), 28, 28)
    pixels[:, 0, 0] = np.arange(len(writers))
    columns = {
        "image": [encoded(Image.fromarray(picture)) for picture in pixels],
        "writer_id": writers,
        "hsf_id": rng.integers(8, size=len(writers)).tolist(),
        "character": rng.integers(62, size=len(writers)).tolist(),
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "hsf_id": datasets.Value("int64"),
            "character": datasets.ClassLabel(names=NAMES),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def split(rows, parquet):
    folder = parquet(train=rows)

    def load(**options):
        base = {
            "dataset": folder,
            "user-column": "writer_id",
            "rotations": 1,
            "num-users": 0,
            "images-per-user": 0,
            "sampling-rate": 1.0,
        }
        return load_users(parse(base | {key.replace("_", "-"): value for key, value in options.items()}))

    return load


def marks(images):
    return images[:, 0, 0, 0].tolist()


def test_one_user_a_writer(split, rows):
    users = split()
    assert (len(users), users.test_groups, users.groups) == (5, 5, None)
    assert users.tables.num_classes == 62
    writers = np.array(rows["writer_id"])
    for user, (writer, count) in enumerate(sorted(WRITERS.items())):
        assert users.test_group_of(user) == user
        train = marks(users.images(user))
        test = marks(users.test_images(user)) if count > 1 and round(0.2 * count) else []
        assert len(test) == round(0.2 * count)
        assert not set(train) & set(test)
        assert sorted(train + test) == np.flatnonzero(writers == writer).tolist()
        characters = np.array(rows["character"])
        assert users.labels(user).tolist() == characters[train].tolist()
        assert users.test_labels(user).tolist() == characters[test].tolist()


def test_images_are_upright_and_grey(split, rows):
    users = split()
    picture = np.asarray(rows[marks(users.images(4))[3]]["image"])
    assert torch.equal(users.images(4)[3], torch.from_numpy(picture.copy())[None])


def test_a_user_of_one_image_trains_on_it_and_tests_nothing(split):
    users = split()
    assert len(users.images(1)) == len(users.labels(1)) == 1
    assert len(users.test_labels(1)) == 0


def test_at_most_so_many_users(split):
    everyone, three = split(), split(num_users=3)
    assert (len(three), three.test_groups) == (3, 3)
    all_writers = [
        set(np.concatenate([a, b])) for a, b in zip(everyone.rows, everyone.own_test_rows, strict=True)
    ]
    chosen = [set(np.concatenate([a, b])) for a, b in zip(three.rows, three.own_test_rows, strict=True)]
    assert all(rows in all_writers for rows in chosen)
    assert any(
        len(set(map(len, split(num_users=3, seed=seed).rows)) ^ set(map(len, three.rows)))
        for seed in range(2, 8)
    )
    with pytest.raises(ConfigError, match=r"^num-users = 6: the data set has 5 users$"):
        split(num_users=6)


def test_at_most_so_many_images(split):
    users, everything = split(images_per_user=6, augment=2), split()
    assert [len(users.rows[user]) for user in range(5)] == [6, 1, 6, 2, 6]
    assert len(users.images(0)) == len(users.labels(0)) == 12
    for user in range(5):  # a cap on training images takes none of the test images
        assert np.array_equal(users.own_test_rows[user], everything.own_test_rows[user])


def test_same_split_on_every_machine(split):
    a, b, c = split(), split(), split(seed=2)
    assert all(np.array_equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))
    assert any(not np.array_equal(x, y) for x, y in zip(a.rows, c.rows, strict=True))


def test_parts_of_a_users_test_images(split):
    users = split()
    whole = users.test_images(0)
    assert torch.equal(
        torch.cat([users.test_images(0, part, 4) for part in range(4)]).sort(0)[0], whole.sort(0)[0]
    )
    assert [len(users.test_labels(2, part, 4)) for part in range(4)] == [1, 0, 0, 0]


def test_writers_may_be_numbers(rows, parquet):
    numbered = rows.map(lambda row: {"hsf_id": int(row["writer_id"][1:5])}, load_from_cache_file=False)
    options = {"dataset": parquet(train=numbered), "user-column": "hsf_id", "rotations": 1, "num-users": 0}
    users = load_users(parse(options))
    assert [len(r) + len(t) for r, t in zip(users.rows, users.own_test_rows, strict=True)] == [
        20,
        1,
        7,
        2,
        13,
    ]


def test_pictures_of_different_kinds_side_by_side(tmp_path):
    """A user's images take the size of its first; grey ones become colour beside colour ones."""
    grey, colour = np.full((12, 8), 200, np.uint8), np.full((20, 10, 3), [10, 20, 30], np.uint8)
    images = [encoded(Image.fromarray(a)) for a in (grey, colour, colour, grey)]
    made = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1], "who": [1, 1, 2, 2]})
    made.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    options = {"dataset": str(tmp_path / "saved"), "user-column": "who", "rotations": 1, "num-users": 0}
    users = load_users(parse(options))
    sizes = set()
    for user in range(2):
        stacked = users.images(user)
        sizes.add(tuple(stacked.shape))
        colours = {tuple(image.flatten(1).float().mean(1).tolist()) for image in stacked}
        assert colours == {(200, 200, 200), (10, 20, 30)}
    assert sizes <= {(2, 3, 12, 8), (2, 3, 20, 10)}


def test_validation_images_are_training_images_else(split):
    final, choice = split(), split(test_on="validation")
    for user in range(len(WRITERS)):
        rows = final.rows[user].tolist()
        assert sorted([*choice.rows[user], *choice.own_test_rows[user]]) == sorted(rows)
        assert len(choice.own_test_rows[user]) == len(final.own_test_rows[user])
        assert len(choice.rows[user])
