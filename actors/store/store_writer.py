"""A process's place to write rollouts to: its node's shard, or the one that takes its place."""

from __future__ import annotations

import asyncio

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockRef, Columns

from .store_actor import ShardLost, StoreAddress, StoreClient

# For the controller to notice a dead shard and to start another.
NEW_SHARD_TIMEOUT_S = 60.0


class StoreWriter:
    def __init__(self, address: StoreAddress) -> None:
        self.client = StoreClient(address)
        self._changed = AsyncCondition()

    def use(self, address: StoreAddress) -> None:
        """The shard has died; there are others."""
        self.client = StoreClient(address)
        self._changed.notify()

    async def put(self, columns: Columns) -> BlockRef:
        """Raises ShardLost if the shard has died and the controller names no other in time."""
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
