"""Helpers for the vLLM engine's tests: tiny models, requests, references by Hugging Face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import (
    Float32Array,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)
from tests.engines import published

TIMEOUT_S = 900.0  # for a busy machine


def make_engine(
    path: Path, *, max_context: int | None = None, dtype: str = "float32", **options: Any
) -> VLLMEngine:
    sizes: dict[str, Any] = {"max_running": 64, "kv_cache_gib": 0.125}
    rollout = RolloutConfig(engine="vllm", **(sizes | options))
    return VLLMEngine(str(path), rollout, dtype=dtype, max_context=max_context)


@asynccontextmanager
async def running_engine(path: Path, **options: Any) -> AsyncIterator[VLLMEngine]:
    engine = make_engine(path, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def publish(model: Any, version: int) -> WeightManifest:
    return published.publish(version, model_tensors(model).items())


def make_requests(
    prompts: Sequence[Sequence[int]], name: str, **sampling: Any
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{name}-{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(**sampling),
            seed=i,
        )
        for i, prompt in enumerate(prompts)
    ]


async def collect_all(engine: GenerationEngine, num: int) -> list[Generation]:
    """Return the next `num` generations, ordered by the number in their ids."""
    generations: list[Generation] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(generations) < num:
            generations += await engine.collect()
    assert len(generations) == num
    return sorted(generations, key=lambda g: int(g.request_id.rsplit("-")[-1]))


async def generate(
    engine: GenerationEngine, requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Run `requests` as one batch from the first step on, by sending them while paused."""
    await engine.pause()
    engine.submit(requests)
    await engine.resume()
    return await collect_all(engine, len(requests))


async def update(engine: GenerationEngine, manifest: WeightManifest) -> None:
    await engine.prepare(manifest)
    await engine.pause()
    await engine.load()
    await engine.resume()


@torch.no_grad()
def hf_logprobs(
    models: Sequence[Any],
    prompt: Sequence[int],
    generation: Generation,
    *,
    temperature: float = 1.0,
) -> Float32Array:
    """Compute log-probabilities [T] by models[v] for tokens of version v.

    The cache has the keys and values of the models before it.
    """
    token_ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
    versions = generation.policy_versions
    cache = None
    logprobs = []
    start = 0
    for version in np.unique(versions):
        # The last token of a version is the first input of the next version's model.
        end = len(prompt) - 1 + int(np.searchsorted(versions, version, side="right"))
        out = models[version](input_ids=token_ids[:, start:end], past_key_values=cache)
        logits = out.logits[0, max(0, len(prompt) - 1 - start) :] / temperature
        logprobs.append(logits.float().log_softmax(-1))
        cache, start = out.past_key_values, end
    sampled = token_ids[0, len(prompt) :, None]
    found: Float32Array = torch.cat(logprobs).gather(1, sampled)[:, 0].numpy()
    return found


def engine_processes(engine: VLLMEngine) -> list[psutil.Process]:
    """Return vLLM's processes, the engine core first."""
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    root = psutil.Process(core.pid)
    return [root, *root.children(recursive=True)]


def gone(processes: Sequence[psutil.Process], *, within_s: float) -> bool:
    """Return whether all processes end within the time."""
    with suppress(psutil.NoSuchProcess):
        _, alive = psutil.wait_procs(processes, timeout=within_s)
        return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    return True


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def build_variant(
    directory: Path, seed: int, *, model_type: str, tied: bool, **options: Any
) -> Path:
    """Build a tiny model of any architecture, with random weights, biases and norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer()
    defaults: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(model_type, **defaults | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
