"""The one way to call a Ray actor: with a time limit, and an error that names actor and method.

worker = Worker("rollout-0", handle, timeout_s=600, heartbeat_timeout_s=30)
reply = await worker.call("submit", requests)

An actor that stops answering has died: its process is gone, shows no sign of life, or needs longer
for a call than it may. All three end the same way: the process is ended, and every call that waits
or comes later raises WorkerDied with the cause.
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

# Exceptions whose message says it all; others keep the actor's trace.
SELF_EXPLAINING = (
    ValueError,
    OSError,
    FloatingPointError,
    FunctionFailed,
    EngineError,
    TrainerDied,
    RowsLost,
)

# A heartbeat takes this share of the time within which it must be answered.
BEAT_FRAC = 1 / 6

# What Ray says where all it knows is that the process is gone.
ENDED_BY_ITSELF = re.compile(r"process has died.*connection error code 2\. End of file", re.DOTALL)

# Limits are counted in pieces of this length, each at most once: while this process itself stands
# still (stopped, a machine that sleeps), no time passes.
TICK_S = 1.0

# For actors to end their processes and files in good order.
CLOSE_TIMEOUT_S = 15.0

# Of the actor class, beside its own: @ray.remote(concurrency_groups=HEARTBEAT_GROUP).
HEARTBEAT_GROUP = {"heartbeat": 1}


class WorkerError(RuntimeError):
    """A call to an actor failed; the message names the actor, the method and the cause."""


class WorkerDied(WorkerError):
    """The actor is gone: its process has died, or was ended because it did not answer."""


class InputLost(WorkerError):
    """The method was not called: an argument is lost, since the actor that was to produce it has
    died, or the node where it lay.
    """


class Heartbeat:
    """Base of every actor class that a Worker watches; declares HEARTBEAT_GROUP."""

    @ray.method(concurrency_group="heartbeat")
    def beat(self, seconds: float) -> None:
        """In a thread of its own, so that it is answered while work goes on. It takes a while, so
        that a call is always under way: its failure tells of the process's death at once.
        """
        time.sleep(seconds)


class Worker:
    """A named Ray actor.

    `timeout_s` is the limit for a call that is given none of its own. `heartbeat_timeout_s`: the
    process has died when it shows no sign of life for so long while a call waits; None for an actor
    that is no Heartbeat. `ordered`: the actor carries out one call after the other, so that a
    call's limit runs only from the answers to all calls before it.
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
        self._cause = ""  # of its death
        self._died = asyncio.Event()
        self._unanswered: dict[asyncio.Future[Any], None] = {}  # in their order
        self._num_waiting = 0  # calls that somebody waits for
        self._has_begun = False  # its process has answered once
        self._beating: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call and wait. Raises WorkerDied; an exception of the method itself is raised as it is,
        where it can travel, else as WorkerError.
        """
        return await self.begin(method, *args, timeout_s=timeout_s)

    def begin(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Call at once; the answer, or the error of `call`, comes when it is awaited."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        before = list(self._unanswered) if self._ordered else []
        answer = None if self._cause else as_future(getattr(self.handle, method).remote(*args))
        if answer is not None:
            self._unanswered[answer] = None
            answer.add_done_callback(self._unanswered.pop)
        return self._answer(method, answer, before, limit_s)

    async def watch(self) -> None:
        """Raises WorkerDied when the worker dies; waits until then."""
        await self._answer("watch", asyncio.get_running_loop().create_future(), (), None)

    @property
    def is_dead(self) -> bool:
        return bool(self._cause)

    def end(self, cause: str) -> None:
        """The worker is of no more use: its calls fail for this cause, its process ends at once."""
        if not self._cause:
            self._cause = cause
            self._died.set()
            self._end_process()

    def kill(self) -> None:
        """Its work is done: end the process at once; no error if it is gone."""
        self.end("it was ended")

    def _end_process(self) -> None:
        ray.kill(self.handle, no_restart=True)  # a stopped one too, within seconds

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
                fail=lambda error: self.end(f"its heartbeats cannot be asked for: {error!r}"),
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
                f"{method} did not answer within {limit_s:g} s; the process may hang (see its "
                "log), or the limit is too short (cluster.call_timeout_s; for a start "
                "cluster.start_timeout_s)"
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
        return WorkerDied(f"{self.name} died during {method}: {self._cause}")

    async def _beat(self, limit_s: float) -> None:
        """Ends the worker when a heartbeat is not answered in time; from the first answer on, since
        the start of a process has a limit of its own.
        """
        try:
            while self._num_waiting and not self._cause:
                seconds = limit_s * BEAT_FRAC if self._has_begun else 0.0
                answer = as_future(self.handle.beat.remote(seconds))
                if not await _any_within(limit_s if self._has_begun else None, answer):
                    self.end(
                        f"its process has shown no sign of life for {limit_s:g} s "
                        "(cluster.heartbeat_timeout_s)"
                    )
                elif error := answer.exception():
                    self.end(_reason(error))
                self._has_begun = True
        finally:
            self._beating = None


def while_loading(model: str, death: Exception) -> str:
    """What to say of a process that died while it loaded its model."""
    return (
        f"model {model!r} could not be loaded, its process died meanwhile ({death}); most often "
        "the memory of its node or GPU is full: use a smaller model, fewer processes beside each "
        f"other, or a larger node ({option('dry_run', True)} estimates what is needed)."
    )


async def end_all(workers: Iterable[Worker]) -> None:
    """Ask each to end its processes and files in good order; after a while, kill."""
    workers = list(workers)
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await while_intact(_close_all(workers))
    except TimeoutError:  # whoever hangs is killed
        return
    finally:
        for worker in workers:
            worker.kill()


async def _close_all(workers: Iterable[Worker]) -> None:
    await asyncio.gather(*(_close(worker) for worker in workers))


async def _close(worker: Worker) -> None:
    with contextlib.suppress(WorkerError, EngineError):  # it is gone, or will be killed
        await worker.call("close")


def as_future(call: Any) -> asyncio.Future[Any]:
    """The answer of a coroutine, or of one of Ray's references; nobody need wait for it, and if it
    is an error nobody may any more.
    """
    answer: asyncio.Future[Any] = asyncio.ensure_future(call)
    answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return answer


async def _any_within(limit_s: float | None, *futures: asyncio.Future[Any]) -> bool:
    """Wait for the first of them; False when none is done within the limit. It may be cancelled,
    they are not.
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
        return InputLost(f"{name}.{method} was not called: {_reason(cause)}")
    return WorkerError(f"{name}.{method} failed: {type(cause).__name__}: {cause}\n{error}")


def _reason(error: BaseException) -> str:
    """Ray's message without its table of ids and its advice; of a traceback, the end."""
    if isinstance(error, OutOfMemoryError):
        used = re.search(r"([\d.]+ ?GB) used / ([\d.]+ ?GB) limit", str(error))
        return (
            "Ray ended it, since the memory of its node was nearly full"
            + (f" ({used[1]} of {used[2]})" if used else "")
            + "; end other programs there, use fewer or smaller processes "
            f"({option('dry_run', True)} estimates what is needed), or a larger node"
        )
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        lines = lines[1:] or lines  # after "The actor died unexpectedly ..."
    told = " ".join(line.strip() for line in lines[-3:]).partition(" Some common causes")[0]
    if isinstance(error, RayActorError) and ENDED_BY_ITSELF.search(told):
        return (
            "its process has ended, and nobody had asked it to (it was killed, crashed in C code, "
            "or called os._exit; its log may say more)"
        )
    return told.rstrip(".") or "no reason given"
