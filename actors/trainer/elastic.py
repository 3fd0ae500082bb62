"""Elastic layouts of a trainer: fewer ranks after a node is lost, more when one joins.

live places ─► Layouts.choose: the first layout that has enough places ─► ranks
               Layouts.until_larger: enough places for a larger layout ─┐
growth: between two steps, all ranks restart in that layout  ◄──────────┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from rlsys import metrics
from rlsys.common.option_names import option
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.controller.worker_protocols import TrainerDied

from ..cluster.placement import ClusterTooSmall

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long to wait for lost places to return before a smaller layout is used.
PATIENCE_S = 5.0

# Interval between queries of the places while a caller waits for them.
POLL_EVERY_S = 0.5

# Interval between queries for more places during training.
WATCH_EVERY_S = 2.0

# Time limit of a query.
QUERY_TIMEOUT_S = 10.0


class Layouts:
    """Layouts of a trainer, the preferred one first and each with fewer ranks than the one before.

    `live_places` returns the live node of each place by its number; it runs in a thread. A single
    layout is always used, and its places are not queried.
    """

    def __init__(
        self,
        layouts: Sequence[ParallelLayout],
        live_places: Callable[[], Mapping[int, str]] = dict,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layouts = layouts
        self._live_places = live_places
        self._clock = clock
        self.current = layouts[0]
        self.places: Sequence[int] = range(layouts[0].num_ranks)
        """Place number of each rank."""

    @property
    def are_elastic(self) -> bool:
        """Return whether there are several layouts."""
        return len(self._layouts) > 1

    @property
    def can_grow(self) -> bool:
        """Return whether the current layout is not the preferred one."""
        return self.current != self._layouts[0]

    async def choose(self, timeout_s: float) -> None:
        """Choose the preferred layout, or after PATIENCE_S the largest that has places.

        Raises:
            ClusterTooSmall: There were not enough places for any layout within the limit.
        """
        if not self.are_elastic:
            return
        start = self._clock()
        while (waited_s := self._clock() - start) < timeout_s:
            nodes = await self._query_places()
            allowed = self._layouts if waited_s >= PATIENCE_S else self._layouts[:1]
            if nodes and (layout := _largest(allowed, len(nodes))):
                self.current, self.places = layout, _closest(nodes, layout.num_ranks)
                return
            await asyncio.sleep(POLL_EVERY_S)
        raise ClusterTooSmall(
            rule=f"for {timeout_s:g} s (cluster.start_timeout_s) there were no places for "
            f"{self._layouts[-1]}, the smallest layout of trainer.layout",
            fix=f"Add a node and continue with {option('resume', True)}.",
        )

    async def while_placed(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; raise TrainerDied when a rank's place is lost meanwhile.

        Ray itself would wait until the place is reserved again.
        """
        if not self.are_elastic:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=POLL_EVERY_S))[0]:
                nodes = await self._query_places()
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
        """Wait until there are places for a larger layout than the current one."""
        larger = self._layouts[: self._layouts.index(self.current)]
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            nodes = await self._query_places()
            if nodes and _largest(larger, len(nodes)):
                return

    async def _query_places(self) -> Mapping[int, str] | None:
        """Return the live node of each place, or None if Ray does not answer this time."""
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await asyncio.to_thread(self._live_places)
        except Exception as error:  # noqa: BLE001 - Ray's clients raise any type
            logger.warning("querying the trainer's places failed: %r", error)
            return None


class Growable(Protocol):
    """A trainer whose number of ranks can grow."""

    @property
    def model(self) -> str:
        """Return the name of the model."""

    @property
    def can_grow_now(self) -> bool:
        """Return whether there are places for a larger layout."""

    async def snapshot(self) -> None:
        """Keep the current state in memory."""


def growth(
    trainer_proxies: Collection[Growable], *, first_step: int, num_steps: int
) -> BetweenSteps:
    """Return the work between steps that restarts all ranks when a trainer can grow.

    The ranks restart as after a death, but no work is lost: each has a snapshot of this step.
    """
    due: set[int] = set()
    newest = first_step - 1  # newest step for which the decision was made

    def is_due(step: int) -> bool:
        """Return whether the ranks restart after this step.

        Decide once per step, when its micro-batches are sent: the restart needs the state after
        this step, which the next step overwrites.
        """
        nonlocal newest
        if step > newest:
            newest = step
            if step < num_steps and any(one.can_grow_now for one in trainer_proxies):
                due.add(step)
        return step in due

    def undo(step: int) -> None:
        nonlocal newest
        newest = step - 1
        due.clear()

    async def grow(step: int) -> None:
        growing = " and ".join(one.model for one in trainer_proxies if one.can_grow_now)
        for one in trainer_proxies:
            await one.snapshot()
        raise TrainerDied(f"restarting the trainer: there are places for more ranks of {growing}")

    return BetweenSteps(name=metrics.RESTART, is_due=is_due, do=grow, done=first_step, undo=undo)


def _largest(layouts: Sequence[ParallelLayout], num_places: int) -> ParallelLayout | None:
    return next((one for one in layouts if one.num_ranks <= num_places), None)


def _closest(nodes: Mapping[int, str], count: int) -> list[int]:
    """Return `count` places on the nodes that have the most."""
    on_node = Counter(nodes.values())
    fullest = sorted(nodes, key=lambda place: (-on_node[nodes[place]], nodes[place], place))
    return sorted(fullest[:count])
