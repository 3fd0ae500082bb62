"""Collects what the actors recorded, after each optimizer step, into the run's trace.json."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from actors.calls import Worker, WorkerDied
from rlsys.dataflow.signal import Signal
from rlsys.observe.trace import TraceBatch
from rlsys.observe.trace_file import TraceFile


class TraceCollector:
    """`workers` is asked anew each time, since actors come and go."""

    def __init__(self, file: TraceFile, workers: Callable[[], Iterable[Worker]]) -> None:
        self._file = file
        self._workers = workers

    async def run(self, stepped: Signal) -> None:
        while True:
            await stepped.next()
            await self.collect()

    async def collect(self) -> None:
        for batch in await asyncio.gather(*map(_drain, self._workers())):
            if batch is not None:
                self._file.write(batch)


async def _drain(worker: Worker) -> TraceBatch | None:
    try:
        batch: TraceBatch = await worker.call("drain_trace")
    except WorkerDied:  # whoever waits for its work decides what that means
        return None
    return batch
