"""Prefill and decode speed of the torch engine on one GPU, against transformers' generate.

    python -m scripts.gpu.generation [--device cpu --small]

128 sequences at a time, bfloat16, random weights in Qwen3's shapes. Decode: prompts of 16 tokens,
256 new tokens each. Prefill: prompts of 1,024 tokens, one new token each, all different.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.records import (
    Settings,
    free_memory,
    gib,
    measured,
    parse_settings,
    peak_bytes,
    seconds_of,
)
from scripts.gpu.shapes import build_shape, scratch_directory

NUM_SEQUENCES, PROMPT, NEW_TOKENS, LONG_PROMPT = 128, 16, 256, 1024
SMALL = (4, 4, 8, 16)
TIMEOUT_S = 300.0


def main() -> None:
    """Measure and print result lines."""
    settings = parse_settings(__doc__)
    for shape in ["tiny"] if settings.small else settings.cases or ["0.6b", "4b"]:
        directory = scratch_directory()
        try:
            path = build_shape(directory / shape, shape, settings.device)
            with measured(kind="generate", engine="rlsys torch", shape=shape) as values:
                asyncio.run(measure_engine(path, settings, values))
            free_memory()
            with measured(kind="generate", engine="transformers", shape=shape) as values:
                measure_transformers(path, settings, values)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def sizes(settings: Settings) -> tuple[int, int, int, int]:
    """Return the number of sequences, prompt lengths and new tokens."""
    return SMALL if settings.small else (NUM_SEQUENCES, PROMPT, NEW_TOKENS, LONG_PROMPT)


async def measure_engine(path: Path, settings: Settings, values: dict[str, Any]) -> None:
    """Measure prefill and decode speed of the torch engine."""
    from rlsys.config import RolloutConfig
    from rlsys.engines.generation.torch.torch_engine import TorchEngine

    count, prompt, new_tokens, long_prompt = sizes(settings)
    rollout = RolloutConfig(max_running=count, kv_cache_gib=0.1 if settings.small else 40.0)
    engine = TorchEngine(path, rollout, dtype="bfloat16", device=settings.device, stop_token_ids=())
    start = time.perf_counter()
    await engine.start()
    values["start_s"] = round(time.perf_counter() - start, 1)
    try:
        await run(engine, count, prompt, new_tokens)  # warm up
        seconds = await run(engine, count, prompt, new_tokens)
        values["decode_tokens_per_s"] = round(count * new_tokens / seconds)
        values["decode_step_ms"] = round(1e3 * seconds / new_tokens, 2)
        await run(engine, count, long_prompt, 1)
        seconds = await run(engine, count, long_prompt, 1)
        values["prefill_tokens_per_s"] = round(count * long_prompt / seconds)
        values["peak_gib"] = gib(peak_bytes(settings))
    finally:
        await engine.close()


async def run(engine: Any, count: int, prompt: int, new_tokens: int) -> float:
    """Return the seconds that `count` requests of random prompts take."""
    from rlsys.types import GenerationRequest, SamplingParams

    chance = random.Random(0)
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=[chance.randrange(4, 500) for _ in range(prompt)],
            sampling=SamplingParams(max_tokens=new_tokens),
            seed=number,
        )
        for number in range(count)
    ]
    start = time.perf_counter()
    engine.submit(requests)
    left = count
    while left:
        left -= len(await asyncio.wait_for(engine.collect(), TIMEOUT_S))
    return time.perf_counter() - start


def measure_transformers(path: Path, settings: Settings, values: dict[str, Any]) -> None:
    """Measure prefill and decode speed of transformers' generate."""
    from transformers import AutoModelForCausalLM

    count, prompt, new_tokens, long_prompt = sizes(settings)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(settings.device)

    def generate(length: int, new: int) -> float:
        ids = torch.randint(4, 500, (count, length), device=settings.device)
        options = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new}
        mask = torch.ones_like(ids)
        return seconds_of(
            lambda: model.generate(ids, attention_mask=mask, pad_token_id=0, **options), repeats=1
        )

    seconds = generate(prompt, new_tokens)
    values["decode_tokens_per_s"] = round(count * new_tokens / seconds)
    values["decode_step_ms"] = round(1e3 * seconds / new_tokens, 2)

    ids = torch.randint(4, 500, (count, long_prompt), device=settings.device)

    def prefill() -> None:
        with torch.no_grad():
            for part in ids.split(8):
                model(input_ids=part, use_cache=True, logits_to_keep=1)

    values["prefill_tokens_per_s"] = round(ids.numel() / seconds_of(prefill, repeats=1))
    values["peak_gib"] = gib(peak_bytes(settings))


if __name__ == "__main__":
    main()
