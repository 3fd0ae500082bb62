"""Back to a larger layout, between two optimizer steps, when there are places for it again."""

from __future__ import annotations

from collections.abc import Collection

from rlsys import metrics
from rlsys.controller import BetweenSteps
from rlsys.controller.worker_protocols import TrainerDied

from .trainer_proxy import RayTrainerProxy


def growth(
    trainer_proxies: Collection[RayTrainerProxy], *, first_step: int, num_steps: int
) -> BetweenSteps:
    """Ends the life of all ranks after a step in which a model has outgrown its layout. They start
    again as after any death, but nothing was under way, and each has its state of this step.
    """
    due: set[int] = set()
    newest = first_step - 1  # of the steps that were asked about

    def is_due(step: int) -> bool:
        """The first answer about a step stands: who hands it out is told, and waits for its end;
        once the next one is under way, this one's state is gone.
        """
        nonlocal newest
        if step > newest:
            newest = step
            if step < num_steps and any(one.is_outgrown for one in trainer_proxies):
                due.add(step)
        return step in due

    def undo(step: int) -> None:
        nonlocal newest
        newest = step - 1
        due.clear()

    async def grow(step: int) -> None:
        told = " and ".join(one.model for one in trainer_proxies if one.is_outgrown)
        for one in trainer_proxies:
            await one.snapshot()
        raise TrainerDied(f"there are places for more ranks of {told} again")

    return BetweenSteps(name=metrics.RESTART, is_due=is_due, do=grow, done=first_step, undo=undo)
