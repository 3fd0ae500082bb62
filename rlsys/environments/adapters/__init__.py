"""Adapters for environments of other projects, each with an optional extra of its name.

In: the name of the other project's environment. Out: a `Foreign`, which makes the rows (`tasks`)
and the environment (`environment`) for `flow.play`:

    lake = Gymnasium(make="FrozenLake-v1")
    prompts = rlsys.Prompts(config=cfg.data, rows=lake.tasks(64))
    flow.play(policy, lake.environment(max_turns=20), prompts, group_size=8)

Environments that block are synchronous functions here, so they run in their own process. Those
behind a network connection are async.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rlsys.environments.environment import Environment, environment
from rlsys.errors import InvalidValue


class Foreign(ABC):
    """Environment of another project. It is pickled and sent to the workers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the environment in metrics and failures."""

    @abstractmethod
    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return a row for each task. The same seed gives the same rows."""

    @abstractmethod
    def __call__(self, chat: Any, task: Mapping[str, Any]) -> Any:
        """Play one rollout of a task."""

    def environment(self, **options: Any) -> Environment:
        """Return the environment. The options are those of `rlsys.environment`."""
        return environment(**{"name": self.name, **options})(self)


def required(package: str, extra: str) -> ModuleType:
    """Import a package. Raises InvalidValue if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise InvalidValue(
            "environment",
            rule=f"needs the package {package} ({error})",
            fix=f"Install it with pip install 'rlsys[{extra}]'.",
        ) from error
