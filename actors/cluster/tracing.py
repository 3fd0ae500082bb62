"""Collect the trace records of all actors after each optimizer step.

The records contain working and waiting times, and the events of the run's trace.json.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable

from rlsys.common.async_condition import AsyncCondition
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.observe.trace_file import TraceFile

from .calls import Worker, WorkerDied


class TraceCollector:
    """Collector of the trace records of the controller and all workers.

    `workers` is called for each collection, because actors come and go. `tracer` is the
    controller's. `on_report` gets the records of each actor, also without a file, except its first
    ones: they include the start of its process.
    """

    def __init__(
        self,
        file: TraceFile | None,
        workers: Callable[[], Iterable[Worker]],
        *,
        tracer: Tracer,
        on_report: Callable[[TraceBatch], None],
    ) -> None:
        self._file = file
        self._workers = workers
        self._tracer = tracer
        self._on_report = on_report
        self._known: weakref.WeakSet[Worker] = weakref.WeakSet()  # have answered
        self._asked: set[Worker] = set()  # have not answered yet

    async def run(self, stepped: AsyncCondition) -> None:
        """Collect the records now, before training, and after each optimizer step, forever.

        An actor that does not answer, because it starts, delays no other one.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._write(self._tracer.drain())
                for worker in self._workers():
                    if worker not in self._asked:
                        self._asked.add(worker)
                        tasks.create_task(self._collect(worker))
                await stepped.next()

    async def collect(self) -> None:
        """Collect the last records of all actors that have answered before."""
        self._write(self._tracer.drain())
        known = [worker for worker in self._workers() if worker in self._known]
        await asyncio.gather(*map(self._collect, known))

    async def _collect(self, worker: Worker) -> None:
        try:
            batch: TraceBatch = await worker.call("drain_trace")
        except WorkerDied:  # the caller of its other methods handles the death
            return
        finally:
            self._asked.discard(worker)
        self._write(batch)
        if worker in self._known:
            self._on_report(batch)
        self._known.add(worker)

    def _write(self, batch: TraceBatch) -> None:
        if self._file is not None:
            self._file.write(batch)
