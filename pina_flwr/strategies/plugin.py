"""A strategy of the user's own, by the path of its class: `strategy = "my_package.my_module:MyStrategy"`.

Its module is imported wherever the run's configuration is read: by the command line, the server and every
node. docs/strategies.md shows one.
"""

from __future__ import annotations

import importlib
import inspect

from pina_flwr.config import NORMALITY, ConfigError
from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import Traits


def load_strategy(path: str) -> type[ClusteredTraining]:
    """The class that `path` names, "package.module:Class".

    Raises:
        ConfigError: there is none, its module can't be imported, or it is no strategy.
    """
    module, name = path.split(":")
    found = _imported(path, module, name)
    if found is None:
        raise ConfigError(f"strategy = {path!r}: module {module} has no {name}")
    if not isinstance(found, type) or not issubclass(found, ClusteredTraining):
        raise ConfigError(
            f"strategy = {path!r}: must be a subclass of pina_flwr.strategies.clustered.ClusteredTraining"
        )
    if inspect.isabstract(found):
        left = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"strategy = {path!r}: {name} is abstract; must define {left}")
    if not isinstance(found.traits, Traits):
        raise ConfigError(f"strategy = {path!r}: {name}.traits must be a pina_flwr.traits.Traits")
    if found.traits.rule not in ("", *NORMALITY):
        rules = ", ".join(NORMALITY)
        raise ConfigError(
            f"strategy = {path!r}: rule = {found.traits.rule!r} must be empty or one of {rules}"
        )
    return found


def _imported(path: str, module: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit, GeneratorExit) as problem:  # whatever the module's own code raises
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise ConfigError(f"strategy = {path!r}: {module} can't be imported here ({reason})") from problem
