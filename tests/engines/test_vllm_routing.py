"""Routing replay with vLLM: the experts that it returns are those that sampled each token."""

from __future__ import annotations

import asyncio
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.types import Generation, GenerationRequest, TrainRow
from tests.engines.test_routing import forced, own_choice
from tests.engines.training_harness import make_engine as make_trainer
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    build_variant,
    collect_all,
    generate,
    load,
    make_requests,
    publish,
    running_engine,
    update,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

NUM_LAYERS, NUM_CHOSEN = 2, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "tied": False,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
RANDOM = np.random.default_rng(0)
SHARED = RANDOM.integers(3, 250, 100).tolist()
PROMPTS = [[*SHARED, *RANDOM.integers(3, 250, n).tolist()] for n in (1, 17, 60)] + [[5, 9, 200]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [build_variant(root / str(seed), seed, **MODEL) for seed in (0, 1)]


def tokens_of(request: GenerationRequest, made: Generation) -> list[int]:
    return [*request.prompt_token_ids, *made.token_ids.tolist()]


def as_sets(experts: np.ndarray) -> np.ndarray:
    """Return experts in ascending order within each token and layer."""
    chosen = experts.reshape(len(experts), NUM_LAYERS, NUM_CHOSEN)
    return np.sort(chosen, -1)


def check_choice(model: Any, request: GenerationRequest, made: Generation) -> None:
    """Assert that all experts of a completion are those of a plain forward pass."""
    assert made.routed_experts is not None
    assert made.routed_experts.dtype == np.uint8
    expected = own_choice(model, tokens_of(request, made)[:-1])
    np.testing.assert_array_equal(as_sets(made.routed_experts), as_sets(expected))


def row_of(request: GenerationRequest, made: Generation) -> TrainRow:
    assert made.routed_experts is not None
    length = len(made.token_ids)
    return TrainRow(
        prompt_token_ids=np.array(request.prompt_token_ids, np.int32),
        token_ids=made.token_ids,
        policy_versions=made.policy_versions,
        loss_mask=np.ones(length, np.bool_),
        columns={"sampler_logprobs": made.sampler_logprobs},
        group_id=0,
        group_size=1,
        group_num_tokens=length,
        routed_experts=made.routed_experts.flatten(),
    )


def choice_with_cache(
    models: list[Any], request: GenerationRequest, made: Generation
) -> np.ndarray:
    """Return the experts of models[v] for tokens of version v, over the keys of those before."""
    chosen: list[list[torch.Tensor]] = [[] for _ in range(NUM_LAYERS)]
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, __, output, number=number: chosen[number].append(output[2])
        )
        for model in models
        for number, layer in enumerate(model.model.layers)
    ]
    token_ids = torch.tensor([tokens_of(request, made)])
    start, cache = 0, None
    with torch.no_grad():
        for version in np.unique(made.policy_versions):
            # The last token of a version is the first input of the next version's model.
            end = len(request.prompt_token_ids) - 1
            end += int(np.searchsorted(made.policy_versions, version, side="right"))
            model = models[version].model
            cache = model(input_ids=token_ids[:, start:end], past_key_values=cache).past_key_values
            start = end
    for hook in hooks:
        hook.remove()
    return torch.cat([torch.cat(of_layer) for of_layer in chosen], -1).numpy()


def test_experts_replayed_are_experts_sampled(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 64 tokens, a cache of 640 tokens, so that requests wait and are preempted."""
    import vllm.engine.arg_utils as arg_utils

    limited = partial(arg_utils.AsyncEngineArgs, max_num_batched_tokens=64)
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", limited)
    models = [load(path) for path in paths]
    first = make_requests(PROMPTS * 2, "first", max_tokens=60, stop_token_ids=())
    again = make_requests(PROMPTS, "again", max_tokens=20)
    # They fit into the cache: a preemption would compute old tokens with new weights.
    flying = make_requests([PROMPTS[0], PROMPTS[3]], "flying", max_tokens=120)
    options = {"replay_routing": True, "kv_cache_gib": 640 * 1024 / 2**30, "max_context": 512}

    async def sample() -> tuple[list[Generation], ...]:
        async with running_engine(paths[0], **options) as engine:
            made = await generate(engine, first)
            reused = engine.stats().num_reused_tokens
            await engine.progress()  # reads the preemptions
            assert engine.stats().num_preempted > 0
            made_again = await generate(engine, again)
            assert engine.stats().num_reused_tokens > reused  # prefixes of earlier requests
            engine.submit(flying)
            engine.submit(make_requests([[7]], "short", max_tokens=5))
            short = await collect_all(engine, 1)
            partial_ones = await engine.progress()
            await update(engine, publish(models[1], 1))
            whole = await collect_all(engine, len(flying))
            return made, made_again, short, partial_ones, whole

    made, made_again, _, partial_ones, whole = asyncio.run(sample())
    for request, one in [*zip(first, made, strict=True), *zip(again, made_again, strict=True)]:
        check_choice(models[0], request, one)
    for request, one in zip(flying, whole, strict=True):
        assert one.routed_experts is not None
        expected = choice_with_cache(models, request, one)
        np.testing.assert_array_equal(as_sets(one.routed_experts), as_sets(expected))
    by_id = {one.request_id: one for one in whole}
    for one in partial_ones:
        after = by_id[one.request_id].routed_experts
        assert one.routed_experts is not None
        assert after is not None
        np.testing.assert_array_equal(one.routed_experts, after[: len(one.routed_experts)])

    rows = [row_of(request, one) for request, one in zip(first, made, strict=True)]
    trainer = make_trainer(paths[0], temperature=1.0)
    found = trainer.infer(rows)
    trainer.close()
    forced_model = load(paths[0])
    for row, logprobs in zip(rows, found, strict=True):
        sampled = row.columns["sampler_logprobs"]
        np.testing.assert_allclose(logprobs, sampled, atol=1e-5)
        np.testing.assert_allclose(forced(forced_model, row).detach(), sampled, atol=1e-5)


def test_two_tensor_parallel_ranks_record_the_same_experts(paths: list[Path]) -> None:
    requests = make_requests(PROMPTS, "two", max_tokens=20)

    async def sample() -> list[Generation]:
        options = {"replay_routing": True, "tensor_parallel": 2, "num_cpus": 2}
        async with running_engine(paths[0], **options) as engine:
            return await generate(engine, requests)

    model = load(paths[0])
    for request, one in zip(requests, asyncio.run(sample()), strict=True):
        check_choice(model, request, one)
