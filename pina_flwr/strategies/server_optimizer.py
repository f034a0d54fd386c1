"""Server optimisers: how a round's rescaled aggregates move the cluster models.

The pseudo-gradient of cluster i is -w_i·Δ_i, minus the aggregate that the round released, times its factor.

    sgd       W ← W + η·w·Δ
    momentum  v ← β·v + w·Δ;  W ← W + η·v  (FedAvgM: Hsu et al. 2019, arXiv 1909.06335)
    adam      Adam with β1, β2, and τ for its ε (FedAdam: Reddi et al. 2021, arXiv 2003.00295), with Adam's
              correction of the moments' bias, which FedAdam's authors leave out

**Privacy.** All of it is post-processing of what rounds release: no ε changes.

**State** is kept for each cluster. A cluster whose factor is 0 is left out of the round: neither its model
nor its state moves, as in the rules that give it, which take its aggregate for noise or find nobody in it. A
round that is dropped gets here not at all, so it moves nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from pina_flwr.config import RunConfig


class ServerOptimizer:
    """The optimiser of all cluster models of a run.

    Args:
        config: with the options `server-…`.
        clusters: C. size: d, length of a model.
    """

    def __init__(self, config: RunConfig, clusters: int, size: int):
        kept = clusters if config.server_optimizer != "sgd" else 0  # plain steps take no state
        self._models = [torch.zeros(size, dtype=torch.float64) for _ in range(kept)]
        self._optimizer = _open(config, self._models) if kept else None

    def step(self, models: np.ndarray, means: np.ndarray, weights: np.ndarray, rate: float) -> np.ndarray:
        """The models after a round, float32 [C, d].

        Args:
            models: before it, float32 [C, d]. means: aggregates Δ, float64 [C, d].
            weights: factors w on these, float64 [C]. rate: η of the round.
        """
        if self._optimizer is None:
            return (models + rate * weights[:, None] * means).astype(np.float32)
        for own, model, mean, weight in zip(self._models, models, means, weights, strict=True):
            own.copy_(torch.from_numpy(model))
            own.grad = torch.from_numpy(-weight * mean) if weight != 0 else None  # None: left out
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        moved: np.ndarray = torch.stack(self._models).numpy().astype(np.float32)
        return moved


def _open(config: RunConfig, models: list[torch.Tensor]) -> torch.optim.Optimizer:
    if config.server_optimizer == "momentum":
        return torch.optim.SGD(models, momentum=config.server_momentum)
    betas = (config.server_momentum, config.server_beta2)
    return torch.optim.Adam(models, betas=betas, eps=config.server_tau)
