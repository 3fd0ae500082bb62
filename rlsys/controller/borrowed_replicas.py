"""The replicas on the trainer's devices (rollout.borrow): awake only while the devices are lent.

    asleep ──wake: load the newest weights──► takes requests ──sleep: withdraw, release──► asleep

A replica that wakes takes requests of others over, and returns the unfinished ones before it
sleeps. They move with their tokens, except in runs that repeat their numbers. A replica that does
not wake or sleep in time is ended, and its requests continue elsewhere from the tokens that it has
reported. It is not started again, because a start would take the devices from the trainer for long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.replicas import ReplicaPool
from rlsys.controller.worker_protocols import Replica, ReplicaDied, Withdrawn
from rlsys.dataflow.scheduling.router import Router


class BorrowedReplicas:
    """All borrowed replicas of a run.

    Args:
        pool: Gives requests to awake replicas.
        router: The requests of all replicas.
        replicas: Borrowed replicas by number, asleep.
        on_withdrawn: Called with the name of a replica and the requests that it has given up.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        router: Router,
        replicas: Mapping[int, Replica],
        *,
        on_withdrawn: Callable[[str, Withdrawn], None],
    ) -> None:
        self._pool = pool
        self._router = router
        self._numbers = {replica.name: number for number, replica in replicas.items()}
        self._replicas = {replica.name: replica for replica in replicas.values()}  # alive
        self._on_withdrawn = on_withdrawn
        self._holding: set[str] = set()  # those that have memory of the devices, or may have
        self._is_unbalanced = False
        self._woken = AsyncCondition()
        self.num_finished = 0  # rollouts that borrowed replicas have finished so far

    @property
    def num_left(self) -> int:
        """Number of borrowed replicas that are alive."""
        return len(self._replicas)

    @property
    def is_sampling(self) -> bool:
        """Return whether an awake replica has requests."""
        return any(self._outstanding(name) for name in self._holding)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines of all loops, by name."""
        return {
            "rebalance": self._rebalance(),
            **{f"borrowed {name}": self._keep(one) for name, one in self._replicas.items()},
        }

    async def wake(self, limit_s: float) -> int:
        """Load the newest weights into all replicas and give them requests; return their number."""
        woken = await asyncio.gather(
            *(self._wake(replica, limit_s) for replica in list(self._replicas.values()))
        )
        if any(woken):
            self._is_unbalanced = True
            self._woken.notify()
        return sum(woken)

    async def sleep(self, limit_s: float) -> None:
        """Withdraw the requests of all replicas and release the devices."""
        await asyncio.gather(
            *(
                self._sleep(replica, limit_s)
                for replica in list(self._replicas.values())
                if replica.name in self._holding
            )
        )

    async def _wake(self, replica: Replica, limit_s: float) -> bool:
        if not self._pool.has_weights:  # a roll-back has withdrawn them
            return False
        self._holding.add(replica.name)
        try:
            async with asyncio.timeout(limit_s):
                gone = await self._pool.load_newest(replica)
        except TimeoutError:
            await self._end(replica, f"{replica.name} did not wake within {limit_s:.1f} s", limit_s)
            return False
        except ReplicaDied as death:
            await self._end(replica, str(death), limit_s)
            return False
        if gone is not None or replica.name not in self._replicas:
            return False
        # No await since the load: the next version finds it among the serving ones.
        self._pool.serve(replica)
        return True

    async def _sleep(self, replica: Replica, limit_s: float) -> None:
        name = replica.name
        self._pool.retire(name)
        try:
            async with asyncio.timeout(limit_s):
                await self._pool.sent(name)
                if requests := self._outstanding(name):
                    self._on_withdrawn(name, await replica.withdraw(requests))
                await replica.release()
        except TimeoutError:
            reason = f"{name} did not give its device back within {limit_s:.1f} s"
            await self._end(replica, reason, limit_s)
        except ReplicaDied as death:
            await self._end(replica, str(death), limit_s)
        self._holding.discard(name)

    def _outstanding(self, name: str) -> list[str]:
        return self._router.outstanding(name) if self._router.has(name) else []

    async def _keep(self, replica: Replica) -> None:
        """Consume the results of a replica until it dies."""
        number = self._numbers[replica.name]
        try:
            while True:
                collected = await replica.collect()
                self.num_finished += len(collected.finished)
                self._pool.collected(number, replica, collected)
        except ReplicaDied as death:
            await self._end(replica, str(death))

    async def _end(self, replica: Replica, reason: str, limit_s: float | None = None) -> None:
        """Remove a replica and end its process; its requests continue elsewhere.

        The process is ended at once. Its memory in the store is reclaimed within a time limit.
        """
        if self._replicas.pop(replica.name, None) is None:
            return  # it was removed already
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                number, death = self._numbers[replica.name], ReplicaDied(reason)
                await self._pool.clean_up(number, replica.name, replica, death)

    async def _rebalance(self) -> None:
        """After replicas have woken, move requests to them from those with more than the mean."""
        while True:
            await self._woken.until(lambda: self._is_unbalanced)
            self._is_unbalanced = False
            surplus = self._router.surplus()
            await asyncio.gather(*(self._move(name, names) for name, names in surplus.items()))

    async def _move(self, name: str, request_ids: list[str]) -> None:
        if (replica := self._pool.serving(name)) is None:
            return
        with contextlib.suppress(ReplicaDied):  # its collect loop notices it
            self._on_withdrawn(name, await replica.withdraw(request_ids))
