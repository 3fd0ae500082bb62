"""Rows and rewards that a recipe gives for the evaluation beside training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.dataflow.graph.stages import RewardFn, check_rows
from rlsys.rewards.reward import as_rewards


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What a model is evaluated on beside training, where evaluation.every is set."""

    rows: Sequence[Mapping[str, Any]] | None = None
    """In place of evaluation.source, where a recipe makes its own."""
    rewards: Sequence[RewardFn] | None = None
    """None: those that the dataflow scores with. Where it plays, the environment scores."""

    def __post_init__(self) -> None:
        check_rows(self.rows, "HeldOut.rows")
        if self.rewards is not None:
            as_rewards(self.rewards)  # raises for what is no reward function
