"""Measure TRL's GRPOTrainer on the CPU, 2 threads: the peer of scripts/bench/e2e.py.

    bash scripts/bench/peers/run.sh trl_grpo MODEL_DIR

Per step 32 prompts x 8 completions of at most 16 tokens, one-digit sums, exact match. The learning
rate is small, so completions keep their lengths. Prints one line of JSON last: the median over the
steps after a warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 32, 8, 16
NUM_STEPS, WARM_UP = 20, 4


class StepClock(TrainerCallback):
    """Callback that records the end of each optimizer step in seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def problems() -> Dataset:
    """Return the dataset."""
    rng = random.Random(0)
    sums = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(4096)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums])


def exact_match(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for each right answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion.split("#")[0].strip() == right) for completion, right in pairs]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="trained rollouts/s of TRL's GRPOTrainer")
    parser.add_argument("model_dir", help="a Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model_dir),
            reward_funcs=exact_match,
            train_dataset=problems(),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_TOKENS,
                max_steps=NUM_STEPS,
                learning_rate=1e-6,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                report_to=[],
                logging_steps=10_000,
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    step_s = statistics.median(
        end - start for start, end in itertools.pairwise(clock.ends[WARM_UP:])
    )
    print(
        json.dumps(
            {
                "peer": "TRL GRPOTrainer",
                "step_s": round(step_s, 4),
                "rollouts_per_s": round(NUM_PROMPTS * GROUP_SIZE / step_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
