"""Whose turn it is on devices that the trainer and the replicas share (placement="colocated").

    generation's ──► a step has all its groups ──► replicas release ──► training's: steps, as
         ▲                                                         long as their groups are there
         └── replicas load ◄── published ◄── the trainer releases ◄────────┘

Where they have devices of their own, it is always the turn of both.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rlsys.common.async_condition import AsyncCondition


class DeviceSharing:
    def __init__(self, *, are_shared: bool) -> None:
        self.are_shared = are_shared
        self._is_training_active = False
        self._num_at_work = 0
        self._changed = AsyncCondition()

    @property
    def is_training_active(self) -> bool:
        """It has been taken, or is being taken, for training alone."""
        return self._is_training_active

    @contextlib.asynccontextmanager
    async def for_generation(self) -> AsyncIterator[None]:
        """Whatever takes memory for generation, a start or a load, belongs into this block: it
        waits for generation's turn, which does not end within. What goes on within ends by itself,
        without training.
        """
        await self._changed.until(lambda: not self._is_training_active)
        self._num_at_work += 1
        try:
            yield
        finally:
            self._num_at_work -= 1
            self._changed.notify()

    async def take(self) -> None:
        """Training's turn begins: what replicas have, they must release now. May be called
        again.
        """
        self._is_training_active = self.are_shared
        await self._changed.until(lambda: not (self._is_training_active and self._num_at_work))

    def release(self) -> None:
        self._is_training_active = False
        self._changed.notify()
