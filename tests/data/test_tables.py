"""Data sets from Hugging Face folders of every usual layout, and one-line errors for the unusual."""

import datasets
import numpy as np
import pytest
import torch
from made_sets import draw, encoded, table
from PIL import Image

from pina_flwr.config import ConfigError, parse
from pina_flwr.data.tables import load_tables

LABELS = [3, 1, 4, 1, 5, 9]


def load(folder, **options):
    return load_tables(parse({"dataset": folder} | {k.replace("_", "-"): v for k, v in options.items()}))


def one_line_error(folder, **options):
    with pytest.raises(ConfigError) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def channels_first(pixels):
    return torch.from_numpy(np.array(pixels[..., None] if pixels.ndim == 3 else pixels)).permute(0, 3, 1, 2)


class TestLayouts:
    @pytest.mark.parametrize(
        ("image", "label", "shape"),
        [("image", "label", (28, 28)), ("img", "label", (32, 32, 3)), ("image", "character", (28, 28))],
    )
    def test_parquet_like_the_hub(self, parquet, image, label, shape):
        """Fashion-MNIST, CIFAR-10 and FEMNIST by the names of their columns."""
        train, test = draw(6, *shape), draw(3, *shape, seed=1)
        folder = parquet(train=table(train, LABELS, image, label), test=table(test, LABELS[:3], image, label))
        tables = load(folder)
        assert tables.num_classes == 10
        assert tables.train.labels.tolist() == LABELS
        assert tables.train.labels.dtype == np.int64
        assert tables.test.labels.tolist() == LABELS[:3]
        assert torch.equal(torch.stack(tables.train.images(range(6))), channels_first(train))
        assert torch.equal(torch.stack(tables.test.images([2, 0])), channels_first(test)[[2, 0]])
        assert tables.train.images([0])[0].dtype == torch.uint8

    def test_columns_named_by_options(self, parquet):
        split = table(draw(6, 8, 8), LABELS, "picture", "kind", image=["no"] * 6, label=[0] * 6)
        tables = load(parquet(train=split, test=split), image_column="picture", label_column="kind")
        assert tables.train.labels.tolist() == LABELS
        assert tables.train.images([5])[0].shape == (1, 8, 8)

    def test_saved_data_set_without_test_split(self, tmp_path):
        pixels = draw(13, 8, 8)
        table(pixels, [*range(10), 0, 1, 2]).save_to_disk(tmp_path / "saved")
        before = sorted((tmp_path / "saved").iterdir())
        tables = load(str(tmp_path / "saved"))
        assert (len(tables.train.labels), len(tables.test.labels)) == (10, 3)
        images = tables.train.images(range(10)) + tables.test.images(range(3))
        assert sorted(i.numpy().tobytes() for i in images) == sorted(map(bytes, pixels))
        assert sorted((tmp_path / "saved").iterdir()) == before  # a data folder may be read-only
        again, other = load(str(tmp_path / "saved")), load(str(tmp_path / "saved"), seed=2)
        assert torch.equal(
            torch.stack(again.test.images(range(3))), torch.stack(tables.test.images(range(3)))
        )
        assert not torch.equal(
            torch.stack(other.test.images(range(3))), torch.stack(tables.test.images(range(3)))
        )

    def test_saved_dict_of_splits(self, tmp_path):
        splits = {"train": table(draw(6, 8, 8), LABELS), "test": table(draw(2, 8, 8, seed=1), [7, 8])}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        tables = load(str(tmp_path / "saved"))
        assert tables.train.labels.tolist() == LABELS
        assert tables.test.labels.tolist() == [7, 8]

    def test_saved_in_torch_format(self, tmp_path):
        table(draw(6, 8, 8, 3), LABELS).with_format("torch").save_to_disk(tmp_path / "saved")
        assert load(str(tmp_path / "saved")).train.images([0])[0].shape == (3, 8, 8)

    @pytest.mark.parametrize("splits", [("train", "test"), ("",)])
    def test_image_folder(self, tmp_path, splits):
        for split in splits:
            for label, name in enumerate(["ants", "bees", "cats"]):
                folder = tmp_path / "images" / split / name
                folder.mkdir(parents=True)
                for i in range(3):
                    Image.fromarray(np.full((6, 6, 3), 80 * label + i, np.uint8)).save(folder / f"{i}.png")
        tables = load(str(tmp_path / "images"))
        assert tables.num_classes == 3
        counts = (9, 9) if "test" in splits else (7, 2)
        for part, count in zip((tables.train, tables.test), counts, strict=True):
            assert len(part.labels) == count
            brightness = [int(image[0, 0, 0]) // 80 for image in part.images(range(count))]
            assert brightness == part.labels.tolist()

    def test_validation_split_stands_in_for_a_test_split(self, parquet):
        split = table(draw(6, 8, 8), LABELS)
        assert len(load(parquet(train=split, validation=split.select([0, 1]))).test.labels) == 2

    def test_test_split_alone_is_not_used_twice(self, parquet):
        pixels = draw(6, 8, 8)
        tables = load(parquet(test=table(pixels, LABELS)))
        images = tables.train.images(range(5)) + tables.test.images(range(1))
        assert sorted(i.numpy().tobytes() for i in images) == sorted(map(bytes, pixels))

    def test_home_is_expanded(self, parquet, monkeypatch, tmp_path):
        parquet(train=table(draw(6, 8, 8), LABELS))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert load("~/set").num_classes == 10

    def test_a_changed_folder_is_read_again(self, parquet):
        folder = parquet(train=table(draw(6, 8, 8), LABELS), test=table(draw(6, 8, 8), LABELS))
        assert load(folder).train.labels.tolist() == LABELS
        parquet(train=table(draw(7, 8, 8), [2] * 7))
        assert load(folder).train.labels.tolist() == [2] * 7


class TestValidation:
    """What options are chosen by, so that no choice has seen the test images."""

    @pytest.mark.parametrize("splits", [("train", "test"), ("train",)])
    def test_holds_out_training_images(self, parquet, splits):
        pixels = draw(36, 8, 8)
        made = {name: table(draw(36, 8, 8, seed=i), [0, 1] * 18) for i, name in enumerate(splits, 1)}
        made["train"] = table(pixels, [0, 1] * 18)
        folder = parquet(**made)
        final, choice = load(folder), load(folder, test_on="validation")
        users, tested = final.train.images(range(len(final.train.labels))), len(choice.test.labels)
        assert tested == len(users) // 6
        mine = choice.train.images(range(len(choice.train.labels))) + choice.test.images(range(tested))
        assert sorted(i.numpy().tobytes() for i in mine) == sorted(i.numpy().tobytes() for i in users)

    def test_of_digits(self):
        final, choice = load("digits"), load("digits", test_on="validation")
        assert (len(final.train.labels), len(choice.train.labels), len(choice.test.labels)) == (
            1400,
            1003,
            397,
        )
        kept = {i.numpy().tobytes() for i in final.test.images(range(397))}
        shown = {i.numpy().tobytes() for i in choice.test.images(range(397))}
        assert len(kept & shown) < 10  # a few digits look the same

    def test_another_word(self):
        assert "test-on = 'train': must be one of test, validation" in one_line_error(
            "digits", test_on="train"
        )


class TestLabels:
    @pytest.mark.parametrize(
        ("labels", "classes", "numbers"),
        [
            (["sun", "moon", "sun", "star"], 3, [2, 0, 2, 1]),
            ([True, False, True, True], 2, [1, 0, 1, 1]),
            ([2.5, 1.5, 2.5, 0.5], 3, [2, 1, 2, 0]),
        ],
    )
    def test_plain_values_become_classes(self, parquet, labels, classes, numbers):
        rows = datasets.Dataset.from_dict({"image": [encoded(Image.new("L", (4, 4)))] * 4, "label": labels})
        tables = load(parquet(train=rows.cast_column("image", datasets.Image()), test=rows.select([2])))
        assert tables.num_classes == classes
        assert tables.train.labels.tolist() == numbers
        assert tables.test.labels.tolist() == numbers[2:3]

    def test_plain_numbers_need_not_be_consecutive(self, parquet):
        rows = table(draw(4, 4, 4), [7, 3, 9, 3]).cast_column("label", datasets.Value("int32"))
        tables = load(parquet(train=rows, test=rows))
        assert tables.num_classes == 3
        assert tables.train.labels.tolist() == [1, 0, 2, 0]

    def test_classes_without_images_count(self, parquet):
        assert load(parquet(train=table(draw(6, 4, 4), [0, 0, 0, 1, 1, 1]))).num_classes == 10

    def test_unknown_test_label(self, parquet):
        folder = parquet(train=table(draw(2, 4, 4), ["a", "b"]), test=table(draw(2, 4, 4), ["a", "c"]))
        assert one_line_error(folder).startswith("label-column = 'label': label 'c' is not among")

    def test_hidden_test_labels(self, parquet):
        """Some hub data sets hide test labels behind -1."""
        hidden = table(draw(2, 4, 4), [0, 1]).remove_columns("label").add_column("label", [-1, -1])
        hidden = hidden.cast_column("label", datasets.ClassLabel(num_classes=10))
        message = one_line_error(parquet(train=table(draw(6, 4, 4), LABELS), test=hidden))
        assert message.startswith("label-column = 'label': label -1 is not among")

    def test_class_names_in_another_order(self, tmp_path):
        splits = {
            name: table(draw(2, 4, 4), [0, 1]).cast_column("label", datasets.ClassLabel(names=names))
            for name, names in {"train": ["cat", "dog"], "test": ["dog", "cat"]}.items()
        }
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        assert one_line_error(str(tmp_path / "saved")).startswith("label-column = 'label': training and test")

    @pytest.mark.parametrize("labels", [["a", None, "b"], [[1], [2], [3]], [{"x": 1}] * 3])
    def test_no_label(self, parquet, labels):
        message = one_line_error(parquet(train=table(draw(3, 4, 4), labels)))
        assert message.startswith("label-column = 'label': must hold one number or text")


def modes():
    """Pictures of every mode with what they should look like: grey [h, w] or colour [h, w, 3]."""
    grey, colour = draw(1, 6, 6)[0], draw(1, 6, 6, 3, seed=1)[0]
    solid = np.dstack([colour, np.full((6, 6), 255, np.uint8)])
    deep = draw(1, 6, 6, seed=2)[0].astype(np.uint16) * 256 + 17
    palette = Image.fromarray(colour).quantize(8)
    ink = Image.fromarray(draw(1, 6, 6, 4, seed=3)[0], mode=None).convert("CMYK")
    bits = Image.fromarray(grey).convert("1")
    return {
        "L": (Image.fromarray(grey), "PNG", grey),
        "RGB": (Image.fromarray(colour), "PNG", colour),
        "RGBA": (Image.fromarray(solid), "PNG", colour),
        "LA": (Image.fromarray(np.dstack([grey, 255 - grey])), "PNG", grey),
        "P": (palette, "PNG", np.asarray(palette.convert("RGB"))),
        "1": (bits, "PNG", np.asarray(bits).astype(np.uint8) * 255),
        "16-bit": (Image.fromarray(deep), "PNG", (deep >> 8).astype(np.uint8)),
        "CMYK": (ink, "TIFF", np.asarray(ink.convert("RGB"))),
    }


class TestImages:
    @pytest.mark.parametrize("mode", modes())
    def test_modes(self, parquet, mode):
        picture, form, expected = modes()[mode]
        rows = table([encoded(picture, form)] * 6, LABELS)
        (image,) = load(parquet(train=rows, test=rows)).train.images([4])
        assert image.dtype == torch.uint8
        assert torch.equal(image, channels_first(expected[None])[0])

    @pytest.mark.parametrize("pixels", [np.full((4, 4), 70000, np.int32), np.full((4, 4), 0.5, np.float32)])
    def test_32_bit_pixels(self, parquet, pixels):
        message = one_line_error(parquet(train=table([encoded(Image.fromarray(pixels), "TIFF")] * 6, LABELS)))
        assert message.startswith("image-column = 'image': an image can't be read (it is no 8-bit")

    @pytest.mark.parametrize("feature", [datasets.Array3D((4, 4, 3), "uint8"), None])
    def test_pixel_arrays(self, tmp_path, feature):
        pixels = draw(6, 4, 4, 3)
        rows = datasets.Dataset.from_dict({"image": pixels.tolist(), "label": LABELS})
        if feature:
            rows = rows.cast_column("image", feature)
        rows.save_to_disk(tmp_path / "saved")
        tables = load(str(tmp_path / "saved"))
        images = tables.train.images(range(5)) + tables.test.images([0])
        assert sorted(i.permute(1, 2, 0).numpy().tobytes() for i in images) == sorted(map(bytes, pixels))

    @pytest.mark.parametrize(
        "column",
        [
            ["a cat"] * 6,
            [1, 2, 3, 4, 5, 6],
            [None] * 6,
            [[0.1, 0.2]] * 6,
            [[[0.1, 0.2], [0.3, 0.4]]] * 6,
            [[[0, 300], [1, 2]]] * 6,
            [[[0, -1], [1, 2]]] * 6,
            [[[1, 2], [3]]] * 6,
            [[]] * 6,
        ],
        ids=str,
    )
    def test_no_image_column(self, tmp_path, column):
        rows = datasets.Dataset.from_dict({"image": column, "label": LABELS})
        rows.save_to_disk(tmp_path / "saved")
        assert one_line_error(str(tmp_path / "saved")).startswith(
            "image-column = 'image': an image can't be read"
        )

    def test_a_damaged_image_among_good_ones(self, parquet):
        good = encoded(Image.fromarray(draw(1, 32, 32)[0]))
        cut = {"bytes": good["bytes"][:200], "path": None}
        folder = parquet(
            train=table([good, cut, good, {"bytes": b"junk", "path": None}], [0, 1, 2, 3]),
            test=table([good], [0]),
        )
        train = load(folder).train
        assert train.images([0, 2])[1].shape == (1, 32, 32)
        for row in (1, 3):
            with pytest.raises(ConfigError, match=r"^image-column = 'image': an image can't be read \(.*\)$"):
                train.images([0, row])


class TestMistakes:
    def test_missing_id(self):
        message = one_line_error("nobody/no-such-set")
        assert message.startswith("dataset = 'nobody/no-such-set': is no local folder and can't be fetched")

    @pytest.mark.parametrize("content", [None, "notes.md", "train.parquet", "train.csv"])
    def test_useless_folder(self, tmp_path, content):
        if content:
            (tmp_path / content).write_text("")
        assert one_line_error(str(tmp_path)).startswith(f"dataset = '{tmp_path}': can't be read")

    @pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.py"])
    def test_a_file_in_place_of_a_folder(self, tmp_path, name):
        (tmp_path / name).write_text("x")
        assert one_line_error(str(tmp_path / name)).startswith(
            f"dataset = '{tmp_path / name}': can't be read"
        )

    def test_damaged_saved_folder(self, tmp_path):
        table(draw(6, 8, 8), LABELS).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "state.json").write_text("{")
        assert one_line_error(str(tmp_path / "saved")).startswith("dataset = ")

    @pytest.mark.parametrize(
        ("options", "start"),
        [
            ({"image_column": "foto"}, "image-column = 'foto': name one of the columns image, label, who"),
            ({"label_column": "kind"}, "label-column = 'kind': name one of the columns image, label, who"),
            (
                {"user_column": "writer", "rotations": 1},
                "user-column = 'writer': name one of the columns image",
            ),
            ({"user_column": "image", "rotations": 1}, "user-column = 'image': must hold one number or text"),
            ({"user_column": "who", "rotations": 1}, "user-column = 'who': must hold one number or text"),
            ({"image_column": "label"}, "image-column = 'label': an image can't be read"),
            ({"label_column": "image"}, "label-column = 'image': must hold one number or text"),
        ],
    )
    def test_wrong_columns(self, parquet, options, start):
        rows = table(draw(6, 8, 8), LABELS, who=["ann", None, "bob", "ann", "bob", None])
        assert one_line_error(parquet(train=rows, test=rows), **options).startswith(start)

    def test_column_that_cannot_be_guessed(self, parquet):
        rows = table(draw(6, 8, 8), LABELS, "foto", "kind")
        assert one_line_error(parquet(train=rows)).startswith(
            "image-column = '': name one of the columns foto, kind"
        )
        both = table(draw(6, 8, 8), LABELS, character=[0] * 6)
        assert one_line_error(parquet(train=both)).startswith("label-column = '': name one of")

    def test_test_split_without_labels(self, tmp_path):
        splits = {
            "train": table(draw(6, 8, 8), LABELS),
            "test": table(draw(6, 8, 8), LABELS).remove_columns("label"),
        }
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        assert one_line_error(str(tmp_path / "saved")).startswith("label-column = 'label': name one of")

    def test_too_few_images(self, tmp_path, parquet):
        folder = parquet(train=table(draw(1, 8, 8), [0]))
        assert one_line_error(folder) == f"dataset = {folder!r}: has too few training images (1)"
        datasets.DatasetDict().save_to_disk(tmp_path / "none")
        assert one_line_error(str(tmp_path / "none")).endswith("has no split")
