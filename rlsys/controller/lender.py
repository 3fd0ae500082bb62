"""Lending of the trainer's devices to borrowed replicas, while the trainer would wait for rollouts.

    trainer is idle ──► release ──► replicas wake ──► groups arrive ──► replicas sleep ──► train
                     └──── hand-over, a task ─────┘                 └ the trainer waits ┘

`LendingPolicy` decides. No call goes to the trainer between its release and the end of `take_back`,
which a hung replica delays by at most two time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rlsys.common.async_condition import AsyncCondition, first_of
from rlsys.controller.borrowed_replicas import BorrowedReplicas
from rlsys.controller.state import RunState
from rlsys.dataflow.scheduling.lending import Decision, LendingPolicy
from rlsys.dataflow.store.stream_store import RowBatch
from rlsys.dataflow.store.subscription import Subscription


class Lending:
    """Calls that training makes. This class never lends: the trainer keeps its devices."""

    is_lent = False
    parts: Sequence[int] = ()  # numbers of groups of the parts of this step that were sent

    def begin_step(self, num_missing: int, previous: asyncio.Task[None] | None) -> None:
        """Begin to collect the groups of a step. `previous` ends with the step before."""

    def missing(self, num_groups: int) -> None:
        """Record how many groups the step lacks now."""

    def holds(self) -> bool:
        """Return whether the groups of the step wait, because the devices are or will be lent."""
        return False

    def sends_part(self, num_groups: int) -> None:
        """Record that a part of the step goes to the trainer, which cannot lend from then on."""

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the time of forward and backward passes, which may overlap."""
        yield

    def trained(self, parts: Sequence[int]) -> None:
        """Record the end of a step that was sent in parts of so many groups."""

    async def next_groups(self, tasks: asyncio.TaskGroup, groups: Subscription) -> RowBatch | None:
        """Take the next groups, or return None when the devices must be taken back."""
        return await groups.take(timeout_s=None)

    async def take_back(self) -> None:
        """Let the borrowed replicas sleep; the trainer has its devices afterwards."""


class Lender(Lending):
    """The hand-overs of one run.

    Args:
        policy: Decides when.
        replicas: The borrowed replicas.
        release_trainer: Releases the memory of the trainer's devices.
    """

    def __init__(
        self,
        state: RunState,
        policy: LendingPolicy,
        replicas: BorrowedReplicas,
        release_trainer: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = state
        self._policy = policy
        self._replicas = replicas
        self._release_trainer = release_trainer
        self._hand_over: asyncio.Task[None] | None = None  # until the devices are back
        self._is_wanted = False  # whether the trainer wants its devices back
        self._lent_at_s = 0.0
        self._num_finished = 0  # rollouts of borrowed replicas before this hand-over
        self._complete_at_s: float | None = None  # when the step's last group arrived
        self._previous: asyncio.Task[None] | None = None  # the end of the previous step
        self._changed = AsyncCondition()  # notified when the previous step or a hand-over ends
        self._may_lend = False  # no part of this step was sent
        self._has_lent = False  # in this step
        self._num_running = 0  # passes of the trainer
        self._busy_since_s = 0.0
        self._busy_s = 0.0  # passes of this step

    @property
    def is_lent(self) -> bool:  # type: ignore[override]
        """Return whether the devices are lent, or are being handed over."""
        return self._hand_over is not None

    def begin_step(self, num_missing: int, previous: asyncio.Task[None] | None) -> None:
        """Begin to collect the groups of a step. `previous` ends with the step before."""
        self._previous = previous
        if previous is not None:
            previous.add_done_callback(lambda _: self._changed.notify())
        self._may_lend, self._has_lent, self.parts = True, False, ()
        self._complete_at_s = None
        self._policy.missing(num_missing, begins=True)

    def missing(self, num_groups: int) -> None:
        """Record how many groups the step lacks now."""
        self._policy.missing(num_groups)
        if num_groups == 0:
            self._complete_at_s = self._state.clock()

    def holds(self) -> bool:
        """Return whether the groups of the step wait, because the devices are or will be lent."""
        if not self._may_lend:
            return False
        return self._decide().action in ("hold", "lend")

    def sends_part(self, num_groups: int) -> None:
        """Record that a part of the step goes to the trainer, which cannot lend from then on."""
        if self._may_lend and not self._has_lent:
            self._state.observer.not_lent(self._policy.reason)
        self._may_lend = False
        self._policy.trains()
        self.parts = [*self.parts, num_groups]

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the time of forward and backward passes, which may overlap."""
        if not self._num_running:
            self._busy_since_s = self._state.clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._busy_s += self._state.clock() - self._busy_since_s

    def trained(self, parts: Sequence[int]) -> None:
        """Record the end of a step that was sent in parts of so many groups."""
        seconds, self._busy_s = self._busy_s, 0.0
        self._policy.trained(seconds, num_parts=len(parts), num_missing_first=sum(parts[1:]))

    def loaded(self, seconds: float) -> None:
        """Record the time in which a replica has loaded new weights."""
        self._policy.loaded(seconds)

    def sampled(self, num_tokens: int) -> None:
        """Record tokens that replicas have sampled, own or borrowed."""
        self._policy.sampled(num_tokens)

    async def next_groups(self, tasks: asyncio.TaskGroup, groups: Subscription) -> RowBatch | None:
        """Take the next groups, or return None when the devices must be taken back."""
        while (batch := groups.take_now()) is None:
            after_s = None
            if self._may_lend:
                decision = self._decide()
                after_s = decision.after_s
                if decision.action == "lend":
                    self._lend(tasks)
                    continue
                if decision.action == "take_back":
                    return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await first_of(groups.offered, self._changed)
        return batch

    async def take_back(self) -> None:
        """Let the borrowed replicas sleep; the trainer has its devices afterwards."""
        state, policy, hand_over = self._state, self._policy, self._hand_over
        start_s = state.clock()
        self._is_wanted = True
        if hand_over is not None and not hand_over.done():
            await asyncio.wait({hand_over}, timeout=policy.limit_s)
            hand_over.cancel()
            await asyncio.wait({hand_over})
        await self._replicas.sleep(policy.limit_s)
        self._hand_over = None
        now_s = state.clock()
        late_s = 0.0 if self._complete_at_s is None else now_s - self._complete_at_s
        policy.gave_back(now_s - start_s, late_s=late_s)
        num_rollouts = self._replicas.num_finished - self._num_finished
        state.observer.devices_lent(now_s - self._lent_at_s, num_rollouts=num_rollouts)
        state.progress.notify()

    def _decide(self) -> Decision:
        is_idle = self._previous is None or self._previous.done()
        replicas = self._replicas
        return self._policy.decide(
            is_idle=is_idle, num_borrowed=replicas.num_left, is_sampling=replicas.is_sampling
        )

    def _lend(self, tasks: asyncio.TaskGroup) -> None:
        self._lent_at_s = self._state.clock()
        self._num_finished = self._replicas.num_finished
        self._has_lent, self._is_wanted = True, False
        self._policy.lends()
        self._hand_over = tasks.create_task(self._hand_devices_over())

    async def _hand_devices_over(self) -> None:
        await self._release_trainer()
        num_awake = 0 if self._is_wanted else await self._replicas.wake(self._policy.limit_s)
        seconds = self._state.clock() - self._lent_at_s
        self._policy.handed_over(seconds, num_awake=num_awake)
        self._changed.notify()
        self._state.progress.notify()
