"""Ray actors of one kind that replace each other: the least loaded one gets the next work.

    run(work) ──► a place ──► its worker: started once, shared by all callers ──► result
                    ▲                        └── it dies: kill, report, retry or drop the work
                    └────────────────────────────┘

A successor is started with the next work of its place. rlsys/common/supervision.py decides which
work is retried.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlsys.common.number_text import counted
from rlsys.common.supervision import Decision, Policy, Supervisor

from .calls import Worker, WorkerDied, as_future

T = TypeVar("T")


class WorkDropped(RuntimeError):
    """Work that is not tried again: it ends its workers, or its place gets no worker.

    The message says which of both, and has the reason of the last death.
    """


class SupervisedPool:
    """Workers that any work of the pool may run in.

    Args:
        start_worker: Starts the actor of a place, by number.
        prepare: Makes a new worker ready for work.
        num_workers: Number of places.
        policy: Limits of restarts and of deaths with the same work.
        on_death: Gets the message and the consequences of a death.
        deadly: Errors after which a worker is replaced.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Worker],
        prepare: Callable[[Worker], Awaitable[None]],
        *,
        num_workers: int,
        policy: Policy,
        on_death: Callable[[str, Decision[int]], None],
        deadly: tuple[type[Exception], ...] = (WorkerDied,),
    ) -> None:
        self._start_worker = start_worker
        self._prepare = prepare
        self._on_death = on_death
        self._deadly = deadly
        self._policy = policy
        self._supervisor = Supervisor[int](policy)
        self._numbers = itertools.count()  # of all work so far
        self._load = [0] * num_workers  # by place
        self._workers: dict[int, Worker] = {}  # by place
        self._starts: dict[Worker, asyncio.Future[None]] = {}
        self._running: dict[Worker, set[int]] = {}
        self._dropped: dict[int, str] = {}  # why, of work whose caller has not noticed yet

    @property
    def num_workers(self) -> int:
        """Return the number of places."""
        return len(self._load)

    @property
    def workers(self) -> list[Worker]:
        """Return the current workers, in the order of their starts."""
        return list(self._workers.values())

    async def start(self) -> None:
        """Start all workers.

        Raises the error of a start, or the last death of a place that is given up.
        """
        await asyncio.gather(*map(self._present, range(self.num_workers)))

    async def run(self, work: Callable[[Worker], Awaitable[T]], *, size: int = 1) -> T:
        """Return the result of `work` in the least loaded worker; retry it if the worker dies.

        `size` is what it adds to the load of its place.

        A death during the start of a worker counts against its place, not against the work.

        Raises:
            WorkDropped: Too many workers have died with it, or in a row before they were ready.
        """
        number = next(self._numbers)
        try:
            while True:
                place = min(range(self.num_workers), key=self._load.__getitem__)
                worker = self._worker(place)
                self._load[place] += size
                self._running[worker].add(number)
                try:
                    await asyncio.shield(self._starts[worker])
                    result = await work(worker)
                except self._deadly as death:
                    self._replace(place, worker, str(death))
                    if number in self._dropped:
                        raise WorkDropped(self._dropped[number]) from None
                else:
                    if self._workers.get(place) is worker:
                        self._supervisor.progressed(place=place)
                    return result
                finally:
                    self._load[place] -= size
                    self._running.get(worker, set()).discard(number)
        finally:
            self._dropped.pop(number, None)
            self._supervisor.ended([number])

    async def _present(self, place: int) -> None:
        """Wait until the worker of a place or a successor is ready."""
        while True:
            worker = self._worker(place)
            try:
                await asyncio.shield(self._starts[worker])
            except WorkerDied as death:
                if self._workers.get(place) is worker:
                    decision = self._forget(place, worker, str(death))
                    if decision.gives_up:
                        raise
                    self._on_death(str(death), decision)
            else:
                return

    def _worker(self, place: int) -> Worker:
        """Return the worker of a place, which may be starting."""
        worker = self._workers.get(place)
        if worker is not None and worker.is_dead:
            self._replace(place, worker, f"{worker.name} died: {worker.cause}")
        if place not in self._workers:
            worker = self._workers[place] = self._start_worker(place)
            self._running[worker] = set()
            self._starts[worker] = as_future(self._prepare(worker))
        return self._workers[place]

    def _replace(self, place: int, worker: Worker, reason: str) -> None:
        """Remove and report a dead worker, unless another caller has done so."""
        if self._workers.get(place) is worker:
            self._on_death(reason, self._forget(place, worker, reason))

    def _forget(self, place: int, worker: Worker, reason: str) -> Decision[int]:
        if not worker.is_dead:  # another error than its death
            worker.kill()
        del self._workers[place]
        start, running = self._starts.pop(worker), self._running.pop(worker)
        is_ready = start.done() and not start.cancelled() and start.exception() is None
        decision = self._supervisor.died(reason, running if is_ready else (), place=place)
        num_deaths = self._policy.poison.max_deaths
        for number in decision.drop:
            self._dropped[number] = (
                f"{counted(num_deaths, 'worker')} in a row died with it: {reason}"
            )
        if decision.gives_up and not is_ready:
            num_starts = self._policy.restart.max_restarts + 1
            failed = f"{counted(num_starts, 'worker')} in a row died while starting: {reason}"
            self._dropped.update(dict.fromkeys(running, failed))
        return decision
