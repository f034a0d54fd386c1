"""Pre-norm transformer blocks whose adapters differ between users while the frozen weights are shared.

A block of any ViT, DeiT or DINOv2 is `h + ls1·o(attention(q, k, v)(norm1(h)))` and then
`h + ls2·fc2(act(fc1(norm2(h))))`. Here each projection adds a user's low-rank term, so that one pass over the
shared weights serves many users: autograd through the sum of their losses gives every user its own gradient.
Two things make it cheap, both exact: the frozen projections of the first trainable block are computed once
(`prepare`), and the last block works out the class token only, since nothing else reaches the head, and
without keys and values of the other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pina_flwr.config import ConfigError

PROJECTIONS = {
    "q": ("q_proj", "query"),
    "k": ("k_proj", "key"),
    "v": ("v_proj", "value"),
    "o": ("o_proj", "out_proj", "dense"),
}
Adapters = Mapping[str, Tensor]  # name → [users, *shape]; a leading 1 is shared by all users


@dataclass(frozen=True)
class Block:
    """The modules of one transformer block, found by walking it, and their names in the backbone."""

    index: int
    heads: int
    norm1: nn.Module
    norm2: nn.Module
    projections: Mapping[str, nn.Linear]
    names: Mapping[str, str]  # q, k, v, o → full module name, as PEFT's target_modules wants it
    fc1: nn.Linear
    fc2: nn.Linear
    activation: nn.Module
    scale1: Tensor | None
    scale2: Tensor | None


@dataclass(frozen=True)
class Prepared:
    """What of a block does not depend on any adapter, for [users, images, tokens, h] hidden states.

    residual, q: [users, images, queries, h], where queries are all tokens or the class token alone.
    normed: [users, images, tokens, h]. keyed: k and v, each [users, images, heads, tokens, h / heads]; empty
    where the class token alone asks.
    """

    residual: Tensor
    normed: Tensor
    q: Tensor
    keyed: tuple[Tensor, ...] = ()

    def pick(self, users: Tensor, images: Tensor | slice = slice(None)) -> Prepared:
        """The same for some images of some users (tensors that broadcast to [users, β]; or all images)."""
        residual, normed, q = (part[users, images] for part in (self.residual, self.normed, self.q))
        return Prepared(residual, normed, q, tuple(part[users, images] for part in self.keyed))


def find_block(layer: nn.Module, prefix: str, index: int, heads: int) -> Block:
    """Read a block's parts off a transformers module, whatever its spelling.

    Raises:
        ConfigError: the layer is not a pre-norm attention and two-layer MLP block.
    """
    linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    norms = [m for m in layer.modules() if isinstance(m, nn.LayerNorm)]
    scales = [p for name, p in layer.named_parameters() if name.endswith("lambda1")]
    found = {short: _projection(linears, spellings) for short, spellings in PROJECTIONS.items()}
    mlp = [m for name, m in linears.items() if name not in found.values()]
    activation = _activation(layer, mlp[0]) if len(mlp) == 2 else None
    if None in found.values() or activation is None or len(norms) != 2 or len(scales) not in (0, 2):
        raise ConfigError(f"backbone: layer {prefix!r} is no pre-norm attention block with a two-layer MLP")
    names = {short: name for short, name in found.items() if name is not None}
    return Block(
        index=index,
        heads=heads,
        norm1=norms[0],
        norm2=norms[1],
        projections={short: linears[name] for short, name in names.items()},
        names={short: f"{prefix}.{name}" for short, name in names.items()},
        fc1=mlp[0],
        fc2=mlp[1],
        activation=activation,
        scale1=scales[0] if scales else None,
        scale2=scales[1] if scales else None,
    )


def _projection(linears: Mapping[str, nn.Linear], spellings: tuple[str, ...]) -> str | None:
    """The first linear layer under the attention that ends in one of these spellings."""
    for name in linears:
        if name.rsplit(".", 1)[-1] in spellings and "attention" in name:
            return name
    return None


def _activation(layer: nn.Module, fc1: nn.Linear) -> nn.Module | None:
    """The one module without parameters beside the MLP's first linear layer (dropout rests in eval mode)."""
    mlp = next(m for m in layer.modules() if fc1 in m.children())
    plain = [m for m in mlp.children() if not list(m.parameters())]
    plain = [m for m in plain if not isinstance(m, nn.Dropout | nn.Identity)]
    return plain[0] if len(plain) == 1 else None


def prepare(block: Block, hidden: Tensor, class_token_only: bool) -> Prepared:
    """The adapter-free half of a block, for hidden states [users, images, tokens, h]."""
    normed = block.norm1(hidden)
    queries = 1 if class_token_only else hidden.shape[-2]
    keyed = () if class_token_only else tuple(block.projections[short](normed) for short in "kv")
    return Prepared(
        residual=hidden[..., :queries, :].float(),
        normed=normed,
        q=block.projections["q"](normed[..., :queries, :]),
        keyed=tuple(_heads(part, block.heads).contiguous() for part in keyed),
    )


def apply_block(block: Block, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
    """The rest of a block under every user's adapter: [users, images, queries, h]."""
    attention = _attention if prepared.keyed else _class_token_attention
    attended = attention(block, prepared, adapters, lora_scale)
    mixed = block.projections["o"](attended)
    if (down := adapters.get(f"{block.index}.o.A")) is not None:
        mixed = mixed + lora_scale * _per_user(_per_user(attended, down), adapters[f"{block.index}.o.B"])
    hidden = prepared.residual + (mixed if block.scale1 is None else block.scale1 * mixed)
    thought = block.fc2(block.activation(block.fc1(block.norm2(hidden))))
    return hidden + (thought if block.scale2 is None else block.scale2 * thought)


def _attention(block: Block, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
    """Multi-head attention; the low-rank terms of keys and values are never spread out over all channels.

    With z = x·Aᵀ: q·(k + s·z·Bᵀ)ᵀ = q·kᵀ + s·(q·B)·zᵀ, and p·(v + s·z·Bᵀ) = p·v + s·(p·z)·Bᵀ, head by head.
    """

    def low_rank(short: str) -> tuple[Tensor, Tensor] | None:
        down, up = (adapters.get(f"{block.index}.{short}.{part}") for part in "AB")
        if down is None or up is None:
            return None
        z = _per_user(prepared.normed, down)[:, :, None]  # [users, images, 1, tokens, r], alike for all heads
        return z, lora_scale * up.reshape(up.shape[0], 1, block.heads, -1, up.shape[-1])

    q, (k, v) = _queries(block, prepared, adapters, lora_scale), prepared.keyed
    scores = q @ k.mT
    if (keys := low_rank("k")) is not None:
        scores = scores + (q @ keys[1]) @ keys[0].mT
    attention = torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1)
    out = attention @ v
    if (values := low_rank("v")) is not None:
        out = out + (attention @ values[0]) @ values[1].mT
    return out.transpose(2, 3).flatten(3)


def _class_token_attention(block: Block, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
    """The same for the class token alone: with one query an image, keys and values need not be worked out.

    q·(W_k x) = (W_kᵀ q)·x, and Σ p·(W_v x) = W_v Σ p·x, head by head. b_k adds the same to all scores of a
    head, which softmax takes no notice of; b_v is added once, since Σ p = 1.
    """
    users, images = prepared.q.shape[:2]
    q = _queries(block, prepared, adapters, lora_scale)[..., 0, :]  # [users, images, heads, h / heads]
    key, value = (block.projections[short].weight.unflatten(0, (block.heads, -1)) for short in "kv")
    sought = _per_head(q, key)  # [users, images, heads, h]
    if (down := adapters.get(f"{block.index}.k.A")) is not None:
        up = adapters[f"{block.index}.k.B"].unflatten(1, (block.heads, -1))[:, None]
        z = (q[..., None, :] @ up)[..., 0, :]
        sought = sought + lora_scale * _per_user(z, down.mT)
    scores = sought @ prepared.normed.mT
    seen = torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1) @ prepared.normed
    out = _per_head(seen, value.mT)
    if (bias := block.projections["v"].bias) is not None:
        out = out + bias.unflatten(0, (block.heads, -1))
    if (down := adapters.get(f"{block.index}.v.A")) is not None:
        up = adapters[f"{block.index}.v.B"].unflatten(1, (block.heads, -1))[:, None]
        out = out + lora_scale * (up @ _per_user(seen, down)[..., None])[..., 0]
    return out.reshape(users, images, 1, -1)


def _queries(block: Block, prepared: Prepared, adapters: Adapters, lora_scale: float) -> Tensor:
    """Every user's queries by head, [users, images, heads, queries, h / heads]."""
    q = prepared.q
    if (down := adapters.get(f"{block.index}.q.A")) is not None:
        asking = prepared.normed[..., : q.shape[-2], :]
        q = q + lora_scale * _per_user(_per_user(asking, down), adapters[f"{block.index}.q.B"])
    return _heads(q, block.heads)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [users, images, heads, i] times each head's weight [heads, i, o]: [users, images, heads, o]."""
    out = x.flatten(0, 1).transpose(0, 1) @ weight
    return out.transpose(0, 1).unflatten(0, x.shape[:2])


def _heads(x: Tensor, heads: int) -> Tensor:
    """[users, images, tokens, h] → [users, images, heads, tokens, h / heads]."""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3)


def _per_user(x: Tensor, weight: Tensor) -> Tensor:
    """x [users, images, tokens, i] times each user's weight [users or 1, o, i], transposed."""
    flat = x.flatten(1, 2)
    out = linear(flat, weight[0]) if weight.shape[0] == 1 else flat @ weight.mT
    return out.unflatten(1, x.shape[1:3])
