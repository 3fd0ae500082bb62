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
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import PerGroupStage, ScoreStage
from rlsys.dataflow.store.selection import FIRST_COMPLETE, whole_groups
from rlsys.dataflow.store.stream_store import RowBatch, Subscription
from rlsys.rewards import RewardFailure, RewardResult

# Calls to the scorer under way at a time: enough that a slow rollout holds up no other batch.
MAX_SCORE_CALLS = 64


class ScoringSide:
    def __init__(self, state: RunState, scorer: Scorer, flow: Dataflow) -> None:
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
                at_once=MAX_SCORE_CALLS,
            )
        for stage in flow.all(PerGroupStage):
            groups = state.store.subscribe(
                stage.name, at_most=step_rows, selection=whole_groups(FIRST_COMPLETE)
            )
            self._loops[stage.name] = self._per_group(stage, groups)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
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
        """Part of a batch has its scores; those are told at once, the rest follows."""
        store, groups = self._state.store, self._state.groups
        results: dict[int, RewardResult] = {}
        for place, score in scores.items():
            # The groups of unreadable rows are issued again when the shard's death is told.
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
            # Issued again in the meantime, the group has other rows.
            if group and row in group.rows:
                group.rollouts[task.index].components = result.components
                live_rows.append(row)
                live_groups[group.group_id] = group
                for name, value in _values(stage, result).items():
                    scalars[name].append(value)
        if live_rows:
            store.write(stage.name, live_rows, scalars=scalars)
        for group in live_groups.values():
            self._look_at_whole(stage, group)
        store.release(stage.name, [rows[place] for place in scores])
        self._state.progress.notify()

    def _look_at_whole(self, stage: ScoreStage, group: RunningGroup) -> None:
        """A group of which all rewards are known tells how well its prompt is learnt."""
        store, total = self._state.store, stage.writes[0].name
        if store.has_written(stage.name, group.rows):
            self._failures[stage.name].whole()
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
        """Consumes groups whose columns are all there. Waits for one; computes at once."""
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
    """Of one rollout, by column."""
    for part in stage.parts:
        if part not in result.components:
            raise ValueError(
                f"flow.score(parts=[{part!r}]): a rollout has {sorted(result.components)} alone; "
                "let the reward function return this part for every rollout."
            )
    total, *parts = (column.name for column in stage.writes)
    return {total: result.total, **{name: result.components[name] for name in parts}}
