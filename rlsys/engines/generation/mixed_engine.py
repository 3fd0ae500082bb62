"""An engine that samples, and answers at once where a request brings its completion.

    submit ─┬─ with a completion ──► DatasetEngine ─┐
            └─ without ────────────► sampling engine ┴─► collect

For a graph whose prompts come with completions of other runs now and then
(rlsys.data.swarm.shared_pool).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from rlsys.engines.generation.dataset_engine import DatasetEngine
from rlsys.engines.generation.generation_protocol import EngineStats, GenerationEngine
from rlsys.types import Generation, GenerationRequest, WeightManifest


class MixedEngine:
    """A rlsys.engines.generation.generation_protocol.GenerationEngine around the one that
    samples.
    """

    def __init__(self, sampling: GenerationEngine) -> None:
        self._sampling = sampling
        self._held = DatasetEngine()
        self._collecting: dict[GenerationEngine, asyncio.Task[list[Generation]]] = {}

    async def start(self) -> None:
        await self._sampling.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        to_sample = [request for request in requests if request.completion is None]
        if to_sample:
            self._sampling.submit(to_sample)
        self._held.submit([request for request in requests if request.completion is not None])

    async def collect(self) -> list[Generation]:
        # Both are left waiting over several calls: a cancelled one could lose what it returns.
        for engine in (self._held, self._sampling):
            if engine not in self._collecting:
                self._collecting[engine] = asyncio.create_task(engine.collect())
        await asyncio.wait(self._collecting.values(), return_when=asyncio.FIRST_COMPLETED)
        ended: list[Generation] = []
        for engine, task in [*self._collecting.items()]:
            if task.done():
                del self._collecting[engine]
                ended += task.result()
        return ended

    async def progress(self) -> list[Generation]:
        return await self._sampling.progress()

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._sampling.abort(request_ids)

    async def pause(self) -> None:
        await self._sampling.pause()

    async def prepare(self, manifest: WeightManifest) -> None:
        await self._sampling.prepare(manifest)
        await self._held.prepare(manifest)

    async def load(self) -> None:
        await self._sampling.load()
        await self._held.load()

    async def resume(self) -> None:
        await self._sampling.resume()

    async def release(self) -> None:
        await self._sampling.release()

    def stats(self) -> EngineStats:
        sampled = self._sampling.stats()
        held = self._held.stats().num_generated_tokens
        return replace(sampled, num_generated_tokens=sampled.num_generated_tokens + held)

    async def close(self) -> None:
        for task in self._collecting.values():
            task.cancel()
        await self._sampling.close()
