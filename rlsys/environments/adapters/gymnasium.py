"""Adapter for environments of Gymnasium (https://gymnasium.farama.org), played by text.

In: the id of a registered environment, or a function that makes one. In each step the policy gets
the observation and replies with the action; the reward of the step is that of the turn. Text and
Discrete spaces work directly; other spaces need `show` and `read`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.common.user_functions import name_of
from rlsys.environments.adapters import Foreign, required
from rlsys.environments.workers.sync_worker_chat import SyncChat


@dataclass(frozen=True, kw_only=True)
class Gymnasium(Foreign):
    """A Gymnasium environment.

    Attributes:
        make: An id such as "FrozenLake-v1" or "module:Id-v0", or a function that makes an
            environment.
        options: Arguments of `gymnasium.make`.
        prompt: Text before the first observation.
        show: Function that converts an observation to text.
        read: Function that converts a reply to an action. If it raises a ValueError, or the action
            is not in the space, the episode ends with the environment's format_reward.
    """

    make: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    show: Callable[[Any], str] = str
    read: Callable[[str], Any] | None = None

    @property
    def name(self) -> str:
        """Name of the environment in metrics and failures."""
        return self.make if isinstance(self.make, str) else name_of(self.make)

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return seeds with which the environment is reset."""
        return [{"seed": seed + n} for n in range(num)]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> None:
        """Play one rollout of a task."""
        env = self._made()
        try:
            observation, _ = env.reset(seed=int(task["seed"]))
            text = self.prompt + self.show(observation)
            is_over = False
            while not is_over:
                action = chat(text, parse=lambda reply: self._action(env.action_space, reply))
                observation, reward, terminated, truncated, _ = env.step(action)
                chat.reward(float(reward))
                text = self.show(observation)
                is_over = terminated or truncated or chat.done
        finally:
            env.close()

    def _made(self) -> Any:
        if callable(self.make):
            return self.make(**self.options)
        return required("gymnasium", "gymnasium").make(self.make, **self.options)

    def _action(self, space: Any, reply: str) -> Any:
        spaces = required("gymnasium", "gymnasium").spaces
        if self.read is not None:
            action = self.read(reply)
        elif isinstance(space, spaces.Discrete):
            action = int(reply)
        elif isinstance(space, spaces.Text):
            action = reply
        else:
            raise RuntimeError(  # a ValueError would be a mistake of the policy
                f"{self.name}: replies cannot be converted to actions of {space}. Pass "
                "Gymnasium(read=...), a function from a reply to an action."
            )
        if not space.contains(action):
            raise ValueError(f"{action!r} is not in {space}")
        return action
