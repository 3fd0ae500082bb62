"""Writer of a process's rollouts, into its node's shard or the shard's successor."""

from __future__ import annotations

import asyncio

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockRef, Columns

from .store_actor import ShardLost, StoreAddress, StoreClient

# Time for the controller to notice a dead shard and to start another.
NEW_SHARD_TIMEOUT_S = 60.0


class StoreWriter:
    """Store client that waits for a successor when its shard dies."""

    def __init__(self, address: StoreAddress) -> None:
        self.client = StoreClient(address)
        self._changed = AsyncCondition()

    def use(self, address: StoreAddress) -> None:
        """Use the new address of the store after a shard was replaced."""
        self.client = StoreClient(address)
        self._changed.notify()

    async def put(self, columns: Columns) -> BlockRef:
        """Write rows.

        Raises:
            ShardLost: The shard has died, and the controller has not replaced it in time.
        """
        while True:
            client = self.client
            try:
                return await client.put_async(columns)
            except ShardLost as death:
                try:
                    async with asyncio.timeout(NEW_SHARD_TIMEOUT_S):
                        while self.client is client:
                            await self._changed.next()
                except TimeoutError:
                    raise death from None
