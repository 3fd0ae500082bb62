"""What episodes are worth, as their environments say it: rewards for the store, failures for the
ledger. A failed episode drops its group; it never counts as a reward of 0.
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
    """Of a run whose rollouts an environment makes."""

    def __init__(self, state: RunState, stage: PlayStage) -> None:
        self._state = state
        self._stage = stage
        self._failures = FailedRewards(state)
        self._named: set[str] = set()  # numbers that episodes gave
        self._num_heard = 0
        self._num_silent = 0  # episodes in a row without a sampled token

    def take(self, group: RunningGroup, index: int, rollout: FinishedRollout) -> bool:
        """Note what an episode is worth. False: it is worth nothing that could be told, and its
        group has ended.
        """
        outcome = rollout.outcome
        if isinstance(outcome, RewardResult):
            group.rollouts[index].components = outcome.components
            self._hear(outcome)
            self._check_not_silent(rollout)
            return True
        if outcome is not None:
            self._failures.failed(group.rows[index], group.group_id, outcome)
        else:
            assert rollout.finish_reason is FinishReason.ABORTED, "played, and worth nothing"
        return False

    def _check_not_silent(self, rollout: FinishedRollout) -> None:
        """Raise RewardsFailed after some steps' worth of episodes without a reply of the policy.

        A single one is normal in games. So many in a row are a mistake in the environment.
        """
        if rollout.num_tokens > rollout.num_injected:
            self._num_silent = 0
            return
        self._num_silent += 1
        config = self._state.config
        if self._num_silent >= MAX_FAILED_STEPS * config.prompts_per_step * self._stage.group_size:
            raise RewardsFailed(
                f"{self._num_silent} episodes in a row ended without a reply of the policy: there "
                "is nothing to train on. Let the environment ask the policy: `await chat(...)`, or "
                "for an agent a request to its endpoint with its key."
            )

    def _hear(self, outcome: RewardResult) -> None:
        """After as many episodes as a step has: whether each part is a number that one gave."""
        config = self._state.config
        num_episodes = config.prompts_per_step * self._stage.group_size
        if self._num_heard == num_episodes:
            return
        self._num_heard += 1
        self._named.update(outcome.components)
        missing = [part for part in self._stage.parts if part not in self._named]
        if self._num_heard == num_episodes and missing:
            self._state.observer.parts_missing(missing, sorted(self._named), num_episodes)

    def scalars(self, rollouts: Sequence[FinishedRollout]) -> Mapping[str, Sequence[float]]:
        """The columns of these rollouts."""
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
        """A group of which all rewards are known tells how well its task is learnt."""
        store = self._state.store
        for group in groups:
            if store.has_written(self._stage.name, group.rows):
                self._failures.whole()
                rewards = store.scalars(group.rows)[self._stage.scalars[0]]
                self._state.curriculum.scored(group.prompt.row, group.of_trained(rewards))
