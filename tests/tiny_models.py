"""Small random image classifiers of transformers in local folders, and the same under PEFT as a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from pina_flwr.models.adapter import AdapterSpec
from pina_flwr.models.backbone import Backbone

VIT_LIKE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
NARROW = {"intermediate_size": 24}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTConfig", VIT_LIKE | NARROW),
    "vit-grey": ("ViTConfig", VIT_LIKE | NARROW | {"num_channels": 1}),
    "vit-relu6": ("ViTConfig", VIT_LIKE | NARROW | {"hidden_act": "relu6", "qkv_bias": False}),
    "vit-tanh": ("ViTConfig", VIT_LIKE | NARROW | {"hidden_act": "gelu_pytorch_tanh"}),
    "vit-oblong": ("ViTConfig", VIT_LIKE | NARROW | {"image_size": (8, 16)}),
    "deit": ("DeiTConfig", VIT_LIKE | NARROW | {"architectures": ["DeiTForImageClassification"]}),
    "deit-distilled": (
        "DeiTConfig",
        VIT_LIKE | NARROW | {"architectures": ["DeiTForImageClassificationWithTeacher"]},
    ),
    "dinov2": (
        "Dinov2Config",
        VIT_LIKE | {"mlp_ratio": 2, "drop_path_rate": 0.2, "hidden_dropout_prob": 0.1},
    ),
    "dinov2-registers": ("Dinov2WithRegistersConfig", VIT_LIKE | {"mlp_ratio": 2}),
    "dinov2-swiglu": ("Dinov2Config", VIT_LIKE | {"mlp_ratio": 2, "use_swiglu_ffn": True}),
    "vit-msn": ("ViTMSNConfig", VIT_LIKE | NARROW),
    "ijepa": ("IJepaConfig", VIT_LIKE | NARROW),
    "beit": ("BeitConfig", VIT_LIKE | NARROW),
    "convnext": ("ConvNextConfig", {"hidden_sizes": [8] * 4, "depths": [1] * 4}),
    "resnet": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}),
    "swin": (
        "SwinConfig",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
    ),
}


def save_model(kind: str, folder: Path, **preprocessor: Any) -> str:
    """Write a model of this kind, all weights random, and its preprocessor's settings if there are any."""
    name, options = CONFIGS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageClassification.from_config(
            getattr(transformers, name)(**options, num_labels=3)
        )
        for parameter in model.parameters():  # far from the usual start, so that every part of a block counts
            torch.nn.init.normal_(parameter, mean=0.2 if parameter.ndim == 1 else 0.0, std=0.3)
    model.save_pretrained(folder)
    if preprocessor:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return str(folder)


class PeftTwin:
    """The reference for an adapter: transformers' own classifier under PEFT, holding the same numbers.

    Args:
        base: transformers' image classifier, changed in place.
        vector: the adapter [d]. What `spec` trains requires gradients, nothing else does.
    """

    def __init__(self, base: Any, backbone: Backbone, spec: AdapterSpec, vector: Tensor):
        tensors = {name: tensor[0] for name, tensor in spec.unflatten(vector[None]).items()}
        blocks = {str(block.index): block for block in backbone.blocks}
        modules = sorted({name[:-2] for name in tensors if name[-2:] in (".A", ".B")})
        paths = {module: blocks[module.split(".")[0]].names[module.split(".")[1]] for module in modules}
        rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(".A"))
        settings = LoraConfig(r=rank, lora_alpha=rank * spec.lora_scale, target_modules=list(paths.values()))
        self.model = get_peft_model(base, settings).eval().requires_grad_(False)
        self.parts = {name: self._part(name, paths, tensor.shape) for name, tensor in tensors.items()}
        self.trainable = spec.trainable
        for name, (parameter, mine) in self.parts.items():
            with torch.no_grad():
                parameter.zero_()  # DINOv2's classifier reads more than ours: the rest counts for nothing
                parameter[mine] = tensors[name]
            if name in spec.trainable:
                mask = torch.zeros_like(parameter)
                mask[mine] = 1
                parameter.requires_grad_(True).register_hook(mask.mul)

    def _part(self, name: str, paths: dict[str, str], shape: torch.Size) -> tuple[Any, tuple[slice, ...]]:
        path = f"classifier.{name.removeprefix('head.')}"
        if not name.startswith("head."):
            path = f"{paths[name[:-2]]}.lora_{name[-1]}.default.weight"
        return self.model.get_parameter(f"base_model.model.{path}"), tuple(slice(size) for size in shape)

    def parameters(self) -> list[Any]:
        """What an optimiser trains."""
        return [self.parts[name][0] for name in self.trainable]

    def logits(self, pixels: Tensor, **options: Any) -> Tensor:
        """Class scores [n, classes] of normalised pixels, through the whole model."""
        return self.model(pixel_values=pixels, **options).logits

    def vector(self) -> Tensor:
        """The trained numbers now, in our order [d]."""
        return torch.cat([p.detach()[mine].flatten() for p, mine in map(self.parts.get, self.trainable)])

    def gradient(self) -> Tensor:
        """Their gradients [d]."""
        return torch.cat([p.grad[mine].flatten() for p, mine in map(self.parts.get, self.trainable)])
