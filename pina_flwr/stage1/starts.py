"""Stage 1 from the server's side: what the cohort is asked each round, and the cluster models that result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pina_flwr.config import RunConfig
from pina_flwr.stage1.directions import initial_b, random_directions, unit
from pina_flwr.stage1.dp_kmeans import best_restart, update
from pina_flwr.stage1.sketch import SketchMechanism, cluster_sketches, open_sketch, sketch_clip_norm


@dataclass(frozen=True)
class Question:
    """What the cohort is asked.

    step: of the client; "sketch" is answered one by one, others through the secure sum. arrays: what the
    step needs.
    """

    step: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class FirstModels:
    """What stage 2 starts from.

    b: B of each cluster model [C, h·r']; None if all start alike. arrays: centroids [C, D] and mean [D] by
    which users find their nearest centroid; empty if there are none.
    """

    b: Tensor | None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class Start(Protocol):
    """A way to initialise cluster models."""

    rounds: int

    def ask(self, round_: int) -> Question:
        """The question of stage-1 round `round_`, from 1."""
        ...

    def receive(self, round_: int, answer: np.ndarray) -> None:
        """Take in the answer: the noisy mean over the expected cohort [size], or sketches [n, h]."""
        ...

    def models(self) -> FirstModels:
        """What stage 2 starts from."""
        ...


class RandomStart:
    """No stage 1: B of random direction and given norm (PINA + RI, and IFCA without server data)."""

    rounds = 0

    def __init__(self, config: RunConfig, b_size: int):
        self._b: Tensor | None = config.random_init_norm * random_directions(
            config.seed, "random start", config.clusters, b_size
        )

    def ask(self, round_: int) -> Question:
        """Never called: there are no rounds."""
        raise ValueError("a random start asks nothing")

    def receive(self, round_: int, answer: np.ndarray) -> None:
        """Never called: there are no rounds."""
        raise ValueError("a random start asks nothing")

    def models(self) -> FirstModels:
        """See `Start.models`."""
        return FirstModels(self._b)


class SharedStart(RandomStart):
    """All models start alike, at B = 0 (FedAvg, and the oracle, which is told the groups)."""

    def __init__(self) -> None:
        self._b = None


class _Centred:
    """The optional first round, in which the mean of unit signals comes through the secure sum."""

    def __init__(self, config: RunConfig, size: int):
        self.config, self.size, self.rounds = config, size, config.t_in
        self.mean: np.ndarray | None = None

    def _found(self, centroids: Tensor) -> FirstModels:
        """From centroids [C, size]: those of ΔB become B; those of features only tell users apart."""
        is_b = self.config.stage1_signal == "update"
        b = initial_b(centroids, self.config.centroid_norm) if is_b else None
        return FirstModels(b, self._shared() | {"centroids": unit(centroids).numpy()})

    def _is_mean_round(self, round_: int) -> bool:
        return round_ == 1 and self.config.sketch_centre == "private"

    def _shared(self) -> dict[str, np.ndarray]:
        return {} if self.mean is None else {"mean": self.mean}

    def _receive_mean(self, answer: np.ndarray) -> None:
        self.mean = answer.astype(np.float32)


class DPKMeans(_Centred):
    """DP k-means through the secure sum: T_in rounds, iterations of R restarts side by side.

    One of the rounds may be the private mean.
    """

    def __init__(self, config: RunConfig, size: int):
        super().__init__(config, size)
        shape = (config.kmeans_restarts, config.clusters, size)
        count = shape[0] * shape[1]
        self.centroids = random_directions(config.seed, "restarts", count, size).reshape(shape)
        self.sums = torch.zeros(shape)
        self.best = 0

    def ask(self, round_: int) -> Question:
        """See `Start.ask`."""
        if self._is_mean_round(round_):
            return Question("mean")
        return Question("lloyd", self._shared() | {"centroids": self.centroids.numpy()})

    def receive(self, round_: int, answer: np.ndarray) -> None:
        """See `Start.receive`."""
        if self._is_mean_round(round_):
            return self._receive_mean(answer)
        latest = torch.from_numpy(answer.astype(np.float32)).reshape(self.centroids.shape)
        self.sums = self.config.kmeans_memory * self.sums + latest
        self.best, self.centroids = best_restart(self.sums), update(self.sums)
        return None

    def models(self) -> FirstModels:
        """See `Start.models`."""
        return self._found(self.centroids[self.best])


class LocalSketches(_Centred):
    """Sketches under local DP from T_in rounds, clustered by k-means: the paper's stage 1."""

    def __init__(self, config: RunConfig, size: int, b_size: int):
        super().__init__(config, size)
        self._b_size = b_size
        self.rows: list[np.ndarray] = []
        self.mechanism = sketch_mechanism(config, size)

    def ask(self, round_: int) -> Question:
        """See `Start.ask`."""
        return Question("mean") if self._is_mean_round(round_) else Question("sketch", self._shared())

    def receive(self, round_: int, answer: np.ndarray) -> None:
        """See `Start.receive`."""
        if self._is_mean_round(round_):
            self._receive_mean(answer)
        else:
            self.rows.append(answer)

    def models(self) -> FirstModels:
        """See `Start.models`. Without any sketch to go by, a random start: equal models would never part."""
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, self.mechanism.width), np.float32)
        if not rows.any():
            return RandomStart(self.config, self._b_size).models()
        found = torch.from_numpy(cluster_sketches(rows, self.config.clusters, self.config.seed))
        return self._found(self.mechanism.lift(found))


def sketch_mechanism(config: RunConfig, size: int) -> SketchMechanism:
    """How a run's users release a sketch of `size` numbers; S_in by Eq. 5."""
    bound = sketch_clip_norm(config.clip_norm, config.sketch_size, size)
    normalise = config.sketch_scale == "normalise"
    return open_sketch(config.sketch, size, config.sketch_size, bound, normalise, config.seed)


def open_start(config: RunConfig, size: int, b_size: int) -> Start:
    """The start that strategy and `stage1` ask for.

    size: numbers of what stage 1 clusters users by. b_size: numbers of B that a start sets, h·r'.
    """
    start = config.traits.start
    if start == "shared":
        return SharedStart()
    if start == "random" or config.stage1 == "random":
        return RandomStart(config, b_size)
    return DPKMeans(config, size) if config.stage1 == "dp-kmeans" else LocalSketches(config, size, b_size)
