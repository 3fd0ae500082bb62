"""Collects what the actors recorded, after each optimizer step, into the run's trace.json."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from actors.calls import Worker
from rlsys.dataflow.signal import Signal
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
        batches = await asyncio.gather(*(w.call("drain_trace") for w in self._workers()))
        for batch in batches:
            self._file.write(batch)
