"""Frozen models between sampling and training: references, teachers, reward models, judges.

store ─► rows that a stage can read ─► Pool ─► store: the column of the stage
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from rlsys.controller.batch_loop import each_batch
from rlsys.controller.failures import FailedRewards
from rlsys.controller.state import RunState
from rlsys.controller.worker_protocols import Pool, RowsLost, StepRowsRef, Written
from rlsys.dataflow.graph.stages import JudgeStage, RowStage
from rlsys.dataflow.store.stream_store import RowBatch

# Batches of each worker: one that runs and one that waits.
CALLS_PER_WORKER = 2

# Delay before unreadable rows are requested again. The death of their shard is reported soon.
RETRY_S = 0.5


class InferenceSide:
    """The loops of all stages that run frozen models; `pools` by the name of the model."""

    def __init__(
        self, state: RunState, stages: Sequence[RowStage], pools: Mapping[str, Pool]
    ) -> None:
        self._state = state
        self._failures = {stage.name: FailedRewards(state) for stage in stages}
        self._loops: dict[str, Coroutine[Any, Any, None]] = {}
        for stage in stages:
            pool = pools[stage.model.name]
            max_batches = CALLS_PER_WORKER * pool.num_workers
            share = -(-state.config.rollouts_per_step // max_batches)
            rollouts = state.store.subscribe(stage.name, at_most=share)
            begin = partial(self._infer, stage, pool)
            self._loops[stage.name] = each_batch(
                state, stage.name, rollouts, begin, max_batches=max_batches
            )

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines of all loops, by name."""
        return self._loops

    def _infer(self, stage: RowStage, pool: Pool, batch: RowBatch) -> Coroutine[Any, Any, None]:
        return self._run(stage, pool, batch, self._rows(stage, batch))

    async def _run(self, stage: RowStage, pool: Pool, batch: RowBatch, rows: StepRowsRef) -> None:
        """Run a batch and write its results; requeue its rows if they or the results were lost.

        Rows whose shard died are dropped once that death is reported.
        """
        store = self._state.store
        try:
            written = await pool.run(rows)
        except RowsLost:
            await asyncio.sleep(RETRY_S)
            store.requeue(stage.name, batch.rows)
            return
        if written.block is not None and store.is_lost(written.block.shard):
            store.requeue(stage.name, batch.rows)
            return
        for place, failure in written.failures.items():
            self._failures[stage.name].failed(batch.rows[place], batch.group_ids[place], failure)
        self._write(stage, batch, written)
        store.release(stage.name, batch.rows)
        self._state.progress.notify()

    def _rows(self, stage: RowStage, batch: RowBatch) -> StepRowsRef:
        groups = [self._state.groups[group_id] for group_id in batch.group_ids]
        origins = []
        if isinstance(stage, JudgeStage):
            origins = [group.origin(i) for group, i in zip(groups, batch.indices, strict=True)]
        return StepRowsRef(
            cells=batch.cells,
            scalars=batch.scalars,
            group_ids=batch.group_ids,
            group_sizes=[len(group.rows) for group in groups],
            group_num_tokens=[0] * len(batch),  # unknown: groups may be incomplete
            origins=origins,
        )

    def _write(self, stage: RowStage, batch: RowBatch, written: Written) -> None:
        """Write the results of live rows; discard the bytes of the others."""
        store = self._state.store
        live = [place for place, row in enumerate(batch.rows) if store.is_live(row)]
        block = written.block
        if block is not None and len(live) < len(batch):
            store.discard(block, set(range(len(batch))).difference(live))
        if live:
            store.write(
                stage.name,
                [batch.rows[place] for place in live],
                block=block,
                places=live if block is not None else None,
                scalars={name: [x[place] for place in live] for name, x in written.scalars.items()},
            )
            groups = {batch.group_ids[place] for place in live}
            if any(store.has_written(stage.name, self._state.groups[one].rows) for one in groups):
                self._failures[stage.name].reset()
