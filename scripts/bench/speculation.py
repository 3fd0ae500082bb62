"""Measure speculation: tokens/s with drafts against without.

    python scripts/bench/speculation.py MODEL_DIR --engine torch
    python scripts/bench/speculation.py MODEL_DIR --engine vllm --shared-draft

For each number of concurrent requests and each temperature: the same requests, with the same seeds,
in turns without and with rollout.speculation, medians of several repetitions. Drafts are n-grams. A
low temperature makes small models repeat themselves, as copying and tool calls do. At temperature 1
few drafts are accepted: the ratio shows what speculation costs then.

With `--shared-draft` the draft is a model with the distribution of the policy: the policy's layers
but the first one are changed to add nothing, and the draft has only the first one. So all drafted
tokens are the likeliest ones of the policy, and a draft costs a small part of a pass.

Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

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
    parser.add_argument("--shared-draft", action="store_true", help="a draft model, with vllm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        draft: dict[str, object] = {"method": "ngram"}
        if args.shared_draft:
            args.model_dir, draft_dir = shared_models(args.model_dir, Path(directory))
            draft = {"method": "draft_model", "model": draft_dir}
        print(json.dumps(asyncio.run(measure(args, draft | {"num_tokens": args.drafted}))))


def shared_models(model_dir: str, directory: Path) -> tuple[str, str]:
    """Write a policy and a draft of one layer with the same distribution. Return their paths."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    policy, draft = directory / "policy", directory / "draft"
    model.save_pretrained(policy)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1]
    model.save_pretrained(draft)
    for path in (policy, draft):
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return str(policy), str(draft)


async def measure(
    args: argparse.Namespace, draft: Mapping[str, object]
) -> dict[str, dict[str, float]]:
    """Return tokens/s of both kinds and their ratio, by temperature and concurrency."""
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
        await engines["drafted"].progress()  # vLLM's counts are read then
        stats = engines["drafted"].stats()
        results["drafts"] = {"acceptance": round(stats.draft_acceptance or 0.0, 3)}
        return results
    finally:
        for engine in engines.values():
            await engine.close()


def build(args: argparse.Namespace, draft: Mapping[str, object]) -> GenerationEngine:
    """Return an engine that is not started."""
    rollout = RolloutConfig(
        engine=args.engine, max_running=max(args.concurrent), speculation=dict(draft)
    )
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
