"""Fashion-MNIST and CIFAR-10 themselves, where they lie beside the checkout."""

from pathlib import Path

import pytest

from pina_flwr.config import parse
from pina_flwr.data.users import load_users

DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "rotations", "shape", "train", "test"),
    [("fashion_mnist", 4, (1, 28, 28), 60000, 10000), ("cifar10", 2, (3, 32, 32), 50000, 10000)],
)
def test_loads_and_deals(name, rotations, shape, train, test):
    if not (DATA / name).is_dir():
        pytest.skip(f"no {name} in {DATA}")
    options = {"dataset": str(DATA / name), "num-users": 40, "images-per-user": 24, "rotations": rotations}
    users = load_users(parse(options | {"deal": "disjoint", "test-images": 100}))
    assert users.tables.num_classes == 10
    assert (len(users.tables.train.labels), len(users.tables.test.labels)) == (train, test)
    assert users.images(7).shape == (24, *shape)
    assert users.test_images(1).shape == (100, *shape)
    assert set(users.labels(0).tolist()) <= set(range(10))
    assert users.images(7).float().std() > 20
