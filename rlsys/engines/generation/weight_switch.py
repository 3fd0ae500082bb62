"""When an engine takes new weights: in the middle of generation, or when what it runs has ended.
And when it has none, as long as the trainer works on its device.

submit ─► [held from `drained` or `release` to `switch`] ─► engine ─► collect
switch:             prepare; pause, load, resume    running requests go on under new weights
drained, switch:    hold, wait; the same, let go    every completion has one version
release, switch:    hold, abort; the same, let go   what ran goes on from its tokens
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlsys.common.async_condition import AsyncCondition
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.types import FinishReason, Generation, GenerationRequest, WeightManifest


class WeightSwitch:
    """Stands before an engine; every request must be submitted and collected through it."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._running: dict[str, GenerationRequest] = {}  # by id, in the order of submission
        self._begun: dict[str, Generation] = {}  # what they had when the memory was let go
        self._held: list[list[GenerationRequest]] = []  # batches, kept whole
        self._cancelled: set[str] = set()  # running ones that are not wanted any more
        self._abort_later: set[str] = set()  # and held ones
        self._is_holding = False
        self._is_released = False
        self._ended = AsyncCondition()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._is_holding:
            self._held.append(list(requests))
            return
        self._engine.submit([self._rest(request) for request in requests])
        self._running.update((request.request_id, request) for request in requests)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel; each comes out of `collect`, those that are held when they are let go."""
        held = {request.request_id for requests in self._held for request in requests}
        self._abort_later |= held.intersection(request_ids)
        self._cancelled |= self._running.keys() & set(request_ids)
        await self._engine.abort([name for name in request_ids if name not in held])

    async def collect(self) -> list[Generation]:
        while True:
            ended = [
                self._whole(generation)
                for generation in await self._engine.collect()
                if not self._is_interrupted(generation)
            ]
            for generation in ended:
                self._running.pop(generation.request_id, None)
                self._begun.pop(generation.request_id, None)
                self._cancelled.discard(generation.request_id)
            self._ended.notify()
            if ended:
                return ended

    async def progress(self) -> list[Generation]:
        """What running requests have sampled so far, and those that are held as they ran before;
        as ABORTED.
        """
        running = [self._whole(generation) for generation in await self._engine.progress()]
        held = [request.request_id for requests in self._held for request in requests]
        return running + [self._begun[name] for name in held if name in self._begun]

    async def drained(self) -> None:
        """Hold what is submitted from now on, and wait until nothing runs; `switch` must follow."""
        self._is_holding = True
        await self._ended.until(lambda: not self._running)

    async def release(self) -> None:
        """Let the engine's memory go. What runs is held with what it has, and so is what is
        submitted from now on; all goes on, in its order, after the next `switch`. Somebody must be
        collecting.
        """
        if self._is_released:
            return
        order = {name: place for place, name in enumerate(self._running)}
        self._held.insert(0, [])  # of what is interrupted
        self._is_holding = True
        await self._engine.abort(list(order))
        await self._ended.until(lambda: not self._running)
        self._held[0].sort(key=lambda request: order[request.request_id])
        await self._engine.release()
        self._is_released = True

    async def switch(self, manifest: WeightManifest) -> float:
        """Take a version, most of it beside generation; returns the seconds in which nothing was
        sampled. On an error the old weights stay and generation goes on, if there are any.
        """
        try:
            await self._engine.prepare(manifest)
            pause_s = await self._load()
            self._is_released = False
            return pause_s
        finally:
            if not self._is_released:
                await self._let_go()

    async def _let_go(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for requests in held:
            if requests:
                self.submit(requests)
        abort, self._abort_later = self._abort_later, set()
        if abort:
            await self.abort(list(abort))

    async def _load(self) -> float:
        start = time.perf_counter()
        await self._engine.pause()
        try:
            await self._engine.load()
        finally:
            await self._engine.resume()
        return time.perf_counter() - start

    def _rest(self, request: GenerationRequest) -> GenerationRequest:
        begun = self._begun.get(request.request_id)
        return request if begun is None else continued(request, begun)

    def _whole(self, generation: Generation) -> Generation:
        begun = self._begun.get(generation.request_id)
        return generation if begun is None else merged(begun, generation)

    def _is_interrupted(self, generation: Generation) -> bool:
        """It has been aborted by `release`, not because nobody wants it: it is held."""
        name = generation.request_id
        if generation.finish_reason is not FinishReason.ABORTED or name in self._cancelled:
            return False
        if name not in self._running:
            return False
        if len(generation.token_ids):
            self._begun[name] = self._whole(generation)
        self._held[0].append(self._running.pop(name))
        return True
