"""The block algebra is that of transformers' model under PEFT: same class scores, same gradients."""

import pytest
import torch
import transformers
from tiny_models import PeftTwin
from torch import nn
from torch.nn.functional import cross_entropy

from pina_flwr.config import ConfigError
from pina_flwr.models.block import find_block, prepare

CASES = [
    ("vit", "v", {}),
    ("vit", "q,k,v,o", {"lora_layers": 3}),
    ("vit", "q,v", {"lora_layers": 2, "image_size": 16}),
    ("vit-tanh", "k,o", {"lora_layers": 1, "strategy": "fedavg"}),
    ("vit-relu6", "q,k,v,o", {"lora_layers": 2, "lora_train_a": False}),
    ("deit", "q,k,v,o", {"lora_layers": 2, "train_head": False}),
    ("dinov2", "q,k,v,o", {"lora_layers": 1}),
    ("dinov2", "q,k,v,o", {"lora_layers": 3, "lora_train_a": False, "train_head": False}),
    ("dinov2-registers", "v,o", {"lora_layers": 2, "lora_rank": 1, "stage1_rank": 1}),
    ("tiny-vit", "q,v", {}),
]


def twin_of(backbone, folder, vector):
    """The same model under PEFT, loaded afresh, so that nothing is shared with ours."""
    if folder == "tiny-vit":
        from pina_flwr.models import tiny_vit

        return PeftTwin(tiny_vit.load(3), backbone, backbone.spec, vector)
    base = transformers.AutoModelForImageClassification.from_pretrained(folder)
    return PeftTwin(base, backbone, backbone.spec, vector)


@pytest.mark.parametrize(("kind", "targets", "options"), CASES)
def test_scores_and_gradients_equal_peft(load, folder_of, kind, targets, options):
    """Three users side by side, each with an adapter and images of its own, against one PEFT model each."""
    backbone = load(kind, lora_targets=targets, **options)
    draw = torch.Generator().manual_seed(2)
    channels = backbone.model.config.num_channels
    pixels = torch.randn((3, 4, channels, backbone.size, backbone.size), generator=draw)
    labels = torch.randint(3, (3, 4), generator=draw)
    vectors = (
        backbone.spec.start() + 0.3 * torch.randn((3, backbone.spec.size), generator=draw)
    ).requires_grad_()
    hidden = backbone.prefix(pixels.flatten(0, 1)).unflatten(0, (3, 4))
    scores = backbone.logits(
        backbone.prepare(hidden), backbone.spec.unflatten(vectors), backbone.spec.lora_scale
    )
    sum(cross_entropy(scores[user], labels[user]) for user in range(3)).backward()

    stretch = kind.startswith(("vit", "deit")) and "image_size" in options
    for user in range(3):
        twin = twin_of(backbone, folder_of(kind) if kind != "tiny-vit" else kind, vectors[user].detach())
        expected = twin.logits(pixels[user], **({"interpolate_pos_encoding": True} if stretch else {}))
        torch.testing.assert_close(scores[user], expected, rtol=1e-4, atol=1e-5)
        cross_entropy(expected, labels[user]).backward()
        gradient = twin.gradient()
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(vectors.grad[user], gradient, rtol=1e-3, atol=1e-6)


def test_one_adapter_serves_all_users(load):
    """A vector [1, d] stands for every user, as when users are measured under one cluster model."""
    backbone = load("dinov2", lora_targets="q,k,v,o", lora_layers=2)
    draw = torch.Generator().manual_seed(4)
    prepared = backbone.prepare(torch.randn((3, 2, 5, 16), generator=draw))
    vector = torch.randn((1, backbone.spec.size), generator=draw)
    shared = backbone.logits(prepared, backbone.spec.unflatten(vector), 2.0)
    copied = backbone.logits(prepared, backbone.spec.unflatten(vector.expand(3, -1)), 2.0)
    torch.testing.assert_close(shared, copied)


def test_fresh_adapter_changes_no_feature(load):
    """B = 0: the start that all share is the pre-trained model."""
    backbone = load("vit", lora_targets="q,k,v,o", lora_layers=3)
    prepared = backbone.prepare(torch.randn((1, 2, 5, 16), generator=torch.Generator().manual_seed(5)))
    start = backbone.spec.unflatten(backbone.spec.start()[None])
    torch.testing.assert_close(backbone.features(prepared, start, 2.0), backbone.features(prepared, {}, 2.0))


def test_class_token_alone_equals_all_tokens(load):
    """The last block may leave out every query but the class token's."""
    backbone = load("vit", lora_targets="q,k,v,o")
    hidden = torch.randn((2, 3, 5, 16), generator=torch.Generator().manual_seed(6))
    short, long = (prepare(backbone.blocks[0], hidden, class_token_only=only) for only in (True, False))
    assert (short.q.shape[2], long.q.shape[2]) == (1, 5)
    adapters = backbone.spec.unflatten(
        torch.randn((2, backbone.spec.size), generator=torch.Generator().manual_seed(7))
    )
    torch.testing.assert_close(
        backbone.features(short, adapters, 2.0), backbone.features(long, adapters, 2.0)
    )


def same_prepared(a, b):
    for name in ("residual", "normed", "q"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
    torch.testing.assert_close(a.keyed, b.keyed)


@pytest.mark.parametrize("layers", [1, 2])
def test_picking_users_and_images_picks_every_part(load, layers):
    backbone = load("vit", lora_layers=layers)
    hidden = torch.randn((3, 4, 5, 16), generator=torch.Generator().manual_seed(8))
    rows = torch.tensor([[3, 0], [1, 1], [2, 0]])
    prepared, users = backbone.prepare(hidden), torch.arange(3)
    assert len(prepared.keyed) == (0 if layers == 1 else 2)
    rowwise = torch.stack([own[some] for own, some in zip(hidden, rows, strict=True)])
    same_prepared(prepared.pick(users[:, None], rows), backbone.prepare(rowwise))
    same_prepared(prepared.pick(users[1:]), backbone.prepare(hidden[1:]))


def test_names_are_the_modules_peft_is_to_wrap(load):
    backbone = load("dinov2", lora_layers=2)
    for block in backbone.blocks:
        for short in "qkvo":
            assert backbone.model.get_submodule(block.names[short]) is block.projections[short]


class Layer(nn.Module):
    """A block that can be taken apart: parts may be left out or added."""

    def __init__(self, drop=(), extra=None, activation=nn.GELU):
        super().__init__()
        self.attention = nn.ModuleDict({p: nn.Linear(8, 8) for p in ("query", "key", "value", "dense")})
        self.norms = nn.ModuleDict({"before": nn.LayerNorm(8), "after": nn.LayerNorm(8)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 16), "act": activation(), "fc2": nn.Linear(16, 8)})
        for part in drop:
            parent, name = part.rsplit(".", 1)
            self.get_submodule(parent).pop(name)
        if extra is not None:
            self.extra = extra


def test_older_spellings_are_found():
    block = find_block(Layer(), "encoder.layer.7", 7, heads=2)
    assert block.names == {
        "q": "encoder.layer.7.attention.query",
        "k": "encoder.layer.7.attention.key",
        "v": "encoder.layer.7.attention.value",
        "o": "encoder.layer.7.attention.dense",
    }
    assert (block.fc1.out_features, block.fc2.out_features) == (16, 8)
    assert isinstance(block.activation, nn.GELU)
    assert block.scale1 is block.scale2 is None


@pytest.mark.parametrize(
    "layer",
    [
        Layer(drop=["attention.value"]),
        Layer(drop=["attention.dense"]),
        Layer(drop=["mlp.fc2"]),
        Layer(drop=["mlp.act"]),
        Layer(drop=["norms.after"]),
        Layer(extra=nn.Linear(8, 8)),
        Layer(extra=nn.LayerNorm(8)),
        Layer(activation=nn.PReLU),
        nn.Identity(),
    ],
    ids=lambda layer: ", ".join(name for name, _ in layer.named_modules() if name),
)
def test_other_blocks_are_refused(layer):
    with pytest.raises(ConfigError, match=r"^backbone: layer 'encoder.0' is no pre-norm attention block"):
        find_block(layer, "encoder.0", 0, heads=2)
