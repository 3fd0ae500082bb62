"""Plain functions, which may block: they run in a process of their own, a thread for each.

    Chat (event loop) ◄──asks── thread of the function        sync_worker_service.py, in the process
         └────────────answers──────►

One that hangs costs its own episode. When too many hang, the process dies, or it falls silent
because a function in C keeps Python's lock, another takes its place. Whose fault that was, nobody
knows: what ran in it is tried again, and what has been in several such deaths, alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlsys.common import pickling
from rlsys.common.background_tasks import report, start_task
from rlsys.common.call_clock import Hold, waiting
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.environments.chat import Chat
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import EpisodeOver
from rlsys.environments.tools.tools import ToolError
from rlsys.rewards.outcome import KINDS, FailureKind
from rlsys.rewards.process.reward_messages import LENGTH, frame
from rlsys.rewards.process.reward_process import KEEPER, SPAWN_TIMEOUT_S
from rlsys.rewards.process_environment import without_secrets

CHILD = Path(__file__).with_name("sync_worker_child.py")

# Threads that were given up and have not ended; then the process is replaced.
MAX_STUCK = 64

# Processes that plain functions may start, all together.
MAX_PROCESSES = 1024

# A process that is silent for so long is held up by one function, and another takes its place.
SILENT_S = 30.0

# Episodes that are played alone, each in a process of its own, at the same time.
MAX_ALONE = 4

# Far more than an episode says at once.
MAX_MESSAGE_BYTES = 2**28


class SyncWorkerFailed(RuntimeError):
    """A plain function raised; `kind` and the message are those of its failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SyncWorkerEnded(SyncWorkerFailed):
    """The process that it ran in, which others may have shared, has ended."""

    def __init__(self) -> None:
        super().__init__("crash", "the process of plain functions ended; see its log.")


class SyncWorkerFunctions:
    """A host's `Plain`. The process starts with the first use, or with `start` where the
    environment itself is plain.
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
        if not self._environment.is_async:
            await self._running()

    @contextlib.asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        if not alone:
            await self.start()  # if it has died: its start is none of the episode's time
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
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        with process.call(number) as messages:
            process.send("act", number, (endpoint, dict(task)))
            return _outcome(await messages.get())

    async def play(self, chat: Chat, task: Mapping[str, Any]) -> Any:
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        chats = {0: chat}
        with process.call(number) as messages:
            process.send("play", number, dict(task))
            while "method" in (message := await messages.get()):
                process.send("answer", number, await _done(chats, message))
        return _outcome(message)

    async def execute(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        process = self._own.get() or await self._running()
        number = next(self._numbers)
        with process.call(number) as messages:
            process.send("call", number, pickling.dumps((function, args, named)))
            message = await messages.get()
        return _outcome(message)

    async def close(self) -> None:
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
        process = _Process()
        await process.start(
            self._packed, memory_gib=self._memory_gib, timeout_s=self._start_timeout_s
        )
        return process


class _Waits:
    """Waits for places that a call's function tells from its process."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()  # of the caller, with the clocks of the call
        self._holds: list[Hold] = []

    def count(self, begins: bool) -> None:
        if begins:
            self._holds.append(self._context.run(Hold))
        elif self._holds:
            self._holds.pop().release()

    def end(self) -> None:
        while self._holds:
            self._holds.pop().release()


class _Process:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._waits: dict[int, _Waits] = {}  # by call
        self._stuck: set[int] = set()
        self._is_dead = self._is_retired = False
        self._heard = asyncio.Event()

    @property
    def is_worn(self) -> bool:
        """It has died, or holds too many threads that would not end."""
        return self._is_dead or len(self._stuck) >= MAX_STUCK

    async def start(self, packed: bytes, *, memory_gib: float, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        self._control.setblocking(False)
        spec = {
            "command": [sys.executable, "-P", "-u", str(CHILD), str(theirs.fileno())],
            "control": control.fileno(),
            "pass_fds": [theirs.fileno()],
            "memory_bytes": int(memory_gib * 2**30),
            "max_processes": MAX_PROCESSES,
        }
        try:
            await asyncio.to_thread(_spawn, spec)
        finally:
            theirs.close()
            control.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(frame(pickle.dumps({"path": sys.path, "environment": packed})))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            self.kill()
            raise ValueError(
                f"the process of the environment's plain functions did not start ({error!r}); see "
                "its log."
            ) from None
        if "failed" in answer:
            self.kill()
            raise ValueError(
                "the environment could not be loaded in the process of its plain functions, where "
                f"every module that it uses must be found: {answer['failed']}"
            )
        self._serving = start_task(self._serve(), fail=self._failed)
        self._watching = start_task(self._watch(), fail=self._failed)

    @contextlib.contextmanager
    def call(self, number: int) -> Iterator[asyncio.Queue[dict[str, Any]]]:
        """The messages of a call; left before its outcome has come, it is given up."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._calls[number] = messages
        self._waits[number] = _Waits()
        try:
            if self._is_dead:
                raise SyncWorkerEnded
            yield messages
        except BaseException:  # cancelled, or what it asked for has failed
            if not self._is_dead:
                self._stuck.add(number)
                self.send("give_up", number, None)
            raise
        finally:
            del self._calls[number]
            self._waits.pop(number).end()
            self._end_if_idle()

    def send(self, name: str, number: int, given: Any) -> None:
        self._writer.write(frame(pickle.dumps((name, number, given))))

    def retire(self) -> None:
        """Nothing new comes: it ends when what runs has."""
        self._is_retired = True
        self._end_if_idle()

    def kill(self) -> None:
        """With all that it has started."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")
        self._writer.close()

    async def close(self) -> None:
        self.kill()
        await asyncio.wait([self._serving])

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._calls:
            self.kill()

    async def _serve(self) -> None:
        # Of the latter two, where a function wrote to every descriptor that it found.
        gone = (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, TypeError)
        with contextlib.suppress(*gone):
            while True:
                message = await self._receive()
                self._heard.set()
                number = message["number"]
                if "waits" in message:
                    if (waits := self._waits.get(number)) is not None:
                        waits.count(bool(message["waits"]))
                    continue
                if "method" not in message:
                    self._stuck.discard(number)
                if (messages := self._calls.get(number)) is not None:
                    messages.put_nowait(message)
        self._ended()
        self._watching.cancel()
        self.kill()
        self._control.close()

    def _ended(self) -> None:
        """End all calls: the process has ended, or nobody reads its answers."""
        self._is_dead = True
        for messages in self._calls.values():
            messages.put_nowait({"ended": True})

    def _failed(self, error: BaseException) -> None:
        """End the process after an error of the tasks that serve and watch it."""
        report(error)
        self._ended()
        self.kill()

    async def _watch(self) -> None:
        """Ends it when it is silent."""
        while True:
            self._heard.clear()
            self.send("ping", 0, None)
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._heard.wait()
            except TimeoutError:
                self.kill()
                return
            await asyncio.sleep(SILENT_S / 2)

    async def _receive(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        return parse_json(await self._reader.readexactly(length))


def _spawn(spec: Mapping[str, Any]) -> None:
    subprocess.run(
        [sys.executable, "-I", "-S", str(KEEPER), dump_json(spec)],
        env=without_secrets(os.environ),
        stdin=subprocess.DEVNULL,
        pass_fds=[spec["control"], *spec["pass_fds"]],
        timeout=SPAWN_TIMEOUT_S,
        check=True,
    )


def _outcome(message: Mapping[str, Any]) -> Any:
    """What the function returned; raises what it raised."""
    if "returned" in message:
        return message["returned"]
    if "told" in message:
        raise ToolError(message["told"])
    if "over" in message:
        raise EpisodeOver(message["over"])
    if "left" in message:
        raise EpisodeOver
    if "ended" in message:
        raise SyncWorkerEnded
    kind, text = message["failed"]
    raise SyncWorkerFailed(kind if kind in KINDS else "exception", str(text))


async def _done(chats: dict[int, Chat], message: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat has to say to a method's call."""
    chat, given = chats[message["chat"]], message["given"]
    try:
        value = await _method(chats, chat, message["method"], given)
    except EpisodeOver as over:
        return {"over": str(over)}
    except ValueError as error:
        return {"error": str(error)}
    state = {"done": chat.done, "truncated": chat.truncated}
    return {"value": value, "state": state, "is_frozen": chat.is_frozen}


async def _method(chats: dict[int, Chat], chat: Chat, method: str, given: Mapping[str, Any]) -> Any:
    match method:
        case "say":
            return await chat(given["text"], max_tokens=given["max_tokens"], role=given["role"])
        case "until_answer":
            return await chat.until_answer(given["text"], max_tokens=given["max_tokens"])
        case "reward":
            return chat.reward(given["value"], given["name"])
        case "system":
            return chat.system(given["text"])
        case "messages":
            return chat.messages
        case "num_tool_calls":
            return chat.num_tool_calls
        case "fork" | "seat":
            made = chat.fork() if method == "fork" else chat.seat(given["name"])
            chats[len(chats)] = made
            return len(chats) - 1
    raise ValueError(f"a chat has no {method!r}")
