"""Collect the trace records of all actors after each optimizer step.

The records contain working and waiting times, and the events of the run's trace.json.
"""

from __future__ import annotations

import asyncio
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
        self._known: list[Worker] = []  # that were asked before

    async def run(self, stepped: AsyncCondition) -> None:
        """Collect the records now, before training, and after each optimizer step, forever."""
        while True:
            await self.collect()
            await stepped.next()

    async def collect(self) -> None:
        """Collect the records once."""
        workers = [*self._workers()]
        known, self._known = self._known, workers
        reports = await asyncio.gather(*map(_drain, workers))
        present = [
            (worker, report)
            for worker, report in zip(workers, reports, strict=True)
            if report is not None
        ]
        if self._file is not None:
            for batch in (self._tracer.drain(), *(report for _, report in present)):
                self._file.write(batch)
        for worker, report in present:
            if worker in known:
                self._on_report(report)


async def _drain(worker: Worker) -> TraceBatch | None:
    try:
        batch: TraceBatch = await worker.call("drain_trace")
    except WorkerDied:  # the caller of its other methods handles the death
        return None
    return batch
