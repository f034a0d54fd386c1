import math

import numpy as np
import pytest
import torch

from pina_flwr.config import parse
from pina_flwr.stage1.directions import initial_b, unit
from pina_flwr.stage1.starts import DPKMeans, LocalSketches, RandomStart, SharedStart, Start, open_start

H = 8  # numbers of what stage 1 clusters users by
B = 6  # numbers of B


def start(**options: object) -> Start:
    usual = {"t-in": 3, "kmeans-restarts": 2, "clusters": 3, "epsilon": math.inf, "sketch-size": 4}
    usual["secure-sum"] = "trusted"
    return open_start(parse(usual | {k.replace("_", "-"): v for k, v in options.items()}), H, B)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, DPKMeans),
        ({"stage1": "sketch"}, LocalSketches),
        ({"stage1": "random"}, RandomStart),
        ({"strategy": "pina-ri"}, RandomStart),
        ({"strategy": "ifca"}, RandomStart),
        ({"strategy": "fedavg"}, SharedStart),
        ({"strategy": "oracle", "clusters": 4}, SharedStart),
    ],
)
def test_who_starts_how(options: dict[str, object], kind: type) -> None:
    opened = start(**options)
    assert type(opened) is kind
    assert opened.rounds == (3 if kind in (DPKMeans, LocalSketches) else 0)


def test_random_start() -> None:
    b = start(stage1="random", random_init_norm=0.3).models().b
    assert b is not None
    assert b.shape == (3, B)
    torch.testing.assert_close(b.norm(dim=1), torch.full((3,), 0.3))
    assert torch.equal(b, start(stage1="random", random_init_norm=0.3).models().b)
    assert not torch.equal(b, start(stage1="random", random_init_norm=0.3, seed=2).models().b)


@pytest.mark.parametrize("strategy", ["fedavg", "oracle"])
def test_shared_start(strategy: str) -> None:
    first = start(strategy=strategy, clusters=4).models()
    assert first.b is None
    assert not first.arrays


@pytest.mark.parametrize("strategy", ["pina-ri", "fedavg"])
def test_starts_without_rounds_ask_nothing(strategy: str) -> None:
    opened = start(strategy=strategy)
    with pytest.raises(ValueError, match="asks nothing"):
        opened.ask(1)
    with pytest.raises(ValueError, match="asks nothing"):
        opened.receive(1, np.zeros(H))


class TestDPKMeans:
    def test_the_mean_comes_first_and_goes_to_all_that_follow(self) -> None:
        opened = start()
        first = opened.ask(1)
        assert (first.step, dict(first.arrays)) == ("mean", {})
        mean = np.linspace(-1, 1, H)
        opened.receive(1, mean)
        second = opened.ask(2)
        assert second.step == "lloyd"
        np.testing.assert_array_equal(second.arrays["mean"], mean.astype(np.float32))
        assert second.arrays["centroids"].shape == (2, 3, H)

    def test_without_centring_all_rounds_are_iterations(self) -> None:
        question = start(sketch_centre="none").ask(1)
        assert question.step == "lloyd"
        assert set(question.arrays) == {"centroids"}

    def test_centroids_follow_the_sums_and_the_best_restart_wins(self) -> None:
        opened = start()
        opened.receive(1, np.zeros(H))
        sums = np.random.default_rng(1).standard_normal((2, 3, H))
        sums[1] *= 10
        opened.receive(2, sums.ravel())
        np.testing.assert_allclose(
            opened.ask(3).arrays["centroids"], sums / np.linalg.norm(sums, axis=2, keepdims=True), rtol=1e-5
        )
        first = opened.models()
        chosen = unit(torch.from_numpy(sums[1]).float())
        torch.testing.assert_close(torch.from_numpy(first.arrays["centroids"]), chosen)
        torch.testing.assert_close(first.b, initial_b(chosen, 0.2))
        assert "mean" in first.arrays

    @pytest.mark.parametrize("memory", [0.0, 0.5])
    def test_earlier_sums_are_remembered_less_and_less(self, memory: float) -> None:
        opened = start(kmeans_memory=memory, kmeans_restarts=1)
        sums = np.random.default_rng(1).standard_normal((2, 1, 3, H))
        for round_, sum_ in enumerate(sums, start=2):
            opened.receive(round_, sum_.ravel())
        expected = unit(torch.from_numpy(sums[1] + memory * sums[0]).float())[0]
        torch.testing.assert_close(torch.from_numpy(opened.models().arrays["centroids"]), expected)

    def test_centroids_of_features_are_no_models(self) -> None:
        opened = start(stage1_signal="features")
        opened.receive(1, np.zeros(H))
        opened.receive(2, np.random.default_rng(1).standard_normal(2 * 3 * H))
        first = opened.models()
        assert first.b is None
        assert first.arrays["centroids"].shape == (3, H)
        assert first.arrays["mean"].shape == (H,)

    def test_if_every_round_was_dropped_models_still_differ(self) -> None:
        b = start().models().b
        torch.testing.assert_close(b.norm(dim=1), torch.full((3,), 0.2))
        assert (b[0] - b[1]).norm() > 0.1


class TestLocalSketches:
    def test_mean_then_sketches(self) -> None:
        opened = start(stage1="sketch")
        assert opened.ask(1).step == "mean"
        opened.receive(1, np.ones(H))
        question = opened.ask(2)
        assert question.step == "sketch"
        np.testing.assert_array_equal(question.arrays["mean"], np.ones(H))

    @pytest.mark.parametrize("sketch", ["paper", "private-support"])
    def test_clusters_the_sketches_of_all_rounds(self, sketch: str) -> None:
        opened = start(stage1="sketch", sketch=sketch, sketch_centre="none", centroid_norm=0.0)
        for row in range(3):
            opened.receive(row + 1, np.eye(3, H, dtype=np.float32)[[row]] * (row + 1))
        first = opened.models()
        norms = first.b.norm(dim=1)
        assert sorted(norms.tolist()) == [1, 2, 3]  # centroid i is B of model i
        torch.testing.assert_close(torch.from_numpy(first.arrays["centroids"]), first.b / norms[:, None])
        assert "mean" not in first.arrays

    @pytest.mark.parametrize("sketch", ["projection", "coordinates"])
    def test_a_public_map_is_undone(self, sketch: str) -> None:
        """Sketches are coordinates in a public basis; centroids are the points that they stand for."""
        opened = start(stage1="sketch", sketch=sketch, sketch_centre="none", centroid_norm=0.0)
        assert isinstance(opened, LocalSketches)
        basis = opened.mechanism.lift(torch.eye(4))
        torch.testing.assert_close(basis @ basis.mT, torch.eye(4))
        for row in range(3):
            opened.receive(row + 1, np.eye(4, dtype=np.float32)[[row]] * (row + 1))
        first = opened.models()
        assert first.b.shape == (3, H)
        found = sorted((first.b @ basis.mT).tolist())
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor([[0.0, 0, 3, 0], [0, 2, 0, 0], [1, 0, 0, 0]])
        )
        torch.testing.assert_close(
            torch.from_numpy(first.arrays["centroids"]), first.b / first.b.norm(dim=1, keepdim=True)
        )

    @pytest.mark.parametrize("sketch", ["projection", "coordinates"])
    def test_the_public_map_is_the_seeds(self, sketch: str) -> None:
        """The same on the server and on every node; another one with another seed."""

        def lifted(seed: int) -> torch.Tensor:
            opened = start(stage1="sketch", sketch=sketch, seed=seed)
            assert isinstance(opened, LocalSketches)
            return opened.mechanism.lift(torch.eye(4))

        assert torch.equal(lifted(1), lifted(1))
        assert len({tuple(lifted(seed).flatten().tolist()) for seed in range(5)}) > 1

    def test_sketches_of_features_are_no_models(self) -> None:
        opened = start(stage1="sketch", sketch_centre="none", stage1_signal="features")
        opened.receive(1, np.eye(4, dtype=np.float32))
        first = opened.models()
        assert first.b is None
        assert first.arrays["centroids"].shape == (3, H)

    @pytest.mark.parametrize("sketch", ["projection", "coordinates", "private-support", "paper"])
    @pytest.mark.parametrize("signal", ["update", "features"])
    def test_no_sketch_at_all(self, sketch: str, signal: str) -> None:
        """Equal models would all be picked first by everybody, so the start is random then."""
        first = start(stage1="sketch", sketch=sketch, stage1_signal=signal).models()
        torch.testing.assert_close(first.b, start(stage1="random").models().b)
        assert not first.arrays
