"""The training side of the controller: groups to micro-batches, optimizer steps, weights out.

store ─► groups with advantages ─► parts of a step ─► ranks ─► optimizer step ─► publish

The learner answers its calls in the order in which they were made. So the optimizer step and the
publication are asked for right behind a step's last part, and the next step's parts right behind
those: the trainer never waits for an answer to travel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from rlsys.controller.state import RunState, TrainedStep
from rlsys.dataflow.batching import ReadyGroup, StepAssembler
from rlsys.dataflow.blocks import Cell
from rlsys.dataflow.selection import FIRST_COMPLETE, IN_ORDER, whole_groups
from rlsys.dataflow.store import RowBatch
from rlsys.types import StepResult, WeightManifest
from rlsys.workers import Learner, RowsLost, TrainTask

# Parts of a step handed to the trainer at a time: one that runs, and the next that waits for it.
MAX_PARTS_IN_FLIGHT = 2


class TrainingSide:
    def __init__(
        self,
        state: RunState,
        learner: Learner,
        *,
        publish: Callable[[WeightManifest], None],
        checkpoint: Callable[[int], Awaitable[None]],
    ) -> None:
        config = state.config
        self._state = state
        self._learner = learner
        self._publish = publish
        self._checkpoint = checkpoint
        self._assembler = StepAssembler(
            groups_per_step=config.prompts_per_step,
            num_ranks=config.trainer.num_ranks,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            stream=config.asynchrony.stream,
        )
        order = IN_ORDER if config.asynchrony.order == "issued" else FIRST_COMPLETE
        self._to_train = state.store.subscribe(
            "train", at_most=config.group_size, selection=whole_groups(order)
        )
        self._cells: dict[int, Cell] = {}  # of rows that wait for their part
        self._num_handed_out = state.step  # steps of which the learner has every part
        self._in_flight: deque[asyncio.Task[None]] = deque()  # parts, without an answer yet
        self._being_read: set[int] = set()  # their groups

    def describe(self) -> str:
        return f"step {self._num_handed_out + 1} lacks {self._assembler.num_wanted} groups"

    async def run(self) -> None:
        """Consumes groups with advantages, in the order of asynchrony.order. Waits for the next
        group of the step; a group's last reward unblocks it."""
        async with asyncio.TaskGroup() as tasks:
            finishing: asyncio.Task[None] | None = None
            while self._num_handed_out < self._state.config.num_steps:
                await self._hand_out(tasks)
                stepped = tasks.create_task(self._learner.optimizer_step())
                published = tasks.create_task(self._learner.publish())
                if finishing is not None:
                    await finishing
                group_ids = self._assembler.group_ids
                self._assembler.finish()
                self._num_handed_out += 1
                finishing = tasks.create_task(self._finish_step(group_ids, stepped, published))
                if self._checkpoint_is_due(self._num_handed_out):
                    await finishing  # what is saved belongs to one step

    async def _hand_out(self, tasks: asyncio.TaskGroup) -> None:
        """Send the learner the parts of one step, as its groups come."""
        while not self._assembler.is_finished:
            if self._assembler.num_wanted:
                with self._state.waiting("train", "groups"):
                    batch = await self._to_train.take(timeout_s=None)
                self._assembler.add(self._fresh(batch))
            while (part := self._assembler.next_part()) is not None:
                if len(self._in_flight) == MAX_PARTS_IN_FLIGHT:
                    await self._in_flight.popleft()
                self._being_read.update(ready.group_id for share in part for ready in share)
                self._in_flight.append(tasks.create_task(self._train(part)))

    def shard_lost(self, group_id: int, shard: str) -> None:
        """A group's rows are gone: forget it. Raises RowsLost if the trainer may be reading it."""
        if group_id in self._being_read:
            raise RowsLost(
                f"shard {shard} of the store died with rows of group {group_id}, which the trainer "
                f"was reading for step {self._num_handed_out + 1}; resume from the newest "
                "checkpoint."
            )
        group = self._assembler.take_back(group_id)
        if group is None:
            return
        for row in group.row_ids:
            del self._cells[row]
        self._state.store.release("train", group.row_ids)

    def _fresh(self, batch: RowBatch) -> list[ReadyGroup]:
        """Drops groups with a token older than the bound: none may enter a gradient."""
        state, size = self._state, self._state.config.group_size
        ready = []
        for start in range(0, len(batch), size):
            rows = batch.rows[start : start + size]
            group = state.groups[batch.group_ids[start]]
            oldest_allowed = state.oldest_version_allowed(self._num_handed_out)
            if group.oldest_version < oldest_allowed:
                state.drop(group.group_id, "stale")
                state.store.release("train", rows)
                continue
            cells = batch.cells["token_ids"][start : start + size]
            self._cells.update(zip(rows, cells, strict=True))
            ready.append(
                ReadyGroup(
                    group_id=group.group_id, row_ids=tuple(rows), num_tokens=group.num_tokens
                )
            )
        return ready

    async def _train(self, shares: list[list[ReadyGroup]]) -> None:
        await self._learner.accumulate(
            [[task for ready in share for task in self._tasks(ready)] for share in shares]
        )
        groups = [ready for share in shares for ready in share]
        self._being_read.difference_update(ready.group_id for ready in groups)
        self._state.store.release("train", [row for ready in groups for row in ready.row_ids])
        self._state.progress.notify()

    def _tasks(self, ready: ReadyGroup) -> list[TrainTask]:
        group = self._state.groups[ready.group_id]
        return [
            TrainTask(
                cell=self._cells.pop(row),
                advantage=note.advantage,
                group_id=group.group_id,
                group_size=len(group.rollouts),
                group_num_tokens=group.num_completion_tokens,
            )
            for row, note in zip(ready.row_ids, group.rollouts, strict=True)
        ]

    async def _finish_step(
        self,
        group_ids: Sequence[int],
        stepped: Awaitable[StepResult],
        published: Awaitable[WeightManifest],
    ) -> None:
        state = self._state
        result = await stepped
        state.step += 1
        trained = [state.groups.pop(group_id) for group_id in sorted(group_ids)]
        state.ledger.train(
            {group.group_id: group.oldest_version for group in trained}, step=state.step
        )
        self._drop_what_comes_too_late()
        self._publish(await published)
        state.observer.step_trained(TrainedStep(step=state.step, result=result, groups=trained))
        if self._checkpoint_is_due(state.step):
            await self._checkpoint(state.step)
        state.progress.notify()

    def _checkpoint_is_due(self, step: int) -> bool:
        config = self._state.config
        regular = config.checkpoint_every and step % config.checkpoint_every == 0
        return bool(regular) or step == config.num_steps

    def _drop_what_comes_too_late(self) -> None:
        """Groups whose first tokens may be older than the next step may train on; after the last
        step, whatever is left of what was issued beyond it."""
        state = self._state
        if state.step == state.config.num_steps:
            state.drop_rest("surplus")
            return
        oldest_allowed = state.oldest_version_allowed(state.step)
        chosen = set(self._assembler.group_ids)  # for the next step, by their tokens' versions
        for group_id, group in list(state.groups.items()):
            if group.version < oldest_allowed and group_id not in chosen:
                state.drop(group_id, "stale")
