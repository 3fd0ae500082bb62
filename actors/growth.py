"""Back to a larger layout, between two optimizer steps, when there are places for it again."""

from __future__ import annotations

from collections.abc import Collection

from rlsys import metrics
from rlsys.controller import BetweenSteps
from rlsys.workers import LearnerDied

from .learner import RayLearner


def growth(learners: Collection[RayLearner], *, first_step: int, num_steps: int) -> BetweenSteps:
    """Ends the life of all ranks after a step in which a model has outgrown its layout. They start
    again as after any death, but nothing was under way, and each has its state of this step."""

    async def grow(step: int) -> None:
        told = " and ".join(one.model for one in learners if one.is_outgrown)
        for one in learners:
            await one.snapshot()
        raise LearnerDied(f"there are places for more ranks of {told} again")

    return BetweenSteps(
        name=metrics.RESTART,
        is_due=lambda step: step < num_steps and any(one.is_outgrown for one in learners),
        do=grow,
        done=first_step,
    )
