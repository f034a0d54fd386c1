"""Cluster models as PEFT adapter folders: `PeftModel.from_pretrained(base, folder)` is the trained model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor

from pina_flwr.config import RunConfig
from pina_flwr.models.backbone import EMBEDDED, Backbone, head_of

TEACHER_HEAD = "distillation_classifier"


def save_adapters(config: RunConfig, backbone: Backbone, models: Tensor, folder: Path) -> list[Path]:
    """Write cluster models [C, d] to `folder`/cluster-0, cluster-1, …; the embedded backbone beside it.

    The base to load them on is `AutoModelForImageClassification.from_pretrained(backbone, num_labels=…)`,
    with `ignore_mismatched_sizes=True` if it comes with a head for other classes.
    """
    base = base_of(config, folder)
    if config.backbone == EMBEDDED:
        from pina_flwr.models import tiny_vit

        tiny_vit.export(Path(base))
    peft_model = _peft_model(config, backbone, base)
    folders = []
    for c, model in enumerate(models):
        result: Any = set_peft_model_state_dict(peft_model, peft_tensors(backbone, model))
        if result.unexpected_keys:
            raise RuntimeError(f"tensors that PEFT does not know: {result.unexpected_keys}")
        folders.append(folder / f"cluster-{c}")
        peft_model.save_pretrained(str(folders[-1]))
    return folders


def base_of(config: RunConfig, folder: Path) -> str:
    """The model that adapters under `folder` are for: a Hugging Face id or an absolute path."""
    if config.backbone == EMBEDDED:
        return str((folder.parent / "backbone").absolute())
    local = Path(config.backbone).expanduser()
    return str(local.absolute()) if local.is_dir() else config.backbone


def peft_tensors(backbone: Backbone, model: Tensor) -> dict[str, Tensor]:
    """A flat model [d] as PEFT's state dict.

    The classifier of transformers sees unscaled features, and DINOv2's sees the mean patch feature beside the
    class token: the feature scale is folded into the head's weight, and the head ignores (weight 0) what it
    was not given. A distilled DeiT averages two heads: the one that reads the class token counts double, the
    other is zero.
    """
    tensors = {name: t[0] for name, t in backbone.spec.unflatten(model[None].cpu()).items()}
    named = {
        f"base_model.model.{block.names[short]}.lora_{part}.weight": tensors[f"{block.index}.{short}.{part}"]
        for block in backbone.blocks
        for short in block.names
        for part in "AB"
        if f"{block.index}.{short}.{part}" in tensors
    }
    head, *others = _heads(backbone)
    weight = torch.zeros(getattr(backbone.model, head).weight.shape)
    weight[:, : tensors["head.weight"].shape[1]] = backbone.feature_scale * tensors["head.weight"]
    for name, factor in ((head, 1 + len(others)), *((other, 0) for other in others)):
        named[f"base_model.model.{name}.weight"] = factor * weight
        named[f"base_model.model.{name}.bias"] = factor * tensors["head.bias"]
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def _heads(backbone: Backbone) -> list[str]:
    """The classifier heads that the model averages; the first reads the class token."""
    return [head_of(backbone.model)] + [TEACHER_HEAD] * hasattr(backbone.model, TEACHER_HEAD)


def _peft_model(config: RunConfig, backbone: Backbone, base: str) -> Any:
    """A PEFT model of the adapter's shape, on a copy of the backbone (PEFT changes the model it wraps)."""
    used = [name.split(".") for name in backbone.spec.initial if name.endswith(".A")]
    blocks = {block.index: block for block in backbone.blocks}
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules=[blocks[int(layer)].names[short] for layer, short, _ in used],
        modules_to_save=_heads(backbone),
        inference_mode=True,
    )
    model = copy.deepcopy(backbone.model).cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers on a name that PEFT uses
        wrapped = get_peft_model(model, settings)
    wrapped.peft_config["default"].base_model_name_or_path = base
    return wrapped
