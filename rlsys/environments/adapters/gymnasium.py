"""Environments of Gymnasium (https://gymnasium.farama.org) that are played by text.

In: the id of a registered environment, or a function that makes one. Each step, the policy is told
the observation and says the action; each step's reward is that turn's. Spaces of text and of
numbered actions are read as they are; for others, say how with `show` and `read`.
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
    """make: an id, such as "FrozenLake-v1" or "module:Id-v0", or a function that makes an environment.
    options: of `gymnasium.make`.
    prompt: stands before the first observation.
    show: the text of an observation.
    read: the action of a reply; a ValueError of it is the policy's mistake, and ends the episode
        with the environment's format_reward, as does an action that is not in the space.
    """

    make: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    show: Callable[[Any], str] = str
    read: Callable[[str], Any] | None = None

    @property
    def name(self) -> str:
        return self.make if isinstance(self.make, str) else name_of(self.make)

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Seeds that the environment is reset with."""
        return [{"seed": seed + place} for place in range(num)]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> None:
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
            raise RuntimeError(  # of ours: a ValueError would be the policy's mistake
                f"{self.name} has actions of {space}, which no reply says by itself; give "
                "Gymnasium(read=...) a function from a reply to an action."
            )
        if not space.contains(action):
            raise ValueError(f"{action!r} is not in {space}")
        return action
