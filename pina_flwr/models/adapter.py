"""Adapters: the trainable tensors of a user or a cluster as one flat float32 vector of d numbers.

Both sides derive the same `AdapterSpec` from the same configuration: names, shapes, offsets, and the tensors
that stay frozen at a draw all share by seed (A under FFA-LoRA, the head when it is not trained).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pina_flwr.config import RunConfig
from pina_flwr.models.block import Block
from pina_flwr.seeding import normal


@dataclass(frozen=True)
class AdapterSpec:
    """Which tensors an adapter has.

    initial: every tensor of the adapter by name, at its shared start. trainable: those in the flat vector, in
    order. lora_scale: alpha / r.
    """

    initial: Mapping[str, Tensor]
    trainable: tuple[str, ...]
    lora_scale: float

    @cached_property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return sum(self.initial[name].numel() for name in self.trainable)

    def start(self) -> Tensor:
        """The flat vector [d] from which every user could start."""
        return self.flatten({name: self.initial[name][None] for name in self.trainable})[0]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors [users, *shape] by name → [users, d]."""
        return torch.cat([tensors[name].flatten(1) for name in self.trainable], dim=1)

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor]:
        """Vectors [users, d] → tensors [users, *shape] by name, the frozen ones included as [1, *shape].

        Raises:
            ValueError: the vectors do not have d columns.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.size:
            raise ValueError(
                f"adapter vectors of shape {tuple(vectors.shape)}: expected [users, {self.size}]"
            )
        sizes = [self.initial[name].numel() for name in self.trainable]
        parts = dict(zip(self.trainable, vectors.split(sizes, dim=1), strict=True))
        return {
            name: parts[name].reshape(-1, *tensor.shape) if name in parts else tensor[None].to(vectors.device)
            for name, tensor in self.initial.items()
        }

    def slice_of(self, name: str) -> slice:
        """Where a trainable tensor lies in the flat vector."""
        start = sum(self.initial[n].numel() for n in self.trainable[: self.trainable.index(name)])
        return slice(start, start + self.initial[name].numel())


def training_spec(config: RunConfig, blocks: list[Block], num_classes: int) -> AdapterSpec:
    """The adapter of stage 2: LoRA of rank r on the chosen projections of the last layers, and the head."""
    initial: dict[str, Tensor] = {}
    for block in blocks:
        for short in (target.strip() for target in config.lora_targets.split(",")):
            weight = block.projections[short].weight
            initial[f"{block.index}.{short}.A"] = _shared_a(config, block.index, short, weight)
            initial[f"{block.index}.{short}.B"] = torch.zeros(weight.shape[0], config.lora_rank)
    hidden = blocks[-1].fc2.out_features
    initial |= _head(config, num_classes, hidden, config.head_std)
    trainable = [name for name in initial if config.lora_train_a or not name.endswith(".A")]
    if not config.train_head:
        trainable = [name for name in trainable if not name.startswith("head.")]
    return AdapterSpec(initial, tuple(trainable), config.lora_alpha / config.lora_rank)


def sketch_spec(config: RunConfig, blocks: list[Block], num_classes: int) -> AdapterSpec:
    """The adapter of stage 1: B ∈ R^{h×r'} on the last value projection; A and the head stay frozen.

    The paper has r' = 1, so that one random direction a·x is all that ΔB sees of a token; a few of them tell
    groups apart far better. A is the first rows of stage 2's A, so that a centroid is the first columns of a
    cluster model's B.
    """
    last, rank = blocks[-1], config.stage1_rank
    weight = last.projections["v"].weight
    name = f"{last.index}.v"
    initial = {
        f"{name}.A": _shared_a(config, last.index, "v", weight)[:rank],
        f"{name}.B": torch.zeros(weight.shape[0], rank),
    }
    initial |= _head(config, num_classes, last.fc2.out_features, config.sketch_head_std or config.head_std)
    return AdapterSpec(initial, (f"{name}.B",), config.lora_alpha / config.lora_rank)


def with_centroid(spec: AdapterSpec, block: Block, centroid: Tensor) -> Tensor:
    """The start of a cluster model [d]: the shared start, stage 1's centroid [h·r'] as first columns of B."""
    name = f"{block.index}.v.B"
    b = spec.initial[name].clone()
    columns = centroid.reshape(len(b), -1)
    b[:, : columns.shape[1]] = columns
    start = spec.start()
    start[spec.slice_of(name)] = b.flatten()
    return start


def _shared_a(config: RunConfig, layer: int, short: str, weight: Tensor) -> Tensor:
    """A ~ N(0, 1/h): a layer-normalised token (norm about √h) projects to unit size."""
    shape = (config.lora_rank, weight.shape[1])
    return normal(config.seed, "lora A", layer, short, shape=shape, std=1 / math.sqrt(weight.shape[1]))


def _head(config: RunConfig, num_classes: int, hidden: int, std: float) -> dict[str, Tensor]:
    """A random head that all share: a zero head would give stage 1 a zero gradient."""
    return {
        "head.weight": normal(config.seed, "head", shape=(num_classes, hidden), std=std),
        "head.bias": torch.zeros(num_classes),
    }
