"""Measure n-gram speculation: tokens/s with drafts against without.

    python scripts/bench/speculation.py MODEL_DIR --engine torch

For each number of concurrent requests and each temperature: the same requests, with the same seeds,
in turns without and with rollout.speculation, medians of several repetitions. A low temperature
makes small models repeat themselves, as copying and tool calls do. At temperature 1 drafts of a
random model are never accepted: the ratio shows what speculation costs then. Prints one line of
JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.types import GenerationRequest, SamplingParams

PROMPT_TOKENS = 16
TOKEN_IDS = range(3, 200)  # of prompts; every vocabulary has them


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", help="a Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--concurrent", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.02, 1.0])
    parser.add_argument("--tokens", type=int, default=256, help="of one completion")
    parser.add_argument("--drafted", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args))))


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return tokens/s of both kinds and their ratio, by temperature and concurrency."""
    draft = {"method": "ngram", "num_tokens": args.drafted}
    engines = {"plain": build(args, {}), "drafted": build(args, draft)}
    for engine in engines.values():
        await engine.start()
    results: dict[str, dict[str, float]] = {}
    try:
        for temperature in args.temperatures:
            for concurrent in args.concurrent:
                rates: dict[str, list[float]] = {"plain": [], "drafted": []}
                for _ in range(args.repeats + 1):
                    for kind, engine in engines.items():
                        rate = await tokens_per_s(engine, args.tokens, concurrent, temperature)
                        rates[kind].append(rate)
                found = {kind: statistics.median(of[1:]) for kind, of in rates.items()}
                found["ratio"] = found["drafted"] / found["plain"]
                name = f"temperature {temperature:g}, {concurrent} requests"
                results[name] = {key: round(value, 3) for key, value in found.items()}
                print(name, results[name], flush=True)
        stats = engines["drafted"].stats()
        results["drafts"] = {"acceptance": round(stats.draft_acceptance or 0.0, 3)}
        return results
    finally:
        for engine in engines.values():
            await engine.close()


def build(args: argparse.Namespace, draft: dict[str, object]) -> GenerationEngine:
    """Return an engine that is not started."""
    rollout = RolloutConfig(engine=args.engine, max_running=max(args.concurrent), speculation=draft)
    if args.engine == "vllm":
        return VLLMEngine(args.model_dir, rollout, dtype="float32")
    return TorchEngine(args.model_dir, rollout, dtype="float32", stop_token_ids=())


async def tokens_per_s(
    engine: GenerationEngine, num_tokens: int, concurrent: int, temperature: float
) -> float:
    """Return the rate of one batch of requests."""
    numbers = random.Random(0)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature)
    began = time.perf_counter()
    engine.submit(
        [
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=numbers.choices(TOKEN_IDS, k=PROMPT_TOKENS),
                sampling=sampling,
                seed=i,
                goes_on=False,
            )
            for i in range(concurrent)
        ]
    )
    num_sampled = num_ended = 0
    while num_ended < concurrent:
        ended = await engine.collect()
        num_ended += len(ended)
        num_sampled += sum(len(one.token_ids) for one in ended)
    return num_sampled / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
