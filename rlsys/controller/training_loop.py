"""The training side of the controller: groups to micro-batches, optimizer steps, weights out.

store ─► groups ─► [ step stages ] ─► parts of a step ─► ranks ─► optimizer step ─► publish

A part is sent to the trainers as soon as its micro-batches are full. If a stage works on the whole
step, or if the step has several updates, training waits for the last group of the step.

A trainer executes its calls in the order in which they were made. So the optimizer step and the
publication are requested right after a step's last part, and the next step's parts right after
those. The trainer never waits for an answer to arrive.

If replicas share the devices (device_sharing.py), a step begins when it has all its groups. It
finishes completely before the devices are released. If replicas borrow the devices (lender.py), the
groups of a step are held until the devices are taken back.

Rows stay in the store until their optimizer step is done. If a trainer dies and continues from the
last step, all parts since then are sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlsys import metrics
from rlsys.algorithms import loss_inputs
from rlsys.algorithms.batch_functions import run_batch_function
from rlsys.common.supervision import TRAINER, Supervisor
from rlsys.config import TrainedRoleConfig, TrainerConfig
from rlsys.controller.adaptive_coefficients import Coefficients
from rlsys.controller.device_sharing import DeviceSharing
from rlsys.controller.lender import Lending
from rlsys.controller.state import RunState, TrainedStep
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.controller.step_rows import StepRows
from rlsys.controller.trainer_group import TrainerGroup
from rlsys.controller.worker_protocols import RowsLost, StepRowsRef, TrainerDied, Written
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import (
    VERSIONS_COLUMN,
    ControlStage,
    GenerateStage,
    InferStage,
    PerBatchStage,
    StepStage,
    TrainStage,
)
from rlsys.dataflow.scheduling.batching import ReadyGroup, StepAssembler, mini_batches, split
from rlsys.dataflow.scheduling.microbatch_plan import Budget, plan_micro_batches
from rlsys.dataflow.store.selection import FIRST_COMPLETE, IN_ORDER, whole_groups
from rlsys.dataflow.store.stream_store import RowBatch
from rlsys.errors import first_error
from rlsys.types import StepResult, WeightManifest

# Parts of a step at the trainer at a time: one that runs and one that waits.
MAX_PARTS_IN_FLIGHT = 2


class TrainingSide:
    """The loop that trains steps.

    Args:
        publish: Called with new weights.
        roll_back: Called to undo the steps after a step.
        release_replicas: Frees the shared devices.
        lender: Lends the devices to borrowed replicas while training would wait.
        between: Hooks between optimizer steps.
        coefficients: Coefficients of a resumed run's checkpoint, by stage.
    """

    def __init__(
        self,
        state: RunState,
        devices: DeviceSharing,
        trainer_proxies: TrainerGroup,
        flow: RunGraph,
        *,
        publish: Callable[[WeightManifest], None],
        roll_back: Callable[[int], None],
        release_replicas: Callable[[], Awaitable[None]],
        lender: Lending,
        between: Sequence[BetweenSteps],
        coefficients: Mapping[str, float],
    ) -> None:
        config = state.config
        self._state = state
        self._devices = devices
        self._has_devices = not devices.are_shared
        self._pending_weights: WeightManifest | None = None  # published with the devices' release
        self._trainer_group = trainer_proxies
        self._step_stages = flow.step_stages
        self._train_stages = {stage.model.name: stage for stage in flow.all(TrainStage)}
        self.coefficients = Coefficients(
            flow.all(ControlStage), step=state.step, initial_values=coefficients
        )
        self._trainers = {
            name: _trainer_config(stage, config.trainer)
            for name, stage in self._train_stages.items()
        }
        self._samples = bool(flow.all(GenerateStage))
        self._updates = max(trainer.updates_per_step for trainer in self._trainers.values())
        self._waits_for_step = bool(self._step_stages) or self._updates > 1 or devices.are_shared
        self._publish = publish
        self._roll_back = roll_back
        self._release_replicas = release_replicas
        self._lender = lender
        self._between = between
        self._assembler = StepAssembler(
            groups_per_step=config.prompts_per_step,
            num_ranks=trainer_proxies.main.num_data,
            num_stages=trainer_proxies.main.num_stages,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            stream=config.asynchrony.stream and not self._waits_for_step,
        )
        order = IN_ORDER if config.asynchrony.order == "issued" else FIRST_COMPLETE
        self._to_train = state.store.subscribe(
            "train", at_most=config.group_size, selection=whole_groups(order)
        )
        self._rows = StepRows(state.store)
        self._taken: dict[int, ReadyGroup] = {}  # groups that were taken and not trained yet
        self._sent: set[int] = set()  # those of them that the trainer may have read
        self._lost: set[int] = set()  # those of the sent ones whose rows are lost
        self._num_sent = state.step  # number of steps whose parts are all sent
        self._in_flight: deque[list[asyncio.Task[None]]] = deque()  # parts without an answer
        self._has_begun = False

    def has_taken(self, group_id: int) -> bool:
        """Return whether a group is part of the current or the next step."""
        return group_id in self._taken

    async def hold(self) -> None:
        """Let all trainers copy their states for a checkpoint."""
        await self._trainer_group.hold()

    def stop(self) -> None:
        """Make the step whose groups are being collected the last one.

        Before `run`, if no group is open, no step is trained.
        """
        state = self._state
        if not self._has_begun and not state.to_reissue:
            state.end_after(state.step)
            state.gate.close()
        else:
            state.end_after(self._num_sent + 1)

    def describe(self) -> str:
        """Return what training waits for, for a stall's message."""
        missing = f"step {self._num_sent + 1} lacks {self._assembler.num_wanted} groups"
        is_active = self._devices.is_training_active
        return f"training has the devices, {missing}" if is_active else missing

    async def run(self) -> None:
        """Train to the last step; restart trainers that die.

        Raises any other error, and the last of too many deaths without a step in between.
        """
        self._has_begun = True
        death: TrainerDied | RowsLost | None = None
        supervisor = Supervisor[str](TRAINER, clock=self._state.clock)
        while True:
            step = self._state.step
            try:
                if death is not None:
                    await self._recover(death)
                await self._run_steps()
                return
            except (TrainerDied, RowsLost, BaseExceptionGroup) as error:
                death = _trainer_death(error)
                if death is None:
                    raise first_error(error) from None
                if self._state.step > step:
                    supervisor.progressed()
                if supervisor.died(str(death)).gives_up:
                    raise death from None

    async def _run_steps(self) -> None:
        """Consume groups with advantages, in the order of asynchrony.order.

        The loop waits for the next group of the step. The last reward of a group unblocks it.
        """
        async with asyncio.TaskGroup() as tasks:
            # Notices a death even without calls: a replica may be waiting for its weights.
            watching = [tasks.create_task(one.watch()) for one in self._trainer_group.values()]
            finishing: asyncio.Task[None] | None = None
            await self._run_due_hooks()  # those that a death interrupted
            while self._num_sent < self._state.last_step:
                self._lender.begin_step(self._assembler.num_wanted, finishing)
                await self._send_step(tasks)
                stepped = [
                    tasks.create_task(trainer_proxy.optimizer_step())
                    for trainer_proxy in self._trainer_group.values()
                ]
                published = [
                    tasks.create_task(call) for call in self._publications(self._num_sent + 1)
                ]
                if finishing is not None:
                    await finishing
                group_ids = self._assembler.group_ids
                self._assembler.finish()
                self._num_sent += 1
                finishing = tasks.create_task(
                    self._finish_step(group_ids, stepped, published, self._lender.parts)
                )
                due = any(one.is_due(self._num_sent) for one in self._between)
                if due or self._devices.are_shared:
                    await finishing
            if finishing is not None:
                await finishing
            for watch in watching:
                watch.cancel()

    async def _send_step(self, tasks: asyncio.TaskGroup) -> None:
        """Send the parts of one step to the trainers, as its groups arrive."""
        while not self._assembler.is_finished:
            if self._assembler.num_wanted:
                if (batch := await self._next_groups(tasks)) is None:
                    await self._take_devices()
                else:
                    self._assembler.add(self._take_fresh_groups(batch))
                    self._lender.missing(self._assembler.num_wanted)
            if self._waits_for_step and self._assembler.num_wanted:
                continue
            if self._lender.holds():
                continue
            await self._take_devices()
            if self._waits_for_step and not await self._is_prepared(tasks):
                continue
            while (part := self._assembler.next_part()) is not None:
                self._lender.sends_part(len(part))
                self._sent.update(ready.group_id for ready in part)
                if len(self._in_flight) == MAX_PARTS_IN_FLIGHT:
                    await asyncio.wait(self._in_flight.popleft())
                # Tasks start in the order of their creation, so calls keep their order.
                calls = [
                    tasks.create_task(self._call_and_notify(call)) for call in self._calls(part)
                ]
                self._in_flight.append(calls)

    async def _next_groups(self, tasks: asyncio.TaskGroup) -> RowBatch | None:
        """Take the groups that are ready, or wait for the next; release the devices meanwhile.

        None: the devices must be taken back from borrowed replicas.
        """
        if self._devices.are_shared:
            if (batch := self._to_train.take_now()) is not None:
                return batch
            await self._release_devices()
        with self._state.waiting("train", "groups"):
            return await self._lender.next_groups(tasks, self._to_train)

    async def _take_devices(self) -> None:
        if self._lender.is_lent:
            with self._state.waiting("train", metrics.DEVICES):
                await self._lender.take_back()
        if self._has_devices:
            return
        with self._state.waiting("train", metrics.DEVICES):
            await self._devices.take()
            await self._release_replicas()
        self._has_devices = True
        self._state.progress.notify()

    async def _release_devices(self) -> None:
        """Release the devices, if training has them, and publish weights for the replicas."""
        if not self._has_devices:
            return
        with self._state.waiting("train", metrics.DEVICES):
            manifest = self._pending_weights or await self._published(self._state.step)
            await self._trainer_group.main.release()
        self._has_devices = False
        self._devices.release()
        self._publish(manifest)
        self._state.progress.notify()

    def _announce(self, manifest: WeightManifest) -> None:
        """Publish new weights now, or when shared devices are released."""
        if self._devices.are_shared:
            self._pending_weights = manifest
        else:
            self._publish(manifest)

    async def _is_prepared(self, tasks: asyncio.TaskGroup) -> bool:
        """Run the step stages; return whether the step still has all its groups."""
        if self._assembler.num_wanted:
            return False
        groups = self._assembler.groups
        self._rows.discard_computed(groups)
        for stage in self._step_stages:
            with self._state.waiting("train", stage.name):
                # As a task, so that it starts after earlier calls.
                await tasks.create_task(self._run_step_stage(stage, groups))
            if self._assembler.groups != groups:  # a group was lost meanwhile
                return False
        return True

    async def _run_step_stage(self, stage: StepStage, groups: Sequence[ReadyGroup]) -> None:
        reads = [column.name for column in stage.reads]
        if isinstance(stage, InferStage):
            trainer_proxy = self._trainer_group[stage.model.name]
            shares = split(groups, trainer_proxy.num_data)
            written = await trainer_proxy.infer(
                stage.writes[0].name,
                [self._rows.rows(share, reads) for share in shares],
                adapters=stage.adapters,
            )
            for share, columns in zip(shares, written, strict=True):
                self._rows.add(share, columns)
        elif isinstance(stage, ControlStage):
            rows = self._rows.rows(groups, reads)
            self._rows.add(groups, self.coefficients.run(stage, rows, step=self._num_sent))
        elif stage.has_tokens:
            rows = self._rows.rows(groups, dict.fromkeys((*reads, VERSIONS_COLUMN)))
            self._rows.add(groups, await self._trainer_group.main.compute(stage.name, rows))
        else:
            self._rows.add(groups, _run_batch_function(stage, self._rows.rows(groups, reads)))

    def shard_lost(self, group_id: int) -> bool:
        """Forget a group whose rows are lost; return whether to issue it again at once.

        A group that the trainer may have read is not issued again unless the trainer fails.
        """
        if group_id in self._sent:
            self._lost.add(group_id)
            return False
        if group_id in self._taken:
            self._assembler.take_back(group_id)
            self._forget(group_id)
        return True

    async def _recover(self, death: TrainerDied | RowsLost) -> None:
        """Restart the trainers and take back the groups that were sent since the restored step."""
        state = self._state
        start = state.clock()
        self._in_flight.clear()
        self._pending_weights = None  # they are gone with the trainer
        await self._take_devices()
        for one in self._between:
            await one.settle()
        reached = state.step
        with state.waiting("train", metrics.RESTART):
            step = await self._trainer_group.restart(reached)
        if step == reached:
            for group_id in sorted(self._lost):
                self._forget(group_id)
                state.reissue(state.groups[group_id])
            taken = sorted(row for ready in self._taken.values() for row in ready.row_ids)
            state.store.requeue("train", taken)
            for group_id in self._taken:
                self._rows.forget(group_id)
            self._taken.clear()
        else:
            self._roll_back(step)
            for group_id in list(self._taken):
                self._forget(group_id)
        self._sent.clear()
        self._lost.clear()
        self._assembler.reset()
        # The layout of the ranks may have changed.
        self._assembler.num_ranks = self._trainer_group.main.num_data
        self._assembler.num_stages = self._trainer_group.main.num_stages
        self._num_sent = step
        for one in self._between:
            one.go_back(step)
        state.observer.trainer_restarted(
            str(death), step=step, lost_steps=reached - step, seconds=state.clock() - start
        )
        state.progress.notify()
        self._announce(await self._published(step))

    async def _published(self, step: int) -> WeightManifest:
        """Publish the weights after `step` optimizer steps and return their manifest."""
        return self._trainer_group.join_manifests(await asyncio.gather(*self._publications(step)))

    def _publications(self, step: int) -> Iterator[Coroutine[Any, Any, WeightManifest]]:
        """Yield the publications of all models that sample, the main one first.

        Create their tasks at once, so that they start after earlier calls.
        """
        if self._samples:
            for trainer_proxy in self._trainer_group.samplers:
                yield trainer_proxy.publish()
        else:
            yield _without_weights(step)

    def _forget(self, group_id: int) -> None:
        """Release the rows of a group."""
        self._rows.forget(group_id)
        self._state.store.release("train", self._taken.pop(group_id).row_ids)

    def _take_fresh_groups(self, batch: RowBatch) -> list[ReadyGroup]:
        """Take the groups of a batch; drop those with a token older than the staleness bound."""
        state, size = self._state, self._state.config.group_size
        ready = []
        for start in range(0, len(batch), size):
            rows = batch.rows[start : start + size]
            group = state.groups[batch.group_ids[start]]
            if group.oldest_version < state.oldest_version_allowed(self._num_sent):
                state.drop(group.group_id, "stale")
                state.store.release("train", rows)
                continue
            self._rows.take(batch, slice(start, start + size), group)
            self._taken[group.group_id] = ReadyGroup(
                group_id=group.group_id, row_ids=tuple(rows), lengths=group.lengths
            )
            ready.append(self._taken[group.group_id])
        return ready

    def _calls(self, part: Sequence[ReadyGroup]) -> Iterator[Coroutine[Any, Any, Any]]:
        """Yield all calls for these groups, in order, except for the step's last update."""
        for model, trainer_proxy in self._trainer_group.items():
            trainer = self._trainers[model]
            stage = self._train_stages[model]
            columns = [column.name for column in stage.trains_on]
            updates = mini_batches(
                part,
                num_minibatches=trainer.num_minibatches,
                num_epochs=trainer.num_epochs,
                seed=self._state.config.seed + self._num_sent,
            )
            for number, groups in enumerate(updates):
                if number:
                    yield trainer_proxy.optimizer_step(last=False)
                micro_batches = [
                    [self._rows.some(share, columns, seats=stage.seats) for share in shares]
                    for shares in self._micro_batches(model, groups)
                ]
                if trainer_proxy.num_stages > 1:
                    yield trainer_proxy.accumulate(micro_batches)
                else:
                    for one in micro_batches:
                        yield trainer_proxy.accumulate([one])

    def _micro_batches(
        self, model: str, groups: Sequence[ReadyGroup]
    ) -> Iterator[list[list[tuple[ReadyGroup, int]]]]:
        """Yield micro-batches: for each rank of a model, groups and places of rows in them."""
        trainer_proxy, trainer = self._trainer_group[model], self._trainers[model]
        plan = plan_micro_batches(
            [ready.lengths for ready in groups],
            Budget(
                num_ranks=trainer_proxy.num_data,
                max_tokens=trainer.micro_batch_tokens,
                attention_tokens=trainer_proxy.attention_tokens,
            ),
            whole_groups=loss_inputs.whole_groups(self._train_stages[model].loss),
        )
        for shares in plan:
            yield [[(groups[group], row) for group, row in share] for share in shares]

    async def _call_and_notify(self, call: Coroutine[Any, Any, Any]) -> None:
        with self._lender.passes():
            await call
        self._state.progress.notify()

    async def _finish_step(
        self,
        group_ids: Sequence[int],
        stepped: Sequence[Awaitable[StepResult]],
        published: Sequence[Awaitable[WeightManifest]],
        parts: Sequence[int],
    ) -> None:
        state = self._state
        result = self._trainer_group.merge_results([await result for result in stepped])
        self._lender.trained(parts)
        # No await until the step is recorded: it is recorded as a whole or not at all.
        state.step += 1
        state.gate.trainer_at(state.step)
        trained = [state.groups.pop(group_id) for group_id in sorted(group_ids)]
        columns = {group_id: self._rows.scalars(group_id) for group_id in group_ids}
        weights = state.step - 1  # the version before this step; also for groups without tokens
        state.ledger.train(
            {group.group_id: min(group.oldest_version, weights) for group in trained},
            step=state.step,
        )
        for group_id in group_ids:
            self._forget(group_id)
        self._sent.difference_update(group_ids)
        self._lost.difference_update(group_ids)
        self._drop_stale_groups()
        state.observer.step_trained(
            TrainedStep(step=state.step, result=result, groups=trained, columns=columns)
        )
        state.progress.notify()
        self._announce(
            self._trainer_group.join_manifests([await manifest for manifest in published])
        )
        await self._run_due_hooks()

    async def _run_due_hooks(self) -> None:
        for one in self._between:
            if one.wants(self._state.step):
                await self._take_devices()
                with self._state.waiting("train", one.name):
                    await one.after(self._state.step)
                self._state.progress.notify()

    def _drop_stale_groups(self) -> None:
        """Drop groups that are too old for the next step; after the last step, all groups."""
        state = self._state
        if state.step == state.last_step:
            state.drop_rest("surplus")
            return
        oldest_allowed = state.oldest_version_allowed(state.step)
        chosen = set(self._assembler.group_ids)  # checked by their tokens' versions already
        for group_id, group in list(state.groups.items()):
            if group.version < oldest_allowed and group_id not in chosen:
                state.drop(group_id, "stale")


async def _without_weights(step: int) -> WeightManifest:
    return WeightManifest(version=step)


def _trainer_config(stage: TrainStage, policys: TrainerConfig) -> TrainerConfig:
    config = stage.model.config
    return config.trainer if isinstance(config, TrainedRoleConfig) else policys


def _run_batch_function(stage: PerBatchStage, rows: StepRowsRef) -> Written:
    """Run the function of a stage over one value per row."""
    made = run_batch_function(
        stage.function,
        [torch.tensor(rows.scalars[column.name], dtype=torch.float32) for column in stage.reads],
        stage=stage.name,
        group_ids=rows.group_ids,
        loss_masks=None,
        writes=[column.name for column in stage.writes],
        per_token=False,
    )
    return Written(scalars={name: values.tolist() for name, values in made.items()})


def _trainer_death(error: BaseException) -> TrainerDied | RowsLost | None:
    """Return the death behind all errors of a group; None if there is any other error."""
    if isinstance(error, BaseExceptionGroup):
        deaths, others = error.split((TrainerDied, RowsLost))
        return None if others or not deaths else _trainer_death(first_error(deaths))
    return error if isinstance(error, TrainerDied | RowsLost) else None
