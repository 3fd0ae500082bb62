"""vLLM's prefix cache and priorities for our requests, compared with Hugging Face."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Generation, GenerationRequest
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    generate,
    hf_logprobs,
    load,
    make_engine,
    make_requests,
    publish,
    update,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

Run = Callable[[Coroutine[Any, Any, Any]], Any]
RANDOM = np.random.default_rng(0)
BLOCK = 32


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))
    loop.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [build_tiny_model(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(paths: list[Path], run: Run) -> Iterator[VLLMEngine]:
    engine = make_engine(paths[0], max_running=2)
    run(engine.start())
    yield engine
    run(engine.close())


def prompts(*lengths: int) -> list[list[int]]:
    return [RANDOM.integers(3, 259, size=length).tolist() for length in lengths]


def added(engine: VLLMEngine, before: Any) -> tuple[int, int]:
    """Return prompt tokens and reused ones since `before`."""
    now = engine.stats()
    return (
        now.num_prompt_tokens - before.num_prompt_tokens,
        now.num_reused_tokens - before.num_reused_tokens,
    )


def next_turn(request: GenerationRequest, generation: Generation, name: str) -> GenerationRequest:
    tokens = [*request.prompt_token_ids, *generation.token_ids.tolist(), *range(10, 17)]
    return dataclasses.replace(request, request_id=name, prompt_token_ids=tokens)


def test_later_turns_reuse_earlier_ones(engine: VLLMEngine, paths: list[Path], run: Run) -> None:
    assert engine.stats().num_prompt_tokens == 0
    before = engine.stats()
    model = load(paths[0])
    requests = make_requests(prompts(40, 70), "turn0", max_tokens=20)
    for turn in range(1, 4):
        generations = run(generate(engine, requests))
        for request, generation in zip(requests, generations, strict=True):
            expected = hf_logprobs([model], request.prompt_token_ids, generation)
            np.testing.assert_allclose(generation.sampler_logprobs, expected, atol=1e-5)
        requests = [
            next_turn(request, generation, f"turn{turn}-{i}")
            for i, (request, generation) in enumerate(zip(requests, generations, strict=True))
        ]
    # Keys and values of 40 + 20 − 1 tokens are cached, then of 67 + 20 − 1; and so on.
    reused = (32 + 64) + (64 + 96)
    assert added(engine, before) == (40 + 67 + 94 + 70 + 97 + 124, reused)


def test_another_salt_and_other_weights_find_nothing(
    engine: VLLMEngine, paths: list[Path], run: Run
) -> None:
    (first,) = make_requests(prompts(70), "salt", max_tokens=4)
    first = dataclasses.replace(first, cache_salt="x")

    def reused(name: str, salt: str) -> int:
        before = engine.stats()
        run(generate(engine, [dataclasses.replace(first, request_id=name, cache_salt=salt)]))
        return added(engine, before)[1]

    assert [reused("a-0", "x"), reused("b-0", "x")] == [0, 64]
    assert [reused("c-0", "y"), reused("d-0", "")] == [0, 0]
    # The same version with other weights, as after a rollback to a checkpoint.
    run(update(engine, publish(load(paths[1]), 0)))
    assert [reused("e-0", "x"), reused("f-0", "x")] == [0, 64]


def test_the_highest_priority_is_admitted_first(engine: VLLMEngine, run: Run) -> None:
    """Run two at a time; equal priorities are admitted in order of arrival, not by name."""
    priorities = [0, 5, -3, 0, 5, 1]
    requests = [
        dataclasses.replace(request, priority=priority, request_id=f"{9 - i}-{i}")
        for i, (request, priority) in enumerate(
            zip(make_requests(prompts(*[5] * 6), "p", max_tokens=4), priorities, strict=True)
        )
    ]

    async def order() -> list[int]:
        await engine.pause()
        engine.submit(requests)
        await engine.resume()
        ended: list[Generation] = []
        while len(ended) < len(requests):
            ended += await engine.collect()
        return [int(one.request_id.rsplit("-")[-1]) for one in ended]

    found = run(order())
    assert [set(found[i : i + 2]) for i in (0, 2, 4)] == [{1, 4}, {5, 0}, {3, 2}]
