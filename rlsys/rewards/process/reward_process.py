"""One process of reward functions, as its supervisor sees it: started, given calls, ended.

    start ──► run, give_up, hand_back ──► kill, or its own end ──► on_death
                 └──► on_outcomes

reward_runner.py decides about calls, reward_service.py runs them, and supervisor.py keeps the
process within bounds.
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
from rlsys.rewards.outcome import KINDS, FailureKind
from rlsys.rewards.process.reward_messages import LENGTH, PackedRollouts, frame
from rlsys.rewards.process.reward_pickle import PackedRewards
from rlsys.rewards.process.running_calls import Running, RunningCalls, num_bytes
from rlsys.rewards.process_environment import without_secrets

KEEPER = Path(__file__).with_name("supervisor.py")
CHILD = Path(__file__).with_name("reward_child.py")

# Functions that were given up and have not returned, beside those that run. A process with half as
# many is replaced, so the bound holds only while its successor starts.
MAX_STUCK = 64

# Processes that the functions of one place may start, on average.
PROCESSES_PER_PLACE = 16

# The keeper kills until nothing is left, and says so; one that says nothing in this time is gone.
END_TIMEOUT_S = 20.0

# For a script of the standard library to start on a machine that is very busy.
SPAWN_TIMEOUT_S = 60.0

# Far more than the outcomes of any batch take.
MAX_ANSWER_BYTES = 2**30

# Looks at which threads use the processor, and the pause between two.
NUM_LOOKS, LOOK_EVERY_S = 5, 0.01

# As reward_service.py writes it: numbers by name, [kind, message], or None for a call given up.
Told = dict[str, float] | tuple[FailureKind, str] | None
# Number of the call, its reward's place among all, its rollout's.
NumberedCall = tuple[int, int, int]


class ProcessEnded(RuntimeError):
    """The process ended while it started."""


@dataclass(frozen=True, kw_only=True)
class Death:
    kind: FailureKind  # of the calls whose fault it is
    reason: str  # what happened, as the end of "the process ..."
    num_begun: int  # calls that had begun, in the order in which they were sent


class RewardProcess:
    def __init__(
        self,
        packed: PackedRewards,
        *,
        concurrency: int,
        memory_gib: float,
        on_outcomes: Callable[[RewardProcess, list[tuple[int, Told]]], None],
        on_handed_back: Callable[[list[int]], None],
        on_death: Callable[[RewardProcess, Death], None],
    ) -> None:
        self._packed = packed
        self._concurrency = concurrency
        self._memory_gib = memory_gib
        self._on_outcomes = on_outcomes
        self._on_handed_back = on_handed_back
        self._on_death = on_death
        self._num_rows = concurrency + MAX_STUCK
        self._kill_reason: str | None = None
        self._num_sent = 0
        self._num_answered = 0
        self._talks_nonsense = False
        self.serving: asyncio.Task[None] | None = None
        """Runs from the start to the death; raises only what is a bug here."""

    async def start(self, timeout_s: float) -> None:
        """Returns when the functions are loaded. Raises ValueError if they cannot be, with their
        error, TimeoutError or ProcessEnded; then nothing is left of it."""
        table_fd = os.memfd_create("rewards")
        os.ftruncate(table_fd, num_bytes(self._num_rows))
        ours, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        self._control.setblocking(False)
        try:
            spawn = asyncio.to_thread(self._spawn, theirs.fileno(), control.fileno(), table_fd)
            await _uninterrupted(spawn)  # the thread needs the descriptors to its end
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
            self._talks_nonsense = isinstance(error, ValueError)
            reason = (await self._ended()).reason
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError | ValueError):
                raise ProcessEnded(f"the process of the reward functions {reason}") from None
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"the reward functions were not loaded within {timeout_s:g} s; import less, or "
                    "raise cluster.start_timeout_s."
                ) from None
            raise
        if "failed" in answer:
            await self._ended()
            raise ValueError(
                "the reward functions could not be loaded in their process, where every module "
                f"that they use must be found: {answer['failed']}"
            )
        self.serving = asyncio.create_task(self._serve())

    def _spawn(self, channel: int, control: int, table_fd: int) -> None:
        fds = [channel, table_fd]
        spec = {
            "command": [sys.executable, "-P", "-u", str(CHILD), str(channel), str(table_fd)],
            "control": control,
            "pass_fds": fds,
            "memory_bytes": int(self._memory_gib * 2**30),
            "max_processes": self._concurrency * PROCESSES_PER_PLACE,
        }
        subprocess.run(
            [sys.executable, "-I", "-S", str(KEEPER), dump_json(spec)],
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
        return self._num_sent

    def give_up(self, number: int) -> None:
        """Ask that a call be given up; an outcome None follows unless it ends by itself first. A
        process that hangs says nothing."""
        self._send(("give_up", number))

    def hand_back(self) -> None:
        """Ask for the calls that have not begun."""
        self._send(("hand_back",))

    def running(self) -> list[Running]:
        return self._table.running()

    async def culprit(self, running: Sequence[Running]) -> int | None:
        """Of the calls of a process that does not answer, the one that must be holding up all of
        it; None if that cannot be told. Takes a moment.

        It is the async call whose step blocks the loop, or the one whose thread alone uses the
        processor: those that wait for the interpreter lock do not.
        """
        running = [call for call in running if call.thread != 0]  # the others have not started
        if len(running) == 1:
            return running[0].number
        loop_thread, step = self._table.loop_thread, self._table.step
        threads = {call.thread for call in running}
        busy = set(threads)
        for _ in range(NUM_LOOKS):
            busy = {thread for thread in busy if _uses_processor(thread)}
            await asyncio.sleep(LOOK_EVERY_S)
        step_holds = step != 0 and self._table.step == step
        if step_holds and (busy <= {loop_thread} or threads == {loop_thread}):
            return step
        if len(busy) != 1 or loop_thread in busy:
            return None
        return next(call.number for call in running if call.thread in busy)

    def kill(self, reason: str) -> None:
        """End the process and all that it has started. `on_death` is called later."""
        self._kill_reason = reason
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")

    async def close(self) -> None:
        """Kill it, and wait until nothing is left. on_death is not called."""
        self._on_death = lambda process, death: None
        self.kill("is no longer needed")
        if self.serving is not None:
            await self.serving

    async def _serve(self) -> None:
        try:
            while True:
                message = await self._receive()
                if "outcomes" in message:
                    outcomes = [(n, _told(told)) for n, told in message["outcomes"]]
                    self._num_answered += len(outcomes)
                    if not self._num_answered <= self._table.num_begun <= self._num_sent:
                        raise ValueError("an outcome of a call that has not begun")
                    self._on_outcomes(self, outcomes)
                elif "handed_back" in message:
                    self._on_handed_back(message["handed_back"])
                else:
                    raise ValueError("a message that is none")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        # A function wrote to every descriptor that it found.
        except (ValueError, KeyError, TypeError):
            self._talks_nonsense = True
        self._on_death(self, await self._ended())

    async def _ended(self) -> Death:
        """Kill what is left of the process, and wait until nothing is."""
        num_begun = self._table.num_begun
        if not self._num_answered <= num_begun <= self._num_sent:  # the table was overwritten
            num_begun = self._num_sent
        with contextlib.suppress(OSError):  # its keeper has ended
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
        if self._talks_nonsense:
            return (
                "crash",
                "was ended, since a function wrote to file descriptors or memory of others",
            )
        if report is None:
            return "crash", "was lost: its keeper was killed"
        if report["reason"] == "memory":
            limit = f"reward.memory_gib={self._memory_gib:g}"
            return "memory", f"and what it had started took more than {limit}"
        if report["reason"] == "processes":
            limit = f"{self._concurrency * PROCESSES_PER_PLACE} processes"
            return "crash", f"had started more than {limit}"
        if report["reason"] == "stopped":
            return "crash", "was ended, since a signal such as SIGSTOP had stopped it"
        code = os.waitstatus_to_exitcode(report["status"])
        if code == FAILED_EXIT_CODE:
            return (
                "crash",
                "ended itself, since a function closed its file descriptors or broke its threads "
                "(the log of the reward worker has the details)",
            )
        if code >= 0:
            return "crash", f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
        hint = " (the kernel does so if memory runs out)" if name == "SIGKILL" else ""
        return "crash", f"was ended by {name}{hint}"

    def _send(self, message: object) -> None:
        """Send a message, unless the process has ended: its death then accounts for the calls."""
        if self._writer.is_closing():  # uvloop raises at a write, asyncio does not
            return
        self._writer.write(frame(pickle.dumps(message)))

    async def _receive(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        return parse_json(await self._reader.readexactly(length))


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Cancelled, it ends only when the work has."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _told(told: Any) -> Told:
    if isinstance(told, list):
        kind, message = told
        if kind in KINDS and isinstance(message, str):
            return kind, message
    elif told is None or (
        isinstance(told, dict) and all(isinstance(value, float) for value in told.values())
    ):
        return told
    raise ValueError(f"no outcome: {told}")


def _uses_processor(thread: int) -> bool:
    try:
        with open(f"/proc/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False
