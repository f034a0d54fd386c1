"""The mechanism of a secure sum, from both sides: a node protects its users' vectors, the server decodes.

Vectors of l2 norm at most S become integers mod 2^b (`encoding.py`). Each user adds its share of the noise,
and the sum over the cohort carries at least σ = z·S a coordinate: Skellam noise (Agarwal et al. 2021), which
adds up to itself, or discrete Gaussian (Kairouz et al. 2021). Continuous Gaussian noise in floats
is there as a reference and for simulation; it is not exact under modular sums. Without noise vectors stay
floats too, unless the secure sum is one of integers.

Dropout: a share is sized for the fewest survivors with whom the round counts, less those who collude
(`cohort.Shares`). With `dropout-noise = "removable"` (XNoise, Jiang et al. 2024) the part that survivors
add in vain comes in components, whose keys they reveal once it is known who survived.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from pina_flwr.config import RunConfig
from pina_flwr.privacy.cohort import largest_cohort, shares
from pina_flwr.privacy.encoding import Encoding, decode, encode, wrap
from pina_flwr.privacy.noise import KEY_BYTES, Entropy, discrete_gaussian, gaussian, keyed_generator, skellam
from pina_flwr.privacy.plan import Shapes, clip_norm_of, encoding_of, vector_size

USERS_AT_ONCE = 16  # encoded side by side, to bound memory


@dataclass(frozen=True)
class Budget:
    """How much noise a sum carries.

    sum_std: σ a coordinate on the sum, in the vectors' units. expected_cohort: q·|K|, by which the sum is
    divided.
    """

    config: RunConfig
    sum_std: float
    expected_cohort: float

    def share(self, users: int, cohort: int) -> float:
        """Variance that `users` of a cohort of `cohort` add together.

        All shares together make σ² / (1 - dropout tolerance - colluding share) whatever the cohort's size, as
        amplification by sampling asks for, and those of the fewest honest survivors at least σ².

        Raises:
            ValueError: no such share exists (fails closed rather than add too little).
        """
        if not 1 <= users <= cohort:
            raise ValueError(f"noise share of {users} users in a cohort of {cohort}")
        spare = 1 - self.config.dropout_tolerance - self.config.colluding_share
        return users * self.sum_std**2 / (cohort * spare)

    def needed(self, cohort: int, vanished: int) -> float:
        """Variance that each survivor has to add when `vanished` of a cohort do not survive.

        All together then make σ² / (1 - colluding share) where nobody vanished, whatever the cohort's size.
        """
        honest = cohort * (1 - self.config.colluding_share) - vanished
        if honest <= 0:
            raise ValueError(f"nobody's noise is secret in a cohort of {cohort} that {vanished} left")
        return self.sum_std**2 / honest

    def mean_std(self, cohort: int, survivors: int, excess: int) -> float:
        """σ a coordinate on the mean that `survivors` of a cohort of `cohort` leave.

        excess: with removable noise, of how many of them what they added in vain is still there.
        """
        if self.sum_std == 0:
            return 0.0
        variance = self.share(survivors, cohort)
        if self.config.dropout_noise == "removable":
            most = cohort - shares(self.config, cohort).survivors
            kept = (survivors - excess) * self.needed(cohort, cohort - survivors)
            variance = kept + excess * self.needed(cohort, most)
        return math.sqrt(variance) / self.expected_cohort


class SumMechanism(Protocol):
    """What both sides of a secure sum agree on."""

    @property
    def budget(self) -> Budget:
        """How much noise the sum carries."""
        ...

    @property
    def bits(self) -> int:
        """b of integers mod 2^b, or 0 for floats."""
        ...

    @property
    def size(self) -> int:
        """Numbers on the wire."""
        ...

    def protect(
        self, vectors: Tensor, cohort: int, seed: object, entropy: Entropy, key: bytes = b""
    ) -> np.ndarray:
        """The bounded vectors [users, d] of some users, added and noised: all that leaves a node.

        In a simulation with a trusted sum these are all of a node, with SecAgg+ it is one user.

        Args:
            cohort: users asked in this round, over all nodes.
            seed: of the public rotation, fresh in each round.
            entropy: where noise and rounding come from.
            key: from which removable components are drawn, if there are any.
        """
        ...

    def decode(self, total: np.ndarray, seed: object) -> np.ndarray:
        """The sum of the vectors, float64 [d], from the secure sum's result."""
        ...


@dataclass(frozen=True)
class FloatSum:
    """Continuous Gaussian noise in float32, or none."""

    budget: Budget
    width: int
    bits: int = 0

    @property
    def size(self) -> int:
        """Numbers on the wire."""
        return self.width

    def protect(
        self, vectors: Tensor, cohort: int, seed: object, entropy: Entropy, key: bytes = b""
    ) -> np.ndarray:
        """See `SumMechanism.protect`."""
        std = math.sqrt(self.budget.share(len(vectors), cohort))
        _check_shape(vectors, self.width)
        if not vectors.isfinite().all():
            raise ValueError("a vector that is not finite: must be clipped first")
        noise = gaussian((self.width,), std, generator=entropy.generator("gaussian"))
        total: np.ndarray = (vectors.sum(dim=0).numpy() + noise).astype(np.float32)
        return total

    def decode(self, total: np.ndarray, seed: object) -> np.ndarray:
        """See `SumMechanism.decode`."""
        return total.astype(np.float64)


@dataclass(frozen=True)
class IntegerSum:
    """Integers mod 2^b with noise that is exact under modular sums. width: length of the users' vectors."""

    budget: Budget
    encoding: Encoding
    width: int

    @property
    def bits(self) -> int:
        """b."""
        return self.encoding.bits

    @property
    def size(self) -> int:
        """Numbers on the wire: a power of two."""
        return self.encoding.padded

    def protect(
        self, vectors: Tensor, cohort: int, seed: object, entropy: Entropy, key: bytes = b""
    ) -> np.ndarray:
        """See `SumMechanism.protect`; uint32 below 2^b."""
        _check_shape(vectors, self.width)
        total = np.zeros(self.size, dtype=np.int64)
        rounding = entropy.generator("rounding")
        for some in vectors.split(USERS_AT_ONCE):
            padded = pad(some, (0, self.encoding.size - self.width))
            total += encode(padded, self.encoding, seed, rounding).sum(axis=0)
        total += self._noise(len(vectors), cohort, entropy, key)
        return wrap(total, self.bits)

    def decode(self, total: np.ndarray, seed: object) -> np.ndarray:
        """See `SumMechanism.decode`."""
        return decode(total, self.encoding, seed)[: self.width]

    def component(self, key: bytes, users: int, cohort: int, dropped: int) -> np.ndarray:
        """The noise that `users` of one node added in vain if fewer than `dropped` users vanished, int64.

        key: of that component, see `component_key`.
        """
        return skellam(keyed_generator(key), (self.size,), users * self._parts(cohort)[dropped])

    def _noise(self, users: int, cohort: int, entropy: Entropy, key: bytes) -> np.ndarray:
        scale = self.encoding.scale**2
        variance, shape = self.budget.share(users, cohort) * scale, (self.size,)
        if self.budget.config.mechanism == "discrete-gaussian":
            each, draws = variance / users, entropy.generator("noise")
            drawn = (discrete_gaussian(draws, shape, each) for _ in range(users))
            return sum(drawn, np.zeros(shape, np.int64))
        if self.budget.config.dropout_noise == "provision":
            return skellam(entropy.generator("noise"), shape, variance)
        parts = self._parts(cohort)
        noise = skellam(entropy.generator("noise"), shape, users * parts[0])
        for dropped in range(1, len(parts)):
            noise += self.component(component_key(key, dropped), users, cohort, dropped)
        return noise

    def _parts(self, cohort: int) -> list[float]:
        """Variance of a user's components, integer units.

        Part 0 stays in any case; part k is needed only if k users or more vanish.
        """
        split, scale = shares(self.budget.config, cohort), self.encoding.scale**2
        most = split.cohort - split.survivors
        needed = [scale * self.budget.needed(cohort, vanished) for vanished in range(most + 1)]
        return [needed[0], *np.diff(needed).tolist()]


def _check_shape(vectors: Tensor, width: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise ValueError(f"vectors of shape {list(vectors.shape)}: must be [users, {width}]")


def component_key(key: bytes, dropped: int) -> bytes:
    """The key of one removable component, 32 bytes, from a node's key of the round.

    Knowing those of some components tells nothing about the others or about `key`.

    Raises:
        ValueError: `key` is not 32 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes: must be {KEY_BYTES}")
    return hashlib.sha256(b"pina-flwr removable noise" + key + dropped.to_bytes(4, "big")).digest()


def open_mechanism(config: RunConfig, step: str, z: float, users: int, shapes: Shapes) -> SumMechanism:
    """The mechanism of a step's secure sum in this run.

    Args:
        config: the run.
        step: "mean", "lloyd" or "update".
        z: noise multiplier, 0 for no noise.
        users: |K|.
        shapes: lengths of vectors.

    Raises:
        ConfigError: `bits` is too small for this run.
    """
    cohort, bound = config.sampling_rate * users, clip_norm_of(config, step)
    sum_std = z * bound * cohort / (config.simulated_cohort or cohort)
    budget = Budget(config, sum_std, cohort)
    if config.mechanism == "gaussian" or (z == 0 and config.secure_sum == "trusted"):
        return FloatSum(budget, vector_size(config, step, shapes))
    clients = largest_cohort(users, config.sampling_rate)
    code = encoding_of(config, step, sum_std, clients, shapes)
    return IntegerSum(budget, code, vector_size(config, step, shapes))


def rotation_seed(config: RunConfig, step: str, round_: int) -> tuple[object, ...]:
    """The public seed of a round's rotation: another one in each round of a step."""
    return (config.seed, "rotation", step, round_)
