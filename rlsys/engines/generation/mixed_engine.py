"""An engine that samples some requests and answers others with a completion that they bring.

    submit ─┬─ with a completion ──► DatasetEngine ─┐
            └─ without ────────────► sampling engine ┴─► collect

Used for graphs whose prompts sometimes come with completions of other runs
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
    """A GenerationEngine that wraps the one that samples."""

    def __init__(self, sampling: GenerationEngine) -> None:
        self._sampling = sampling
        self._held = DatasetEngine()
        self._collecting: dict[GenerationEngine, asyncio.Task[list[Generation]]] = {}

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        return self._sampling.context

    async def start(self) -> None:
        """See `GenerationEngine.start`."""
        await self._sampling.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        to_sample = [request for request in requests if request.completion is None]
        if to_sample:
            self._sampling.submit(to_sample)
        self._held.submit([request for request in requests if request.completion is not None])

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        # Both tasks may outlast this call: cancelling one could lose its result.
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
        """See `GenerationEngine.progress`."""
        return await self._sampling.progress()

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        await self._sampling.abort(request_ids)

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        await self._sampling.pause()

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        await self._sampling.prepare(manifest)
        await self._held.prepare(manifest)

    async def load(self) -> None:
        """See `GenerationEngine.load`."""
        await self._sampling.load()
        await self._held.load()

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        await self._sampling.resume()

    async def release(self) -> None:
        """See `GenerationEngine.release`."""
        await self._sampling.release()

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        sampled = self._sampling.stats()
        held = self._held.stats().num_generated_tokens
        return replace(sampled, num_generated_tokens=sampled.num_generated_tokens + held)

    async def close(self) -> None:
        """See `GenerationEngine.close`."""
        for task in self._collecting.values():
            task.cancel()
        await self._sampling.close()
