"""Labelled images from scikit-learn's digits, a Hugging Face id, or a local folder, behind one class."""

from __future__ import annotations

import math
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
HELD_OUT = 1 / 6  # of a data set that has no test split, and of training images for validation


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
    """Training and test images of one data set; `test` is None if users hold out their own (user-column)."""

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

    named = {"image": config.image_column, "label": config.label_column, "user": config.user_column}
    for kind, column in named.items():
        if column:
            raise ConfigError(f"{kind}-column = {column!r}: dataset 'digits' has no such column")
    data = load_digits()
    pixels = torch.from_numpy(np.round(data.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = data.target.astype(np.int64)
    order = generator(config.seed, "test split").permutation(len(labels))
    if config.test_on == "validation":
        order = order[DIGITS_TEST:]

    def table(rows: np.ndarray) -> ImageTable:
        return ImageTable(labels[rows], lambda picked: [pixels[rows[i]] for i in picked])

    return Tables(table(order[DIGITS_TEST:]), table(order[:DIGITS_TEST]), num_classes=10)


def _hugging_face(config: RunConfig) -> Tables:
    splits = _open(config.dataset)
    train = splits.pop("train" if "train" in splits else next(iter(splits)))
    if train.num_rows < 2:
        raise ConfigError(f"dataset = {config.dataset!r}: has too few training images ({train.num_rows})")
    image = _column(train, config.image_column, IMAGE_COLUMNS, "image-column")
    label = _column(train, config.label_column, LABEL_COLUMNS, "label-column")
    names = _class_names(train, label)
    if config.user_column:
        owner = _column(train, config.user_column, (), "user-column")
        return Tables(_table(train, image, label, names, owner), None, len(names))
    test_name = next((name for name in TEST_SPLITS if name in splits), None)
    if test_name is None:
        train, test = _split(config, train, "test split")
    else:
        test = splits[test_name]
        _check_like(train, test, image, label)
    if config.test_on == "validation":
        train, test = _split(config, train, "validation split")
    return Tables(_table(train, image, label, names), _table(test, image, label, names), len(names))


def _split(config: RunConfig, table: Any, name: str) -> tuple[Any, Any]:
    """Training and held-out rows of a table that has no split of this name."""
    order = generator(config.seed, name).permutation(table.num_rows)
    held = math.ceil(HELD_OUT * table.num_rows)
    return table.select(np.sort(order[held:])), table.select(np.sort(order[:held]))


def _open(name: str) -> dict[str, Any]:
    """The splits of a hub data set, or of a folder that `load_dataset` reads or `save_to_disk` wrote."""
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
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if not splits:
        raise ConfigError(f"dataset = {name!r}: has no split")
    return splits


def _check_like(train: Any, test: Any, image: str, label: str) -> None:
    """The test split needs the training split's columns, and the same class names in the same order."""
    _column(test, image, (), "image-column")
    _column(test, label, (), "label-column")
    if getattr(train.features[label], "names", None) != getattr(test.features[label], "names", None):
        raise ConfigError(f"label-column = {label!r}: training and test split have other classes")


def _first_line(problem: BaseException) -> str:
    problem = problem.__cause__ or problem  # the library wraps what it met
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
    try:
        return sorted(table.unique(label))
    except Exception:  # lists, images, or missing values among others
        raise ConfigError(f"label-column = {label!r}: must hold one number or text an image") from None


def _table(table: Any, image: str, label: str, names: list[Any], owner: str = "") -> ImageTable:
    position = {name: i for i, name in enumerate(names)}
    raw = table.with_format(None)[label]
    try:
        labels = np.asarray([position[value] for value in raw], dtype=np.int64)
    except KeyError as unknown:
        raise ConfigError(
            f"label-column = {label!r}: label {unknown} is not among the training labels"
        ) from None
    users = _owners(table, owner) if owner else None
    pictures = table.select_columns([image]).with_format(None)

    def decode(rows: Sequence[int]) -> list[Tensor]:
        try:
            return [_as_tensor(picture) for picture in pictures.select(list(rows))[image]]
        except Exception as problem:  # whatever the image decoder raises on a damaged file
            reason = _first_line(problem)
            raise ConfigError(f"image-column = {image!r}: an image can't be read ({reason})") from problem

    decode([0])  # a wrong column is found before the run, not in it
    return ImageTable(labels, decode, users)


def _owners(table: Any, owner: str) -> np.ndarray:
    values = list(table.with_format(None)[owner])
    if not all(isinstance(value, str | int | float) for value in values):
        raise ConfigError(f"user-column = {owner!r}: must hold one number or text an image")
    return np.asarray(values)


def _as_tensor(picture: Any) -> Tensor:
    """PIL image, or array of pixel values, to uint8 [1 or 3, height, width].

    Raises:
        ValueError: not 8 or 16-bit grey, not colour.
    """
    array = _pixel_values(picture) if hasattr(picture, "convert") else np.asarray(picture)
    if array.ndim == 2:
        array = array[:, :, None]
    fits = array.ndim == 3 and array.shape[2] in (1, 3) and array.size and array.dtype.kind in "ui"
    if not fits or array.min() < 0 or array.max() > 255:
        kind = f"{getattr(picture, 'mode', type(picture).__name__)}, {array.dtype} of shape {array.shape}"
        raise ValueError(f"it is no 8-bit grey or colour image but {kind}")
    return torch.from_numpy(array.astype(np.uint8).transpose(2, 0, 1).copy())


def _pixel_values(picture: Any) -> np.ndarray:
    """Grey as [height, width], colour as [height, width, 3]; 16-bit grey keeps its upper 8 bits."""
    if picture.mode.startswith("I;16"):
        return np.asarray(picture) >> 8
    if picture.mode in ("I", "F"):  # 32 bits a pixel, of a range nobody states
        return np.asarray(picture, dtype=np.float32)
    return np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))
