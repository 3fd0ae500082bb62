"""Synchronous functions, which may block, in a worker process with a thread for each call.

    Chat (event loop) ◄─requests── thread of the function     sync_worker_service.py, in the process
         └────────────answers──────►

A function that hangs fails its own episode only. The process is replaced when it dies, when too
many threads hang, or when it does not answer, for example because a C function holds Python's GIL.
Since the cause is not known then, all calls of the process are retried, and an episode that was in
several such deaths gets its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from rlsys.common import pickling
from rlsys.common.background_tasks import report, start_task
from rlsys.common.call_clock import Hold, waiting
from rlsys.common.local_process import LoadFailed, LocalProcess, ProcessEnded
from rlsys.environments.chat import Chat
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import EpisodeOver
from rlsys.environments.tools.tools import ToolError
from rlsys.errors import InvalidValue
from rlsys.rewards.outcome import KINDS, FailureKind
from rlsys.rewards.process_environment import without_secrets

# Runs in the process.
MODULE = "rlsys.environments.workers.sync_worker_service"

# Number of cancelled threads that have not ended at which the process is replaced.
MAX_STUCK = 64

# Maximum number of processes that synchronous functions may start.
MAX_PROCESSES = 1024

# Time without an answer after which a process is replaced.
SILENT_S = 30.0

# Maximum number of episodes with their own process at the same time.
MAX_ALONE = 4


class SyncWorkerFailed(RuntimeError):
    """Failure of a synchronous function, with its kind and message."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SyncWorkerEnded(SyncWorkerFailed):
    """End of the process that a function ran in, possibly with other calls."""

    def __init__(self) -> None:
        super().__init__("crash", "the process of synchronous functions ended. See its log.")


class SyncWorkerFunctions:
    """Executor of synchronous functions for an EpisodeHost (its `SyncExecutor`).

    The process starts with the first call, or with `start` if the environment is synchronous.
    """

    def __init__(
        self, environment: Environment, *, memory_gib: float, start_timeout_s: float
    ) -> None:
        self._environment = environment
        self._packed = pickling.dumps(environment)
        self._memory_gib = memory_gib
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count(1)
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_ALONE)
        self._own: ContextVar[_Process | None] = ContextVar("own", default=None)

    async def start(self) -> None:
        """Start the process if the environment is synchronous. Raises InvalidValue on failure."""
        if not self._environment.is_async:
            await self._running()

    @contextlib.asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        """Return the context of one episode, whose calls run in a shared or its own process."""
        if not alone:
            await self.start()  # a restart must not count for the time of the episode
            yield
            return
        async with self._places:
            process = await self._started()
            token = self._own.set(process)
            try:
                yield
            finally:
                self._own.reset(token)
                await process.close()

    async def act(self, endpoint: Endpoint, task: Mapping[str, Any]) -> Any:
        """Call the environment's function, an agent."""
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        with process.call(number) as messages:
            process.send("act", number, (endpoint, dict(task)))
            return _outcome(await messages.get())

    async def play(self, chat: Chat, task: Mapping[str, Any]) -> Any:
        """Call the environment's function and answer the requests of its chats."""
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        chats = {0: chat}
        with process.call(number) as messages:
            process.send("play", number, dict(task))
            while "method" in (message := await messages.get()):
                process.send("answer", number, await _answer(chats, message))
        return _outcome(message)

    async def execute(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call another function, such as a tool."""
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        with process.call(number) as messages:
            process.send("call", number, pickling.dumps((function, args, named)))
            message = await messages.get()
        return _outcome(message)

    async def close(self) -> None:
        """End the shared process."""
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> _Process:
        with waiting() as begin:
            await self._starting.acquire()
            begin()
        try:
            if self._process is None or self._process.is_worn:
                worn, self._process = self._process, None
                with waiting():
                    self._process = await self._started()
                if worn is not None:
                    worn.retire()
            return self._process
        finally:
            self._starting.release()

    async def _started(self) -> _Process:
        process = _Process(memory_gib=self._memory_gib)
        await process.start(self._packed, timeout_s=self._start_timeout_s)
        return process


class _Waits:
    """Waits that the function of a call reports, during which the clocks of the call stop."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()  # of the caller, with the clocks of the call
        self._holds: list[Hold] = []

    def count(self, begins: bool) -> None:
        """Record the begin or the end of a wait."""
        if begins:
            self._holds.append(self._context.run(Hold))
        elif self._holds:
            self._holds.pop().release()

    def end(self) -> None:
        """End all waits of the call."""
        while self._holds:
            self._holds.pop().release()


class _Process:
    """A worker process."""

    def __init__(self, *, memory_gib: float) -> None:
        self._process = LocalProcess(
            MODULE,
            memory_gib=memory_gib,
            max_processes=MAX_PROCESSES,
            environment=without_secrets(os.environ),
        )
        self._calls: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._waits: dict[int, _Waits] = {}  # by call
        self._stuck: set[int] = set()
        self._is_dead = self._is_retired = False
        self._received = asyncio.Event()

    @property
    def is_worn(self) -> bool:
        """Return whether it has died or has too many threads that hang."""
        return self._is_dead or len(self._stuck) >= MAX_STUCK

    async def start(self, packed: bytes, *, timeout_s: float) -> None:
        """Start the process and load the environment. Raises InvalidValue on failure."""
        try:
            await self._process.start({"environment": packed}, timeout_s=timeout_s)
        except (ProcessEnded, TimeoutError) as error:
            raise InvalidValue(
                "environment",
                rule=f"the process of its synchronous functions did not start ({error!r})",
                fix="See the log of the process.",
            ) from None
        except LoadFailed as error:
            raise InvalidValue(
                "environment",
                rule=f"cannot be loaded in the process of its synchronous functions: {error}",
                fix="All modules that it uses must be importable there.",
            ) from None
        self._serving = start_task(self._serve(), fail=self._failed)
        self._watching = start_task(self._watch(), fail=self._failed)

    @contextlib.contextmanager
    def call(self, number: int) -> Iterator[asyncio.Queue[dict[str, Any]]]:
        """Return the queue of a call's messages. Leaving the block early cancels the call."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._calls[number] = messages
        self._waits[number] = _Waits()
        try:
            if self._is_dead:
                raise SyncWorkerEnded
            yield messages
        except BaseException:  # cancelled, or a request of the function has failed
            if not self._is_dead:
                self._stuck.add(number)
                self.send("cancel", number, None)
            raise
        finally:
            del self._calls[number]
            self._waits.pop(number).end()
            self._end_if_idle()

    def send(self, name: str, number: int, payload: Any) -> None:
        """Send a message about a call."""
        self._process.send((name, number, payload))

    def retire(self) -> None:
        """End the process once its running calls have ended. It gets no new ones."""
        self._is_retired = True
        self._end_if_idle()

    def kill(self) -> None:
        """End the process and all processes that it has started."""
        self._process.kill("is no longer needed")

    async def close(self) -> None:
        """End the process and wait for its end."""
        self.kill()
        await asyncio.wait([self._serving])

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._calls:
            self.kill()

    async def _serve(self) -> None:
        await self._process.serve(self._take)
        self._ended()
        self._watching.cancel()
        await self._process.end()

    def _take(self, message: Any) -> None:
        self._received.set()
        number = message["number"]
        if "waits" in message:
            if (waits := self._waits.get(number)) is not None:
                waits.count(bool(message["waits"]))
            return
        if "method" not in message:
            self._stuck.discard(number)
        if (messages := self._calls.get(number)) is not None:
            messages.put_nowait(message)

    def _ended(self) -> None:
        """End all calls: the process has ended, or its answers are not read any more."""
        self._is_dead = True
        for messages in self._calls.values():
            messages.put_nowait({"ended": True})

    def _failed(self, error: BaseException) -> None:
        """End the process after an error of the tasks that serve and watch it."""
        report(error)
        self._ended()
        self.kill()

    async def _watch(self) -> None:
        """Kill the process when it does not answer for SILENT_S."""
        while True:
            self._received.clear()
            self.send("ping", 0, None)
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._received.wait()
            except TimeoutError:
                self.kill()
                return
            await asyncio.sleep(SILENT_S / 2)


def _outcome(message: Mapping[str, Any]) -> Any:
    """Return the result of the function or raise its error."""
    if "returned" in message:
        return message["returned"]
    if "tool_error" in message:
        raise ToolError(message["tool_error"])
    if "over" in message:
        raise EpisodeOver(message["over"])
    if "cancelled" in message:
        raise EpisodeOver
    if "ended" in message:
        raise SyncWorkerEnded
    kind, text = message["failed"]
    raise SyncWorkerFailed(kind if kind in KINDS else "exception", str(text))


async def _answer(chats: dict[int, Chat], message: Mapping[str, Any]) -> dict[str, Any]:
    """Call a method of a chat and return the answer for the process."""
    chat = chats[message["chat"]]
    try:
        value = await _call_method(chats, chat, message["method"], message["arguments"])
    except EpisodeOver as over:
        return {"over": str(over)}
    except ValueError as error:
        return {"error": str(error)}
    state = {"done": chat.done, "truncated": chat.truncated}
    return {"value": value, "state": state, "is_frozen": chat.is_frozen}


async def _call_method(
    chats: dict[int, Chat], chat: Chat, method: str, args: Mapping[str, Any]
) -> Any:
    match method:
        case "call":
            return await chat(args["text"], max_tokens=args["max_tokens"], role=args["role"])
        case "until_answer":
            return await chat.until_answer(args["text"], max_tokens=args["max_tokens"])
        case "reward":
            return chat.reward(args["value"], args["name"])
        case "system":
            return chat.system(args["text"])
        case "messages":
            return chat.messages
        case "num_tool_calls":
            return chat.num_tool_calls
        case "fork" | "seat":
            chats[len(chats)] = chat.fork() if method == "fork" else chat.seat(args["name"])
            return len(chats) - 1
    raise ValueError(f"a chat has no method {method!r}")
