"""Which of a trainer's layouts its places allow, as nodes are lost and join.

places that stand ─► choose: the first layout that has enough ─► ranks
                     until_larger: enough for one before it ─► the ranks move there
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from rlsys.common.option_names import option
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.controller.worker_protocols import TrainerDied

from ..cluster.placement import ClusterTooSmall

logger = logging.getLogger(__name__)

T = TypeVar("T")

# For places that are lost to stand again on nodes with room, before fewer are made do with.
PATIENCE_S = 5.0

# Between two looks at the places while somebody waits for them.
LOOK_EVERY_S = 0.5

# And beside the training, for more of them.
WATCH_EVERY_S = 2.0

# For Ray's answer to one look.
LOOK_TIMEOUT_S = 10.0


class Layouts:
    """Those that a trainer may have, the preferred one first, each of fewer ranks than the one
    before. `standing`: by number of a place, the node that lives and has it; called in a thread.
    One layout alone is had in any case, and nobody asks for places.
    """

    def __init__(
        self,
        layouts: Sequence[ParallelLayout],
        standing: Callable[[], Mapping[int, str]] = dict,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layouts = layouts
        self._standing = standing
        self._clock = clock
        self.current = layouts[0]
        self.places: Sequence[int] = range(layouts[0].num_ranks)
        """By rank, the number of its place."""

    @property
    def vary(self) -> bool:
        return len(self._layouts) > 1

    @property
    def can_grow(self) -> bool:
        return self.current != self._layouts[0]

    async def choose(self, timeout_s: float) -> None:
        """The preferred layout, or after PATIENCE_S the largest that has places. Raises
        ClusterTooSmall where there are too few for any within the limit.
        """
        if not self.vary:
            return
        start = self._clock()
        while (waited_s := self._clock() - start) < timeout_s:
            nodes = await self._look()
            allowed = self._layouts if waited_s >= PATIENCE_S else self._layouts[:1]
            if nodes and (layout := _largest(allowed, len(nodes))):
                self.current, self.places = layout, _closest(nodes, layout.num_ranks)
                return
            await asyncio.sleep(LOOK_EVERY_S)
        raise ClusterTooSmall(
            f"for {timeout_s:g} s (cluster.start_timeout_s) no node had the places of a trainer "
            f"of {self._layouts[-1]}, the smallest of trainer.layout; when there is one again, go "
            f"on with {option('resume', True)}."
        )

    async def while_standing(self, work: Awaitable[T]) -> T:
        """Its result. Raises LearnerDied when one of the ranks' places is lost meanwhile: Ray would
        wait for it to be there again.
        """
        if not self.vary:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_EVERY_S))[0]:
                nodes = await self._look()
                if nodes is None:
                    continue
                if lost := [place for place in self.places if place not in nodes]:
                    raise TrainerDied(
                        f"the place of rank {self.places.index(lost[0])} of the trainer is lost"
                    )
            return task.result()
        finally:
            task.cancel()

    async def until_larger(self) -> None:
        """Until there are places for a larger layout than the current one."""
        larger = self._layouts[: self._layouts.index(self.current)]
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            nodes = await self._look()
            if nodes and _largest(larger, len(nodes)):
                return

    async def _look(self) -> Mapping[int, str] | None:
        """None where Ray does not answer, this time."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                return await asyncio.to_thread(self._standing)
        except Exception as error:  # noqa: BLE001 - its clients raise what they like
            logger.warning("Ray does not say where the trainer's places are: %r", error)
            return None


def _largest(layouts: Sequence[ParallelLayout], num_places: int) -> ParallelLayout | None:
    return next((one for one in layouts if one.num_ranks <= num_places), None)


def _closest(nodes: Mapping[int, str], count: int) -> list[int]:
    """So many places, on the nodes that have the most."""
    on_node = Counter(nodes.values())
    fullest = sorted(nodes, key=lambda place: (-on_node[nodes[place]], nodes[place], place))
    return sorted(fullest[:count])
