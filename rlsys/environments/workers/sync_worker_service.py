"""Main loop of the process of synchronous functions: one thread per episode and tool call.

socket ──► main thread ──► begin: a new thread ──► requests to its chat, outcome ──► socket
                      └──► answers to the thread that waits for one

A thread cannot be killed. To cancel a call, an exception is raised in its thread, which ends Python
code; afterwards the thread is ignored.
"""

from __future__ import annotations

import ctypes
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

from rlsys.common.background_tasks import start_thread
from rlsys.common.call_clock import clocked
from rlsys.common.child_channel import ChildChannel
from rlsys.common.safe_json import dump_json
from rlsys.environments.environment import Environment
from rlsys.environments.episode import EpisodeOver
from rlsys.environments.returned_rewards import EpisodeFailed, numbers_of
from rlsys.environments.tools.tools import ToolError
from rlsys.environments.workers.sync_worker_chat import SyncChat
from rlsys.rewards.outcome import failure_from


class CallCancelled(BaseException):
    """Raised in the thread of a cancelled call."""


class _ClockOfCall:
    """Stand-in for a call's clock, which the parent process keeps; it sends pause and resume."""

    def __init__(self, send: Callable[[dict[str, Any]], None], number: int) -> None:
        self._send = send
        self._number = number

    def pause(self) -> None:
        """Stop the clock."""
        self._send({"number": self._number, "waits": True})

    def resume(self) -> None:
        """Let the clock run again."""
        self._send({"number": self._number, "waits": False})


class _Calls:
    """Running calls of the process, by number."""

    def __init__(self, channel: ChildChannel, environment: Environment) -> None:
        self.send = channel.send
        self._environment = environment
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._threads: dict[int, int] = {}

    def begin(self, number: int, run: Callable[[], Any]) -> None:
        """Call a function in a new thread."""
        self._answers[number] = queue.SimpleQueue()
        start_thread(self._work, number, run, name="plain", expected=(CallCancelled,))

    def play(self, number: int, task: Any) -> None:
        """Call the environment's function with a chat."""
        chat = SyncChat(lambda chat, method, args: self._request(number, chat, method, args))
        self.begin(number, lambda: self._numbers(self._environment.function(chat, task)))

    def act(self, number: int, arguments: Any) -> None:
        """Call the environment's function, an agent."""
        self.begin(number, lambda: self._numbers(self._environment.function(*arguments)))

    def _numbers(self, returned: object) -> dict[str, float] | None:
        """Return the result as numbers by name, which JSON can hold. The episode checks None."""
        name = self._environment.name
        return None if returned is None else numbers_of(name, returned, or_none=True)

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Pass an answer to the thread of a call."""
        if (waiting := self._answers.get(number)) is not None:
            waiting.put(answer)

    def cancel(self, number: int) -> None:
        """Raise CallCancelled in the thread of a call."""
        if (thread := self._threads.get(number)) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(CallCancelled)
            )
        self.answer(number, {"over": ""})

    # Run in the thread of a call

    def _work(self, number: int, run: Callable[[], Any]) -> None:
        self._threads[number] = threading.get_ident()
        try:
            with clocked(_ClockOfCall(self.send, number)):
                self._run(number, run)
        except CallCancelled:
            self.send({"number": number, "cancelled": True})
        finally:
            self._threads.pop(number, None)
            self._answers.pop(number, None)

    def _run(self, number: int, run: Callable[[], Any]) -> None:
        try:
            outcome: dict[str, Any] = {"returned": run()}
            dump_json(outcome)
        except CallCancelled:
            raise
        except EpisodeOver as over:
            outcome = {"over": str(over)}
        except ToolError as error:
            outcome = {"tool_error": str(error)}
        except EpisodeFailed as error:
            outcome = {"failed": ["type", str(error)]}
        # Any error of a user's function, SystemExit included, is the outcome of its episode.
        except BaseException as error:  # noqa: BLE001
            failure = failure_from(self._environment.name, error)
            outcome = {"failed": [failure.kind, failure.message]}
        self.send({"number": number, **outcome})

    def _request(self, number: int, chat: int, method: str, args: dict[str, Any]) -> dict[str, Any]:
        self.send({"number": number, "chat": chat, "method": method, "arguments": args})
        answer = self._answers[number].get()
        if answer is None:
            raise EpisodeOver
        if "over" in answer:
            raise EpisodeOver(answer["over"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def load(*, environment: bytes) -> Callable[[ChildChannel], None]:
    """Load the environment, and return the function that serves calls of its functions."""
    loaded: Environment = pickle.loads(environment)
    return lambda channel: serve(channel, loaded)


def serve(channel: ChildChannel, environment: Environment) -> None:
    """Serve calls until the parent closes the socket, then end the process."""
    calls = _Calls(channel, environment)
    calls.send({"ready": True})
    while True:
        name, number, payload = channel.receive()
        if name == "play":
            calls.play(number, payload)
        elif name == "act":
            calls.act(number, payload)
        elif name == "call":
            function, args, named = pickle.loads(payload)
            calls.begin(number, _bound(function, args, named))
        elif name == "answer":
            calls.answer(number, payload)
        elif name == "cancel":
            calls.cancel(number)
        elif name == "ping":
            calls.send({"number": number, "alive": True})


def _bound(function: Any, args: Any, named: Any) -> Callable[[], Any]:
    return lambda: function(*args, **named)
