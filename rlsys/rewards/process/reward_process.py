"""Handle of one process of reward functions, used by the runner.

    start ──► run, cancel, return_pending ──► kill, or its own end ──► on_death
                 └──► on_outcomes

reward_runner.py decides about calls, and reward_service.py runs them in the process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.local_process import LoadFailed, LocalProcess, ProcessEnded
from rlsys.errors import InvalidValue
from rlsys.rewards.outcome import KINDS, FailureKind
from rlsys.rewards.process.reward_messages import PackedRollouts
from rlsys.rewards.process.reward_pickle import PackedRewards
from rlsys.rewards.process.running_calls import Running, RunningCalls, num_bytes
from rlsys.rewards.process_environment import without_secrets

# Runs in the process.
MODULE = "rlsys.rewards.process.reward_service"

# Maximum cancelled calls that have not returned, in addition to running ones. A process with half
# as many is replaced, so this limit matters only while its successor starts.
MAX_STUCK = 64

# Maximum processes that functions start, per concurrent call.
PROCESSES_PER_CALL = 16

# Samples of which threads use the processor, and the pause between two.
NUM_SAMPLES, SAMPLE_INTERVAL_S = 5, 0.01

# In the format of reward_service.py: numbers by name, (kind, message), or None if cancelled.
WireOutcome = dict[str, float] | tuple[FailureKind, str] | None
# Number of the call, index of its reward, index of its rollout.
NumberedCall = tuple[int, int, int]


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
        self._on_outcomes = on_outcomes
        self._on_returned = on_returned
        self._on_death = on_death
        self._num_rows = concurrency + MAX_STUCK
        self._num_sent = 0
        self._num_answered = 0
        self._process = LocalProcess(
            MODULE,
            memory_gib=memory_gib,
            max_processes=concurrency * PROCESSES_PER_CALL,
            environment=without_secrets(os.environ, keep=packed.environment),
        )
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
        self._table = RunningCalls(table_fd, self._num_rows)
        arguments = {
            "rewards": self._packed.pickled,
            "concurrency": self._concurrency,
            "num_rows": self._num_rows,
        }
        try:
            await self._process.start(arguments, timeout_s=timeout_s, shared_fds=[table_fd])
        except ProcessEnded as ended:
            raise ProcessEnded(f"the process of the reward functions {ended}") from None
        except TimeoutError:
            raise TimeoutError(
                f"the reward functions were not loaded within {timeout_s:g} s. Import less in "
                "their modules, or raise cluster.start_timeout_s."
            ) from None
        except LoadFailed as error:
            raise InvalidValue(
                "rewards",
                [one.name for one in self._packed.rewards],
                rule=f"cannot be loaded in another process: {error}",
                fix="Use modules that can be imported there.",
            ) from None
        finally:
            os.close(table_fd)
        self.serving = asyncio.create_task(self._serve())

    def run(self, rollouts: PackedRollouts, calls: Sequence[NumberedCall]) -> None:
        """Send calls. The process begins all calls in the order in which they are sent."""
        self._num_sent += len(calls)
        self._process.send(("run", rollouts, calls))

    @property
    def num_sent(self) -> int:
        """Number of calls that were sent."""
        return self._num_sent

    def cancel(self, number: int) -> None:
        """Ask the process to cancel a call.

        The outcome None follows unless the call ends first. A process that hangs does not answer.
        """
        self._process.send(("cancel", number))

    def return_pending(self) -> None:
        """Ask the process to return the calls that have not begun."""
        self._process.send(("return_pending",))

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
        self._process.kill(reason)

    async def close(self) -> None:
        """Kill the process, and wait until nothing is left. `on_death` is not called."""
        self._on_death = lambda process, death: None
        self.kill("is no longer needed")
        if self.serving is not None:
            await self.serving

    async def _serve(self) -> None:
        await self._process.serve(self._take)
        num_begun = self._table.num_begun
        if not self._num_answered <= num_begun <= self._num_sent:  # the table was overwritten
            num_begun = self._num_sent
        ending = await self._process.end()
        kind: FailureKind = "memory" if ending.is_out_of_memory else "crash"
        self._on_death(self, Death(kind=kind, reason=ending.reason, num_begun=num_begun))

    def _take(self, message: Any) -> None:
        """Handle a message, or raise ValueError, KeyError or TypeError for a forged one."""
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
