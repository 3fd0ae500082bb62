"""Time-sharing of devices between the trainer and the replicas (placement="colocated").

    generation ──► a step has all its groups ──► replicas release ──► training: steps, while
         ▲                                                           their groups are complete
         └── replicas load ◄── weights published ◄── trainer releases ◄────────┘

With separate devices, both run at any time and nothing here waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rlsys.common.async_condition import AsyncCondition


class DeviceSharing:
    """The lock that alternates training and generation on shared devices."""

    def __init__(self, *, are_shared: bool) -> None:
        self.are_shared = are_shared
        self._is_training_active = False
        self._num_generation_blocks = 0
        self._changed = AsyncCondition()

    @property
    def is_training_active(self) -> bool:
        """Return whether the devices are taken, or being taken, for training."""
        return self._is_training_active

    @contextlib.asynccontextmanager
    async def for_generation(self) -> AsyncIterator[None]:
        """Hold the devices for generation: wait for the trainer to release them.

        Use the block to start an engine or to load weights. It keeps the devices until it ends. Do
        not wait for training inside the block.
        """
        await self._changed.until(lambda: not self._is_training_active)
        self._num_generation_blocks += 1
        try:
            yield
        finally:
            self._num_generation_blocks -= 1
            self._changed.notify()

    async def take(self) -> None:
        """Take the devices for training. The replicas must then release their memory.

        Repeated calls are allowed.
        """
        self._is_training_active = self.are_shared
        await self._changed.until(
            lambda: not (self._is_training_active and self._num_generation_blocks)
        )

    def release(self) -> None:
        """Give the devices back to generation."""
        self._is_training_active = False
        self._changed.notify()
