"""The embedded backbone: loading, export, and the script that makes it."""

import importlib.util
import string
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageFont
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from pina_flwr.models import tiny_vit

FONT_FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "make_tiny_vit.py"
    spec = importlib.util.spec_from_file_location("make_tiny_vit", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1


@torch.no_grad()
def test_load_gives_a_finite_float32_classifier_in_eval_mode(pixels: Tensor) -> None:
    model = tiny_vit.load(7)
    output = model(pixel_values=pixels, output_hidden_states=True)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert output.logits.shape == (5, 7)
    assert output.hidden_states[-1].shape == (5, 17, 64)
    assert all(torch.isfinite(x).all() for x in (output.logits, *output.hidden_states))
    assert output.logits.std() > 0


@torch.no_grad()
def test_load_is_deterministic_and_leaves_the_global_random_state_alone(pixels: Tensor) -> None:
    before = torch.get_rng_state()
    one, two = tiny_vit.load(10), tiny_vit.load(10)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one(pixels).logits, two(pixels).logits)


@torch.no_grad()
def test_features_do_not_depend_on_the_number_of_labels(pixels: Tensor) -> None:
    assert torch.equal(
        tiny_vit.load(2).vit(pixels).last_hidden_state, tiny_vit.load(62).vit(pixels).last_hidden_state
    )


@torch.no_grad()
def test_export_loads_with_transformers_and_gives_the_same_features(tmp_path: Path, pixels: Tensor) -> None:
    folder = tiny_vit.export(tmp_path / "new" / "folder")
    expected = tiny_vit.load(10).vit(pixels).last_hidden_state
    classifier = AutoModelForImageClassification.from_pretrained(folder, num_labels=10)
    assert torch.equal(AutoModel.from_pretrained(folder)(pixels).last_hidden_state, expected)
    assert torch.equal(classifier.vit(pixels).last_hidden_state, expected)
    assert classifier(pixels).logits.shape == (5, 10)


def test_exported_preprocessor_normalises_as_training_did(tmp_path: Path, maker: ModuleType) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    processor = AutoImageProcessor.from_pretrained(tiny_vit.export(tmp_path))
    processed = processor(Image.fromarray(grey), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(processed[0, 0], maker.normalise(torch.from_numpy(grey)))
    assert tiny_vit.preprocessor() == {"image_mean": [maker.MEAN], "image_std": [maker.STD]}


def test_weights_are_text_under_700_kb() -> None:
    content = tiny_vit.WEIGHTS.read_bytes()
    assert len(content) < 700_000
    assert content.isascii()


def test_every_glyph_is_the_letter_that_its_class_names(maker: ModuleType) -> None:
    assert set(maker.LETTERS) == set(string.ascii_letters)
    for name in maker.FONTS:
        font = FT2Font(str(FONT_FOLDER / name))
        codes = font.get_charmap()
        assert [font.get_glyph_name(codes[ord(letter)]) for letter in maker.LETTERS] == list(maker.LETTERS), (
            name
        )


def test_alphabet_has_every_font_and_class(maker: ModuleType) -> None:
    glyphs, classes = maker.draw_alphabet()
    assert glyphs.shape == (52 * len(maker.FONTS), 1, 64, 64)
    assert set(classes.tolist()) == set(range(len(maker.class_names())))
    assert (glyphs.amax((1, 2, 3)) > 0.9).all()
    assert glyphs.mean() < 0.5


def test_letters_are_upright(maker: ModuleType) -> None:
    font = ImageFont.truetype(str(FONT_FOLDER / "DejaVuSans.ttf"), 96)
    ell, tee = maker.draw_glyph("L", font), maker.draw_glyph("T", font)
    assert ell[:, :32].sum() > ell[:, 32:].sum()
    assert ell[32:].sum() > ell[:32].sum()
    assert tee[:32].sum() > tee[32:].sum()


def test_drawings_look_like_digits_images_but_are_none_of_them(maker: ModuleType) -> None:
    glyphs, _ = maker.draw_alphabet()
    drawn = maker.jitter(glyphs, torch.Generator().manual_seed(0))
    digits = (load_digits().images / 16 * 255).round().astype(np.uint8)
    assert drawn.shape == (len(glyphs), 1, 8, 8)
    assert drawn.dtype == torch.uint8
    assert set(drawn.unique().tolist()) == set(np.unique(digits).tolist())
    assert 0.5 < drawn.float().mean() / digits.mean() < 2
    assert {x.numpy().tobytes() for x in drawn}.isdisjoint(x.tobytes() for x in digits)


def test_jitter_follows_its_generator(maker: ModuleType) -> None:
    glyphs = maker.draw_alphabet()[0][:20]
    one, two, other = (maker.jitter(glyphs, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_training_never_reads_digits_and_repeats_itself(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> None:
        raise AssertionError("pre-training read the users' data")

    monkeypatch.setattr(maker, "load_digits", forbidden)
    random_state = torch.get_rng_state()
    one, two = (maker.pack(maker.train(seed=5, steps=3, batch=16).vit) for _ in range(2))
    torch.set_rng_state(random_state)
    assert one == two
    assert one["config"] == maker.CONFIG


def test_packed_weights_are_the_trained_ones(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pixels: Tensor
) -> None:
    model = maker.train(seed=5, steps=3, batch=16)
    path = tmp_path / "weights.json"
    path.write_text(maker.json.dumps(maker.pack(model.vit)))
    monkeypatch.setattr(tiny_vit, "WEIGHTS", path)
    with torch.no_grad():
        expected, got = (m.vit(pixels).last_hidden_state for m in (model, tiny_vit.load(3)))
    torch.testing.assert_close(got, expected, atol=0.01, rtol=0.01)


def test_features_serve_one_rotation_at_a_time_better_than_all_at_once(maker: ModuleType) -> None:
    shared, own = maker.probe(tiny_vit.load(10).vit)
    assert own > 0.9
    assert own > shared + 0.1
