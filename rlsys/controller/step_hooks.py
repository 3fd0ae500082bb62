"""What is done between two optimizer steps, while the trained models stand still: checkpoints, and
exports for an evaluation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


async def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class BetweenSteps:
    """`do` is awaited after the steps for which `is_due` says so, once for each. `name` is what
    training is said to wait for meanwhile.
    """

    name: str
    is_due: Callable[[int], bool]
    do: Callable[[int], Awaitable[None]]
    done: int
    """The newest step that needs it no more."""
    undo: Callable[[int], None] = lambda step: None
    """Told of a step when those after it are trained again."""
    settle: Callable[[], Awaitable[None]] = _nothing
    """Awaited when a learner has died, before it is started again."""

    def wants(self, step: int) -> bool:
        """Whether there is something to do after this step."""
        return step > self.done and self.is_due(step)

    async def after(self, step: int) -> None:
        """Do it, if there is something to do."""
        if self.wants(step):
            await self.do(step)
            self.done = step

    def go_back(self, step: int) -> None:
        """The steps after `step` are trained again."""
        self.done = min(self.done, step)
        self.undo(step)
