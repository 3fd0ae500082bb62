"""Measure the whole system with a real pretrained model on the CPU: speed and precision.

    python scripts/bench/real_model.py MODEL_DIR

The workload is that of scripts/bench/peers/trl_real_model.py: per step 16 prompts x 8 completions
of at most 24 tokens, sums of two numbers up to 20 asked in words, chat template. Prints one line of
JSON last: medians over the steps after a warm-up of an asynchronous run in --dtype; and by
precision the gap between log-probabilities of sampler and trainer with the same weights: the mean
(kl/sampler_trainer), the mean absolute and the largest difference of a token.

MODEL_DIR: a Hugging Face checkpoint with a chat template, such as SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys import metrics
from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.registry import parse
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    ModelConfig,
    ObserveConfig,
    Precision,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.data.prompts import PromptSource, load_tokenizer
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.types import Generation, GenerationRequest, TrainRow

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 16, 8, 24
NUM_PROBLEMS, MAX_CONTEXT = 4096, 512
PRECISIONS: Sequence[Precision] = get_args(Precision)


def problem(rng: random.Random) -> dict[str, Any]:
    """Return a random sum with its answer."""
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": a + b}


@rlsys.reward
def right_number(rollout: rlsys.Rollout) -> float:
    """Return 1 if the last number is the sum."""
    found = re.findall(r"-?\d+", rollout.completion_text)
    return float(bool(found) and int(found[-1]) == rollout.metadata["answer"])


def configuration(args: argparse.Namespace, dtype: Precision, runs_dir: str) -> GRPOConfig:
    """Return the configuration of the run."""
    return GRPOConfig(
        name="real-model",
        runs_dir=runs_dir,
        num_steps=max(1, args.num_steps),
        prompts_per_step=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        model=ModelConfig(path=args.model_dir, dtype=dtype),
        data=DataConfig(chat_template=True),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        rollout=RolloutConfig(
            engine=args.engine,
            max_running=NUM_PROMPTS * GROUP_SIZE,
            num_cpus=args.rollout_cpus,
            kv_cache_gib=0.5,
        ),
        trainer=TrainerConfig(
            learning_rate=1e-5,
            micro_batch_tokens=args.micro_batch_tokens,
            num_cpus=args.trainer_cpus,
        ),
        asynchrony=AsyncConfig(max_staleness=args.max_staleness),
        observe=ObserveConfig(print_samples=0, record_groups=0, trace=False),
    )


def measure(config: GRPOConfig, rows: list[dict[str, Any]], warm_up: int) -> dict[str, float]:
    """Return medians over the steps of a run after the warm-up."""
    rlsys.launch(config, grpo(config, [right_number], rows=rows))
    lines = read_metrics(Path(config.runs_dir) / config.name / "metrics.jsonl")[warm_up:]

    def median(name: str) -> float:
        return statistics.median(line[name] for line in lines)

    return {
        "step_s": round(median(metrics.TIME_STEP_S), 2),
        "rollouts_per_s": round(median(metrics.THROUGHPUT_TRAINED_ROLLOUTS), 3),
        "train_s": round(median(metrics.TIME_TRAIN_S), 2),
        "trainer_idle_s": round(median(metrics.TIME_TRAINER_IDLE_S), 2),
        "reward": round(statistics.fmean(line[metrics.REWARD_MEAN] for line in lines), 3),
    }


def gap(config: GRPOConfig, rows: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """Return the gap between the log-probabilities of engine and trainer; each row is a group."""
    prompts = PromptSource(
        config.data,
        load_tokenizer(config.model.path),
        seed=seed,
        max_tokens=MAX_TOKENS,
        max_context=MAX_CONTEXT,
        rows=rows,
    )
    requests = [
        GenerationRequest(
            request_id=f"{prompt}-{index}",
            prompt_token_ids=token_ids,
            sampling=config.sampling.params(),
            seed=prompt * GROUP_SIZE + index,
        )
        for prompt, token_ids in enumerate(
            prompts.at(index).token_ids for index in range(len(rows))
        )
        for index in range(GROUP_SIZE)
    ]
    generations = asyncio.run(sampled(config, requests))
    trained = [
        train_row(request.prompt_token_ids, generations[request.request_id], number // GROUP_SIZE)
        for number, request in enumerate(requests)
    ]
    trainer = FSDPEngine(
        model_path=config.model.path,
        trainer=config.trainer,
        model=config.model,
        loss=parse(config.loss, "loss"),
        aggregation=token_mean,
        temperature=config.sampling.temperature,
        num_total_steps=1,
        seed=seed,
    )
    found = np.concatenate(trainer.infer(trained))
    trainer.close()
    sampler = np.concatenate([row.columns["sampler_logprobs"] for row in trained])
    return {
        metrics.KL_SAMPLER_TRAINER: float(f"{np.mean(sampler - found):.2g}"),
        "mean_difference": float(f"{np.abs(sampler - found).mean():.2g}"),
        "largest_difference": float(f"{np.abs(sampler - found).max():.2g}"),
        "num_tokens": len(found),
    }


async def sampled(
    config: GRPOConfig, requests: Sequence[GenerationRequest]
) -> dict[str, Generation]:
    """Return the completions of an engine."""
    path, dtype = config.model.path, config.model.dtype
    engine: GenerationEngine
    if config.rollout.engine == "vllm":
        engine = VLLMEngine(path, config.rollout, dtype=dtype, max_context=MAX_CONTEXT)
    else:
        engine = TorchEngine(path, config.rollout, dtype=dtype)
    await engine.start()
    try:
        engine.submit(requests)
        found: dict[str, Generation] = {}
        while len(found) < len(requests):
            found |= {one.request_id: one for one in await engine.collect()}
    finally:
        await engine.close()
    return found


def train_row(prompt: Sequence[int], generation: Generation, group_id: int) -> TrainRow:
    """Return a row to train on."""
    num_tokens = len(generation.token_ids)
    return TrainRow(
        prompt_token_ids=np.asarray(prompt, np.int32),
        token_ids=generation.token_ids,
        policy_versions=generation.policy_versions,
        loss_mask=np.ones(num_tokens, np.bool_),
        columns={"sampler_logprobs": generation.sampler_logprobs},
        group_id=group_id,
        group_size=GROUP_SIZE,
        group_num_tokens=num_tokens,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="precision of the run"
    )
    parser.add_argument("--num-steps", type=int, default=8, help="steps of the run; 0: no run")
    parser.add_argument("--warm-up", type=int, default=2, help="steps to leave out")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--trainer-cpus", type=float, default=2)
    parser.add_argument("--rollout-cpus", type=float, default=1)
    parser.add_argument(
        "--gaps", choices=PRECISIONS, nargs="*", default=PRECISIONS, help="precisions to compare"
    )
    parser.add_argument(
        "--gap-prompts", type=int, default=NUM_PROMPTS, help="prompts for the comparison"
    )
    args = parser.parse_args()
    rng = random.Random(1)
    rows = [problem(rng) for _ in range(NUM_PROBLEMS)]
    result: dict[str, Any] = {"peer": f"rlsys, real model, {args.engine}", "dtype": args.dtype}
    gaps: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as runs_dir:
        if args.num_steps:
            result |= measure(configuration(args, args.dtype, runs_dir), rows, args.warm_up)
        torch.set_num_threads(max(1, int(args.trainer_cpus)))
        for dtype in args.gaps:
            gaps[dtype] = gap(configuration(args, dtype, runs_dir), rows[: args.gap_prompts], 0)
            print(f"{dtype}: {gaps[dtype]}", file=sys.stderr)
    result["kl_by_precision"] = gaps
    print(json.dumps(result))


if __name__ == "__main__":
    main()
