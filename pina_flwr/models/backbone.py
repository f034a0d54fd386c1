"""The pre-trained backbone: a frozen prefix, run once per image, and a tail in which adapters train.

Any image classifier of transformers made of pre-norm ViT blocks works (ViT, DeiT, DINOv2): its parts are
found by walking the model, and loading checks on a probe that prefix and tail together reproduce the model.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate, linear

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.models.adapter import AdapterSpec, sketch_spec, training_spec
from pina_flwr.models.block import Adapters, Block, Prepared, apply_block, find_block, prepare
from pina_flwr.privacy.plan import Shapes, signal_rows

EMBEDDED = "tiny-vit"
HEADS = ("classifier", "cls_classifier")  # the second in a DeiT that was distilled
HUB_PATIENCE = 8.0  # seconds to wait for the hub before its files are sought on disk alone
PROBE_TOLERANCE = 1e-3  # relative; float32 sums in another order differ by about 1e-6
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Reached(Exception):
    """Ends the backbone's forward pass: nothing behind this block is wanted."""


@dataclass(frozen=True)
class Backbone:
    """A frozen vision transformer.

    model: transformers' image classifier, frozen, in eval mode. blocks: its last m blocks, where adapters
    live. size: pixels a side. mean, std: pixel normalisation by channel. spec, sketch: adapters of stage 2
    and of stage 1. shapes: lengths of the vectors that users release. features_layer: index of the block
    whose input `mean_features` averages, in features_grid² cells. dtype: arithmetic of the blocks; adapters,
    residuals, norms and the head stay float32.
    """

    model: Any
    layers: nn.ModuleList
    blocks: list[Block]
    final_norm: nn.Module
    size: int
    mean: Tensor
    std: Tensor
    feature_scale: float
    spec: AdapterSpec
    sketch: AdapterSpec
    shapes: Shapes
    features_layer: int
    features_grid: int
    dtype: torch.dtype = torch.float32

    @property
    def side(self) -> int:
        """Patches a side."""
        return self.size // _side(self.model.config, "patch_size")

    @property
    def device(self) -> torch.device:
        """Where the frozen weights are."""
        return self.mean.device

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [n, 1 or 3, height, width] → normalised float32 [n, channels, size, size].

        Grey repeats over colours; colour becomes its mean for a grey backbone.
        """
        x, channels = images.to(self.device).float() / 255, self.model.config.num_channels
        if x.shape[1] != channels:
            x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
        if x.shape[-2:] != (self.size, self.size):
            x = interpolate(
                x, size=(self.size, self.size), mode="bilinear", antialias=True, align_corners=False
            )
        return (x - self.mean[:, None, None]) / self.std[:, None, None]

    def prefix(self, pixels: Tensor) -> Tensor:
        """Pixels → hidden states [n, tokens, h] that enter the first trainable block."""
        return self.entering([self.blocks[0].index], pixels)[0]

    def mean_features(self, pixels: Tensor) -> Tensor:
        """Pixels of n images → mean hidden state of each cell of the grid, [grid²·h].

        It keeps what lies where in the images, which tells rotations apart, and forgets which they are.
        """
        return self.cell_means(self.entering([self.features_layer], pixels)[0], self.features_grid)

    def cell_means(self, hidden: Tensor, grid: int) -> Tensor:
        """Hidden states [n, tokens, h] → means over the images and over the patches of a cell, [grid²·h]."""
        patches = hidden.mean(0)[-(self.side**2) :].unflatten(0, (self.side, self.side)).permute(2, 0, 1)
        return adaptive_avg_pool2d(patches, grid).flatten(1).T.flatten()

    @torch.no_grad()
    def entering(self, blocks: Sequence[int], pixels: Tensor) -> list[Tensor]:
        """Hidden states [n, tokens, h] that enter each of these blocks, in one pass that ends at the last."""
        found: dict[int, Tensor] = {}

        def keep(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[index] = args[0] if args else kwargs["hidden_states"]
            if index == max(blocks):
                raise _Reached

        hooks = [
            self.layers[index].register_forward_pre_hook(partial(keep, index), with_kwargs=True)
            for index in set(blocks)
        ]
        try:
            _base(self.model)(pixels, **_size_option(self.model, self.size))
        except _Reached:
            return [found[index] for index in blocks]
        finally:
            for hook in hooks:
                hook.remove()
        raise AssertionError(f"block {max(blocks)} was never reached")

    def prepare(self, hidden: Tensor) -> Prepared:
        """The adapter-free part of the tail, for hidden states [users, images, tokens, h]."""
        with self._arithmetic():
            return prepare(self.blocks[0], hidden.to(self.dtype), class_token_only=len(self.blocks) == 1)

    def features(self, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
        """Class-token features after the final norm [users, images, h]."""
        with self._arithmetic():
            hidden = apply_block(self.blocks[0], prepared, adapters, lora_scale)
            for block in self.blocks[1:]:
                ready = prepare(block, hidden, class_token_only=block is self.blocks[-1])
                hidden = apply_block(block, ready, adapters, lora_scale)
        return self.final_norm(hidden[..., 0, :])

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def logits(self, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
        """Class scores [users, images, classes] under each user's adapter."""
        features = self.feature_scale * self.features(prepared, adapters, lora_scale)
        weight, bias = adapters["head.weight"], adapters["head.bias"]
        if weight.shape[0] == 1:
            return linear(features, weight[0], bias[0])
        return torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))


def load_backbone(config: RunConfig, num_classes: int, device: torch.device | None = None) -> Backbone:
    """Load `config.backbone`, freeze it and find its last `lora-layers` blocks.

    Raises:
        ConfigError: it can't be loaded, or is not made of pre-norm ViT blocks.
    """
    model, preprocessor = _load_model(config.backbone, num_classes)
    model.requires_grad_(False).eval()
    layers, prefix = _layers(model, config)
    heads = model.config.num_attention_heads
    start = len(layers) - config.lora_layers
    blocks = [find_block(layers[i], f"{prefix}.{i}", i, heads) for i in range(start, len(layers))]
    size = _size(config, model)
    mean, std = _normalisation(preprocessor, model.config.num_channels)
    _check_rank(config, blocks[-1].fc2.out_features)
    spec, sketch = training_spec(config, blocks, num_classes), sketch_spec(config, blocks, num_classes)
    model.to(device or torch.device("cpu"))
    backbone = Backbone(
        model=model,
        layers=layers,
        blocks=blocks,
        final_norm=_final_norm(model, layers, blocks[-1].fc2.out_features),
        size=size,
        mean=mean.to(model.device),
        std=std.to(model.device),
        feature_scale=config.feature_scale,
        spec=spec,
        sketch=sketch,
        shapes=Shapes(signal_rows(config) * blocks[-1].fc2.out_features, spec.size),
        features_layer=features_index(config, len(layers), size // _side(model.config, "patch_size")),
        features_grid=config.features_grid,
    )
    _check_tail(config, backbone)
    return replace(backbone, dtype=getattr(torch, config.precision))


def features_index(config: RunConfig, layers: int, side: int) -> int:
    """Index of the block whose input is averaged; by default two thirds of the way up.

    Raises:
        ConfigError: a backbone of so many layers and patches a side has no such features.
    """
    if config.features_layer > layers:
        raise ConfigError(f"features-layer = {config.features_layer}: the backbone has {layers} layers")
    if config.stage1_signal == "features" and config.features_grid > side:
        raise ConfigError(
            f"features-grid = {config.features_grid}: must be at most {side}, the backbone's patches a side"
        )
    return (config.features_layer or 2 * layers // 3 + 1) - 1


def _check_rank(config: RunConfig, hidden: int) -> None:
    if config.lora_rank > hidden:
        raise ConfigError(
            f"lora-rank = {config.lora_rank}: must be at most the backbone's hidden size {hidden}"
        )


def _load_model(name: str, num_classes: int) -> tuple[Any, dict[str, Any]]:
    """The classifier in float32, and its preprocessor's settings when it has them."""
    from transformers import AutoModelForImageClassification
    from transformers.utils import cached_file, logging

    logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    logging.disable_progress_bar()
    if name == EMBEDDED:
        from pina_flwr.models import tiny_vit

        return tiny_vit.load(num_classes), tiny_vit.preprocessor()
    folder = Path(name).expanduser()
    path = str(folder) if folder.is_dir() else name
    try:
        local = folder.is_dir() or not _hub_answers(name)
        model, loaded = AutoModelForImageClassification.from_pretrained(
            path,
            num_labels=num_classes,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=local,
            adapter_kwargs={"local_files_only": local},
        )
        settings = cached_file(
            path,
            "preprocessor_config.json",
            local_files_only=local,
            _raise_exceptions_for_missing_entries=False,
        )
        preprocessor = json.loads(Path(settings).read_text()) if settings else {}
    except Exception as problem:  # the library raises many kinds, all of them about the user's model
        reason = _first_line(problem)
        raise ConfigError(
            f"backbone = {name!r}: no image classifier can be loaded from it ({reason})"
        ) from problem
    _check_weights(name, model, loaded)
    return model, preprocessor


def _hub_answers(name: str) -> bool:
    """Ask the hub once; the library would ask many times for each file before it turns to its cache."""
    url = huggingface_hub.hf_hub_url(name, "config.json")
    try:
        huggingface_hub.utils.get_session().head(url, timeout=HUB_PATIENCE)
    except Exception:  # kinds differ by HTTP library; also raised if the library is told to stay offline
        return False
    return True


def _check_weights(name: str, model: Any, loaded: dict[str, Any]) -> None:
    """Only the head may be new: the library draws other missing weights at random, and only warns."""
    absent = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    base = f"{model.base_model_prefix}."
    if absent := {key for key in absent if key.startswith(base) and "mask_token" not in key}:
        raise ConfigError(
            f"backbone = {name!r}: {len(absent)} of its weights are missing, {min(absent)!r} among them"
        )


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def _base(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def _layers(model: Any, config: RunConfig) -> tuple[nn.ModuleList, str]:
    """The list of transformer blocks and its name: the ModuleList that has as many entries."""
    wanted = getattr(model.config, "num_hidden_layers", None)
    equal = isinstance(getattr(model.config, "num_attention_heads", None), int)
    for name, module in model.named_modules():
        if equal and isinstance(module, nn.ModuleList) and len(module) == wanted:
            if config.lora_layers > len(module):
                raise ConfigError(
                    f"lora-layers = {config.lora_layers}: the backbone has {len(module)} layers"
                )
            return module, name
    raise ConfigError(f"backbone = {config.backbone!r}: has no list of equal transformer layers")


def _final_norm(model: Any, layers: nn.ModuleList, hidden: int) -> nn.Module:
    inside = {id(m) for m in layers.modules()}
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm) and id(m) not in inside]
    norms = [m for m in norms if m.normalized_shape == (hidden,)]
    return norms[-1] if norms else nn.Identity()


def _side(settings: Any, name: str) -> int:
    """`image_size` or `patch_size` in pixels a side; 0 if it has two sides or is not known."""
    value = getattr(settings, name, None)
    sides = {value} if isinstance(value, int) else set(value or ())
    return sides.pop() if len(sides) == 1 else 0


def _size(config: RunConfig, model: Any) -> int:
    own, patch = (_side(model.config, name) for name in ("image_size", "patch_size"))
    if not own or not patch:
        raise ConfigError(f"backbone = {config.backbone!r}: must have square images and patches")
    size = config.image_size or own
    if size % patch:
        raise ConfigError(f"image-size = {size}: must be a multiple of the backbone's patch size {patch}")
    return size


def _size_option(model: Any, size: int) -> dict[str, bool]:
    """ViT and DeiT must be told to stretch their position encodings; DINOv2 does so by itself."""
    option = "interpolate_pos_encoding"
    asks = option in inspect.signature(_base(model).forward).parameters
    return {option: True} if asks and size != _side(model.config, "image_size") else {}


def _normalisation(preprocessor: dict[str, Any], channels: int) -> tuple[Tensor, Tensor]:
    if preprocessor.get("do_normalize") is False:
        return torch.zeros(channels), torch.ones(channels)
    grey = channels == 1
    mean = preprocessor.get("image_mean") or ([0.5] if grey else IMAGENET_MEAN)
    std = preprocessor.get("image_std") or ([0.5] if grey else IMAGENET_STD)
    return torch.tensor(mean).reshape(-1)[:channels], torch.tensor(std).reshape(-1)[:channels]


def head_of(model: Any) -> str:
    """The name of the linear layer that classifies the class token, or '' if there is none."""
    return next((name for name in HEADS if isinstance(getattr(model, name, None), nn.Linear)), "")


@torch.no_grad()
def _check_tail(config: RunConfig, backbone: Backbone) -> None:
    """Compare prefix and tail with what the whole model hands to its classifier, on random pixels."""
    shape = (2, backbone.model.config.num_channels, backbone.size, backbone.size)
    try:
        probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(backbone.device)
        expected = _classified(backbone.model, probe, _size_option(backbone.model, backbone.size))
    except Exception as problem:
        reason = _first_line(problem)
        raise ConfigError(
            f"image-size = {backbone.size}: the backbone can't be run at it ({reason})"
        ) from problem
    ours = backbone.features(backbone.prepare(backbone.prefix(probe)[None]), {}, 1.0)[0]
    expected = expected[:, : ours.shape[1]]
    same = ours.shape == expected.shape and (ours - expected).norm() <= PROBE_TOLERANCE * expected.norm()
    if not same:  # NaN is never within the tolerance
        raise ConfigError(
            f"backbone = {config.backbone!r}: its blocks are no pre-norm ViT blocks that can be trained, "
            "or its classifier does not read the class token"
        )


def _classified(model: Any, pixels: Tensor, options: dict[str, bool]) -> Tensor:
    """What the model hands to its classifier [n, features], class token first; empty without one."""
    seen = [pixels.new_zeros(len(pixels), 0)]
    if head := head_of(model):
        hook = getattr(model, head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            model(pixels, **options)
        finally:
            hook.remove()
    return seen[-1]
