"""Rollouts that are being scored together, and the calls that this takes.

In: how each function ended on each rollout. Out: a rollout's result when all have ended on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsys.rewards.outcome import Outcome, RewardFailure, RewardResult, combine
from rlsys.rewards.process.reward_pickle import PackedReward
from rlsys.rewards.process.reward_process import RewardProcess
from rlsys.types import Rollout

TellResult = Callable[[int, RewardResult | RewardFailure], None]


class RewardBatch:
    """`tell` is called with each rollout's place and result, `fail` with an error instead of all
    that has not been told.
    """

    def __init__(
        self,
        rewards: Sequence[PackedReward],
        rollouts: Sequence[Rollout],
        *,
        tell: TellResult,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.rollouts = rollouts
        self.fail = fail
        self._rewards = rewards
        self._tell = tell
        self._outcomes: dict[int, dict[int, Outcome]] = {}  # by place and reward, until complete

    def ended(self, place: int, reward: int, outcome: Outcome) -> None:
        """One function has ended on one rollout."""
        in_order = [outcome]
        if len(self._rewards) > 1:
            outcomes = self._outcomes.setdefault(place, {})
            outcomes[reward] = outcome
            if len(outcomes) < len(self._rewards):
                return
            del self._outcomes[place]
            in_order = [outcomes[i] for i in range(len(self._rewards))]
        self._tell(place, combine(self._rewards, in_order))


@dataclass(kw_only=True, eq=False, slots=True)
class RewardCall:
    """One reward function on one rollout."""

    number: int
    reward: int  # its place among the rewards
    place: int  # of its rollout in the batch
    batch: RewardBatch
    limit_s: float
    process: RewardProcess | None = None
    turn: int = 0  # its place, from 1, among all calls sent to that process
    asked_s: float | None = None  # when its process was asked to give it up
