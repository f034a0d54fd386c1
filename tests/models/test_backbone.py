"""Prefix and tail against transformers' own forward pass; what can't be a backbone is refused in one line."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import hf_hub_url
from PIL import Image
from tiny_models import save_model

from pina_flwr.config import ConfigError, parse
from pina_flwr.models.backbone import load_backbone

KINDS = [
    "vit",
    "vit-grey",
    "vit-relu6",
    "vit-tanh",
    "deit",
    "deit-distilled",
    "dinov2",
    "dinov2-registers",
    "vit-msn",
]
REAL = Path(__file__).parents[2].parent / "shared" / "models" / "dinov2-small"


def pixels_for(backbone, count=3):
    shape = (count, backbone.model.config.num_channels, backbone.size, backbone.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def whole(folder, pixels, **options):
    """Class-token features by the model itself."""
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model.base_model(pixels, **options).last_hidden_state[:, 0]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_and_tail_equal_the_whole_model(load, folder_of, kind, size, layers):
    backbone = load(kind, image_size=size, lora_layers=layers)
    assert backbone.size == size or (backbone.size == 8 and size == 0)
    assert [block.index for block in backbone.blocks] == list(range(3 - layers, 3))
    pixels = pixels_for(backbone)
    stretch = {"interpolate_pos_encoding": True} if size and not kind.startswith("dinov2") else {}
    expected = whole(folder_of(kind), pixels, **stretch)
    with torch.no_grad():
        ours = backbone.features(backbone.prepare(backbone.prefix(pixels)[None]), {}, 1.0)[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_cell_means_of_a_hidden_layer(load, folder_of, kind, layer, grid):
    backbone = load(kind, image_size=16, features_layer=layer, features_grid=grid, stage1_signal="features")
    pixels = pixels_for(backbone)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder_of(kind)).eval()
    stretch = {} if kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        hidden = model.base_model(pixels, output_hidden_states=True, **stretch).hidden_states[layer - 1]
    patches = hidden[:, -16:].reshape(3, 4, 4, -1)  # of 4 pixels; what comes before are no patches
    cells = [cell for row in patches.chunk(grid, dim=1) for cell in row.chunk(grid, dim=2)]
    expected = torch.cat([cell.mean((0, 1, 2)) for cell in cells])
    torch.testing.assert_close(backbone.mean_features(pixels), expected, rtol=1e-4, atol=1e-5)


def test_features_come_from_two_thirds_of_the_way_up(load):
    assert load("tiny-vit").features_layer == 2  # of 0..3
    assert load("vit").features_layer == 2  # of 0..2


def test_images_of_several_users_do_not_mix(load):
    backbone = load("dinov2", lora_layers=2)
    hidden = backbone.prefix(pixels_for(backbone, 6))
    together = backbone.features(backbone.prepare(hidden.unflatten(0, (2, 3))), {}, 1.0)
    alone = [backbone.features(backbone.prepare(h[None, None]), {}, 1.0)[0, 0] for h in hidden]
    torch.testing.assert_close(together.flatten(0, 1), torch.stack(alone))


def test_nothing_of_the_backbone_trains(load):
    backbone = load("dinov2")
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())


def test_loading_leaves_the_random_state_alone(load):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a = load("tiny-vit")
    assert torch.equal(torch.get_rng_state(), before)
    b = load("tiny-vit")
    assert torch.equal(a.spec.start(), b.spec.start())


class TestPixels:
    def test_grey_repeats_over_colours(self, load):
        grey = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
        backbone = load("vit")
        assert torch.equal(backbone.pixels(grey), backbone.pixels(grey.expand(-1, 3, -1, -1)))
        assert backbone.prefix(backbone.pixels(grey)).shape == (2, 5, 16)

    def test_colour_becomes_grey(self, load):
        colour = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
        backbone = load("vit-grey")
        pixels = backbone.pixels(colour)
        torch.testing.assert_close(pixels, (colour.float().mean(1, keepdim=True) / 255 - 0.5) / 0.5)
        assert backbone.prefix(pixels).shape == (2, 5, 16)

    def test_imagenet_statistics_by_default(self, load):
        white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
        expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
        torch.testing.assert_close(load("vit").pixels(white)[0, :, 3, 4], expected)

    @pytest.mark.parametrize(
        "settings",
        [
            {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3]},
            {"image_mean": [0.5], "image_std": [0.25]},
            {"image_mean": 0.5, "image_std": 0.25},
            {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        ],
        ids=str,
    )
    def test_statistics_of_the_preprocessor(self, tmp_path, settings):
        backbone = load_backbone(parse({"backbone": save_model("vit", tmp_path, **settings)}), 3)
        image = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
        full = {k: v * 3 if isinstance(v, list) and len(v) == 1 else v for k, v in settings.items()}
        processor = transformers.ViTImageProcessor(**full, size={"height": 8, "width": 8})
        expected = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"]
        ours = backbone.pixels(torch.from_numpy(image).permute(2, 0, 1)[None])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("shape", [(28, 28), (4, 4), (12, 20)])
    def test_resizes_to_the_model(self, load, shape):
        backbone = load("vit", image_size=16)
        flat = torch.full((2, 1, *shape), 51, dtype=torch.uint8)
        assert backbone.pixels(flat).shape == (2, 3, 16, 16)
        torch.testing.assert_close(
            backbone.pixels(flat), backbone.pixels(flat[..., :1, :1].expand(-1, -1, 16, 16))
        )


def refusal(name, **options):
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        load_backbone(parse({"backbone": str(name)} | options), 3)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 5
    return str(error.value)


class TestRefusals:
    @pytest.mark.parametrize(
        "kind", ["resnet", "convnext", "swin", "beit", "ijepa", "dinov2-swiglu", "vit-oblong"]
    )
    @pytest.mark.parametrize("size", [0, 16])
    def test_backbone_of_another_kind(self, folder_of, kind, size):
        assert refusal(folder_of(kind), **{"image-size": size}).startswith("backbone")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"features-layer": 4}, "features-layer = 4: the backbone has 3 layers"),
            ({"features-grid": 3}, "features-grid = 3: must be at most 2, the backbone's patches a side"),
        ],
    )
    def test_features_that_the_backbone_does_not_have(self, folder_of, options, reason):
        assert refusal(folder_of("vit"), **{"stage1-signal": "features"} | options) == reason

    def test_text_model(self, tmp_path):
        config = transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        )
        transformers.BertModel(config).save_pretrained(tmp_path)
        assert refusal(tmp_path).startswith(f"backbone = '{tmp_path}': no image classifier can be loaded")

    @pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "/no/such/folder", "tiny vit"])
    def test_missing_id(self, name):
        assert refusal(name).startswith(f"backbone = {name!r}: no image classifier can be loaded")

    def test_hub_out_of_reach_is_asked_once(self, monkeypatch, capfd):
        """A real request, to a port of this machine at which nobody listens."""
        asked = []

        def closed(*address):
            asked.append(hf_hub_url(*address, endpoint="http://127.0.0.1:9"))
            return asked[-1]

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "hf_hub_url", closed)
        message = refusal("nobody/no-such-model")
        assert message.startswith("backbone = 'nobody/no-such-model': no image classifier can be loaded")
        assert asked == ["http://127.0.0.1:9/nobody/no-such-model/resolve/main/config.json"]
        assert "".join(capfd.readouterr()) == ""

    def test_empty_folder(self, tmp_path):
        assert refusal(tmp_path).startswith(f"backbone = '{tmp_path}': no image classifier can be loaded")

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("model.safetensors", b"junk"),
            ("model.safetensors", None),
            ("config.json", b"{"),
            ("config.json", b'{"model_type": "vit", "hidden_size": "wide"}'),
            ("config.json", b'{"model_type": "no-such-type"}'),
            ("preprocessor_config.json", b"{"),
        ],
    )
    def test_damaged_folder(self, folder_of, tmp_path, file, content):
        folder = shutil.copytree(folder_of("vit"), tmp_path / "copy")
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        assert refusal(folder).startswith(f"backbone = '{folder}': no image classifier can be loaded")

    @pytest.mark.parametrize("change", [{"num_hidden_layers": 4}, {"image_size": 16}])
    def test_weights_that_are_not_all_there(self, folder_of, tmp_path, change):
        """transformers would draw the missing ones at random."""
        folder = shutil.copytree(folder_of("vit"), tmp_path / "copy")
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | change))
        assert "of its weights are missing, 'vit." in refusal(folder)

    def test_more_lora_layers_than_layers(self, folder_of):
        message = refusal(folder_of("vit"), **{"lora-layers": 4})
        assert message == "lora-layers = 4: the backbone has 3 layers"

    @pytest.mark.parametrize("kind", ["vit", "dinov2", "tiny-vit"])
    def test_rank_above_the_hidden_size(self, load, kind):
        hidden = load(kind).blocks[-1].fc2.out_features
        assert load(kind, lora_rank=hidden).spec.lora_scale == 8 / hidden
        with pytest.raises(ConfigError) as error:
            load(kind, lora_rank=hidden + 1)
        message = f"lora-rank = {hidden + 1}: must be at most the backbone's hidden size {hidden}"
        assert str(error.value) == message

    def test_image_too_large_for_memory(self, folder_of):
        config = replace(parse({"backbone": folder_of("vit")}), image_size=4 * 10**7)
        with pytest.raises(ConfigError, match=r"^image-size = 40000000: the backbone can't be run") as error:
            load_backbone(config, 3)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("kind", ["vit", "dinov2"])
    @pytest.mark.parametrize("size", [1, 6, 9])
    def test_image_size_and_patch(self, folder_of, kind, size):
        message = refusal(folder_of(kind), **{"image-size": size})
        assert message == f"image-size = {size}: must be a multiple of the backbone's patch size 4"

    def test_size_the_model_cannot_take(self, folder_of, tmp_path):
        """Here transformers itself trips over a patch size given as a list when it stretches positions."""
        folder = shutil.copytree(folder_of("vit"), tmp_path / "copy")
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"patch_size": [4, 4]}))
        assert load_backbone(parse({"backbone": str(folder)}), 3).size == 8
        assert refusal(folder, **{"image-size": 16}).startswith(
            "image-size = 16: the backbone can't be run at it"
        )

    def test_weights_that_are_not_finite(self, folder_of, tmp_path):
        model = transformers.AutoModelForImageClassification.from_pretrained(folder_of("vit"))
        model.vit.layernorm.weight.data[3] = float("nan")
        model.save_pretrained(tmp_path)
        assert refusal(tmp_path).startswith(f"backbone = '{tmp_path}'")


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no {REAL}")
def test_real_dinov2_at_56_pixels():
    """Loading compares prefix and tail with the whole model; here once more, on images."""
    options = {"backbone": str(REAL), "image-size": 56, "feature-scale": 0.25, "lora-layers": 2}
    backbone = load_backbone(parse(options), 10)
    images = torch.from_numpy(np.random.default_rng(0).integers(256, size=(2, 1, 28, 28), dtype=np.uint8))
    pixels = backbone.pixels(images)
    hidden = backbone.prefix(pixels)
    assert hidden.shape == (2, 17, 384)
    expected = whole(REAL, pixels)
    with torch.no_grad():
        ours = backbone.features(backbone.prepare(hidden[None]), {}, 1.0)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
