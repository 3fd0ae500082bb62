"""A supervised local process that runs user code, as its parent sees it.

    start ──► send, serve ──► kill, or its own end ──► end: nothing is left, and the reason

process_child.py is its entry point. process_supervisor.py enforces its limits and ends all that it
has started. supervision.py decides whether another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.common.background_tasks import FAILED_EXIT_CODE
from rlsys.common.child_channel import LENGTH, frame
from rlsys.common.safe_json import dump_json, parse_json

SUPERVISOR = Path(__file__).with_name("process_supervisor.py")
CHILD = Path(__file__).with_name("process_child.py")

# Name of the option with the memory limit.
MEMORY = "reward.memory_gib"

# Time for the supervisor to kill everything and report. Without a report it is gone.
END_TIMEOUT_S = 20.0

# Time for a standard-library script to start on a very busy machine.
SPAWN_TIMEOUT_S = 60.0

# Far more than any real message.
MAX_MESSAGE_BYTES = 2**30


class LoadFailed(RuntimeError):
    """The user's code raised an error while it was loaded. The message is its traceback."""


class ProcessEnded(RuntimeError):
    """The process ended while it started. The message is the reason of an `Ending`."""


# Errors of a start after which another attempt may succeed.
START_ERRORS = (ProcessEnded, ValueError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a process.

    Attributes:
        reason: The reason, as the end of a sentence that begins with "the process".
        is_out_of_memory: Whether it exceeded its memory limit.
    """

    reason: str
    is_out_of_memory: bool = False


class LocalProcess:
    """A process of user code.

    Args:
        module: Module whose function `load` is called in the process with the descriptors that it
            shares and the arguments. It returns the function that serves calls.
        memory_gib: Limit of its private memory, with all processes that it starts.
        max_processes: Limit of their number.
        environment: Environment variables of the process.
    """

    def __init__(
        self,
        module: str,
        *,
        memory_gib: float,
        max_processes: int,
        environment: Mapping[str, str],
    ) -> None:
        self._module = module
        self._memory_gib = memory_gib
        self._max_processes = max_processes
        self._environment = environment
        self._kill_reason = ""
        self._is_corrupt = False

    async def start(
        self, arguments: Mapping[str, Any], *, timeout_s: float, shared_fds: Sequence[int] = ()
    ) -> None:
        """Start the process and wait until the user's code is loaded.

        After an error no process is left.

        Raises:
            LoadFailed: The code cannot be loaded.
            TimeoutError: It was not loaded in time.
            ProcessEnded: The process ended before it was loaded.
        """
        ours, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        self._control.setblocking(False)
        try:
            spawn = asyncio.to_thread(self._spawn, control.fileno(), [theirs.fileno(), *shared_fds])
            await _uninterrupted(spawn)  # the thread needs the descriptors until it ends
        except BaseException:
            ours.close()
            self._control.close()
            raise
        finally:
            theirs.close()
            control.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(timeout_s):
                self.send({"path": sys.path, "module": self._module, "arguments": dict(arguments)})
                answer = await self._receive()
        except BaseException as error:
            self._is_corrupt = isinstance(error, ValueError)
            reason = (await self.end()).reason
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError | ValueError):
                raise ProcessEnded(reason) from None
            raise
        if "failed" in answer:
            await self.end()
            raise LoadFailed(answer["failed"])

    def _spawn(self, control: int, fds: Sequence[int]) -> None:
        spec = {
            "command": [sys.executable, "-P", "-u", str(CHILD), *map(str, fds)],
            "control": control,
            "pass_fds": fds,
            "memory_bytes": int(self._memory_gib * 2**30),
            "max_processes": self._max_processes,
        }
        subprocess.run(
            [sys.executable, "-I", "-S", str(SUPERVISOR), dump_json(spec)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[control, *fds],
            timeout=SPAWN_TIMEOUT_S,
            check=True,
        )

    def send(self, message: object) -> None:
        """Send a message, unless the process has ended. `serve` returns then."""
        if not self._writer.is_closing():  # uvloop raises at a write, asyncio does not
            self._writer.write(frame(pickle.dumps(message)))

    async def serve(self, on_message: Callable[[Any], None]) -> None:
        """Pass messages on until the process has ended or has sent anything else."""
        try:
            while True:
                on_message(await self._receive())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        # User code wrote to all descriptors.
        except (ValueError, KeyError, TypeError):
            self._is_corrupt = True

    def kill(self, reason: str) -> None:
        """End the process and all that it has started. `serve` returns later."""
        self._kill_reason = self._kill_reason or reason
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")

    async def end(self) -> Ending:
        """Kill what is left of the process tree, and wait until nothing is left."""
        with contextlib.suppress(OSError):  # its supervisor has ended
            self._control.send(b"k")
        self._writer.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                report = await loop.sock_recv(self._control, 1024)
        except (TimeoutError, OSError):
            report = b""
        self._control.close()
        return self._ending(parse_json(report) if report else None)

    def _ending(self, report: Mapping[str, Any] | None) -> Ending:
        if self._kill_reason:
            return Ending(reason=self._kill_reason)
        if self._is_corrupt:
            reason = "was ended because a function wrote to file descriptors or memory of others"
            return Ending(reason=reason)
        if report is None:
            return Ending(reason="was lost because its supervisor was killed")
        match report["reason"]:
            case "memory":
                reason = f"and its child processes took more than {MEMORY}={self._memory_gib:g}"
                return Ending(reason=reason, is_out_of_memory=True)
            case "processes":
                return Ending(reason=f"had started more than {self._max_processes} processes")
            case "stopped":
                reason = "was ended because a signal such as SIGSTOP had stopped it"
                return Ending(reason=reason)
        code = os.waitstatus_to_exitcode(report["status"])
        if report["reason"] == "request" and code == -signal.SIGKILL:
            # It had closed the connection, and was killed before it ended itself.
            code = FAILED_EXIT_CODE
        return Ending(reason=_exit_reason(code))

    async def _receive(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes is too large")
        return parse_json(await self._reader.readexactly(length))


def _exit_reason(code: int) -> str:
    if code == FAILED_EXIT_CODE:
        return (
            "ended itself because a function closed its file descriptors or broke its threads "
            "(the log of the worker has the details)"
        )
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    hint = " (the kernel does so if memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work. A cancellation takes effect only after the work has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
