"""The one way to call a Ray actor: with a time limit, and an error that names actor and method.

worker = Worker("rollout-0", handle, timeout_s=600)
reply = await worker.call("submit", requests)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlsys.engines.generation.protocol import EngineError
from rlsys.workers import RowsLost

# Exceptions whose message says it all; others keep the actor's trace.
SELF_EXPLAINING = (ValueError, OSError, FloatingPointError, EngineError, RowsLost)


class WorkerError(RuntimeError):
    """A call to an actor failed; the message names the actor, the method and the cause."""


class WorkerDied(WorkerError):
    """The actor's process is gone."""


class Worker:
    """A named Ray actor."""

    def __init__(self, name: str, handle: Any, *, timeout_s: float) -> None:
        self.name = name
        self.handle = handle
        self._timeout_s = timeout_s

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call and wait. Raises WorkerDied, or WorkerError for a time-out; an exception of the
        method itself is raised as it is, where it can travel, else as WorkerError."""
        return await self.begin(method, *args, timeout_s=timeout_s)

    def begin(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Call at once; the answer, or the error of `call`, comes when it is awaited."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        return self._answer(method, getattr(self.handle, method).remote(*args), limit)

    async def _answer(self, method: str, reference: Any, limit: float) -> Any:
        try:
            async with asyncio.timeout(limit):
                return await reference
        except RayTaskError as error:  # the method's own error, which may be a TimeoutError too
            raise _unwrapped(self.name, method, error) from None
        except TimeoutError:
            raise WorkerError(
                f"{self.name}.{method} did not answer within {limit:g} s; the process may hang "
                "(see its log), or the limit is too short (cluster.call_timeout_s; for a start "
                "cluster.start_timeout_s)."
            ) from None
        except RayActorError as error:
            raise WorkerDied(f"{self.name} died during {method}: {_reason(error)}") from None

    def kill(self) -> None:
        """End the process at once; no error if it is gone."""
        ray.kill(self.handle, no_restart=True)


def _unwrapped(name: str, method: str, error: RayTaskError) -> Exception:
    cause = error.cause
    if isinstance(cause, SELF_EXPLAINING):
        return cause
    return WorkerError(f"{name}.{method} failed: {type(cause).__name__}: {cause}\n{error}")


def _reason(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-3:]) if lines else "no reason given"
