"""The engine that answers with the dataset's completions: content, timing and versions."""

from __future__ import annotations

import asyncio

import numpy as np

from rlsys.engines.generation.dataset_engine import DatasetEngine
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightManifest
from tests.errors import invalid


def request(name: str, *token_ids: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        seed=0,
        completion=Completion(text="", token_ids=token_ids),
    )


def test_each_request_is_answered_with_its_completion() -> None:
    async def scenario() -> None:
        engine: GenerationEngine = DatasetEngine()
        switch = WeightSwitch(engine)
        switch.submit([request("a", 5, 6, 2), request("b", 2)])
        first, second = await switch.collect()
        assert (first.request_id, second.request_id) == ("a", "b")
        assert first.token_ids.tolist() == [5, 6, 2]
        assert np.isnan(first.sampler_logprobs).tolist() == [True] * 3
        assert first.policy_versions.tolist() == [0, 0, 0]
        assert second.finish_reason is FinishReason.STOP
        assert await engine.progress() == []
        await engine.abort(["a", "unknown"])

        await switch.drained()  # returns at once, because nothing runs
        switch.submit([request("c", 7)])
        await switch.switch(WeightManifest(version=3))
        (third,) = await switch.collect()
        assert third.policy_versions.tolist() == [3]
        assert (engine.stats().policy_version, engine.stats().num_generated_tokens) == (3, 5)

    asyncio.run(scenario())


def test_collect_waits_for_a_request() -> None:
    async def scenario() -> None:
        engine = DatasetEngine()
        collecting = asyncio.create_task(engine.collect())
        await asyncio.sleep(0)
        assert not collecting.done()
        engine.submit([request("a", 1)])
        assert [generation.request_id for generation in await collecting] == ["a"]

    asyncio.run(scenario())


def test_a_request_without_a_completion_is_rejected() -> None:
    sampled = GenerationRequest(
        request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), seed=0
    )
    with invalid("request 'a': completion"):
        DatasetEngine().submit([sampled])
