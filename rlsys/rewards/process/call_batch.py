"""Batches of rollouts that are scored together, and their calls of reward functions.

In: the outcome of each function on each rollout. Out: a rollout's result when all functions have
ended on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsys.rewards.outcome import Outcome, RewardFailure, RewardResult, combine
from rlsys.rewards.process.reward_pickle import PackedReward
from rlsys.rewards.process.reward_process import RewardProcess
from rlsys.types import Rollout

OnResult = Callable[[int, RewardResult | RewardFailure], None]


class RewardBatch:
    """Rollouts that are scored together.

    `on_result` gets the place and the result of each rollout. `fail` gets an error that replaces
    all missing results.
    """

    def __init__(
        self,
        rewards: Sequence[PackedReward],
        rollouts: Sequence[Rollout],
        *,
        on_result: OnResult,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.rollouts = rollouts
        self.fail = fail
        self._rewards = rewards
        self._on_result = on_result
        self._outcomes: dict[int, dict[int, Outcome]] = {}  # by place and reward

    def ended(self, place: int, reward: int, outcome: Outcome) -> None:
        """Record the outcome of one function on one rollout."""
        in_order = [outcome]
        if len(self._rewards) > 1:
            outcomes = self._outcomes.setdefault(place, {})
            outcomes[reward] = outcome
            if len(outcomes) < len(self._rewards):
                return
            del self._outcomes[place]
            in_order = [outcomes[i] for i in range(len(self._rewards))]
        self._on_result(place, combine(self._rewards, in_order))


@dataclass(kw_only=True, eq=False, slots=True)
class RewardCall:
    """A reward function on one rollout."""

    number: int
    reward: int  # index among the rewards
    place: int  # index of its rollout in the batch
    batch: RewardBatch
    limit_s: float
    process: RewardProcess | None = None
    position: int = 0  # from 1, among all calls sent to that process
    cancel_sent_s: float | None = None  # when its process was asked to cancel it
