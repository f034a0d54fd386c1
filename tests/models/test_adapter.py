"""Adapters as flat vectors: what is in them, where, and that both sides derive the same."""

import math

import pytest
import torch

from pina_flwr.config import parse
from pina_flwr.models.adapter import sketch_spec, with_centroid

H = 16  # hidden size of the tiny models, which have 3 classes


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 2 * (4 * H + H * 4) + 3 * H + 3),
        ({"lora_train_a": False}, 2 * H * 4 + 3 * H + 3),
        ({"train_head": False}, 2 * (4 * H + H * 4)),
        (
            {
                "lora_targets": "v",
                "lora_rank": 1,
                "stage1_rank": 1,
                "train_head": False,
                "lora_train_a": False,
            },
            H,
        ),
        (
            {"lora_targets": " q, k ,v,o", "lora_rank": 2, "stage1_rank": 2, "lora_layers": 3},
            3 * 4 * 2 * 2 * H + 3 * H + 3,
        ),
    ],
)
def test_number_of_trained_parameters(load, options, size):
    backbone = load("vit", **options)
    spec = backbone.spec
    assert spec.size == size == spec.start().numel()
    assert spec.start().dtype == torch.float32
    assert backbone.sketch.size == H * options.get("stage1_rank", 4)
    assert spec.lora_scale == 8 / options.get("lora_rank", 4)


def test_flat_vector_and_tensors(load):
    spec = load("dinov2", lora_targets="q,v", lora_layers=2, lora_train_a=False).spec
    vectors = torch.randn(5, spec.size, generator=torch.Generator().manual_seed(0))
    tensors = spec.unflatten(vectors)
    assert set(tensors) == set(spec.initial)
    for name, tensor in tensors.items():
        assert tensor.shape == (5 if name in spec.trainable else 1, *spec.initial[name].shape)
        if name in spec.trainable:
            assert torch.equal(tensor.flatten(1), vectors[:, spec.slice_of(name)])
        else:
            assert torch.equal(tensor[0], spec.initial[name])
    assert torch.equal(spec.flatten(tensors), vectors)
    slices = [spec.slice_of(name) for name in spec.trainable]
    assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
    assert slices[-1].stop == spec.size


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 2, 3)])
def test_vectors_of_another_size_are_refused(load, shape):
    with pytest.raises(ValueError, match=r"expected \[users, "):
        load("vit").spec.unflatten(torch.zeros(shape))


def test_shared_start(load):
    """B is zero, A has rows of about unit norm, the head has the spread asked for; all by the seed."""
    one, same, other = (load("tiny-vit", classes=10, head_std=0.3, seed=seed).spec for seed in (1, 1, 2))
    assert torch.equal(one.start(), same.start())
    assert not torch.equal(one.start(), other.start())
    for name, tensor in one.initial.items():
        if name.endswith((".B", ".bias")):
            assert not tensor.any()
        elif name.endswith(".A"):
            assert tensor.std().item() == pytest.approx(1 / math.sqrt(64), rel=0.15)
        else:
            assert tensor.std().item() == pytest.approx(0.3, rel=0.1)
    assert not torch.equal(one.initial["3.q.A"], one.initial["3.v.A"])


def test_what_is_trained_does_not_change_the_start(load):
    full, frozen = (load("vit", lora_train_a=train, train_head=train).spec for train in (True, False))
    for name in full.initial:
        assert torch.equal(full.initial[name], frozen.initial[name])
    assert frozen.trainable == ("2.q.B", "2.v.B")


@pytest.mark.parametrize("rank", [1, 3])
def test_sketch_trains_b_of_the_last_value_projection_alone(load, rank):
    backbone = load("vit", lora_layers=2, sketch_head_std=0.5, stage1_rank=rank)
    assert backbone.sketch.trainable == ("2.v.B",)
    assert set(backbone.sketch.initial) == {"2.v.A", "2.v.B", "head.weight", "head.bias"}
    assert backbone.sketch.initial["2.v.A"].shape == (rank, H)
    assert torch.equal(backbone.sketch.initial["2.v.A"], backbone.spec.initial["2.v.A"][:rank])
    weight = backbone.sketch.initial["head.weight"]
    torch.testing.assert_close(weight, 5 * backbone.spec.initial["head.weight"])
    own = sketch_spec(parse({"sketch-head-std": 0.0}), backbone.blocks, 3)
    assert torch.equal(own.initial["head.weight"], backbone.spec.initial["head.weight"])


@pytest.mark.parametrize(("rank", "train_a"), [(1, True), (1, False), (4, True)])
def test_centroid_starts_a_cluster_model_where_stage_1_left_off(load, rank, train_a):
    """A cluster model with the centroid as first columns of B is the model of stage 1 that has it as B."""
    backbone = load("vit", lora_layers=2, sketch_head_std=0.0, stage1_rank=rank, lora_train_a=train_a)
    spec, sketch = backbone.spec, backbone.sketch
    centroid = torch.randn(H * rank, generator=torch.Generator().manual_seed(1))
    start = with_centroid(spec, backbone.blocks[-1], centroid)
    b = start[spec.slice_of("2.v.B")].reshape(H, 4)
    assert torch.equal(b[:, :rank].flatten(), centroid)
    assert (start != spec.start()).sum() == H * rank
    prepared = backbone.prepare(torch.randn((1, 4, 5, H), generator=torch.Generator().manual_seed(2)))
    stage1 = backbone.logits(prepared, sketch.unflatten(centroid[None]), sketch.lora_scale)
    stage2 = backbone.logits(prepared, spec.unflatten(start[None]), spec.lora_scale)
    fresh = backbone.logits(prepared, spec.unflatten(spec.start()[None]), spec.lora_scale)
    torch.testing.assert_close(stage1, stage2)
    assert not torch.allclose(stage2, fresh)
