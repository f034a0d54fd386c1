"""A client's own policy: what its owner lets a server ask for, whatever the server says.

The server's offer names the mechanism, the noise and the cohort of a round. `check` compares it with the
policy and adds what the round releases to what the user has released before, towards the server itself: it
draws the sample, so nothing is amplified. The server learns one of a few fixed phrases, never a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from flwr.app import ConfigRecordValues

from pina_flwr.config import ConfigError, key_of, option
from pina_flwr.privacy.accountant import epsilon
from pina_flwr.privacy.ledger import check_place, merged
from pina_flwr.privacy.release_json import kind_of
from pina_flwr.privacy.releases import Release, unamplified
from pina_flwr.privacy.scalars import from_flat, kinds, scalar, to_flat

REASONS = (
    "mechanism not accepted",
    "noise under the policy",
    "clip norm outside the policy",
    "cohort outside the policy",
    "too few survivors allowed",
    "too few colluders allowed for",
    "sampling rate outside the policy",
    "too many rounds",
    "stale round",
    "budget spent",
    "parameters differ from the run's",
)
"""All that a server is told when a client refuses. None of it depends on data."""
MECHANISMS = ("skellam", "discrete-gaussian", "zcdp", "gaussian")
"""Mechanisms that a policy may accept, by their name in ledgers; "zcdp" is a user's own noise, in floats."""
EXACT = MECHANISMS[:3]
SECURE_SUMS = ("secagg+", "trusted", "none")
LARGEST_COHORT = 2**31 - 1
MOST_BITS = 64
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Refusal(ValueError):
    """A client refuses to take part. `reason`, one of `REASONS`, is all that may be said about it."""

    def __init__(self, reason: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"{reason!r} is no reason that a server may be told")
        super().__init__(reason)

    @property
    def reason(self) -> str:
        """Why, as a fixed phrase."""
        return str(self.args[0])


@dataclass(frozen=True)
class Offer:
    """What a server offers with a request.

    Attributes:
        mechanism: name of the noise's mechanism, e.g. "skellam".
        noise_multiplier: z, σ of the sum over the sensitivity; 0 is no noise, which no policy accepts.
        clip_norm: S, above 0.
        cohort: users asked in this round.
        survivors: the fewest of them with whom the round counts; at most `cohort`.
        colluders: the most whose noise the server may know; under `survivors`.
        bits: b of the run; integers are mod 2^b, floats and sketches don't use it.
        sampling_rate: q in (0, 1].
        run, stage, round: where in which run; stage and round from 1.

    Raises:
        ValueError: a field is of a wrong type or out of bounds.
    """

    mechanism: str
    noise_multiplier: float
    clip_norm: float
    cohort: int
    survivors: int
    colluders: int
    bits: int
    sampling_rate: float
    run: str
    stage: int
    round: int

    def __post_init__(self) -> None:
        for key, (name, kind) in kinds(Offer).items():
            scalar(key, getattr(self, name), kind)
        check_place(self.run, self.stage, self.round)
        bounds = {
            "mechanism": NAME.fullmatch(self.mechanism) is not None,
            "noise-multiplier": self.noise_multiplier >= 0,
            "clip-norm": self.clip_norm > 0,
            "cohort": 1 <= self.cohort <= LARGEST_COHORT,
            "survivors": 1 <= self.survivors <= self.cohort,
            "colluders": 0 <= self.colluders < self.survivors,
            "bits": 0 <= self.bits <= MOST_BITS,
            "sampling-rate": 0 < self.sampling_rate <= 1,
        }
        for key, holds in bounds.items():
            if not holds:
                raise ValueError(f"{key} = {getattr(self, key.replace('-', '_'))!r}: out of bounds")

    def to_dict(self) -> dict[str, ConfigRecordValues]:
        """The offer as scalars, for a Flower `ConfigRecord`; keys as in the run config."""
        return {**to_flat(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Offer:
        """Inverse of `to_dict`.

        Raises:
            ValueError: it is no offer, or one that makes no sense.
        """
        return from_flat(cls, values)


@dataclass(frozen=True)
class Policy:
    """Limits that a client's owner sets. Each field says what for.

    max_epsilon, delta: the one limit that follows from the definition of privacy; it counts all runs. The
        others hold whatever an accountant says. δ is a chance of no protection at all, so at most 0.1.
    max_rounds: stops a server that samples one user every time; counts all runs and stages.
    min_noise_multiplier: with less noise one release alone can show an update.
    min_cohort: a sum over few users is nearly one user's update, and only the noise is left to protect it.
    max_cohort: each user adds 1 / survivors of the noise, so a server that claims a huge cohort gets little.
    min_survivors: as `min_cohort`, for those who are left after dropout.
    min_survivor_share: of the cohort. Above 0.5, two sets of survivors always overlap, so a server can't
        have disjoint parts of one cohort unmasked as if each were the round.
    min_colluder_share: of the cohort. So many may give their noise away, and the rest is still enough.
    min_clip_norm, max_clip_norm: ε does not depend on S, but arithmetic with huge or tiny numbers breaks.
    max_sampling_rate: how often the owner is willing to be asked.
    mechanisms: by default those that are exact in integers, and local sketches. Continuous noise in floats
        ("gaussian") has low bits that attacks can read (Mironov 2012), and so have local sketches.
    secure_sums: by default those that keep a server from seeing a single vector. "trusted" does not: it is
        for simulation, and a vector alone carries only its own share of the noise. "none": each user's update
        may leave by itself, with all the noise that its ε needs (strategy "ifca").

    Raises:
        ConfigError: a field is of a wrong type or out of bounds.
    """

    max_epsilon: float = option(dataclasses.MISSING, "ε over all runs, towards a server", above=0)
    delta: float = option(dataclasses.MISSING, "δ of that ε", above=0, high=0.1)
    max_rounds: int = option(1000, "rounds over all runs and stages", low=1)
    min_noise_multiplier: float = option(0.5, "z", above=0)
    min_cohort: int = option(10, "users asked in a round", low=1)
    max_cohort: int = option(10_000, "users asked in a round", low=1, high=LARGEST_COHORT)
    min_survivors: int = option(5, "users left in a round that counts", low=1)
    min_survivor_share: float = option(0.51, "users left, of those asked", low=0, high=1)
    min_colluder_share: float = option(
        0.0, "users whose noise a server may know, of those asked", low=0, high=1
    )
    min_clip_norm: float = option(1e-6, "S", above=0)
    max_clip_norm: float = option(1e6, "S", above=0)
    max_sampling_rate: float = option(1.0, "q", above=0, high=1)
    mechanisms: tuple[str, ...] = option(EXACT, "mechanisms accepted", choices=MECHANISMS)
    secure_sums: tuple[str, ...] = option(("secagg+",), "secure sums accepted", choices=SECURE_SUMS)

    def __post_init__(self) -> None:
        hints = get_type_hints(Policy)
        for spec in dataclasses.fields(self):
            _check_field(key_of(spec.name), getattr(self, spec.name), hints[spec.name], spec.metadata)
        for low, high in (("min_cohort", "max_cohort"), ("min_clip_norm", "max_clip_norm")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"{key_of(low)} = {getattr(self, low)}: must be at most {key_of(high)} = "
                    f"{getattr(self, high)}"
                )


def load_policy(path: str | Path) -> Policy:
    """Read a policy from a TOML file; every field but `max-epsilon` and `delta` has a default.

    Raises:
        ConfigError: the file is missing or no TOML; an option is unknown, missing, of a wrong type or out of
            bounds.
    """
    values = _read(Path(path))
    fields = {key_of(spec.name): spec for spec in dataclasses.fields(Policy)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise ConfigError(
                f"{path}: unknown option {key[:60]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for key, spec in fields.items():
        if key not in values and spec.default is dataclasses.MISSING:
            raise ConfigError(f"{path}: {key}: must be given")
    arguments: dict[str, Any] = {
        fields[key].name: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    try:
        return Policy(**arguments)
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from None


def check(
    offer: Offer, release: Release, policy: Policy, spent: Sequence[Release], rounds_taken: int
) -> None:
    """Accept a round for one user, or raise. Every comparison fails closed: NaN is refused.

    Args:
        offer: what the server offers.
        release: what the round would release about the user; its sampling rate is taken as 1.
        policy: of the client.
        spent: what the user has released before, in all runs.
        rounds_taken: how many rounds it took part in before, in all runs and stages.

    Raises:
        Refusal: something is outside the policy.
        TypeError: a release that no accountant knows.
        ValueError: `release` has a count under 1: every round releases something.
    """
    if not release.count >= 1:
        raise ValueError(f"count = {release.count}: a round releases something")
    accepted = {offer.mechanism, kind_of(release)} <= set(policy.mechanisms)
    fewest = offer.survivors / offer.cohort >= policy.min_survivor_share
    rules = (
        (offer.noise_multiplier >= policy.min_noise_multiplier, "noise under the policy"),
        (accepted, "mechanism not accepted"),
        (
            policy.min_clip_norm <= offer.clip_norm <= policy.max_clip_norm,
            "clip norm outside the policy",
        ),
        (policy.min_cohort <= offer.cohort <= policy.max_cohort, "cohort outside the policy"),
        (fewest and offer.survivors >= policy.min_survivors, "too few survivors allowed"),
        (offer.colluders / offer.cohort >= policy.min_colluder_share, "too few colluders allowed for"),
        (0 < offer.sampling_rate <= policy.max_sampling_rate, "sampling rate outside the policy"),
        (0 <= rounds_taken < policy.max_rounds, "too many rounds"),
    )
    for holds, reason in rules:
        if not holds:
            raise Refusal(reason)
    everything = tuple(merged(map(unamplified, [*spent, release])))
    if not _epsilon(everything, policy.delta) <= policy.max_epsilon:
        raise Refusal("budget spent")


@lru_cache(maxsize=4096)  # many users of a node have the same history
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    return epsilon(releases, delta)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}; must be a policy file") from problem
    except ValueError as problem:
        raise ConfigError(f"{path}: is not valid TOML: {problem}") from problem


def _check_field(key: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> None:
    if kind not in (int, float):
        _check_names(key, value, bounds["choices"])
        return
    try:
        number = scalar(key, value, kind)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    assert not isinstance(number, str)
    if bounds["low"] is not None and number < bounds["low"]:
        raise ConfigError(f"{key} = {value}: must be at least {bounds['low']:g}")
    if bounds["above"] is not None and number <= bounds["above"]:
        raise ConfigError(f"{key} = {value}: must be above {bounds['above']:g}")
    if bounds["high"] is not None and number > bounds["high"]:
        raise ConfigError(f"{key} = {value}: must be at most {bounds['high']:g}")


def _check_names(key: str, names: Any, choices: Sequence[str]) -> None:
    listed = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    if not listed or not names or not set(names) <= set(choices):
        shown = list(names) if isinstance(names, tuple) else names
        raise ConfigError(f"{key} = {str(shown)[:60]}: must be a list of some of {', '.join(choices)}")
