"""Measure how far quantised engines are from the trainer: kl/sampler_trainer per scheme.

    python scripts/bench/quantised_rollouts.py --model MODEL_DIR

Each scheme starts a vLLM engine with the model, and samples completions of random prompts at
temperature 1. transformers computes the log-probabilities of the same tokens from the same weights
in the precision of the scheme, without quantisation. Prints a table and one line of JSON last:

    kl/sampler_trainer   mean of log μ − log π, in nats per token, with its standard error
    largest              largest difference of one token
    tokens/s             of generation, the second time, with this machine's kernels
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.errors import InvalidValue
from rlsys.types import Generation, GenerationRequest, SamplingParams

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Scheme:
    """A precision and the options that quantise it."""

    dtype: str
    options: dict[str, Any]


SCHEMES = {
    "float32": Scheme("float32", {}),
    "bfloat16": Scheme("bfloat16", {}),
    "float32, fp8 keys and values": Scheme("float32", {"vllm": {"kv_cache_dtype": "fp8"}}),
    "bfloat16, fp8 keys and values": Scheme("bfloat16", {"vllm": {"kv_cache_dtype": "fp8"}}),
    "fp8_per_block": Scheme("bfloat16", {"quantization": "fp8_per_block"}),
    "fp8_per_channel": Scheme("bfloat16", {"quantization": "fp8_per_channel"}),
    "int8 experts": Scheme("bfloat16", {"quantization": "int8"}),
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint with tokenizer")
    parser.add_argument("--schemes", nargs="*", default=[*SCHEMES], choices=[*SCHEMES])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of one completion")
    parser.add_argument("--gpus", type=float, default=0)
    args = parser.parse_args()
    results: dict[str, dict[str, float] | str] = {}
    for name in args.schemes:
        try:
            results[name] = asyncio.run(measure(SCHEMES[name], args))
        except (InvalidValue, RuntimeError) as error:  # no kernels here, or not for this model
            results[name] = str(error)
        print(f"{name}: {results[name]}", flush=True)
    print(json.dumps(results))


async def measure(scheme: Scheme, args: argparse.Namespace) -> dict[str, float]:
    """Return the numbers of a scheme."""
    options: dict[str, Any] = {"engine": "vllm", "num_gpus": args.gpus, **scheme.options}
    length = PROMPT_TOKENS + args.tokens
    engine = VLLMEngine(
        args.model, RolloutConfig(**options), dtype=scheme.dtype, max_context=length
    )
    await engine.start()
    try:
        await sample(engine, args, "warm")
        began = time.perf_counter()
        prompts, generations = await sample(engine, args, "timed")
        seconds = time.perf_counter() - began
    finally:
        await engine.close()
    gaps = difference(args.model, scheme.dtype, prompts, generations)
    mean = gaps.mean().item()
    return {
        "kl/sampler_trainer": round(mean, 7),
        "standard error": round(gaps.std().item() / math.sqrt(len(gaps)), 7),
        "largest": round(gaps.abs().max().item(), 7),
        "tokens/s": round(len(gaps) / seconds, 1),
    }


async def sample(
    engine: VLLMEngine, args: argparse.Namespace, name: str
) -> tuple[list[list[int]], list[Generation]]:
    """Sample completions of random prompts; return both in the same order."""
    numbers = random.Random(0)
    width = engine.vocabulary
    prompts = [
        [numbers.randrange(width) for _ in range(PROMPT_TOKENS)] for _ in range(args.sequences)
    ]
    engine.submit(
        [
            GenerationRequest(
                request_id=f"{name}-{i}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=args.tokens),
                seed=i,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    found: dict[str, Generation] = {}
    while len(found) < len(prompts):
        found |= {one.request_id: one for one in await engine.collect()}
    return prompts, [found[f"{name}-{i}"] for i in range(len(prompts))]


@torch.no_grad()
def difference(
    path: str, dtype: str, prompts: Sequence[Sequence[int]], generations: Sequence[Generation]
) -> torch.Tensor:
    """Return log μ − log π of every sampled token."""
    model = load_causal_lm(path, dtype=dtype).eval()
    gaps = []
    for prompt, made in zip(prompts, generations, strict=True):
        sampled = torch.from_numpy(made.token_ids).long()
        row = torch.cat((torch.tensor(prompt), sampled))[None]
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        gaps.append(torch.from_numpy(made.sampler_logprobs) - logprobs)
    return torch.cat(gaps)


if __name__ == "__main__":
    main()
