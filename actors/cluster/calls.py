"""Calls to Ray actors with a time limit and an error that names actor and method.

    worker = Worker("rollout-0", handle, timeout_s=600, heartbeat_timeout_s=30)
    reply = await worker.call("submit", requests)

An actor counts as dead when its process has ended, when it sends no heartbeats, or when a call
exceeds its limit. All three cases end the same way: the process is killed, and every pending or
later call raises WorkerDied with the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rlsys.common.background_tasks import start_task
from rlsys.common.option_names import option
from rlsys.common.user_functions import FunctionFailed
from rlsys.controller.worker_protocols import RowsLost, TrainerDied
from rlsys.engines.generation.generation_protocol import EngineError

from .local_ray import while_intact
from .method_words import doing

# Exceptions with a complete message; others are raised with the actor's traceback.
SELF_EXPLAINING = (
    ValueError,
    OSError,
    FloatingPointError,
    FunctionFailed,
    EngineError,
    TrainerDied,
    RowsLost,
)

# Duration of a heartbeat as a fraction of its time limit.
BEAT_FRAC = 1 / 6

# Ray's message if it only knows that the process is gone.
ENDED_BY_ITSELF = re.compile(r"process has died.*connection error code 2\. End of file", re.DOTALL)

# Time limits are counted in ticks of this length, each at most once, so that a pause of this
# process (a stopped process, a suspended machine) does not count.
TICK_S = 1.0

# Limit for actors to close their processes and files.
CLOSE_TIMEOUT_S = 15.0

# Cause of the calls that fail because their worker was killed.
KILLED = "the run ended it"

# Concurrency group of the heartbeats: @ray.remote(concurrency_groups=HEARTBEAT_GROUP).
HEARTBEAT_GROUP = {"heartbeat": 1}


class WorkerError(RuntimeError):
    """A call to an actor failed. The message names the actor, what it did, and the cause."""


class WorkerDied(WorkerError):
    """The process of an actor has died, or was killed because the actor did not answer.

    Attributes:
        worker: Name of the actor, or "".
        method: The call that failed, or "" if the worker was only watched.
        cause: Cause of the death, or "".
    """

    def __init__(
        self, message: str, *, worker: str = "", method: str = "", cause: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.method = method
        self.cause = cause


class InputLost(WorkerError):
    """The method was not called: an argument was lost with the actor or node that held it."""


class Heartbeat:
    """Base class of every actor that a Worker watches; requires HEARTBEAT_GROUP."""

    @ray.method(concurrency_group="heartbeat")
    def beat(self, seconds: float) -> None:
        """Answer after `seconds`, in a thread of its own, while other calls run.

        It sleeps so that one call is always pending: that call fails as soon as the process dies.
        """
        time.sleep(seconds)


class Worker:
    """Ray actor with a name.

    `timeout_s` is the default limit of a call. `heartbeat_timeout_s` is the longest time without a
    heartbeat while a call is pending, or None for an actor that is no Heartbeat. With `ordered`,
    the actor runs one call after the other, and the limit of a call starts after all calls before
    it.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        *,
        timeout_s: float,
        heartbeat_timeout_s: float | None = None,
        ordered: bool = False,
    ) -> None:
        self.name = name
        self.handle = handle
        self.timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._ordered = ordered
        self._cause = ""  # of the death; "" while the actor is alive
        self._died = asyncio.Event()
        self._unanswered: dict[asyncio.Future[Any], None] = {}  # in the order of the calls
        self._num_waiting = 0  # pending calls
        self._has_begun = False  # the process has answered a heartbeat
        self._beating: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method and return its answer.

        Raises:
            WorkerDied: The actor is dead.
            WorkerError: The method raised an exception that cannot be sent. Other exceptions of the
                method
                are raised unchanged.
        """
        return await self.start_call(method, *args, timeout_s=timeout_s)

    def start_call(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Send a call immediately; await the result for the answer, with the errors of `call`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        before = list(self._unanswered) if self._ordered else []
        answer = None if self._cause else as_future(getattr(self.handle, method).remote(*args))
        if answer is not None:
            self._unanswered[answer] = None
            answer.add_done_callback(self._unanswered.pop)
        return self._answer(method, answer, before, limit_s)

    async def watch(self) -> None:
        """Wait until the worker dies, then raise WorkerDied."""
        await self._answer("", asyncio.get_running_loop().create_future(), (), None)

    @property
    def is_dead(self) -> bool:
        """Return whether the worker has died or was ended."""
        return bool(self._cause)

    @property
    def cause(self) -> str:
        """Return the cause of the death, or "" while the worker is alive."""
        return self._cause

    def end(self, cause: str) -> None:
        """End the process at once; all of its calls fail with this cause."""
        if not self._cause:
            self._cause = cause
            self._died.set()
            self._end_process()

    def kill(self) -> None:
        """End the process at once after its work is done. Does nothing if it is gone."""
        self.end(KILLED)

    def _end_process(self) -> None:
        ray.kill(self.handle, no_restart=True)  # kills a suspended process too, within seconds

    async def _answer(
        self,
        method: str,
        answer: asyncio.Future[Any] | None,
        before: Sequence[asyncio.Future[Any]],
        limit_s: float | None,
    ) -> Any:
        if answer is None:
            raise self._death(method)
        self._num_waiting += 1
        if self._heartbeat_timeout_s is not None and self._beating is None:
            self._beating = start_task(
                self._beat(self._heartbeat_timeout_s),
                fail=lambda error: self.end(f"its heartbeats failed: {error!r}"),
            )
        died = asyncio.ensure_future(self._died.wait())
        try:
            for earlier in before:
                await _any_within(None, earlier, answer, died)
            in_time = await _any_within(limit_s, answer, died)
        finally:
            self._num_waiting -= 1
            died.cancel()
        if not in_time:
            self.end(
                f"it did not finish {doing(method)} within {limit_s:g} s; the process hangs (see "
                "its log), or the limit is too short (cluster.call_timeout_s, or "
                "cluster.start_timeout_s for a start)"
            )
        if not answer.done():
            raise self._death(method)
        try:
            return answer.result()
        except RayTaskError as error:  # the method's own error
            raise _unwrapped(self.name, method, error) from None
        except RayError as error:
            self.end(_reason(error))
            raise self._death(method) from None

    def _death(self, method: str) -> WorkerDied:
        during = f" while {doing(method)}" if method else ""  # watched, but not called
        message = f"{self.name} died{during}: {self._cause}"
        return WorkerDied(message, worker=self.name, method=method, cause=self._cause)

    async def _beat(self, limit_s: float) -> None:
        """End the worker when it does not answer a heartbeat in time.

        The limit applies from the first answer on, because the start of a process has its own
        limit.
        """
        try:
            while self._num_waiting and not self._cause:
                seconds = limit_s * BEAT_FRAC if self._has_begun else 0.0
                answer = as_future(self.handle.beat.remote(seconds))
                if not await _any_within(limit_s if self._has_begun else None, answer):
                    self.end(
                        f"its process sent no heartbeat for {limit_s:g} s "
                        "(cluster.heartbeat_timeout_s)"
                    )
                elif error := answer.exception():
                    self.end(_reason(error))
                self._has_begun = True
        finally:
            self._beating = None


def loading_failure(model: str, death: Exception) -> str:
    """Return the message for a process that died while it loaded its model."""
    return (
        f"model {model!r} could not be loaded because its process died ({death}). The usual cause "
        "is that the node or GPU is out of memory. Use a smaller model, fewer processes per node, "
        f"or a larger node ({option('dry_run', True)} estimates the demand)."
    )


async def end_all(workers: Iterable[Worker]) -> None:
    """Ask each worker to close its processes and files; kill those that take too long."""
    workers = list(workers)
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await while_intact(_close_all(workers))
    except TimeoutError:  # hung workers are killed below
        return
    finally:
        for worker in workers:
            worker.kill()


async def _close_all(workers: Iterable[Worker]) -> None:
    await asyncio.gather(*(_close(worker) for worker in workers))


async def _close(worker: Worker) -> None:
    with contextlib.suppress(WorkerError, EngineError):  # the worker is dead, or is killed below
        await worker.call("close")


def as_future(call: Any) -> asyncio.Future[Any]:
    """Return the future of a coroutine or Ray reference.

    It need not be awaited: an exception that is never retrieved is not logged.
    """
    answer: asyncio.Future[Any] = asyncio.ensure_future(call)
    answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return answer


async def _any_within(limit_s: float | None, *futures: asyncio.Future[Any]) -> bool:
    """Wait for the first future; return False if none is done within the limit.

    Cancelling the wait does not cancel the futures.
    """
    if limit_s is None:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return True
    left_s = limit_s
    while left_s > 0:
        tick_s = min(TICK_S, left_s)
        done, _ = await asyncio.wait(futures, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return True
        left_s -= tick_s
    return False


def _unwrapped(name: str, method: str, error: RayTaskError) -> Exception:
    cause = error.cause
    if isinstance(cause, SELF_EXPLAINING):
        return cause
    if isinstance(cause, RayActorError | ObjectLostError):
        return InputLost(f"{name} did not begin {doing(method)}: {_reason(cause)}")
    return WorkerError(
        f"{name} failed while {doing(method)}: {type(cause).__name__}: {cause}\n{error}"
    )


def _reason(error: BaseException) -> str:
    """Return Ray's message without its table of ids and advice, or the end of a traceback."""
    if isinstance(error, OutOfMemoryError):
        used = re.search(r"([\d.]+ ?GB) used / ([\d.]+ ?GB) limit", str(error))
        return (
            "Ray killed the process because its node was nearly out of memory"
            + (f" ({used[1]} of {used[2]})" if used else "")
            + "; end other programs there, use fewer or smaller processes "
            f"({option('dry_run', True)} estimates the demand), or use a larger node"
        )
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        lines = lines[1:] or lines  # after "The actor died unexpectedly ..."
    text = " ".join(line.strip() for line in lines[-3:]).partition(" Some common causes")[0]
    if isinstance(error, RayActorError) and ENDED_BY_ITSELF.search(text):
        return (
            "its process ended unexpectedly (it was killed, crashed in native code, or called "
            "os._exit; see its log)"
        )
    return text.rstrip(".") or "no reason given"
