"""Environments of other projects, each adapter one file with an optional extra of its name.

In: what names the foreign environment. Out: a `Foreign`, which gives the rows (`tasks`) and the
environment (`environment`) that `flow.play` takes:

    lake = Gymnasium(make="FrozenLake-v1")
    prompts = rlsys.Prompts(config=cfg.data, rows=lake.tasks(64))
    flow.play(policy, lake.environment(max_turns=20), prompts, group_size=8)

Foreign environments that block are plain functions here, so that they run in a process of their
own; those that are asked over a network are async.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rlsys.environments.environment import Environment, environment


class Foreign(ABC):
    """One foreign environment. It travels to the workers, which make what they need of it there."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What its rewards and failures are told under."""

    @abstractmethod
    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Rows, one for each task; the same for the same seed."""

    @abstractmethod
    def __call__(self, chat: Any, task: Mapping[str, Any]) -> Any:
        """One rollout of a task."""

    def environment(self, **options: Any) -> Environment:
        """With the limits that `rlsys.environment` takes, such as max_turns and timeout_s."""
        return environment(**{"name": self.name, **options})(self)


def required(package: str, extra: str) -> ModuleType:
    """The package. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this environment needs the package {package} ({error}); install it with "
            f"pip install 'rlsys[{extra}]'."
        ) from error
