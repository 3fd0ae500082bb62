"""The engine that samples some requests and answers others with their completions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from rlsys.common.async_condition import AsyncCondition
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats, GenerationEngine
from rlsys.engines.generation.mixed_engine import MixedEngine
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.types import (
    Completion,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)


class Sampler:
    """Engine whose requests end, or which fails, when a test says so."""

    context = 1 << 20

    def __init__(self) -> None:
        self.version = 0
        self.running: list[GenerationRequest] = []
        self.to_end: list[str] = []
        self.changed = AsyncCondition()
        self.failure: Exception | None = None
        self.closed = False

    def end(self, *names: str) -> None:
        self.to_end += names
        self.changed.notify()

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert requests
        self.running += requests

    async def collect(self) -> list[Generation]:
        await self.changed.until(lambda: bool(self.to_end) or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        ended, self.to_end = self.to_end, []
        self.running = [request for request in self.running if request.request_id not in ended]
        return [
            Generation(
                request_id=name,
                token_ids=np.array([1], np.int32),
                sampler_logprobs=np.array([-0.5], np.float32),
                policy_versions=np.array([self.version], np.int32),
                finish_reason=FinishReason.STOP,
            )
            for name in ended
        ]

    async def progress(self) -> list[Generation]:
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        self.end(*[r.request_id for r in self.running if r.request_id in request_ids])

    async def pause(self) -> None: ...

    async def prepare(self, manifest: WeightManifest) -> None:
        self.next_version = manifest.version

    async def load(self) -> None:
        self.version = self.next_version

    async def resume(self) -> None: ...

    async def release(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=0,
            num_running=len(self.running),
            num_generated_tokens=100,
            policy_version=self.version,
        )

    async def close(self) -> None:
        self.closed = True


def request(name: str, *held: int, reason: FinishReason = FinishReason.STOP) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        seed=0,
        completion=Completion(text="", token_ids=held, finish_reason=reason) if held else None,
    )


def names(generations: Sequence[Generation]) -> list[str]:
    return [generation.request_id for generation in generations]


def test_held_completions_do_not_wait_for_sampled_ones() -> None:
    async def scenario() -> None:
        sampler = Sampler()
        engine: GenerationEngine = MixedEngine(sampler)
        switch = WeightSwitch(engine)
        switch.submit([request("a"), request("b", 5, 6, reason=FinishReason.LENGTH), request("c")])
        assert [one.request_id for one in sampler.running] == ["a", "c"]
        (held,) = await switch.collect()
        assert (held.request_id, held.token_ids.tolist()) == ("b", [5, 6])
        assert held.finish_reason is FinishReason.LENGTH
        assert np.isnan(held.sampler_logprobs).all()
        assert held.policy_versions.tolist() == [0, 0]

        collecting = asyncio.create_task(switch.collect())
        await asyncio.sleep(0)
        assert not collecting.done()
        sampler.end("c")
        assert names(await collecting) == ["c"]

        await switch.switch(WeightManifest(version=4))
        switch.submit([request("d", 7)])  # nothing to sample: the sampler gets no call
        sampler.end("a")
        both = await switch.collect()
        while len(both) < 2:
            both += await switch.collect()
        assert sorted(names(both)) == ["a", "d"]
        assert {v for one in both for v in one.policy_versions.tolist()} == {4}
        stats = engine.stats()
        assert (stats.num_running, stats.num_generated_tokens) == (0, 103)
        assert stats.policy_version == 4
        await engine.close()
        assert sampler.closed

    asyncio.run(scenario())


def test_a_cancelled_collect_loses_nothing() -> None:
    async def scenario() -> None:
        sampler = Sampler()
        engine = MixedEngine(sampler)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.collect()
        engine.submit([request("a"), request("b", 1)])
        sampler.end("a")
        found = await engine.collect()
        while len(found) < 2:
            found += await engine.collect()
        assert sorted(names(found)) == ["a", "b"]
        engine.submit([request("c")])
        await engine.abort(["c", "b"])
        assert names(await engine.collect()) == ["c"]
        await engine.close()

    asyncio.run(scenario())


def test_collect_raises_the_samplers_failure() -> None:
    async def scenario() -> None:
        sampler = Sampler()
        engine = MixedEngine(sampler)
        collecting = asyncio.create_task(engine.collect())
        await asyncio.sleep(0)
        sampler.failure = EngineError("its loop died")
        sampler.changed.notify()
        with pytest.raises(EngineError) as raised:
            await collecting
        assert raised.value is sampler.failure
        await engine.close()

    asyncio.run(scenario())
