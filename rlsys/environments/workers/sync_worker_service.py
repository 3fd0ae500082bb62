"""In the process of plain functions: a thread for each episode and each call of a tool.

socket ──► this thread ──► begin: a thread ──► asks of its chat, outcome ──► socket
                      └──► answers to the thread that waits for one

A thread cannot be killed. One that is given up gets an exception, which ends what runs in Python,
and is ignored from then on.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from rlsys.common.background_tasks import start_thread
from rlsys.common.call_clock import clocked
from rlsys.common.safe_json import dump_json
from rlsys.environments.environment import Environment
from rlsys.environments.episode import EpisodeFailed, EpisodeOver, numbers_of
from rlsys.environments.tools.tools import ToolError
from rlsys.environments.workers.sync_worker_chat import SyncChat
from rlsys.rewards.outcome import failure_from
from rlsys.rewards.process.reward_messages import LENGTH, frame


class GivenUp(BaseException):
    """Raised in the thread of a call that nobody waits for."""


class _ClockOfCall:
    """Clock of a call that the worker keeps: it is sent when the call waits for a place."""

    def __init__(self, send: Callable[[dict[str, Any]], None], number: int) -> None:
        self._send = send
        self._number = number

    def pause(self) -> None:
        self._send({"number": self._number, "waits": True})

    def resume(self) -> None:
        self._send({"number": self._number, "waits": False})


class _Calls:
    def __init__(self, channel: socket.socket, environment: Environment) -> None:
        self._channel = channel
        self._environment = environment
        self._sending = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._threads: dict[int, int] = {}

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._channel.sendall(frame(dump_json(message).encode()))
            except ConnectionError:  # the worker is gone
                os._exit(0)

    def begin(self, number: int, run: Callable[[], Any]) -> None:
        self._answers[number] = queue.SimpleQueue()
        start_thread(self._work, number, run, name="plain", expected=(GivenUp,))

    def play(self, number: int, task: Any) -> None:
        chat = SyncChat(lambda chat, method, given: self._ask(number, chat, method, given))
        self.begin(number, lambda: self._numbers(self._environment.function(chat, task)))

    def act(self, number: int, given: Any) -> None:
        self.begin(number, lambda: self._numbers(self._environment.function(*given)))

    def _numbers(self, returned: object) -> dict[str, float] | None:
        """As they travel; whether there must be any is the episode's to say."""
        name = self._environment.name
        return None if returned is None else numbers_of(name, returned, or_none=True)

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        if (waiting := self._answers.get(number)) is not None:
            waiting.put(answer)

    def give_up(self, number: int) -> None:
        if (thread := self._threads.get(number)) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(GivenUp)
            )
        self.answer(number, {"over": ""})

    # In a thread:

    def _work(self, number: int, run: Callable[[], Any]) -> None:
        self._threads[number] = threading.get_ident()
        try:
            with clocked(_ClockOfCall(self.send, number)):
                self._tell(number, run)
        except GivenUp:
            self.send({"number": number, "left": True})
        finally:
            self._threads.pop(number, None)
            self._answers.pop(number, None)

    def _tell(self, number: int, run: Callable[[], Any]) -> None:
        try:
            outcome: dict[str, Any] = {"returned": run()}
            dump_json(outcome)
        except GivenUp:
            raise
        except EpisodeOver as over:
            outcome = {"over": str(over)}
        except ToolError as error:
            outcome = {"told": str(error)}
        except EpisodeFailed as error:
            outcome = {"failed": ["type", str(error)]}
        # Whatever a user's function raises, SystemExit included, is the outcome of its episode.
        except BaseException as error:  # noqa: BLE001
            failure = failure_from(self._environment.name, error)
            outcome = {"failed": [failure.kind, failure.message]}
        self.send({"number": number, **outcome})

    def _ask(self, number: int, chat: int, method: str, given: dict[str, Any]) -> dict[str, Any]:
        self.send({"number": number, "chat": chat, "method": method, "given": given})
        answer = self._answers[number].get()
        if answer is None:
            raise EpisodeOver
        if "over" in answer:
            raise EpisodeOver(answer["over"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def serve(channel: socket.socket, environment: Environment) -> None:
    """Until the worker closes the socket; then ends the process."""
    calls = _Calls(channel, environment)
    calls.send({"ready": True})
    while True:
        message = _receive(channel)
        if message is None:
            os._exit(0)
        name, number, given = message
        if name == "play":
            calls.play(number, given)
        elif name == "act":
            calls.act(number, given)
        elif name == "call":
            function, args, named = pickle.loads(given)
            calls.begin(number, _bound(function, args, named))
        elif name == "answer":
            calls.answer(number, given)
        elif name == "give_up":
            calls.give_up(number)
        elif name == "ping":
            calls.send({"number": number, "alive": True})


def _bound(function: Any, args: Any, named: Any) -> Callable[[], Any]:
    return lambda: function(*args, **named)


def _receive(channel: socket.socket) -> Any:
    try:
        head = channel.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        return pickle.loads(channel.recv(length, socket.MSG_WAITALL))
    except (ConnectionError, EOFError):
        return None
