"""What a process keeps between messages: users' data, the frozen backbone, activations; and the work on them.

Users of a node go through each step side by side, in passes of bounded memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pina_flwr.config import ConfigError, RunConfig
from pina_flwr.data.users import Users, load_users
from pina_flwr.models.backbone import Backbone, load_backbone
from pina_flwr.seeding import generator
from pina_flwr.training.activations import Activations, open_activations
from pina_flwr.training.local import Batch, LocalSGD, user_losses
from pina_flwr.training.local_work import effective_steps, epochs_of, normalised

log = logging.getLogger("flwr")
PASS_NUMBERS = 2**24  # hidden-state numbers of one pass: 64 MiB in float32, about 5 times that in use
PREFIX_IMAGES = 64  # images of one forward pass through the frozen prefix


class Workbench:
    """A process's users and backbone, and the steps of the method that run on users' data."""

    def __init__(self, config: RunConfig, users: Users, backbone: Backbone, activations: Activations):
        self.config, self.users, self.backbone = config, users, backbone
        self._activations = activations
        self._signals: dict[int, Tensor] = {}

    def stage1_signals(self, ids: Sequence[int]) -> Tensor:
        """What stage 1 clusters users by [users, `shapes.sketch`]; worked out once, as it never changes."""
        missing = [user for user in ids if user not in self._signals]
        features = self.config.stage1_signal == "features"
        self._signals |= self._features(missing) if features else self._deltas(missing)
        width = self.backbone.shapes.sketch
        return torch.stack([self._signals[user] for user in ids]) if ids else torch.zeros(0, width)

    def _features(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """Mean hidden state of each user's images, by cells [grid²·h]."""
        found, at = {}, f"{self.backbone.features_layer}-{self.backbone.features_grid}"
        for user in ids:
            mean = partial(self._mean_features, user)
            found[user] = self._activations.get(f"features-{at}-user-{user}", mean).float()
        return found

    def _mean_features(self, user: int) -> Tensor:
        images, total = self.users.images(user), torch.zeros(self.backbone.shapes.sketch)
        for part in images.split(PREFIX_IMAGES):
            total += len(part) * self.backbone.mean_features(self.backbone.pixels(part)).cpu()
        return total / len(images)

    def _deltas(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """ΔB of each user's stage-1 adapter [h·r']."""
        c, spec, found = self.config, self.backbone.sketch, dict[int, Tensor]()
        sgd = LocalSGD(c.stage1_epochs, c.batch_size, c.stage1_learning_rate)
        for some, batch in self._passes(ids, uniform=c.sketch_target == "uniform"):
            start = spec.start().to(self.backbone.device).expand(len(some), -1)
            orders = [generator(c.seed, "stage 1 order", user) for user in some]
            trained = sgd.train(self.backbone, spec, start, batch, orders).vectors
            found |= dict(zip(some, (trained - start).cpu(), strict=True))
        return found

    @torch.no_grad()
    def losses(self, ids: Sequence[int], models: Tensor) -> Tensor:
        """Mean training loss of each user under each of C models [C, d], Eq. 6: [users, C]."""
        parts = [self._losses(batch, models) for _, batch in self._passes(ids)]
        return torch.cat(parts) if parts else torch.zeros(0, len(models))

    def train(
        self, ids: Sequence[int], models: Tensor, choices: Tensor | None, round_: int
    ) -> tuple[Tensor, Tensor]:
        """Local training of stage 2: each user trains the model it chose, or the one of least loss (Eq. 6).

        Args:
            models: [C, d].
            choices: cluster of each user [users]; None lets each pick by its loss, in the same pass.

        Returns:
            Unclipped updates [users, d], scaled as FedNova does if the strategy is normalised, and the
            clusters chosen [users].
        """
        c, spec = self.config, self.backbone.spec
        mu = c.mu if c.traits.proximal else 0.0
        sgd = LocalSGD(c.local_epochs, c.batch_size, c.learning_rate, mu)
        updates, chosen, done = [torch.zeros(0, spec.size)], [torch.zeros(0, dtype=torch.long)], 0
        for some, batch in self._passes(ids):
            given = None if choices is None else choices[done : done + len(some)]
            picked = least(self._losses(batch, models)) if given is None else given
            start = models[picked].to(self.backbone.device)
            orders = [generator(c.seed, "order", user, round_) for user in some]
            epochs = epochs_of(c, some, round_)
            trained = sgd.train(self.backbone, spec, start, batch, orders, epochs)
            update = trained.vectors - start
            if c.traits.normalised:
                update = normalised(update, trained.steps, effective_steps(c))
            updates.append(update.cpu())
            chosen.append(picked)
            done += len(some)
        return torch.cat(updates), torch.cat(chosen)

    @torch.no_grad()
    def test_correct(
        self, models: Tensor, groups: Sequence[int], part: int, parts: int
    ) -> tuple[Tensor, Tensor]:
        """Right answers of every model on a share of the test images of some groups.

        Returns:
            How many were right, int [groups, C], and how many images there were, int [groups].
        """
        correct = torch.zeros(len(groups), len(models), dtype=torch.int64)
        total = torch.zeros(len(groups), dtype=torch.int64)
        for i, group in enumerate(groups):
            labels = self.users.test_labels(group, part, parts)
            total[i] = len(labels)
            if len(labels):
                images = partial(self.users.test_images, group, part, parts)
                hidden = self._hidden(f"test-{group}-{part}-of-{parts}", images)
                correct[i] = self._correct(hidden, labels, models)
        return correct, total

    def _correct(self, hidden: Tensor, labels: Tensor, models: Tensor) -> Tensor:
        spec, counts = self.backbone.spec, torch.zeros(len(models), dtype=torch.int64)
        images = max(1, PASS_NUMBERS // hidden[0].numel())
        for some, truth in zip(hidden.split(images), labels.split(images), strict=True):
            prepared = self.backbone.prepare(some[None].to(self.backbone.device))
            for c, model in enumerate(models.to(self.backbone.device)):
                scores = self.backbone.logits(prepared, spec.unflatten(model[None]), spec.lora_scale)
                counts[c] += (scores[0].argmax(-1).cpu() == truth).sum()
        return counts

    @torch.no_grad()
    def _losses(self, batch: Batch, models: Tensor) -> Tensor:
        models = models.to(self.backbone.device)
        columns = [user_losses(self.backbone, self.backbone.spec, model[None], batch) for model in models]
        return torch.stack(columns, dim=1).cpu()

    def _passes(self, ids: Sequence[int], uniform: bool = False) -> Iterator[tuple[list[int], Batch]]:
        """Users in groups that fit one pass, padded side by side."""
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for user in ids:
            hidden = self._hidden(f"user-{user}", partial(self.users.images, user))
            longest = max([len(hidden), *(len(h) for _, h, _ in waiting)])
            if waiting and (len(waiting) + 1) * longest * hidden[0].numel() > PASS_NUMBERS:
                yield self._side_by_side(waiting, uniform)
                waiting = []
            waiting.append((user, hidden, self.users.labels(user)))
        if waiting:
            yield self._side_by_side(waiting, uniform)

    @torch.no_grad()
    def _side_by_side(self, some: list[tuple[int, Tensor, Tensor]], uniform: bool) -> tuple[list[int], Batch]:
        classes, device = self.users.tables.num_classes, self.backbone.device
        images = max(len(labels) for _, _, labels in some)
        shape = some[0][1].shape[1:]
        hidden = torch.zeros(len(some), images, *shape, dtype=some[0][1].dtype)
        targets = torch.full((len(some), images, classes), 1 / classes)
        weights = torch.zeros(len(some), images)
        for i, (_, h, labels) in enumerate(some):
            hidden[i, : len(h)], weights[i, : len(h)] = h, 1
            if not uniform:
                targets[i, : len(h)] = one_hot(labels, classes).float()
        prepared = self.backbone.prepare(hidden.to(device))
        return [user for user, _, _ in some], Batch(prepared, targets.to(device), weights.to(device))

    def _hidden(self, key: str, images: Callable[[], Tensor]) -> Tensor:
        """What enters the first trainable block, bfloat16 [images, tokens, h]."""

        def compute() -> Tensor:
            parts = images().split(PREFIX_IMAGES)
            return torch.cat([self.backbone.prefix(self.backbone.pixels(part)) for part in parts])

        return self._activations.get(key, compute)


def least(losses: Tensor) -> Tensor:
    """Eq. 6's argmin over [users, C]; a loss that is not finite is never the smallest."""
    return losses.where(losses.isfinite(), torch.inf).argmin(dim=1)


def pick_device(name: str) -> torch.device:
    """The device of the run option `device`.

    Raises:
        ConfigError: no such device, or not here.
    """
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise ConfigError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0]
        raise ConfigError(f"device = {name!r}: not available here ({reason}); use auto or cpu") from None
    return device


def is_slow(precision: str, device: torch.device) -> bool:
    """True if bfloat16 is emulated, at a sixtieth of the speed of float32 (measured on a CPU with AVX2)."""
    simple = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return precision == "bfloat16" and device.type == "cpu" and simple


@lru_cache(maxsize=1)
def open_workbench(config: RunConfig) -> Workbench:
    """The workbench of this process: loaded at the first message, kept for the following ones.

    Raises:
        ConfigError: data or backbone can't be loaded.
    """
    users, device = load_users(config), pick_device(config.device)
    if is_slow(config.precision, device):
        log.warning(
            "precision = %r: this CPU has no such arithmetic; float32 is far faster", config.precision
        )
    backbone = load_backbone(config, users.tables.num_classes, device)
    return Workbench(config, users, backbone, open_activations(config))
