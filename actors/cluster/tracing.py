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
    controller's. `on_report` gets the records of each actor, also without a file.
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

    async def run(self, stepped: AsyncCondition) -> None:
        """Collect the records after each optimizer step, forever."""
        while True:
            await stepped.next()
            await self.collect()

    async def collect(self) -> None:
        """Collect the records once."""
        reports = await asyncio.gather(*map(_drain, self._workers()))
        present = [report for report in reports if report is not None]
        if self._file is not None:
            for batch in (self._tracer.drain(), *present):
                self._file.write(batch)
        for report in present:
            self._on_report(report)


async def _drain(worker: Worker) -> TraceBatch | None:
    try:
        batch: TraceBatch = await worker.call("drain_trace")
    except WorkerDied:  # the caller of its other methods handles the death
        return None
    return batch
