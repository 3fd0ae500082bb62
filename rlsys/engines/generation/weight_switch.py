"""When an engine takes new weights: in the middle of generation, or when what it runs has ended.

submit ─► [held from `drained` to `switch`] ─► engine ─► collect
switch:             prepare; pause, load, resume    running requests go on under new weights
drained, switch:    hold, wait; the same, let go    every completion has one version
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlsys.dataflow.signal import Signal
from rlsys.engines.generation.protocol import GenerationEngine
from rlsys.types import Generation, GenerationRequest, WeightManifest


class WeightSwitch:
    """Stands before an engine; every request must be submitted and collected through it."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._running: set[str] = set()
        self._held: list[list[GenerationRequest]] = []  # batches, kept whole
        self._abort_later: set[str] = set()  # those of them that are not wanted any more
        self._is_holding = False
        self._ended = Signal()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._is_holding:
            self._held.append(list(requests))
            return
        self._engine.submit(requests)
        self._running.update(request.request_id for request in requests)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel; each comes out of `collect`, those that are held when they are let go."""
        held = {request.request_id for requests in self._held for request in requests}
        self._abort_later |= held.intersection(request_ids)
        await self._engine.abort([name for name in request_ids if name not in held])

    async def collect(self) -> list[Generation]:
        generations = await self._engine.collect()
        self._running.difference_update(g.request_id for g in generations)
        self._ended.notify()
        return generations

    async def drained(self) -> None:
        """Hold what is submitted from now on, and wait until nothing runs; `switch` must follow."""
        self._is_holding = True
        await self._ended.until(lambda: not self._running)

    async def switch(self, manifest: WeightManifest) -> float:
        """Take a version, most of it beside generation; returns the seconds in which nothing was
        sampled. On an error the old weights stay and generation goes on."""
        try:
            await self._engine.prepare(manifest)
            return await self._load()
        finally:
            self._is_holding = False
            held, self._held = self._held, []
            for requests in held:
                self.submit(requests)
            abort, self._abort_later = self._abort_later, set()
            if abort:
                await self._engine.abort(abort)

    async def _load(self) -> float:
        start = time.perf_counter()
        await self._engine.pause()
        try:
            await self._engine.load()
        finally:
            await self._engine.resume()
        return time.perf_counter() - start
