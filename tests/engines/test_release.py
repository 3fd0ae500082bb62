"""Engines that free their memory and allocate it again with new weights: both, on the CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from rlsys.config import ModelConfig, RolloutConfig, SamplingConfig
from rlsys.engines.generation.engine_choice import build_engine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Generation, GenerationRequest
from tests.engines.vllm_harness import TIMEOUT_S, engine_processes, load, make_requests, publish

SIZES: dict[str, Any] = {"width": 512, "mlp_width": 2048, "num_layers": 6}  # 77 MiB
CACHE_GIB = 0.125
PROMPTS = [np.random.default_rng(n).integers(3, 259, size=n).tolist() for n in (5, 17, 60)]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "engine",
    [
        "torch",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.skipif(
                    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
                ),
            ],
        ),
    ],
)
def test_a_released_engine_continues_unchanged(
    engine: Literal["torch", "vllm"], tmp_path: Path
) -> None:
    paths = [build_tiny_model(tmp_path / str(seed), seed=seed, **SIZES) for seed in (0, 1)]
    models = [load(path) for path in paths]
    weight_bytes = sum(tensor.nbytes for tensor in model_tensors(models[0]).values())

    async def scenario() -> None:
        running = build_engine(
            ModelConfig(path=str(paths[0])),
            RolloutConfig(engine=engine, kv_cache_gib=CACHE_GIB, max_running=16),
            SamplingConfig(),
            max_context=512,
            shares_device=True,
        )
        await running.start()
        try:
            switch = WeightSwitch(running)
            await switch.switch(publish(models[0], 1))
            before = await generate(switch, "before")
            await switch.switch(publish(models[1], 2))
            await generate(switch, "others")

            held = resident_bytes(running)
            await switch.release()
            freed = held - resident_bytes(running)
            # The embedded engine's cache is as large as the requests that ran.
            cache_bytes = CACHE_GIB * 2**30 if engine == "vllm" else 0
            assert freed > 0.9 * (weight_bytes + cache_bytes)

            await switch.switch(publish(models[0], 3))
            # Batching depends on timing, and affects the last bits.
            assert_same(await generate(switch, "after"), before, atol=1e-5)

            # During completions, and with a request that arrives meanwhile.
            sampled = running.stats().num_generated_tokens
            interrupted = asyncio.create_task(generate(switch, "interrupted"))
            while running.stats().num_generated_tokens < sampled + 30:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await switch.release()
            sampled = running.stats().num_generated_tokens
            assert 30 <= sum(len(one.token_ids) for one in await switch.progress()) < 300
            switch.submit(make_requests(PROMPTS[:1], "late", max_tokens=4))
            await asyncio.sleep(0.1)
            assert running.stats().num_generated_tokens == sampled
            await switch.switch(publish(models[0], 4))
            ended = await interrupted
            assert_same([g for g in ended if "late" not in g.request_id], before, atol=1e-4)
            assert {3, 4} == {v for one in ended for v in one.policy_versions.tolist()}
        finally:
            await running.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def requests(name: str) -> list[GenerationRequest]:
    """Return requests without stop tokens, so that completions have fixed lengths."""
    return make_requests(PROMPTS, name, max_tokens=100)


async def generate(switch: WeightSwitch, name: str) -> list[Generation]:
    """Return generations in the order of their prompts."""
    switch.submit(requests(name))
    ended: list[Generation] = []
    while len([g for g in ended if g.request_id.startswith(name)]) < len(PROMPTS):
        ended += await switch.collect()
    return sorted(ended, key=lambda one: one.request_id)


def assert_same(
    found: Sequence[Generation], expected: Sequence[Generation], *, atol: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason is other.finish_reason
        np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=atol, rtol=0)


def resident_bytes(engine: Any) -> int:
    """Return the anonymous and shared memory of the processes that have the model."""
    pids = [os.getpid()]
    if isinstance(engine, VLLMEngine):
        pids = [process.pid for process in engine_processes(engine)]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )
