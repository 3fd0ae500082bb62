"""The training side of the controller: groups to micro-batches, optimizer steps, weights out.

store ─► groups with advantages ─► parts of a step ─► ranks ─► optimizer step ─► publish

The learner answers its calls in the order in which they were made. So the optimizer step and the
publication are asked for right behind a step's last part, and the next step's parts right behind
those: the trainer never waits for an answer to travel.

Rows stay in the store until their optimizer step is done. So when the learner dies, and goes on
from where it was after the last step, everything that it had been handed since is handed out again.
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
from rlsys.errors import first_error
from rlsys.types import StepResult, WeightManifest
from rlsys.workers import Learner, LearnerDied, RowsLost, TrainTask

# Parts of a step handed to the trainer at a time: one that runs, and the next that waits for it.
MAX_PARTS_IN_FLIGHT = 2

# A trainer that dies so often, without an optimizer step in between, is not started again.
MAX_FRUITLESS_LIVES = 5


class TrainingSide:
    """`publish` is told of new weights, `checkpoint` saves what belongs to the step that it is
    told, `roll_back` takes the run back to a step."""

    def __init__(
        self,
        state: RunState,
        learner: Learner,
        *,
        publish: Callable[[WeightManifest], None],
        roll_back: Callable[[int], None],
        checkpoint: Callable[[int], Awaitable[None]],
    ) -> None:
        config = state.config
        self._state = state
        self._learner = learner
        self._publish = publish
        self._roll_back = roll_back
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
        self._cells: dict[int, Cell] = {}  # of rows that were taken
        self._taken: dict[int, ReadyGroup] = {}  # groups that were taken and not trained yet
        self._handed_out: set[int] = set()  # those of them that the learner may have read
        self._lost: set[int] = set()  # and those of these whose rows are lost since
        self._num_handed_out = state.step  # steps of which the learner has every part
        self._in_flight: deque[asyncio.Task[None]] = deque()  # parts, without an answer yet
        self._checkpointed = state.step

    def has_taken(self, group_id: int) -> bool:
        """The group is part of a step that is under way, or of the next."""
        return group_id in self._taken

    def describe(self) -> str:
        return f"step {self._num_handed_out + 1} lacks {self._assembler.num_wanted} groups"

    async def run(self) -> None:
        """Train to the last step, over deaths of the learner. Raises any other error, and a death
        after MAX_FRUITLESS_LIVES without a step between them."""
        death: LearnerDied | RowsLost | None = None
        num_fruitless = 0
        while True:
            step = self._state.step
            try:
                if death is not None:
                    await self._recover(death)
                await self._run_steps()
                return
            except (LearnerDied, RowsLost, BaseExceptionGroup) as error:
                death = _death_of_the_learner(error)
                if death is None:
                    raise first_error(error) from None
                num_fruitless = 1 if self._state.step > step else num_fruitless + 1
                if num_fruitless > MAX_FRUITLESS_LIVES:
                    raise death from None

    async def _run_steps(self) -> None:
        """Consumes groups with advantages, in the order of asynchrony.order. Waits for the next
        group of the step; a group's last reward unblocks it."""
        async with asyncio.TaskGroup() as tasks:
            finishing: asyncio.Task[None] | None = None
            await self._checkpoint_if_due()  # where the learner died before it was written
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
                self._handed_out.update(ready.group_id for share in part for ready in share)
                if len(self._in_flight) == MAX_PARTS_IN_FLIGHT:
                    await self._in_flight.popleft()
                self._in_flight.append(tasks.create_task(self._train(part)))

    def shard_lost(self, group_id: int) -> bool:
        """A group's rows are gone. Whether it is to be issued again at once: not if the learner may
        have read it, which goes on as if nothing had happened unless it fails."""
        if group_id in self._handed_out:
            self._lost.add(group_id)
            return False
        if group_id in self._taken:
            self._assembler.take_back(group_id)
            self._forget(group_id)
        return True

    async def _recover(self, death: LearnerDied | RowsLost) -> None:
        """Start the learner again, and take back what it was handed since the step that it then
        has behind it."""
        state = self._state
        start = state.clock()
        self._in_flight.clear()
        reached = state.step
        step = await self._learner.restart(reached)
        if step == reached:
            for group_id in sorted(self._lost):
                self._forget(group_id)
                state.issue_again(state.groups[group_id])
            state.store.requeue("train", sorted(self._cells))
            self._taken.clear()
            self._cells.clear()
        else:
            self._roll_back(step)
            for group_id in list(self._taken):
                self._forget(group_id)
        self._handed_out.clear()
        self._lost.clear()
        self._assembler.reset()
        self._num_handed_out = step
        self._checkpointed = min(self._checkpointed, step)
        state.observer.learner_restarted(
            str(death), step=step, lost_steps=reached - step, seconds=state.clock() - start
        )
        state.progress.notify()
        self._publish(await self._learner.publish())

    def _forget(self, group_id: int) -> None:
        """Let a group's rows go."""
        rows = self._taken.pop(group_id).row_ids
        for row in rows:
            del self._cells[row]
        self._state.store.release("train", rows)

    def _fresh(self, batch: RowBatch) -> list[ReadyGroup]:
        """Drops groups with a token older than the bound: none may enter a gradient."""
        state, size = self._state, self._state.config.group_size
        ready = []
        for start in range(0, len(batch), size):
            rows = batch.rows[start : start + size]
            group = state.groups[batch.group_ids[start]]
            if group.oldest_version < state.oldest_version_allowed(self._num_handed_out):
                state.drop(group.group_id, "stale")
                state.store.release("train", rows)
                continue
            cells = batch.cells["token_ids"][start : start + size]
            self._cells.update(zip(rows, cells, strict=True))
            self._taken[group.group_id] = ReadyGroup(
                group_id=group.group_id, row_ids=tuple(rows), num_tokens=group.num_tokens
            )
            ready.append(self._taken[group.group_id])
        return ready

    async def _train(self, shares: list[list[ReadyGroup]]) -> None:
        await self._learner.accumulate(
            [[task for ready in share for task in self._tasks(ready)] for share in shares]
        )
        self._state.progress.notify()

    def _tasks(self, ready: ReadyGroup) -> list[TrainTask]:
        group = self._state.groups[ready.group_id]
        return [
            TrainTask(
                cell=self._cells[row],
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
        # No wait within: a step is done as a whole, or not at all.
        state.step += 1
        state.gate.trainer_at(state.step)
        trained = [state.groups.pop(group_id) for group_id in sorted(group_ids)]
        state.ledger.train(
            {group.group_id: group.oldest_version for group in trained}, step=state.step
        )
        for group_id in group_ids:
            self._forget(group_id)
        self._handed_out.difference_update(group_ids)
        self._lost.difference_update(group_ids)
        self._drop_what_comes_too_late()
        state.observer.step_trained(TrainedStep(step=state.step, result=result, groups=trained))
        state.progress.notify()
        self._publish(await published)
        await self._checkpoint_if_due()

    async def _checkpoint_if_due(self) -> None:
        step = self._state.step
        if self._checkpoint_is_due(step) and self._checkpointed < step:
            await self._checkpoint(step)
            self._checkpointed = step
            self._state.progress.notify()

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


def _death_of_the_learner(error: BaseException) -> LearnerDied | RowsLost | None:
    """The death that all errors of a group come from; None if there is another one among them."""
    if isinstance(error, BaseExceptionGroup):
        deaths, others = error.split((LearnerDied, RowsLost))
        return None if others or not deaths else _death_of_the_learner(first_error(deaths))
    return error if isinstance(error, LearnerDied | RowsLost) else None
