"""The vLLM engine with an engine per test: architectures, ranks, deaths, Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.generation.vllm.vllm_leftovers import shared_files
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.reallocation.shards import Box, TensorShard
from rlsys.types import Generation, GenerationRequest
from tests.engines.buffered_models import build_buffered
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    build_variant,
    collect_all,
    engine_processes,
    generate,
    gone,
    hf_logprobs,
    load,
    make_engine,
    make_requests,
    publish,
    running_engine,
    update,
)
from tests.errors import invalid

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

PROMPTS = [[5, 9, 200], list(range(3, 70)), [17]]
REPOSITORY = Path(__file__).parents[2]

EXPERTS = {"tied": False, "head_dim": 32, "num_experts_per_tok": 2}
QWEN3_MOE = EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, untied": {"model_type": "llama", "tied": False},
    "llama, padded blocks": {
        "model_type": "llama",
        "tied": True,
        "head_dim": 32,
        "hidden_size": 192,  # blocks of quantised weights have 128 rows and columns
        "intermediate_size": 256,
    },
    "qwen2, with biases": {"model_type": "qwen2", "tied": True},
    "qwen3": {"model_type": "qwen3", "tied": True, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", "tied": True, "head_dim": 32},
    "gemma3": {"model_type": "gemma3_text", "tied": True, "head_dim": 32, "sliding_window": 32},
    "phi3, fused on the hub": {"model_type": "phi3", "tied": False},
    "qwen3_moe": QWEN3_MOE | {"moe_intermediate_size": 128},
    "qwen3_moe, padded for kernels": QWEN3_MOE | {"moe_intermediate_size": 48},
    "mixtral": EXPERTS | {"model_type": "mixtral", "num_local_experts": 8},
    "gpt_oss": EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 32},
}
BUFFERED = ["gemma4_text", "glm4_moe"]


def build(variant: str, directory: Path) -> list[Path]:
    """Build two models with different weights."""
    paths = [directory / str(seed) for seed in (0, 1)]
    if variant in VARIANTS:
        return [build_variant(path, i, **VARIANTS[variant]) for i, path in enumerate(paths)]
    return [build_buffered(path, variant, seed=i) for i, path in enumerate(paths)]


def greedy(name: str) -> list[GenerationRequest]:
    return make_requests(PROMPTS, name, temperature=0.0, max_tokens=24)


async def updated_and_fresh(
    paths: list[Path], **options: Any
) -> tuple[list[Generation], list[Generation]]:
    """Return greedy completions after an update to another model, and after a fresh start."""
    async with running_engine(paths[0], **options) as engine:
        await generate(engine, greedy("old"))
        await update(engine, publish(load(paths[1]), 1))
        updated = await generate(engine, greedy("new"))
    async with running_engine(paths[1], **options) as engine:
        fresh = await generate(engine, greedy("new"))
    return updated, fresh


@pytest.mark.parametrize("variant", [*VARIANTS, *BUFFERED])
def test_an_update_equals_a_fresh_start_for(variant: str, tmp_path: Path) -> None:
    paths = build(variant, tmp_path)
    models = [load(path) for path in paths]
    updated, fresh = asyncio.run(updated_and_fresh(paths))
    for prompt, a, b in zip(PROMPTS, updated, fresh, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        expected = hf_logprobs(models, prompt, a)
        np.testing.assert_allclose(a.sampler_logprobs, expected, atol=1e-3)


CHANNELS, BLOCKS, INT8 = "fp8_per_channel", "fp8_per_block", "int8"


@pytest.mark.parametrize(
    ("variant", "dtype", "scheme"),
    [
        *itertools.product(
            ["qwen3", "llama, untied", "qwen2, with biases"], ["float16", "bfloat16"], [CHANNELS]
        ),
        *itertools.product(["qwen3", "llama, padded blocks"], ["bfloat16"], [BLOCKS]),
        ("qwen3_moe", "bfloat16", INT8),
    ],
)
def test_weights_are_quantized_again_at_an_update(
    variant: str, dtype: str, scheme: str, tmp_path: Path
) -> None:
    """Expect the results of a fresh start, which differ from full precision."""
    paths = build(variant, tmp_path)
    models = [load(paths[1])] * 2
    options = {"dtype": dtype, "quantization": scheme}
    updated, fresh = asyncio.run(updated_and_fresh(paths, **options))
    for prompt, a, b in zip(PROMPTS, updated, fresh, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        exact = hf_logprobs(models, prompt, a)
        apart = np.abs(a.sampler_logprobs - exact).mean()
        assert 1e-4 < apart < 0.2


def test_arguments_reach_vllm_and_weights_are_updated(tmp_path: Path) -> None:
    """Use fp8 keys and values, small chunks of prompts and larger blocks at once."""
    paths = build("qwen3", tmp_path)
    models = [load(paths[1])] * 2
    arguments: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 64,
        "max_num_scheduled_tokens": 48,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 32,
        "block_size": 64,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 400,
        "watermark": 0.05,
    }
    updated, fresh = asyncio.run(updated_and_fresh(paths, vllm=arguments))
    for prompt, a, b in zip(PROMPTS, updated, fresh, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        exact = hf_logprobs(models, prompt, a)
        assert 1e-6 < np.abs(a.sampler_logprobs - exact).mean() < 0.2  # keys are rounded


def test_experts_are_not_quantized(tmp_path: Path) -> None:
    (path, _) = build("qwen3_moe", tmp_path)
    with pytest.raises((ValueError, EngineError)) as found:
        asyncio.run(make_engine(path, quantization="fp8_per_channel").start())
    assert "quantiz" in str(found.value)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_an_update_equals_a_fresh_start_for_two_tensor_parallel_ranks(
    variant: str, tmp_path: Path
) -> None:
    paths = build(variant, tmp_path)
    updated, fresh = asyncio.run(updated_and_fresh(paths, tensor_parallel=2, num_cpus=2))
    for a, b in zip(updated, fresh, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)


async def holdings_of(path: Path) -> list[list[TensorShard]]:
    async with running_engine(path, tensor_parallel=2, num_cpus=2) as engine:
        return await engine.holdings()


def test_two_tensor_parallel_ranks_together_have_the_model(tmp_path: Path) -> None:
    """Expect vLLM's split: padded vocabulary, heads, columns and rows of the MLP, whole norms."""
    (path, _) = build("qwen3", tmp_path)
    first, last = asyncio.run(holdings_of(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors(load(path)).items()}
    assert {one.name: one.shape for one in first} == shapes
    boxes = [{one.name: one.box for one in of_rank} for of_rank in (first, last)]
    for name, shape in shapes.items():
        left = Box.whole(shape).without(boxes[0][name])
        norm = name.endswith("norm.weight")
        assert boxes[1][name] == Box.whole(shape) if norm else left == [boxes[1][name]], name
    vocabulary, width = shapes["model.embed_tokens.weight"]
    half = -(-vocabulary // 64) * 64 // 2
    assert str(boxes[0]["model.embed_tokens.weight"]) == f"[0:{half}, 0:{width}]"


def test_an_architecture_that_vllm_loads_but_cannot_run_fails_at_the_start(tmp_path: Path) -> None:
    path = build_variant(tmp_path, 0, model_type="qwen3", tied=True, head_dim=16)
    with pytest.raises(EngineError):
        asyncio.run(make_engine(path).start())


def test_a_start_that_fails_midway_leaves_no_process(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    engine = make_engine(path, max_context=2048, kv_cache_gib=0.0005)  # far below one sequence
    with pytest.raises(EngineError) as found:
        asyncio.run(engine.start())
    assert "rollout.kv_cache_gib" in str(found.value)
    started = [
        process
        for process in set(psutil.Process().children(recursive=True)) - before
        if "resource_tracker" not in " ".join(process.cmdline())
    ]
    assert gone(started, within_s=5)


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.engines.vllm_harness import engine_processes, make_engine

async def main():
    engine = make_engine(Path(sys.argv[1]))
    await engine.start()
    print(*(process.pid for process in engine_processes(engine)), flush=True)
    await engine.collect()  # for ever

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_engine_whose_processes_are_stopped_does_not_answer(tmp_path: Path) -> None:
    async def stop() -> None:
        async with running_engine(build_tiny_model(tmp_path)) as engine:
            for process in engine_processes(engine):
                process.suspend()
            asked = asyncio.create_task(engine.progress())
            await asyncio.wait([asked], timeout=5.0)
            assert not asked.done()
            for process in engine_processes(engine):
                process.resume()
            assert await asyncio.wait_for(asked, TIMEOUT_S) == []

    asyncio.run(stop())


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a directory with a name that is short enough for socket names."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        yield Path(name)


def test_the_engine_ends_with_a_killed_owner(tmp_path: Path, temporary: Path) -> None:
    path = build_tiny_model(tmp_path / "model")
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(processes) >= 2
    assert shared_files(processes) == set()  # such files would stay if all processes were killed
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(timeout=300)
    assert gone(processes, within_s=10)
    assert [path.name for path in temporary.iterdir() if path.is_file()] == []


def test_it_runs_in_an_asynchronous_ray_actor(tmp_path: Path) -> None:
    import ray

    paths = [build_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    models = [load(path) for path in paths]
    manifest = publish(models[1], 1)

    class Engine:
        async def start(self, path: Path) -> list[int]:
            self.engine = make_engine(path)
            await self.engine.start()
            return [process.pid for process in engine_processes(self.engine)]

        async def sample(self, name: str) -> list[Generation]:
            return await generate(self.engine, greedy(name))

        async def update(self) -> None:
            self.engine.submit(make_requests([[5]], "running", max_tokens=100, temperature=0.0))
            await update(self.engine, manifest)
            await collect_all(self.engine, 1)

        async def close(self) -> None:
            await self.engine.close()

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _system_config={"worker_niceness": 0},
        runtime_env={"env_vars": {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}"}},
    )
    try:
        actor = ray.remote(num_cpus=1)(Engine).remote()
        pids = ray.get(actor.start.remote(paths[0]), timeout=300)
        processes = [psutil.Process(pid) for pid in pids]
        ray.get(actor.update.remote(), timeout=300)
        for prompt, generation in zip(
            PROMPTS, ray.get(actor.sample.remote("new"), timeout=300), strict=True
        ):
            assert (generation.policy_versions == 1).all()
            expected = hf_logprobs(models, prompt, generation)
            np.testing.assert_allclose(generation.sampler_logprobs, expected, atol=1e-3)
        ray.get(actor.close.remote(), timeout=300)
        assert gone(processes, within_s=0)
    finally:
        ray.shutdown()


def test_weights_that_cannot_be_replaced_are_rejected_at_the_start(
    tmp_path: Path,
) -> None:
    path = build_variant(tmp_path, 0, **VARIANTS["gpt_oss"])
    with invalid("model.path") as refusal:
        asyncio.run(make_engine(path, dtype="float16").start())
    assert "attention sinks in float32" in refusal.value.rule


def test_latent_attention_is_rejected_on_the_cpu(tmp_path: Path) -> None:
    path = build_buffered(tmp_path, "deepseek_v3")
    with invalid("model.path") as refusal:
        asyncio.run(make_engine(path).start())
    assert "latent attention" in refusal.value.rule


def test_bfloat16_logits_are_not_rounded(tmp_path: Path) -> None:
    """Check the precision: log-probabilities differ as logits do.

    bfloat16 logits beyond 4 are multiples of 1/32.
    """
    path = build_variant(tmp_path, 0, model_type="llama", tied=False)
    model = load(path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(path)
    requests = make_requests([[5, 9, 200]] * 64, "logits", temperature=2.0, max_tokens=1)

    async def sample() -> list[Generation]:
        async with running_engine(path, dtype="bfloat16") as engine:
            return await generate(engine, requests)

    found = np.concatenate([one.sampler_logprobs for one in asyncio.run(sample())])
    logits = 2.0 * np.unique(found).astype(np.float64)
    multiples = 32 * (logits - logits[0])[1:]
    assert len(multiples) >= 8
    assert np.mean(np.abs(multiples - np.round(multiples)) < 0.01) < 0.5


def test_bfloat16_serves_float32_weights_rounded(tmp_path: Path) -> None:
    async def sample() -> list[Generation]:
        path = build_tiny_model(tmp_path / "0", seed=0)
        async with running_engine(path, dtype="bfloat16") as engine:
            model = load(build_tiny_model(tmp_path / "1", seed=1))
            await update(engine, publish(model, 1))
            return await generate(engine, greedy("rounded"))

    generations = asyncio.run(sample())
    models = [None, load(tmp_path / "1").to(torch.bfloat16)]
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = hf_logprobs(models, prompt, generation)
        np.testing.assert_allclose(generation.sampler_logprobs, expected, atol=0.1)
