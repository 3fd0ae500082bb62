"""Rows and rewards of a recipe for the evaluation during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.dataflow.graph.stages import RewardFn, check_rows
from rlsys.rewards.reward import as_rewards


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Data and rewards of the evaluation during training, for runs with evaluation.every > 0.

    Attributes:
        rows: Held-out rows, instead of evaluation.source.
        rewards: Reward functions; None takes those of the dataflow. Episodes of flow.play are
            scored by their environment.
    """

    rows: Sequence[Mapping[str, Any]] | None = None
    rewards: Sequence[RewardFn] | None = None

    def __post_init__(self) -> None:
        check_rows(self.rows, "HeldOut.rows")
        if self.rewards is not None:
            as_rewards(self.rewards)  # raises for invalid reward functions
