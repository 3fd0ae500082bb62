"""The worker of a policy whose tokens the engine of another policy's replica samples.

    Worker("rollout-0") ──────────────────────────► RolloutActor ──► engine
    PolicyWorker("rival-rollout-0") ── for_policy ──────┘

Callers use a PolicyWorker and its handle as those of an actor of its own. It lives and dies with
the replica's worker.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from ..cluster.calls import Worker


class PolicyHandle:
    """The handle of a RolloutActor for one of the other policies of its engine.

    Its methods are called as those of the actor, with `handle.method.remote(...)`. It can be sent
    to other actors.
    """

    def __init__(self, actor: Any, policy: str) -> None:
        self._actor = actor
        self._policy = policy

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=partial(self._actor.for_policy.remote, self._policy, method))


class PolicyWorker(Worker):
    """Worker of another policy of the engine in `owner`.

    The heartbeats of the owner watch the process. Ending either of them ends both.
    """

    def __init__(self, name: str, owner: Worker, policy: str) -> None:
        super().__init__(name, PolicyHandle(owner.handle, policy), timeout_s=owner.timeout_s)
        self._owner = owner

    @property
    def is_dead(self) -> bool:
        """Return whether the process has died or was ended."""
        return super().is_dead or self._owner.is_dead

    def _end_process(self) -> None:
        self._owner.end(self.cause)
