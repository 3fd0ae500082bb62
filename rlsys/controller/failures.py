"""Rollouts without a score: their groups are dropped; too many in a row end the run."""

from __future__ import annotations

from rlsys.controller.state import RunState
from rlsys.rewards import RewardFailure

# The run ends after so many steps' worth of failed groups without a complete group between them.
MAX_FAILED_STEPS = 2


class RewardsFailed(RuntimeError):
    """Too many groups in a row without a reward: the reward function is broken."""


class FailedRewards:
    """The failed groups of one stage."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._num_in_a_row = 0

    def reset(self) -> None:
        """Start counting anew: a group has all its scores."""
        self._num_in_a_row = 0

    def failed(self, row: int, group_id: int, failure: RewardFailure) -> None:
        """Drop the group of a failed rollout, since its baseline would be wrong.

        Raises:
            RewardsFailed: Too many groups in a row have failed.
        """
        state = self._state
        state.observer.reward_failed(failure)
        if group_id not in state.groups or row not in state.groups[group_id].rows:
            return
        self._num_in_a_row += 1
        if self._num_in_a_row >= MAX_FAILED_STEPS * state.config.prompts_per_step:
            raise RewardsFailed(
                f"{self._num_in_a_row} groups in a row were dropped because of {failure.what} "
                f"{failure.reward!r}: {failure.message}\nNo step can be filled. Fix the "
                f"{failure.what} and run again."
            )
        state.drop(group_id, f"{failure.what} {failure.kind}")
