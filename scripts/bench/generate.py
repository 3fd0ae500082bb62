"""Measure generation engines: tokens/s, and the pause of a weight update.

    python scripts/bench/generate.py MODEL_DIR --engine torch

The workload is that of scripts/bench/peers/hf_generate.py: 128 sequences of 8 prompt tokens. Equal:
64 new tokens each. Mixed: the same total number of new tokens, with lengths spread evenly from 4 to
124. Then weights are replaced while 64 requests run; the pause lasts from the call of pause() to
the end of resume(). Prints one line of JSON last: medians, in tokens/s and milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.reallocation.transport.weight_views import stage_whole
from rlsys.types import GenerationRequest, SamplingParams

NUM_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 128, 8, 64
SHORTEST, LONGEST = 4, 124
REPEATS = 5
NUM_RUNNING_AT_UPDATE, NUM_UPDATES = 64, 10


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", help="a Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of vLLM's processes
    result = asyncio.run(measure(args.model_dir, args.engine, args.threads))
    print(json.dumps({"peer": f"rlsys, {args.engine}", **result}))


async def measure(model_dir: str, engine_name: str, num_threads: int) -> dict[str, float]:
    """Return the results."""
    engine = build_engine(model_dir, engine_name, num_threads)
    equal = [NEW_TOKENS] * NUM_SEQUENCES
    span = LONGEST - SHORTEST
    mixed = [SHORTEST + round(span * i / (NUM_SEQUENCES - 1)) for i in range(NUM_SEQUENCES)]
    random.Random(0).shuffle(mixed)
    await engine.start()
    try:
        for lengths in (equal, mixed):
            await tokens_per_s(engine, lengths)  # warm up
        return {
            "equal_tokens_per_s": round(
                statistics.median([await tokens_per_s(engine, equal) for _ in range(REPEATS)])
            ),
            "mixed_tokens_per_s": round(
                statistics.median([await tokens_per_s(engine, mixed) for _ in range(REPEATS)])
            ),
            "update_pause_ms": round(await update_pause_ms(engine, model_dir), 2),
        }
    finally:
        await engine.close()


def build_engine(model_dir: str, name: str, num_threads: int) -> GenerationEngine:
    """Return an engine."""
    rollout = RolloutConfig(max_running=NUM_SEQUENCES, num_cpus=num_threads)
    if name == "vllm":
        return VLLMEngine(model_dir, rollout, dtype="float32")
    return TorchEngine(model_dir, rollout, dtype="float32", stop_token_ids=())


async def tokens_per_s(engine: GenerationEngine, lengths: Sequence[int]) -> float:
    """Return the speed for requests of these lengths."""
    start = time.perf_counter()
    engine.submit(requests(lengths))
    num_left, num_tokens = len(lengths), 0
    while num_left:
        ended = await asyncio.wait_for(engine.collect(), timeout=600)
        num_left -= len(ended)
        num_tokens += sum(len(one.token_ids) for one in ended)
    return num_tokens / (time.perf_counter() - start)


async def update_pause_ms(engine: GenerationEngine, model_dir: str) -> float:
    """Return the median time from pause() to the end of resume() around load()."""
    model = load_causal_lm(model_dir, dtype="float32")
    pauses = []
    engine.submit(requests([1000] * NUM_RUNNING_AT_UPDATE))
    for version in range(1, NUM_UPDATES + 1):
        stage, manifest = stage_whole(version, model_tensors(model))
        generated = engine.stats().num_generated_tokens
        while engine.stats().num_generated_tokens == generated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.prepare(manifest)
        start = time.perf_counter()
        await engine.pause()
        await engine.load()
        await engine.resume()
        pauses.append(1000 * (time.perf_counter() - start))
        stage.close()
    await engine.abort([str(i) for i in range(NUM_RUNNING_AT_UPDATE)])
    return statistics.median(pauses)


def requests(lengths: Sequence[int]) -> list[GenerationRequest]:
    """Return requests of these lengths."""
    prompts = random.Random(0)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_token_ids=[prompts.randrange(4, 40) for _ in range(PROMPT_TOKENS)],
            sampling=SamplingParams(max_tokens=length),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]


if __name__ == "__main__":
    main()
