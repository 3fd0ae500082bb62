"""Measure TRL's GRPOTrainer with a real model: the peer of scripts/bench/real_model.py.

    bash scripts/bench/peers/run.sh trl_real_model MODEL_DIR

Runs on the CPU in float32. Per step 16 prompts x 8 completions of at most 24 tokens: sums of two
numbers up to 20, asked in words, with the chat template; forward and backward passes of 32
rollouts. Prints one line of JSON last: the median over the steps after a warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 16, 8, 24
NUM_PROBLEMS = 4096


class StepClock(TrainerCallback):
    """Callback that records the end of each optimizer step in seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def problem(rng: random.Random) -> dict[str, Any]:
    """Return a random sum with its answer."""
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": a + b}


def right_number(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    """Return 1 if the last number is the sum."""
    found = [re.findall(r"-?\d+", messages[0]["content"]) for messages in completions]
    pairs = zip(found, answer, strict=True)
    return [float(bool(numbers) and int(numbers[-1]) == right) for numbers, right in pairs]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="trained rollouts/s of TRL's GRPOTrainer")
    parser.add_argument("model_dir", help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=1, help="steps to leave out")
    parser.add_argument("--rollouts-per-pass", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(1)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model_dir),
            reward_funcs=right_number,
            train_dataset=Dataset.from_list([problem(rng) for _ in range(NUM_PROBLEMS)]),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=args.rollouts_per_pass,
                gradient_accumulation_steps=NUM_PROMPTS * GROUP_SIZE // args.rollouts_per_pass,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_TOKENS,
                max_steps=args.num_steps,
                learning_rate=1e-5,
                beta=0.0,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    # The clock does not know the beginning of the first step.
    ends = clock.ends[max(args.warm_up, 1) - 1 :]
    step_s = statistics.median(end - start for start, end in itertools.pairwise(ends))
    print(
        json.dumps(
            {
                "peer": "TRL GRPOTrainer, real model",
                "step_s": round(step_s, 2),
                "rollouts_per_s": round(NUM_PROMPTS * GROUP_SIZE / step_s, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
