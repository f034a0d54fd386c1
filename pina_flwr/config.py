"""The run configuration: every option of a run, typed, documented and validated once, at the border.

Flower hands an app a flat dictionary of scalars. `parse` turns it into a frozen `RunConfig`; code behind it
never reads dictionaries. Names follow the paper (arXiv 2604.20596): T_in, T_no, T_tr, E, β, η, S, q, z, C.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pina_flwr.secure_sum.session import Rules
from pina_flwr.secure_sum.shamir import MOST_HOLDERS
from pina_flwr.traits import TRAITS, Traits, traits_of

STRATEGIES = tuple(TRAITS)
STAGE1 = ("dp-kmeans", "sketch", "random")
SIGNALS = ("update", "features")
SKETCHES = ("projection", "coordinates", "private-support", "paper")
MECHANISMS = ("skellam", "discrete-gaussian", "gaussian")
SECURE_SUMS = ("secagg+", "trusted", "none")
SERVER_OPTIMIZERS = ("sgd", "momentum", "adam")
DROPOUT_NOISE = ("provision", "removable")
TEST_ON = ("test", "validation")
NORMALITY = ("count", "paper", "paper-no-zeroing", "energy", "none")
NEVER_EMPTY = ("output", "dataset", "backbone")
LARGEST_INT = 2**63 - 1  # of TOML and of int64
LARGEST_FLOAT = 3.4e38  # what float32 arithmetic can take
LEAST_NOISE = 1e-6  # least z above 0


class ConfigError(ValueError):
    """A user's mistake in an option: one line that names the option, the value and what would be right."""


def expanded(key: str, path: str | Path) -> Path:
    """The path with a leading ~ or ~user replaced by the home folder.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{key} = {str(path)!r}: {error}; must be a path") from error


def option(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its documentation and its admissible values (`above` is a strict bound)."""
    return field(
        default=default, metadata={"doc": doc, "low": low, "high": high, "above": above, "choices": choices}
    )


@dataclass(frozen=True)
class RunConfig:
    """All options of a run. `option` gives each its default, its meaning and its bounds."""

    strategy: str = option("pina", "algorithm: one of STRATEGIES, or a class as package.module:Class")
    seed: int = option(1, "data order and initialisation; never noise or keys", low=0)
    output: str = option("runs/latest", "folder that receives everything the run leaves")

    dataset: str = option("digits", "'digits' (embedded), a Hugging Face id, or a local folder")
    image_column: str = option("", "image column; empty: found among img, image")
    label_column: str = option("", "label column; empty: found among label, character")
    user_column: str = option("", "split users by this column (FEMNIST: writer_id); empty: deal images")
    num_users: int = option(232, "users |K|; with user-column at most this many (0: all of them)", low=0)
    images_per_user: int = option(
        24, "training images of each user; with user-column a cap (0: no cap)", low=0
    )
    rotations: int = option(4, "hidden groups by rotation: 1 none, 2 (0/180°), 4 (0/90/180/270°)")
    group_shares: str = option(
        "", "how users divide among the rotations, such as '70,10,10,10' (empty: evenly)"
    )
    deal: str = option(
        "every-rotation",
        "'disjoint': an image has one user; 'every-rotation': one a rotation",
        choices=("disjoint", "every-rotation"),
    )
    augment: int = option(
        1, "each user's training set times this, by random crop and flip (paper: 5)", low=1, high=1000
    )
    test_on: str = option(
        "test",
        "images that accuracy is measured on; 'validation' holds out training images, to choose options by",
        choices=TEST_ON,
    )
    test_images: int = option(0, "test images used, each in every rotation (0: all)", low=0)

    backbone: str = option("tiny-vit", "'tiny-vit' (embedded), a Hugging Face id, or a local folder")
    image_size: int = option(0, "pixels a side fed to the backbone (0: its own size)", low=0, high=4096)
    clusters: int = option(4, "C, cluster models (strategies with one model use 1)", low=1, high=10000)
    lora_rank: int = option(4, "LoRA rank r in stage 2", low=1, high=4096)
    lora_alpha: float = option(8.0, "LoRA alpha; updates are scaled by alpha / r", above=0)
    lora_targets: str = option("q,v", "attention projections with LoRA, of q, k, v, o, comma separated")
    lora_layers: int = option(1, "how many of the last layers have LoRA", low=1)
    lora_train_a: bool = option(True, "train A too; false freezes A at its shared draw (FFA-LoRA)")
    train_head: bool = option(True, "train the classifier head")
    head_std: float = option(0.1, "standard deviation of the random head that all share", low=0)
    feature_scale: float = option(1.0, "factor on the features before the head (DINOv2: 0.25)", above=0)

    stage1: str = option("dp-kmeans", "how cluster models are initialised", choices=STAGE1)
    t_in: int = option(10, "T_in, rounds of stage 1 (a private mean is one of them)", low=0)
    stage1_signal: str = option(
        "update",
        "what stage 1 clusters users by: 'update' is ΔB of a small LoRA (the paper's), 'features' the mean "
        "of a hidden layer over their images",
        choices=SIGNALS,
    )
    features_layer: int = option(
        0, "the block whose input 'features' are, from 1 (0: two thirds of the way up)", low=0
    )
    features_grid: int = option(
        2, "'features' are means over each cell of a grid of so many cells a side", low=1, high=64
    )
    stage1_rank: int = option(4, "LoRA rank in stage 1, at most lora-rank (paper: 1)", low=1, high=4096)
    stage1_epochs: int = option(10, "E in stage 1", low=1)
    stage1_learning_rate: float = option(0.1, "η in stage 1", above=0)
    sketch_target: str = option(
        "labels",
        "stage-1 objective: cross-entropy to the labels, or to uniform",
        choices=("labels", "uniform"),
    )
    sketch_head_std: float = option(
        0.1, "standard deviation of stage 1's fixed head (0: the model's head)", low=0
    )
    sketch_centre: str = option(
        "private", "centre sketches on a mean from a private secure sum", choices=("private", "none")
    )
    sketch_scale: str = option(
        "normalise",
        "bring a sketch under S_in by clipping, or to S_in by normalising",
        choices=("clip", "normalise"),
    )
    sketch: str = option(
        "projection", "what a user sends with stage1 = 'sketch'; 'paper' has no finite ε", choices=SKETCHES
    )
    sketch_size: int = option(32, "n, numbers of a sketch (paper: n/2 largest and n/2 smallest)", low=2)
    kmeans_restarts: int = option(16, "restarts of DP k-means, side by side in one release", low=1, high=4096)
    kmeans_memory: float = option(
        0.5, "weight of earlier iterations in a centroid: each sees a new cohort", low=0
    )
    centroid_norm: float = option(0.2, "l2 norm given to the centred centroids (0: left as they are)", low=0)
    random_init_norm: float = option(0.1, "l2 norm of random initial B (random start, restarts)", above=0)

    t_no: int = option(
        0, "T_no, first stage-2 rounds: Eq. 8 with the paper's rules, server-lr-no with all", low=0
    )
    t_tr: int = option(20, "T_tr, rounds of stage 2", low=1)
    self_assign_rounds: int = option(
        5, "first stage-2 rounds in which users take their nearest centroid", low=0
    )
    local_epochs: int = option(5, "E, local epochs in stage 2", low=1)
    local_epochs_least: int = option(
        0, "each user draws its epochs of a round from this to local-epochs (0: all do local-epochs)", low=0
    )
    batch_size: int = option(0, "β, local batch size (0: the whole local set)", low=0)
    learning_rate: float = option(0.2, "η, learning rate of local SGD in stage 2", above=0)
    mu: float = option(1.0, "μ, weight of FedProx's proximal term μ/2·‖w - w_start‖²", low=0)
    effective_steps: float = option(
        0.0, "τ_eff of FedNova, SGD steps that an update is scaled to (0: the expected number)", low=0
    )
    normality: str = option("count", "how the server rescales each cluster's aggregate", choices=NORMALITY)
    normality_threshold: float = option(0.99, "Shapiro–Wilk W from which Eq. 9 zeroes", above=0, high=1)
    count_share: float = option(0.1, "share of S that the one-hot count takes (normality = count)", above=0)
    server_lr_no: float = option(1.0, "server learning rate of the first t-no rounds", above=0)
    server_lr: float = option(1.0, "server learning rate afterwards", above=0)
    server_optimizer: str = option(
        "sgd",
        "how aggregates move models: 'sgd', 'momentum' (FedAvgM), 'adam' (FedAdam)",
        choices=SERVER_OPTIMIZERS,
    )
    server_momentum: float = option(0.9, "β of 'momentum', β1 of 'adam'", low=0)
    server_beta2: float = option(0.99, "β2 of 'adam'", low=0)
    server_tau: float = option(1e-3, "τ of 'adam', added to the root of the second moment", above=0)
    malicious_users: int = option(
        1, "f, users of a cohort that Krum, MultiKrum and Bulyan are to withstand", low=0, high=10**6
    )
    trim_share: float = option(0.2, "share that FedTrimmedAvg cuts off at either end of a coordinate", low=0)

    sampling_rate: float = option(0.215, "q, probability with which each user joins a round", above=0, high=1)
    clip_norm: float = option(1.0, "S, l2 bound on a user's contribution", low=1e-12, high=1e12)
    epsilon: float = option(8.0, "ε in all, towards recipients of the models; inf: no noise", above=0)
    delta: float = option(0.0, "δ (0: |K|^-1.1)", low=0)
    noise_multiplier: float = option(0.0, "z for both stages (0: calibrated from epsilon)", low=0, high=1e6)
    stage1_budget: float = option(0.3, "share of ε that stage 1 may take (0: one z for both stages)", low=0)
    noise_cohort_size: int = option(10000, "noise of a cohort of this many users (0: the true cohort)", low=0)
    mechanism: str = option(
        "skellam", "noise of secure sums; 'gaussian' is continuous and in floats", choices=MECHANISMS
    )
    bits: int = option(20, "b, bits of a number in a secure sum of integers mod 2^b", low=8, high=32)
    dropout_tolerance: float = option(
        0.1, "share of a cohort that may vanish in a round; noise is sized for the rest", low=0
    )
    dropout_noise: str = option(
        "provision",
        "'provision': noise in excess stays; 'removable': survivors reveal it",
        choices=DROPOUT_NOISE,
    )
    colluding_share: float = option(0.0, "share of a cohort whose noise the server may know", low=0)
    participation_cap: int = option(
        0,
        "most rounds of a stage one user takes part in (0: what 1 in 1,000 would exceed; one sketch)",
        low=0,
    )
    ledger: str = option("", "file that counts earlier runs against epsilon too (empty: this run only)")
    reproducible_noise: bool = option(False, "debugging only: noise from the seed, which protects nobody")
    secure_sum: str = option(
        "secagg+",
        "secure sum: 'secagg+' is the real protocol, 'trusted' an ideal one for large simulations; 'none': "
        "users send updates in the clear, for strategies that need that",
        choices=SECURE_SUMS,
    )
    secagg_neighbours: int = option(
        0,
        "k, neighbours of each user in SecAgg+, even (0: the fewest that fail with chance 2^-40)",
        low=0,
        high=MOST_HOLDERS - 1,
    )
    secagg_threshold: int = option(
        0, "t, neighbours that can unmask a user together (0: derived; needs secagg-neighbours)", low=0
    )
    secagg_signed: bool = option(
        False, "keys and survivors are signed, against a malicious server; nodes need key-registry"
    )

    diagnostics: bool = option(True, "simulation only: evaluate on users' data and log what really happened")
    evaluate_every: int = option(1, "evaluate after every so many rounds (and after the last)", low=1)
    precision: str = option("float32", "arithmetic of the trainable blocks", choices=("float32", "bfloat16"))
    device: str = option("auto", "'auto', 'cpu', 'cuda', 'cuda:1', …")
    cache_gib: float = option(2.0, "memory for frozen activations per process, GiB", low=0, high=1e6)
    cache_dir: str = option("", "folder that keeps frozen activations between runs (empty: memory only)")
    round_timeout: float = option(
        1800.0,
        "seconds after which a round is given up; SecAgg+ gives phases that train nothing an eighth of it",
        above=0,
        high=1e7,
    )

    @property
    def private(self) -> bool:
        """True if noise is added: ε is finite or z is given."""
        return self.noise_multiplier > 0 or math.isfinite(self.epsilon)

    @property
    def traits(self) -> Traits:
        """What is particular to the strategy."""
        return traits_of(self.strategy)

    @property
    def local_updates(self) -> bool:
        """True if each user protects its update by noise of its own, with no secure sum (IFCA + LDP)."""
        return self.traits.local_noise and self.private

    @property
    def simulated_cohort(self) -> int:
        """Users of the cohort whose noise secure sums carry in place of the true one's; 0 if that of none."""
        return self.noise_cohort_size if self.private and not self.local_updates else 0

    @property
    def secagg(self) -> Rules:
        """How SecAgg+ is set up."""
        return Rules(
            self.dropout_tolerance,
            self.colluding_share,
            self.secagg_neighbours,
            self.secagg_threshold,
            self.secagg_signed,
        )

    @property
    def shares_of_groups(self) -> tuple[float, ...]:
        """`group-shares` as numbers, not normalised; empty if users divide evenly.

        Raises:
            ValueError: they are no numbers.
        """
        return tuple(float(part) for part in self.group_shares.split(",")) if self.group_shares else ()

    @property
    def slots(self) -> int:
        """Adapters side by side in the secure sum: C, or 1 where there is one model for all."""
        return 1 if self.traits.one_model else self.clusters


def key_of(name: str) -> str:
    """Run-config key of a field: `num_users` → `num-users`."""
    return name.replace("_", "-")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as Flower's flat run config; `parse(to_dict(c)) == c`."""
    return {key_of(f.name): getattr(config, f.name) for f in dataclasses.fields(config)}


def parse(values: Mapping[str, Any]) -> RunConfig:
    """Build a `RunConfig` from Flower's run config.

    Raises:
        ConfigError: an unknown option, a wrong type, a value out of bounds, or options that contradict each
        other.
    """
    fields = {key_of(f.name): f for f in dataclasses.fields(RunConfig)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            raise ConfigError(f"unknown option {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    config = RunConfig(**{fields[k].name: _coerce(fields[k], k, v) for k, v in values.items()})
    _check_together(config)
    return config


def _coerce(spec: dataclasses.Field[Any], key: str, value: Any) -> Any:
    kind = type(spec.default)
    right_type = isinstance(value, bool) == (kind is bool)
    if isinstance(value, int) and abs(value) > LARGEST_INT:  # left out: it may be too long to print
        raise ConfigError(f"{key}: a whole number must be within ±{LARGEST_INT}")
    if kind is float and isinstance(value, int) and right_type:
        value = float(value)
    if not right_type or not isinstance(value, kind):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{key} = {value!r}: must be {names[kind]}")
    if isinstance(value, str):
        _check_text(key, value)
    _check_bounds(spec.metadata, key, value)
    return value


def _check_text(key: str, value: str) -> None:
    if "\0" in value:
        raise ConfigError(f"{key} = {value!r}: must have no NUL character")
    if key in NEVER_EMPTY and not value.strip():
        raise ConfigError(f"{key} = {value!r}: must not be empty")


def _check_bounds(bounds: Mapping[str, Any], key: str, value: Any) -> None:
    if bounds["choices"] and value not in bounds["choices"]:
        raise ConfigError(f"{key} = {value!r}: must be one of {', '.join(bounds['choices'])}")
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key != "epsilon")):
        raise ConfigError(f"{key} = {value!r}: must be a finite number")
    if isinstance(value, float) and LARGEST_FLOAT < abs(value) < math.inf:
        raise ConfigError(f"{key} = {value!r}: must be within ±{LARGEST_FLOAT:g}")
    if bounds["low"] is not None and value < bounds["low"]:
        raise ConfigError(f"{key} = {value!r}: must be at least {bounds['low']:g}")
    if bounds["above"] is not None and value <= bounds["above"]:
        raise ConfigError(f"{key} = {value!r}: must be above {bounds['above']:g}")
    if bounds["high"] is not None and value > bounds["high"]:
        raise ConfigError(f"{key} = {value!r}: must be at most {bounds['high']:g}")


def _check_together(c: RunConfig) -> None:
    targets, traits = [t.strip() for t in c.lora_targets.split(",")], c.traits
    rules = [
        (c.rotations in (1, 2, 4), f"rotations = {c.rotations}: must be 1, 2 or 4"),
        (
            set(targets) <= set("qkvo") and len(set(targets)) == len(targets),
            f"lora-targets = {c.lora_targets!r}: must be some of q, k, v, o, comma separated, each once",
        ),
        (
            "v" in targets or traits.start == "shared",
            f"lora-targets = {c.lora_targets!r}: must include v, the projection in which models start apart",
        ),
        (
            c.stage1_rank <= c.lora_rank,
            f"stage1-rank = {c.stage1_rank}: must be at most lora-rank = {c.lora_rank}",
        ),
        (c.delta < 1, f"delta = {c.delta}: must be under 1"),
        (c.stage1_budget < 1, f"stage1-budget = {c.stage1_budget}: must be under 1"),
        (c.kmeans_memory < 1, f"kmeans-memory = {c.kmeans_memory}: must be under 1"),
        (c.count_share < 1, f"count-share = {c.count_share}: must be under 1"),
        (c.server_momentum < 1, f"server-momentum = {c.server_momentum}: must be under 1"),
        (c.server_beta2 < 1, f"server-beta2 = {c.server_beta2}: must be under 1"),
        (c.trim_share < 0.5, f"trim-share = {c.trim_share}: must be under 0.5"),
        (
            c.local_epochs_least <= c.local_epochs,
            f"local-epochs-least = {c.local_epochs_least}: must be at most local-epochs = {c.local_epochs}",
        ),
        (
            not traits.proximal or c.mu * c.learning_rate < 2,
            f"mu = {c.mu}: with learning-rate = {c.learning_rate} the proximal term alone makes training "
            f"diverge; must be under 2 / learning-rate",
        ),
        (c.t_no <= c.t_tr, f"t-no = {c.t_no}: must be at most t-tr = {c.t_tr}"),
        (
            c.t_no == 0 or traits.rule or "paper" in c.normality or c.server_lr_no != c.server_lr,
            f"t-no = {c.t_no}: has no effect with normality = {c.normality!r}, Eq. 8 belongs to 'paper' and "
            "'paper-no-zeroing'; set one of them, or t-no = 0",
        ),
        (
            c.sketch_size % 2 == 0 or c.sketch in ("projection", "coordinates"),
            f"sketch-size = {c.sketch_size}: must be even (half largest, half smallest)",
        ),
        (
            c.dropout_tolerance + c.colluding_share <= 0.99,
            f"dropout-tolerance = {c.dropout_tolerance}, colluding-share = {c.colluding_share}: must add up "
            "to at most 0.99",
        ),
        (
            c.dropout_noise == "provision" or c.mechanism == "skellam",
            f"dropout-noise = {c.dropout_noise!r}: needs mechanism = 'skellam', which can be split",
        ),
        (
            c.noise_multiplier == 0 or c.noise_multiplier >= LEAST_NOISE,
            f"noise-multiplier = {c.noise_multiplier}: must be 0 or at least {LEAST_NOISE:g}",
        ),
        (
            c.noise_multiplier == 0 or c.epsilon in (RunConfig.epsilon, math.inf),
            f"noise-multiplier = {c.noise_multiplier}: sets the noise itself, so epsilon = {c.epsilon} would "
            "be ignored; leave one of them out",
        ),
        (
            c.num_users == 0 or c.sampling_rate * c.num_users > 1 - 1e-9,  # 49 · (1 / 49) is under 1
            f"sampling-rate = {c.sampling_rate}: means {c.sampling_rate * c.num_users:g} users a round with "
            f"num-users = {c.num_users}; must be at least 1 / num-users",
        ),
        (
            traits.start != "stage1" or c.stage1 == "random" or c.t_in >= 1 + (c.sketch_centre == "private"),
            f"t-in = {c.t_in}: stage1 = '{c.stage1}' with sketch-centre = '{c.sketch_centre}' needs at least "
            f"{1 + (c.sketch_centre == 'private')}",
        ),
        (
            c.secure_sum == "secagg+" or not c.secagg_signed,
            f"secagg-signed = true: signs what secure-sum = {c.secure_sum!r} does not have; set 'secagg+'",
        ),
        (
            not (c.secagg_signed and c.local_updates),
            f"secagg-signed = true: with strategy {c.strategy!r} vectors leave one by one; set false",
        ),
        (
            c.stage1_signal == "update" or traits.start != "stage1" or c.self_assign_rounds > 0,
            "self-assign-rounds = 0: with stage1-signal = 'features' models start alike and part only where "
            "users take the nearest centroid first; must be at least 1",
        ),
        (bool(c.user_column) or c.num_users >= 1, f"num-users = {c.num_users}: must be at least 1"),
        (
            bool(c.user_column) or c.images_per_user >= 1,
            f"images-per-user = {c.images_per_user}: must be at least 1",
        ),
        (
            not traits.normalised or c.effective_steps > 0 or c.batch_size == 0 or c.images_per_user > 0,
            f"images-per-user = {c.images_per_user}: says nothing about how many batches an epoch has, which "
            f"strategy {c.strategy!r} needs; set effective-steps",
        ),
        (
            not c.user_column or c.rotations == 1,
            f"rotations = {c.rotations}: with user-column the groups are natural; set rotations = 1",
        ),
        (
            not c.group_shares or _are_shares(c),
            f"group-shares = {c.group_shares!r}: must be a number above 0 for each of rotations = "
            f"{c.rotations}, comma separated",
        ),
        (
            not traits.knows_groups or not c.user_column,
            f"strategy = {c.strategy!r}: needs true groups, which a split by user-column does not have",
        ),
        (
            not traits.knows_groups or c.clusters == c.rotations,
            f"clusters = {c.clusters}: strategy {c.strategy!r} needs as many as rotations = {c.rotations}",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)
    try:
        _ = c.secagg
    except ValueError as problem:
        raise ConfigError(f"secagg-{problem}") from None
    _check_clear(c)
    if not c.user_column:
        check_updates(c, c.num_users)
    if c.secure_sum == "secagg+" and not c.local_updates:
        _check_secagg(c)


def _are_shares(c: RunConfig) -> bool:
    try:
        shares = c.shares_of_groups
    except ValueError:
        return False
    return len(shares) == c.rotations and all(0 < share < LARGEST_FLOAT for share in shares)


def _check_clear(c: RunConfig) -> None:
    """Updates leave users in the clear where the strategy needs it and the run says it, and else never."""
    clear = c.traits.in_the_clear
    rules = [
        (
            not clear or c.secure_sum == "none",
            f"secure-sum = {c.secure_sum!r}: strategy {c.strategy!r} needs every user's own update; set "
            "secure-sum = 'none'",
        ),
        (
            clear or c.secure_sum != "none",
            f"secure-sum = 'none': is for strategies that need every user's own update, which {c.strategy!r} "
            "does not; must be 'secagg+' or 'trusted'",
        ),
        (
            not clear or not c.private,
            f"epsilon = {c.epsilon}, noise-multiplier = {c.noise_multiplier}: strategy {c.strategy!r} has no "
            "central DP; set epsilon = inf and noise-multiplier = 0",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def check_updates(c: RunConfig, users: int) -> None:
    """Refuse a strategy in the clear that needs more updates than `users` users give in a round.

    Raises:
        ConfigError: it does.
    """
    needed, expected = c.traits.fewest_updates(c.malicious_users), c.sampling_rate * users
    if c.traits.per_malicious and expected < needed - 1e-9:
        raise ConfigError(
            f"malicious-users = {c.malicious_users}: strategy {c.strategy!r} then needs {needed} users a "
            f"round, and q·|K| = {expected:g}; must be fewer, or raise sampling-rate"
        )


def _check_secagg(c: RunConfig) -> None:
    instead = "set secure-sum = 'trusted', in simulation"
    rules = [
        (
            c.mechanism != "gaussian",
            f"mechanism = 'gaussian': is not of integers, which secure-sum = 'secagg+' adds; {instead}",
        ),
        (
            2 * c.dropout_tolerance + c.colluding_share < 1,
            f"dropout-tolerance = {c.dropout_tolerance}, colluding-share = {c.colluding_share}: twice the "
            "first plus the second must be under 1, or SecAgg+ has no safe threshold",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)
