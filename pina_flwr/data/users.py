"""Users and their private data: who holds which images, which hidden group each belongs to.

Rotated data sets: all images of a user carry one rotation, which is its hidden group (Ghosh et al. 2020).
Natural splits (`user-column`): one user per value of the column, groups unknown, each user holds out images
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.data.augmentation import enlarge, rotate
from pina_flwr.data.tables import ImageTable, Tables, load_tables
from pina_flwr.seeding import generator

OWN_TEST_SHARE = 0.2  # of a user's images, held out where the split is natural


@dataclass(frozen=True)
class Users:
    """|K| users, their training images and the test images that stand for each test group.

    rows: training rows of each user. groups: hidden group of each user, int [K], or None when unknown.
    """

    config: RunConfig
    tables: Tables
    rows: list[np.ndarray]
    groups: np.ndarray | None
    own_test_rows: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def test_groups(self) -> int:
        """Test groups: one per rotation, or one per user where the split is natural."""
        return len(self) if self.own_test_rows is not None else self.config.rotations

    def test_group_of(self, user: int) -> int:
        """The test group whose images stand for this user's."""
        return user if self.groups is None else int(self.groups[user])

    def labels(self, user: int) -> Tensor:
        """Labels of a user's training images, augmented copies included: int64 [n]."""
        return torch.from_numpy(np.tile(self.tables.train.labels[self.rows[user]], self.config.augment))

    def images(self, user: int) -> Tensor:
        """A user's images, augmented and rotated, ever the same: uint8 [n, channels, height, width]."""
        c = self.config
        upright = self.tables.train.images(self.rows[user].tolist())
        upright = enlarge(upright, c.augment, generator(c.seed, "augment", user))
        return rotate(_stack(upright), self._turns(self.test_group_of(user)))

    def test_labels(self, group: int, part: int = 0, parts: int = 1) -> Tensor:
        """Labels of every `parts`-th test image of a group, from the `part`-th on: int64 [n]."""
        table, rows = self._test_rows(group)
        return torch.from_numpy(table.labels[rows[part::parts]])

    def test_images(self, group: int, part: int = 0, parts: int = 1) -> Tensor:
        """The images to `test_labels`, rotated (nodes share evaluation by parts): uint8 as `images`."""
        table, rows = self._test_rows(group)
        return rotate(_stack(table.images(rows[part::parts].tolist())), self._turns(group))

    def _test_rows(self, group: int) -> tuple[ImageTable, np.ndarray]:
        if self.own_test_rows is not None:
            return self.tables.train, self.own_test_rows[group]
        assert self.tables.test is not None  # only a natural split has none
        count = len(self.tables.test.labels)
        order = generator(self.config.seed, "test images").permutation(count)
        return self.tables.test, order[: self.config.test_images or count]

    def _turns(self, group: int) -> int:
        return group * 4 // self.config.rotations if self.own_test_rows is None else 0


def load_users(config: RunConfig) -> Users:
    """Load the data set and deal it to users; the same on every machine that has the same configuration.

    Raises:
        ConfigError: the data can't be read, or does not suffice for so many users.
    """
    tables = load_tables(config)
    return _natural(config, tables) if config.user_column else _rotated(config, tables)


def _rotated(config: RunConfig, tables: Tables) -> Users:
    size, available = config.images_per_user, len(tables.train.labels)
    if size > available:
        raise ConfigError(f"images-per-user = {size}: the data set has {available} training images")
    decks = config.rotations if config.deal == "every-rotation" else 1
    sizes = _group_sizes(config)
    largest = max(sizes) if decks > 1 else config.num_users  # users that one deck has to serve
    if largest * size > available:
        shares = config.shares_of_groups or (1,) * config.rotations
        most = int(available // size * (sum(shares) / max(shares) if decks > 1 else 1))
        raise ConfigError(
            f"num-users = {config.num_users}: {available} training images suffice for {most} users of "
            f"images-per-user = {size} under deal = {config.deal!r}"
        )
    groups = _mixed(sizes) if config.group_shares else np.arange(config.num_users) % config.rotations
    hands = np.zeros(decks, dtype=int)
    orders = [generator(config.seed, "deal", deck).permutation(available) for deck in range(decks)]
    rows = []
    for group in groups:
        deck = group % decks
        rows.append(orders[deck][hands[deck] * size : (hands[deck] + 1) * size])
        hands[deck] += 1
    return Users(config, tables, rows, groups)


def _group_sizes(config: RunConfig) -> list[int]:
    """How many users each hidden group has."""
    users, groups = config.num_users, config.rotations
    if not config.group_shares:
        return [(users + groups - 1 - group) // groups for group in range(groups)]
    ends = np.cumsum(config.shares_of_groups) / sum(config.shares_of_groups)
    sizes = np.diff(np.round(ends * users), prepend=0).astype(int).tolist()
    if 0 in sizes:
        raise ConfigError(
            f"group-shares = {config.group_shares!r}: leave a group without users at num-users = {users}"
        )
    return sizes


def _mixed(sizes: list[int]) -> np.ndarray:
    """Groups of these sizes, each spread evenly over all users: int [K]."""
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(places, kind="stable")]


def _natural(config: RunConfig, tables: Tables) -> Users:
    owners = tables.train.users
    assert owners is not None  # load_tables reads the user column
    order = np.argsort(owners, kind="stable")
    _, starts = np.unique(owners[order], return_index=True)
    holdings = np.split(order, starts[1:])
    if config.num_users:
        if config.num_users > len(holdings):
            raise ConfigError(f"num-users = {config.num_users}: the data set has {len(holdings)} users")
        picked = generator(config.seed, "users").permutation(len(holdings))[: config.num_users]
        holdings = [holdings[i] for i in np.sort(picked)]
    train, test = [], []
    for user, rows in enumerate(holdings):
        rows = generator(config.seed, "hold out", user).permutation(rows)
        held = round(OWN_TEST_SHARE * len(rows)) if len(rows) > 1 else 0
        if config.test_on == "validation":
            rows = rows[held:]
        test.append(rows[:held])
        train.append(rows[held:][: config.images_per_user or None])
    return Users(config, tables, train, None, test)


def _stack(images: list[Tensor]) -> Tensor:
    """One tensor of a user's images; different sizes or modes are brought to those of the first."""
    size, channels = images[0].shape[-2:], max(image.shape[0] for image in images)
    return torch.stack([_conform(image, tuple(size), channels) for image in images])


def _conform(image: Tensor, size: tuple[int, ...], channels: int) -> Tensor:
    if image.shape[0] != channels:
        image = image.expand(channels, -1, -1)
    if image.shape[-2:] != size:
        scaled = interpolate(image[None].float(), size=size, mode="bilinear", antialias=True)[0]
        image = scaled.round().clamp(0, 255).to(torch.uint8)
    return image
