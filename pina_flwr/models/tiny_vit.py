"""The embedded backbone `tiny-vit`: a toy ViT whose weights ship as text, since Flower bundles no binaries.

`scripts/make_tiny_vit.py` makes `tiny_vit.json` (ViT configuration, preprocessing, base64 safetensors of
float16 tensors); `tiny_vit.md` is its model card. Architecture: Dosovitskiy et al. 2021 (arXiv 2010.11929).
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification

WEIGHTS = Path(__file__).with_suffix(".json")
HEAD_SEED = 0


def _read() -> tuple[ViTConfig, dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration, preprocessing, and backbone tensors in float32 under their Hub names."""
    content = json.loads(WEIGHTS.read_text(encoding="utf-8"))
    tensors = load_tensors(base64.b64decode(content["safetensors"]))
    config = ViTConfig(**content["config"], architectures=["ViTModel"], dtype="float32")
    return config, content["preprocessor"], {name: tensor.float() for name, tensor in tensors.items()}


def preprocessor() -> dict[str, Any]:
    """`image_mean` and `image_std`, one number each, as in preprocessor_config.json."""
    return _read()[1]


def load(num_labels: int) -> ViTForImageClassification:
    """The backbone under a random classifier of `num_labels` outputs (std 0.02, zero bias, one fixed draw).

    Input: pixels (N, 1, 8, 8) float32, (x / 255 - 0.5) / 0.5. The model is float32 and in eval mode; the
    global random state is left alone.
    """
    config, _, tensors = _read()
    config.num_labels = num_labels
    generator = torch.Generator().manual_seed(HEAD_SEED)
    state = {f"vit.{name}": tensor for name, tensor in tensors.items()}
    state["classifier.weight"] = 0.02 * torch.randn(num_labels, config.hidden_size, generator=generator)
    state["classifier.bias"] = torch.zeros(num_labels)
    # from_pretrained, not load_state_dict: it maps the Hub's tensor names to those of the release installed.
    return ViTForImageClassification.from_pretrained(None, config=config, state_dict=state).eval()


def export(folder: Path) -> Path:
    """Write the backbone as a Hugging Face folder, for `AutoModel` and `AutoModelForImageClassification`.

    Args:
        folder: made if need be; gets config.json, model.safetensors (float32), preprocessor_config.json.

    Returns:
        The folder.
    """
    config, normalisation, tensors = _read()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    side = {"height": config.image_size, "width": config.image_size}
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        **normalisation,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return folder
