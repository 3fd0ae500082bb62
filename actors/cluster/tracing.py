"""Collects what the actors recorded, after each optimizer step: how long each worked and waited,
and the events of the run's trace.json.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rlsys.common.async_condition import AsyncCondition
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.observe.trace_file import TraceFile

from .calls import Worker, WorkerDied


class TraceCollector:
    """`workers` is asked anew each time, since actors come and go; `tracer` is the controller's;
    `on_report` gets what each actor tells, whether or not there is a file.
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
        while True:
            await stepped.next()
            await self.collect()

    async def collect(self) -> None:
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
    except WorkerDied:  # whoever waits for its work decides what that means
        return None
    return batch
