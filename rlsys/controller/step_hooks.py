"""Work between two optimizer steps, such as checkpoints and exports for an evaluation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


async def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class BetweenSteps:
    """A hook that runs after optimizer steps, while no model is trained.

    Attributes:
        name: Reason of the wait in the trainer's records.
        is_due: Whether the hook runs after a step.
        do: The work, awaited once per step that is due.
        done: The newest step that does not need the hook any more.
        undo: Called with a step when the steps after it are trained again.
        settle: Awaited after the death of a trainer, before it is restarted.
    """

    name: str
    is_due: Callable[[int], bool]
    do: Callable[[int], Awaitable[None]]
    done: int
    undo: Callable[[int], None] = lambda step: None
    settle: Callable[[], Awaitable[None]] = _nothing

    def wants(self, step: int) -> bool:
        """Return whether there is work to do after this step."""
        return step > self.done and self.is_due(step)

    async def after(self, step: int) -> None:
        """Do the work after this step, if it is due."""
        if self.wants(step):
            await self.do(step)
            self.done = step

    def go_back(self, step: int) -> None:
        """Prepare for the steps after `step`, which are trained again."""
        self.done = min(self.done, step)
        self.undo(step)
