"""The controller's loops between generation and training: rewards, and functions over groups.

store ─► score ──► reward workers ──► store ─► per group ─► store
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlsys.algorithms.group_functions import run_group_function
from rlsys.common.user_functions import name_of
from rlsys.controller.batch_loop import each_batch
from rlsys.controller.failures import FailedRewards
from rlsys.controller.state import IMPLICIT_COLUMNS, RunningGroup, RunState
from rlsys.controller.worker_protocols import Score, Scorer, ScoreTask, Unreadable
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import PerGroupStage, ScoreStage
from rlsys.dataflow.store.selection import FIRST_COMPLETE, whole_groups
from rlsys.dataflow.store.stream_store import RowBatch, Subscription
from rlsys.errors import require
from rlsys.rewards import RewardFailure, RewardResult

# Concurrent calls to the scorer: enough that a slow rollout does not delay other batches.
MAX_SCORE_CALLS = 64


class ScoringSide:
    """The loops of the score stage and of functions over groups."""

    def __init__(self, state: RunState, scorer: Scorer, flow: RunGraph) -> None:
        self._state = state
        self._scorer = scorer
        self._failures = {stage.name: FailedRewards(state) for stage in flow.all(ScoreStage)}
        step_rows = state.config.rollouts_per_step
        self._loops: dict[str, Coroutine[Any, Any, None]] = {}
        for score in flow.all(ScoreStage):
            rollouts = state.store.subscribe(score.name, at_most=step_rows)
            self._loops[score.name] = each_batch(
                state,
                score.name,
                rollouts,
                partial(self._score, score),
                max_batches=MAX_SCORE_CALLS,
            )
        for stage in flow.all(PerGroupStage):
            groups = state.store.subscribe(
                stage.name, at_most=step_rows, selection=whole_groups(FIRST_COMPLETE)
            )
            self._loops[stage.name] = self._per_group(stage, groups)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines of all loops, by name."""
        return self._loops

    def _score(self, stage: ScoreStage, batch: RowBatch) -> Coroutine[Any, Any, None]:
        rows, tasks = batch.rows, [self._task(batch, i) for i in range(len(batch))]
        return self._scorer.score(tasks, lambda scores: self._scored(stage, rows, tasks, scores))

    def _scored(
        self,
        stage: ScoreStage,
        rows: Sequence[int],
        tasks: Sequence[ScoreTask],
        scores: Mapping[int, Score],
    ) -> None:
        """Write the scores of a part of a batch, by place in the batch."""
        store, groups = self._state.store, self._state.groups
        results: dict[int, RewardResult] = {}
        for place, score in scores.items():
            # The groups of unreadable rows are issued again once the shard's death is reported.
            if isinstance(score, Unreadable):
                continue
            if isinstance(score.outcome, RewardFailure):
                failures = self._failures[stage.name]
                failures.failed(rows[place], tasks[place].group_id, score.outcome)
            else:
                results[place] = score.outcome
        live_rows: list[int] = []
        live_groups: dict[int, RunningGroup] = {}
        scalars: dict[str, list[float]] = {column.name: [] for column in stage.writes}
        for place, result in results.items():
            row, task = rows[place], tasks[place]
            group = groups.get(task.group_id)
            # A group that was issued again in the meantime has other rows.
            if group and row in group.rows:
                group.rollouts[task.index].components = result.components
                live_rows.append(row)
                live_groups[group.group_id] = group
                for name, value in _values(stage, result).items():
                    scalars[name].append(value)
        if live_rows:
            store.write(stage.name, live_rows, scalars=scalars)
        for group in live_groups.values():
            self._report_if_complete(stage, group)
        store.release(stage.name, [rows[place] for place in scores])
        self._state.progress.notify()

    def _report_if_complete(self, stage: ScoreStage, group: RunningGroup) -> None:
        """Report the rewards of a group to the curriculum once all are known."""
        store, total = self._state.store, stage.writes[0].name
        if store.has_written(stage.name, group.rows):
            self._failures[stage.name].reset()
            rewards = store.scalars(group.rows)[total]
            self._state.curriculum.scored(group.prompt.row, group.of_trained(rewards))

    def _task(self, batch: RowBatch, i: int) -> ScoreTask:
        group = self._state.groups[batch.group_ids[i]]
        return ScoreTask(
            group_id=group.group_id,
            index=batch.indices[i],
            cell=batch.cells["token_ids"][i],
            prompt_text=group.prompt.text,
            metadata=group.prompt.metadata,
            finish_reason=group.rollouts[batch.indices[i]].finish_reason,
        )

    async def _per_group(self, stage: PerGroupStage, groups: Subscription) -> None:
        """Consume groups whose columns are complete, and write the function's column."""
        state = self._state
        size = state.config.group_size
        while True:
            with state.waiting(stage.name, "groups"):
                batch = await groups.take(timeout_s=None)
            rows: list[int] = []
            results: list[float] = []
            for start in range(0, len(batch), size):
                of_group = slice(start, start + size)
                group = state.groups[batch.group_ids[start]]
                columns = {
                    column.name: [IMPLICIT_COLUMNS[column.name](note) for note in group.rollouts]
                    if column.is_implicit
                    else batch.scalars[column.name][of_group]
                    for column in stage.reads
                }
                tensors = [
                    torch.tensor(columns[column.name], dtype=torch.float32)
                    for column in stage.reads
                ]
                values = run_group_function(stage.function, tensors, stage=stage.name)
                if values is None:
                    state.observer.group_refused(name_of(stage.function), columns)
                    state.drop(group.group_id, "refused")
                    continue
                rows += batch.rows[of_group]
                results += values.tolist()
            if rows:
                state.store.write(stage.name, rows, scalars={stage.writes[0].name: results})
            state.store.release(stage.name, batch.rows)
            state.progress.notify()


def _values(stage: ScoreStage, result: RewardResult) -> dict[str, float]:
    """Return the values of one rollout, by column."""
    for part in stage.parts:
        require(
            part in result.components,
            "flow.score: parts",
            part,
            rule=f"the reward of a rollout has only the parts {sorted(result.components)}",
            fix="Return this part from the reward function for every rollout.",
        )
    total, *parts = (column.name for column in stage.writes)
    return {total: result.total, **{name: result.components[name] for name in parts}}
