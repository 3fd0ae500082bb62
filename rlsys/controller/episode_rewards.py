"""Rewards that environments give for episodes: rewards for the store, failures for the ledger.

A failed episode drops its group; it never counts as a reward of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlsys.controller.failures import MAX_FAILED_STEPS, FailedRewards, RewardsFailed
from rlsys.controller.state import RunningGroup, RunState
from rlsys.controller.worker_protocols import FinishedRollout
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.rewards import RewardResult
from rlsys.types import FinishReason


class PlayedOutcomes:
    """The episode rewards of a run with flow.play."""

    def __init__(self, state: RunState, stage: PlayStage) -> None:
        self._state = state
        self._stage = stage
        self._failures = FailedRewards(state)
        self._seen_parts: set[str] = set()
        self._num_seen = 0
        self._num_empty = 0  # episodes in a row without a sampled token

    def record(self, group: RunningGroup, index: int, rollout: FinishedRollout) -> bool:
        """Record the reward of an episode and return True.

        Return False for an episode without a reward, whose group has ended.
        """
        outcome = rollout.outcome
        if isinstance(outcome, RewardResult):
            group.rollouts[index].components = outcome.components
            self._check_parts(outcome)
            self._check_not_empty(rollout)
            return True
        if outcome is not None:
            self._failures.failed(group.rows[index], group.group_id, outcome)
        else:
            assert rollout.finish_reason is FinishReason.ABORTED, "a played episode has no outcome"
        return False

    def _check_not_empty(self, rollout: FinishedRollout) -> None:
        """Raise RewardsFailed after several steps' worth of episodes without a reply of the policy.

        A single one is normal in games. So many in a row are a mistake in the environment.
        """
        if rollout.num_tokens > rollout.num_injected:
            self._num_empty = 0
            return
        self._num_empty += 1
        config = self._state.config
        if self._num_empty >= MAX_FAILED_STEPS * config.prompts_per_step * self._stage.group_size:
            raise RewardsFailed(
                f"{self._num_empty} episodes in a row ended without a reply of the policy. Call "
                "`await chat(...)` in the environment, or let the agent send a request to its "
                "endpoint with its key."
            )

    def _check_parts(self, outcome: RewardResult) -> None:
        """Report parts that no episode gave, after as many episodes as a step has."""
        config = self._state.config
        num_episodes = config.prompts_per_step * self._stage.group_size
        if self._num_seen == num_episodes:
            return
        self._num_seen += 1
        self._seen_parts.update(outcome.components)
        missing = [part for part in self._stage.parts if part not in self._seen_parts]
        if self._num_seen == num_episodes and missing:
            self._state.observer.parts_missing(missing, sorted(self._seen_parts), num_episodes)

    def scalars(self, rollouts: Sequence[FinishedRollout]) -> Mapping[str, Sequence[float]]:
        """Return the reward columns of these rollouts."""
        total, *parts = self._stage.scalars
        results = [rollout.outcome for rollout in rollouts]
        columns: dict[str, list[float]] = {name: [] for name in (total, *parts)}
        for result in results:
            assert isinstance(result, RewardResult)
            columns[total].append(result.total)
            for part in parts:
                columns[part].append(result.components.get(part, 0.0))
        return columns

    def written(self, groups: Iterable[RunningGroup]) -> None:
        """Report the rewards of groups that are complete now to the curriculum."""
        store = self._state.store
        for group in groups:
            if store.has_written(self._stage.name, group.rows):
                self._failures.reset()
                rewards = store.scalars(group.rows)[self._stage.scalars[0]]
                self._state.curriculum.scored(group.prompt.row, group.of_trained(rewards))
