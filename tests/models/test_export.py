"""Adapter folders against PEFT's own loading: another program gets the model that was trained."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from pina_flwr.config import parse
from pina_flwr.models.backbone import load_backbone
from pina_flwr.models.export import save_adapters

CASES = [
    ("tiny-vit", {}),
    ("tiny-vit", {"lora_train_a": False, "train_head": False}),
    (
        "vit",
        {"lora_targets": "q,k,v,o", "lora_layers": 3, "lora_rank": 2, "stage1_rank": 2, "lora_alpha": 3.0},
    ),
    ("deit", {"lora_targets": "v"}),
    ("deit-distilled", {"feature_scale": 0.5}),
    ("dinov2", {"feature_scale": 0.25, "lora_layers": 2, "image_size": 16}),
    ("dinov2", {"feature_scale": 0.25, "lora_train_a": False, "train_head": False, "lora_targets": "v,o"}),
    ("dinov2-registers", {"feature_scale": 0.25}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_loads_with_peft_and_gives_our_scores(folder_of, tmp_path, kind, options):
    name = kind if kind == "tiny-vit" else folder_of(kind)
    config = parse({"backbone": name} | {key.replace("_", "-"): value for key, value in options.items()})
    backbone = load_backbone(config, 7)
    draw = torch.Generator().manual_seed(0)
    models = backbone.spec.start() + 0.2 * torch.randn((3, backbone.spec.size), generator=draw)
    untouched = {key: tensor.clone() for key, tensor in backbone.model.state_dict().items()}
    folders = save_adapters(config, backbone, models, tmp_path / "run" / "adapters")
    assert folders == [tmp_path / "run" / "adapters" / f"cluster-{c}" for c in range(3)]
    pixels = torch.randn(
        (5, backbone.model.config.num_channels, backbone.size, backbone.size), generator=draw
    )
    for folder, model in zip(folders, models, strict=True):
        settings = json.loads((folder / "adapter_config.json").read_text())
        base = AutoModelForImageClassification.from_pretrained(
            settings["base_model_name_or_path"], num_labels=7, ignore_mismatched_sizes=kind != "tiny-vit"
        )
        loaded = PeftModel.from_pretrained(base, str(folder)).eval()
        prepared = backbone.prepare(backbone.prefix(pixels)[None])
        with torch.no_grad():
            expected = backbone.logits(
                prepared, backbone.spec.unflatten(model[None]), backbone.spec.lora_scale
            )[0]
            scores = loaded(pixel_values=pixels).logits
        assert expected.std() > 0.01
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, untouched[key]) for key, tensor in backbone.model.state_dict().items())


def test_base_is_named_so_that_others_find_it(folder_of, tmp_path, monkeypatch):
    """A relative backbone folder is written down as an absolute one; the embedded one is written beside."""
    monkeypatch.chdir(Path(folder_of("vit")).parent)
    for name, base in [
        (Path(folder_of("vit")).name, folder_of("vit")),
        ("tiny-vit", str(tmp_path / "run" / "backbone")),
    ]:
        config = parse({"backbone": name})
        backbone = load_backbone(config, 3)
        (folder,) = save_adapters(
            config, backbone, backbone.spec.start()[None], tmp_path / "run" / "adapters"
        )
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_folders_hold_the_adapter_and_nothing_of_the_backbone(folder_of, tmp_path):
    config = parse({"backbone": folder_of("vit"), "lora-targets": "q,v", "lora-layers": 2})
    backbone = load_backbone(config, 3)
    (folder,) = save_adapters(config, backbone, backbone.spec.start()[None], tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == backbone.spec.size
    assert len(tensors) == 2 * 2 * 2 + 2


def test_exporting_leaves_the_backbone_usable(folder_of, tmp_path):
    config = parse({"backbone": folder_of("dinov2")})
    backbone = load_backbone(config, 3)
    for run in ("a", "b"):
        save_adapters(config, backbone, backbone.spec.start()[None], tmp_path / run / "adapters")
    assert (tmp_path / "b" / "adapters" / "cluster-0" / "adapter_model.safetensors").is_file()
    prepared = backbone.prepare(torch.randn((1, 2, 5, 16)))
    assert backbone.logits(prepared, backbone.spec.unflatten(backbone.spec.start()[None]), 1.0).shape == (
        1,
        2,
        3,
    )
