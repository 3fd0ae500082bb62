"""Handle of one process of reward functions, used by the runner.

    start ──► run, cancel, return_pending ──► kill, or its own end ──► on_death
                 └──► on_outcomes

reward_runner.py decides about calls, reward_service.py runs them in the process, and supervisor.py
enforces the limits of the process.
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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.common.background_tasks import FAILED_EXIT_CODE
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.rewards.outcome import KINDS, FailureKind
from rlsys.rewards.process.reward_messages import LENGTH, PackedRollouts, frame
from rlsys.rewards.process.reward_pickle import PackedRewards
from rlsys.rewards.process.running_calls import Running, RunningCalls, num_bytes
from rlsys.rewards.process_environment import without_secrets

SUPERVISOR = Path(__file__).with_name("supervisor.py")
CHILD = Path(__file__).with_name("reward_child.py")

# Maximum cancelled calls that have not returned, in addition to running ones. A process with half
# as many is replaced, so this limit matters only while its successor starts.
MAX_STUCK = 64

# Maximum processes that functions start, per concurrent call.
PROCESSES_PER_CALL = 16

# Time for the supervisor to kill everything and report. Without a report it is gone.
END_TIMEOUT_S = 20.0

# Time for a standard-library script to start on a very busy machine.
SPAWN_TIMEOUT_S = 60.0

# Far more than the outcomes of any batch.
MAX_ANSWER_BYTES = 2**30

# Samples of which threads use the processor, and the pause between two.
NUM_SAMPLES, SAMPLE_INTERVAL_S = 5, 0.01

# In the format of reward_service.py: numbers by name, (kind, message), or None if cancelled.
WireOutcome = dict[str, float] | tuple[FailureKind, str] | None
# Number of the call, index of its reward, index of its rollout.
NumberedCall = tuple[int, int, int]


class ProcessEnded(RuntimeError):
    """The process ended while it started."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a process.

    Attributes:
        kind: Kind of failure of the call that caused it.
        reason: The reason, as the end of a sentence that begins with "the process".
        num_begun: Number of calls that had begun, in the order in which they were sent.
    """

    kind: FailureKind
    reason: str
    num_begun: int


class RewardProcess:
    """A process of reward functions.

    `on_outcomes` gets the outcomes of calls, `on_returned` the numbers of calls that it has not
    begun, and `on_death` its end.
    """

    def __init__(
        self,
        packed: PackedRewards,
        *,
        concurrency: int,
        memory_gib: float,
        on_outcomes: Callable[[RewardProcess, list[tuple[int, WireOutcome]]], None],
        on_returned: Callable[[list[int]], None],
        on_death: Callable[[RewardProcess, Death], None],
    ) -> None:
        self._packed = packed
        self._concurrency = concurrency
        self._memory_gib = memory_gib
        self._on_outcomes = on_outcomes
        self._on_returned = on_returned
        self._on_death = on_death
        self._num_rows = concurrency + MAX_STUCK
        self._kill_reason: str | None = None
        self._num_sent = 0
        self._num_answered = 0
        self._is_corrupt = False
        self.serving: asyncio.Task[None] | None = None
        """Runs from the start of the process to its end. It raises only because of a bug."""

    async def start(self, timeout_s: float) -> None:
        """Start the process and wait until the functions are loaded.

        After an error no process is left.

        Raises:
            InvalidValue: The functions cannot be loaded.
            TimeoutError: They were not loaded in time.
            ProcessEnded: The process ended before they were loaded.
        """
        table_fd = os.memfd_create("rewards")
        os.ftruncate(table_fd, num_bytes(self._num_rows))
        ours, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        self._control.setblocking(False)
        try:
            spawn = asyncio.to_thread(self._spawn, theirs.fileno(), control.fileno(), table_fd)
            await _uninterrupted(spawn)  # the thread needs the descriptors until it ends
        except BaseException:
            ours.close()
            self._control.close()
            os.close(table_fd)
            raise
        finally:
            theirs.close()
            control.close()
        self._table = RunningCalls(table_fd, self._num_rows)
        os.close(table_fd)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(timeout_s):
                self._send(
                    {
                        "path": sys.path,
                        "rewards": self._packed.pickled,
                        "concurrency": self._concurrency,
                        "num_rows": self._num_rows,
                    }
                )
                answer = await self._receive()
        except BaseException as error:
            self._is_corrupt = isinstance(error, ValueError)
            reason = (await self._ended()).reason
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError | ValueError):
                raise ProcessEnded(f"the process of the reward functions {reason}") from None
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"the reward functions were not loaded within {timeout_s:g} s. Import less in "
                    "their modules, or raise cluster.start_timeout_s."
                ) from None
            raise
        if "failed" in answer:
            await self._ended()
            raise InvalidValue(
                "rewards",
                [one.name for one in self._packed.rewards],
                rule=f"cannot be loaded in another process: {answer['failed']}",
                fix="Use modules that can be imported there.",
            )
        self.serving = asyncio.create_task(self._serve())

    def _spawn(self, channel: int, control: int, table_fd: int) -> None:
        fds = [channel, table_fd]
        spec = {
            "command": [sys.executable, "-P", "-u", str(CHILD), str(channel), str(table_fd)],
            "control": control,
            "pass_fds": fds,
            "memory_bytes": int(self._memory_gib * 2**30),
            "max_processes": self._concurrency * PROCESSES_PER_CALL,
        }
        subprocess.run(
            [sys.executable, "-I", "-S", str(SUPERVISOR), dump_json(spec)],
            env=without_secrets(os.environ, keep=self._packed.environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[control, *fds],
            timeout=SPAWN_TIMEOUT_S,
            check=True,
        )

    def run(self, rollouts: PackedRollouts, calls: Sequence[NumberedCall]) -> None:
        """Send calls. The process begins all calls in the order in which they are sent."""
        self._num_sent += len(calls)
        self._send(("run", rollouts, calls))

    @property
    def num_sent(self) -> int:
        """Number of calls that were sent."""
        return self._num_sent

    def cancel(self, number: int) -> None:
        """Ask the process to cancel a call.

        The outcome None follows unless the call ends first. A process that hangs does not answer.
        """
        self._send(("cancel", number))

    def return_pending(self) -> None:
        """Ask the process to return the calls that have not begun."""
        self._send(("return_pending",))

    def running(self) -> list[Running]:
        """Return the calls that have begun and not ended, according to the table."""
        return self._table.running()

    async def blocking_call(self, running: Sequence[Running]) -> int | None:
        """Return the number of the call that blocks a process which does not answer.

        It is the async call whose step blocks the loop, or the call whose thread alone uses the
        processor: threads that wait for the interpreter lock do not. Return None if there is no
        single such call. Takes a moment.
        """
        running = [call for call in running if call.thread != 0]  # others have not started
        if len(running) == 1:
            return running[0].number
        loop_thread, step = self._table.loop_thread, self._table.step
        threads = {call.thread for call in running}
        busy = set(threads)
        for _ in range(NUM_SAMPLES):
            busy = {thread for thread in busy if _uses_processor(thread)}
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        is_in_step = step != 0 and self._table.step == step
        if is_in_step and (busy <= {loop_thread} or threads == {loop_thread}):
            return step
        if len(busy) != 1 or loop_thread in busy:
            return None
        return next(call.number for call in running if call.thread in busy)

    def kill(self, reason: str) -> None:
        """End the process and all that it has started. `on_death` follows later."""
        self._kill_reason = reason
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")

    async def close(self) -> None:
        """Kill the process, and wait until nothing is left. `on_death` is not called."""
        self._on_death = lambda process, death: None
        self.kill("is no longer needed")
        if self.serving is not None:
            await self.serving

    async def _serve(self) -> None:
        try:
            while True:
                message = await self._receive()
                if "outcomes" in message:
                    outcomes = [(n, _parse_outcome(one)) for n, one in message["outcomes"]]
                    self._num_answered += len(outcomes)
                    if not self._num_answered <= self._table.num_begun <= self._num_sent:
                        raise ValueError("an outcome of a call that has not begun")
                    self._on_outcomes(self, outcomes)
                elif "returned" in message:
                    self._on_returned(message["returned"])
                else:
                    raise ValueError("an unknown message")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        # A function wrote to all descriptors.
        except (ValueError, KeyError, TypeError):
            self._is_corrupt = True
        self._on_death(self, await self._ended())

    async def _ended(self) -> Death:
        """Kill the rest of the process tree, and wait until nothing is left."""
        num_begun = self._table.num_begun
        if not self._num_answered <= num_begun <= self._num_sent:  # the table was overwritten
            num_begun = self._num_sent
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
        kind, reason = self._reason(parse_json(report) if report else None)
        return Death(kind=kind, reason=reason, num_begun=num_begun)

    def _reason(self, report: dict[str, Any] | None) -> tuple[FailureKind, str]:
        if self._kill_reason is not None:
            return "crash", self._kill_reason
        if self._is_corrupt:
            return (
                "crash",
                "was ended because a function wrote to file descriptors or memory of others",
            )
        if report is None:
            return "crash", "was lost because its supervisor was killed"
        if report["reason"] == "memory":
            limit = f"reward.memory_gib={self._memory_gib:g}"
            return "memory", f"and its child processes took more than {limit}"
        if report["reason"] == "processes":
            limit = f"{self._concurrency * PROCESSES_PER_CALL} processes"
            return "crash", f"had started more than {limit}"
        if report["reason"] == "stopped":
            return "crash", "was ended because a signal such as SIGSTOP had stopped it"
        code = os.waitstatus_to_exitcode(report["status"])
        if code == FAILED_EXIT_CODE:
            return (
                "crash",
                "ended itself because a function closed its file descriptors or broke its threads "
                "(the log of the reward worker has the details)",
            )
        if code >= 0:
            return "crash", f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
        hint = " (the kernel does so if memory runs out)" if name == "SIGKILL" else ""
        return "crash", f"was ended by {name}{hint}"

    def _send(self, message: object) -> None:
        """Send a message, unless the process has ended. Its end then accounts for the calls."""
        if self._writer.is_closing():  # uvloop raises at a write, asyncio does not
            return
        self._writer.write(frame(pickle.dumps(message)))

    async def _receive(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        return parse_json(await self._reader.readexactly(length))


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work. A cancellation takes effect only after the work has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _parse_outcome(received: Any) -> WireOutcome:
    """Return an outcome, or raise ValueError for a value that user code has forged."""
    if isinstance(received, list):
        kind, message = received
        if kind in KINDS and isinstance(message, str):
            return kind, message
    elif received is None or (
        isinstance(received, dict) and all(isinstance(value, float) for value in received.values())
    ):
        return received
    raise ValueError(f"not an outcome: {received}")


def _uses_processor(thread: int) -> bool:
    try:
        with open(f"/proc/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # the thread has ended
        return False
