"""A sampler of a server: a generation engine and a scorer in a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlsys.engines.generation.generation_protocol import (
    AdapterEngine,
    GenerationEngine,
)
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.tinker_server.server_backend import ScoreRequest, Scores
from rlsys.types import Generation, GenerationRequest, WeightManifest

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat
from ..cluster.long_poll import LongPoll

if TYPE_CHECKING:
    from rlsys.tinker_server.saved_weights import SequenceScorer

# How long ended completions wait for others, to be returned in one call.
GATHER_S = 0.01


@dataclass(frozen=True, kw_only=True)
class SamplerFactory:
    """Configuration of an actor, which builds the engine in its own process."""

    make_engine: Callable[[], GenerationEngine]
    base_path: str
    dtype: str
    device: str
    pass_tokens: int  # of one forward pass of the scorer


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class SamplerActor(Heartbeat):
    """Sampler on one node. It loads weights only while it samples nothing (SamplerScheduler)."""

    def __init__(self, make: SamplerFactory) -> None:
        self._make = make
        self._engine = make.make_engine()
        self._switch = WeightSwitch(self._engine)
        self._ended = LongPoll(self._switch.collect)
        self._scorer: SequenceScorer | None = None
        self._scoring = asyncio.Lock()

    async def start(self) -> str:
        """Load the base model and return the id of the node."""
        await self._engine.start()
        return str(ray.get_runtime_context().get_node_id())

    async def submit(self, requests: list[GenerationRequest]) -> None:
        """Start completions."""
        self._switch.submit(requests)

    async def abort(self, request_ids: list[str]) -> None:
        """Abort completions."""
        await self._switch.abort(request_ids)

    async def collect(self) -> list[Generation]:
        """Return ended completions, none if there are none for a while: call it again."""
        return await self._ended.gathered(GATHER_S)

    async def take_published(self, manifest: WeightManifest) -> None:
        """Load weights that a trainer has published.

        Raises:
            MemoryGone: The trainer has freed this version.
            DamagedWeightsError: The memory is not what was published.
        """
        with await asyncio.to_thread(Weights, manifest) as weights:
            await self._switch.switch(weights.local)

    async def take_saved(self, number: int, directory: Path | None) -> None:
        """Load the weights in a directory, or those of the base model, under a number."""
        from rlsys.reallocation.transport.weight_views import stage_whole
        from rlsys.tinker_server.saved_weights import saved_tensors

        def staged() -> Any:
            found = saved_tensors(self._make.base_path, directory, dtype=self._make.dtype)
            return stage_whole(number, found)

        stage, manifest = await asyncio.to_thread(staged)
        try:
            await self._switch.switch(manifest)
        finally:
            stage.close()

    async def add_adapter(self, number: int, directory: Path) -> None:
        """Load an adapter while the engine samples with others.

        Raises:
            OSError: It cannot be read.
            ValueError: It does not fit the base model.
        """
        assert isinstance(self._engine, AdapterEngine)
        await self._engine.add_adapter(number, directory)

    async def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        assert isinstance(self._engine, AdapterEngine)
        await self._engine.drop_adapter(number)

    async def score(self, request: ScoreRequest) -> list[Scores]:
        """Return the scores of each row. It runs in a thread, concurrently with sampling."""
        async with self._scoring:
            return await asyncio.to_thread(self._scores, request)

    def _scores(self, request: ScoreRequest) -> list[Scores]:
        from rlsys.tinker_server.saved_weights import SequenceScorer

        make = self._make
        if self._scorer is None:
            self._scorer = SequenceScorer(
                make.base_path, dtype=make.dtype, device=make.device, max_tokens=make.pass_tokens
            )
        self._scorer.take(request.weights.key, request.weights.directory)
        return self._scorer.score(
            request.rows, top_k=request.top_k, temperature=request.temperature
        )

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
