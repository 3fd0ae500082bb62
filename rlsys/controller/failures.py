"""Rollouts without a score: their groups end, and if nearly all do, so does the run."""

from __future__ import annotations

from rlsys.controller.state import RunState
from rlsys.rewards import RewardFailure

# Steps' worth of groups that may fail, with none between them that is whole, before the run ends.
MAX_FAILED_STEPS = 2


class RewardsFailed(RuntimeError):
    """Too many groups in a row had no reward: the reward function is broken."""


class FailedRewards:
    """Those of one stage."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._num_in_a_row = 0

    def whole(self) -> None:
        """A group has all its scores: a step can be filled."""
        self._num_in_a_row = 0

    def failed(self, row: int, group_id: int, failure: RewardFailure) -> None:
        """One failed rollout drops its group, whose baseline would be wrong without it."""
        state = self._state
        state.observer.reward_failed(failure)
        if group_id not in state.groups or row not in state.groups[group_id].rows:
            return
        self._num_in_a_row += 1
        if self._num_in_a_row >= MAX_FAILED_STEPS * state.config.prompts_per_step:
            raise RewardsFailed(
                f"{self._num_in_a_row} groups in a row were dropped because of {failure.what} "
                f"{failure.reward!r}: {failure.message}\nNo step can be filled; mend the "
                f"{failure.what} and run again."
            )
        state.drop(group_id, f"reward {failure.kind}")
