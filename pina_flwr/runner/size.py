"""How large the simulation is: SuperNodes, and the CPUs and GPUs that each may use at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import metadata

from joblib import cpu_count


@dataclass(frozen=True)
class SimulationSize:
    """SuperNodes on a machine; as many of them work at the same time as there are pairs of CPUs."""

    nodes: int
    """SuperNodes."""
    cpus: int
    """CPUs of the machine."""
    gpus: int = 0
    """GPUs that PyTorch sees."""

    @property
    def at_a_time(self) -> int:
        """Nodes that work at the same time."""
        return min(self.nodes, default_nodes(self.cpus))

    @property
    def cpus_per_node(self) -> int:
        """CPUs of each node at work; all of them if there is one CPU only."""
        return self.cpus // self.at_a_time

    @property
    def gpus_per_node(self) -> float:
        """Share of a GPU of each node at work: a GPU is split evenly, no node uses two; 0 without a GPU."""
        if not self.gpus:
            return 0.0
        sharing = math.ceil(self.at_a_time / self.gpus)
        return math.floor(1e4 / sharing) / 1e4  # Ray counts in steps of 1e-4

    def federation_config(self) -> str:
        """The argument of `flwr run --federation-config`. A GPU is only asked for where there is one."""
        settings: dict[str, int | float] = {
            "num-supernodes": self.nodes,
            "client-resources-num-cpus": self.cpus_per_node,
            "init-args-num-cpus": self.cpus,
        }
        if self.gpus:
            settings["client-resources-num-gpus"] = self.gpus_per_node
            settings["init-args-num-gpus"] = self.gpus
        return " ".join(f"{key}={value}" for key, value in settings.items())

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        cpus = "1 CPU" if self.cpus_per_node == 1 else f"{self.cpus_per_node} CPUs"
        gpus = f" and {self.gpus_per_node:g} GPU" if self.gpus else ""
        return f"{nodes}, {self.at_a_time} at a time with {cpus}{gpus}"


def default_nodes(cpus: int) -> int:
    """One node for each two CPUs."""
    return max(1, cpus // 2)


def measure(nodes: int | None = None) -> SimulationSize:
    """The size for this machine: CPUs by affinity and container quota, GPUs as PyTorch sees them."""
    cpus = cpu_count()
    return SimulationSize(nodes=nodes or default_nodes(cpus), cpus=cpus, gpus=_gpu_count())


def _gpu_count() -> int:
    if metadata.version("torch").endswith("+cpu"):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
