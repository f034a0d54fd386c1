"""Labelled images from scikit-learn's digits, a Hugging Face id, or a local folder, behind one small class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.seeding import generator

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "character")
TEST_SPLITS = ("test", "validation", "valid")
DIGITS_TEST = 397  # of 1,797: leaves 1,400 for users
HELD_OUT = 1 / 6  # of a data set that has no test split


@dataclass(frozen=True)
class ImageTable:
    """N labelled images, decoded only when asked for.

    labels: int64 [N] in 0..num_classes-1. users: the natural owner of each row [N], or None.
    """

    labels: np.ndarray
    decode: Callable[[Sequence[int]], list[Tensor]]
    users: np.ndarray | None = None

    def images(self, rows: Sequence[int]) -> list[Tensor]:
        """The images of these rows, each uint8 [channels, height, width] with 1 (grey) or 3 channels."""
        return self.decode(rows)


@dataclass(frozen=True)
class Tables:
    """Training and test images of one data set; `test` is None when users hold out their own (user-column)."""

    train: ImageTable
    test: ImageTable | None
    num_classes: int


def load_tables(config: RunConfig) -> Tables:
    """Load `config.dataset`.

    Raises:
        ConfigError: the data set can't be found or read, or has no such column.
    """
    return _digits(config) if config.dataset == "digits" else _hugging_face(config)


def _digits(config: RunConfig) -> Tables:
    from sklearn.datasets import load_digits

    if config.user_column:
        raise ConfigError(f"user-column = {config.user_column!r}: dataset 'digits' has no such column")
    data = load_digits()
    pixels = torch.from_numpy(np.round(data.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = data.target.astype(np.int64)
    order = generator(config.seed, "test split").permutation(len(labels))

    def table(rows: np.ndarray) -> ImageTable:
        return ImageTable(labels[rows], lambda picked: [pixels[rows[i]] for i in picked])

    return Tables(table(order[DIGITS_TEST:]), table(order[:DIGITS_TEST]), num_classes=10)


def _hugging_face(config: RunConfig) -> Tables:
    splits = _open(config.dataset)
    train = splits["train"] if "train" in splits else splits[next(iter(splits))]
    image = _column(train, config.image_column, IMAGE_COLUMNS, "image-column")
    label = _column(train, config.label_column, LABEL_COLUMNS, "label-column")
    names = _class_names(train, label)
    if config.user_column:
        owner = _column(train, config.user_column, (), "user-column")
        return Tables(_table(train, image, label, names, owner), None, len(names))
    test_name = next((name for name in TEST_SPLITS if name in splits), None)
    if test_name is None:
        parts = train.train_test_split(test_size=HELD_OUT, seed=config.seed)
        train, test = parts["train"], parts["test"]
    else:
        test = splits[test_name]
    return Tables(_table(train, image, label, names), _table(test, image, label, names), len(names))


def _open(name: str) -> dict[str, Any]:
    """The splits of a hub data set, of a folder that `load_dataset` reads, or of one saved by `save_to_disk`."""
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name)
    except Exception as problem:  # the library raises many kinds, all of them about the user's data
        what = "can't be read" if folder.exists() else "is no local folder and can't be fetched from the hub"
        raise ConfigError(f"dataset = {name!r}: {what} ({_first_line(problem)})") from problem
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def _column(table: Any, wanted: str, usual: tuple[str, ...], key: str) -> str:
    names = list(table.column_names)
    found = [wanted] if wanted in names else [] if wanted else [name for name in usual if name in names]
    if len(found) != 1:
        raise ConfigError(f"{key} = {wanted!r}: name one of the columns {', '.join(names)}")
    return found[0]


def _class_names(table: Any, label: str) -> list[Any]:
    """Class names in label order; those of a plain column are its sorted values."""
    feature = table.features[label]
    if hasattr(feature, "names"):
        return list(range(len(feature.names)))
    return sorted(table.unique(label))


def _table(table: Any, image: str, label: str, names: list[Any], owner: str = "") -> ImageTable:
    position = {name: i for i, name in enumerate(names)}
    raw = table.with_format(None)[label]
    try:
        labels = np.asarray([position[value] for value in raw], dtype=np.int64)
    except KeyError as unknown:
        raise ConfigError(f"label-column = {label!r}: label {unknown} is not among the training labels") from None
    users = np.asarray(table[owner]) if owner else None
    pictures = table.select_columns([image])

    def decode(rows: Sequence[int]) -> list[Tensor]:
        return [_as_tensor(picture, image) for picture in pictures.select(list(rows))[image]]

    return ImageTable(labels, decode, users)


def _as_tensor(picture: Any, column: str) -> Tensor:
    """PIL image, or array of pixel values, to uint8 [1 or 3, height, width]."""
    if hasattr(picture, "convert"):
        grey = picture.mode in ("1", "L", "LA", "I", "I;16", "F")
        array = np.asarray(picture.convert("L" if grey else "RGB"))
    else:
        array = np.asarray(picture)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or array.min() < 0 or array.max() > 255:
        raise ConfigError(f"image-column = {column!r}: holds no 8-bit grey or colour images (shape {array.shape})")
    return torch.from_numpy(array.astype(np.uint8).transpose(2, 0, 1).copy())
