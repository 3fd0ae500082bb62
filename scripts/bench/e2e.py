"""Measure trained rollouts/s of the whole system on the CPU: Ray actors, store, controller.

    python scripts/bench/e2e.py MODEL_DIR

The workload is that of scripts/bench/peers/trl_grpo.py: per step 32 prompts x 8 completions of at
most 16 tokens, one-digit sums, exact match. Prints one line of JSON last: medians over the steps
after a warm-up, asynchronous (the main number) and synchronous.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys import metrics
from rlsys.config import (
    AsyncConfig,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.runs.observe.metrics_file import read_metrics

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 32, 8, 16


def problem(rng: random.Random) -> dict[str, Any]:
    """Return a random sum with its answer."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


@rlsys.reward
def exact_match(rollout: rlsys.Rollout) -> float:
    """Return 1 for the right answer, else 0."""
    return float(rollout.completion_text.split("#")[0].strip() == rollout.metadata["answer"])


def measure(args: argparse.Namespace, *, max_staleness: int, stream: bool) -> dict[str, float]:
    """Return medians over the steps of a run after the warm-up."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as runs_dir:
        config = GRPOConfig(
            name="e2e",
            runs_dir=runs_dir,
            num_steps=args.num_steps,
            prompts_per_step=NUM_PROMPTS,
            group_size=GROUP_SIZE,
            model=ModelConfig(path=args.model_dir),
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
            rollout=RolloutConfig(max_running=NUM_PROMPTS * GROUP_SIZE),
            trainer=TrainerConfig(
                learning_rate=1e-6,
                micro_batch_tokens=args.micro_batch_tokens,
                num_cpus=args.trainer_cpus,
            ),
            asynchrony=AsyncConfig(max_staleness=max_staleness, stream=stream),
            observe=ObserveConfig(print_samples=0, record_groups=0, trace=False),
        )
        rlsys.launch(config, grpo(config, [exact_match], rows=[problem(rng) for _ in range(4096)]))
        lines = read_metrics(Path(runs_dir) / "e2e" / "metrics.jsonl")[args.warm_up :]

    def median(name: str) -> float:
        return statistics.median(line[name] for line in lines)

    return {
        "step_s": round(median(metrics.TIME_STEP_S), 4),
        "rollouts_per_s": round(median(metrics.THROUGHPUT_TRAINED_ROLLOUTS), 1),
        "trainer_idle_frac": round(
            median(metrics.TIME_TRAINER_IDLE_S) / median(metrics.TIME_STEP_S), 4
        ),
        "generation_pause_s": round(median(metrics.TIME_GENERATION_PAUSE_S), 4),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=8, help="steps to leave out")
    parser.add_argument("--micro-batch-tokens", type=int, default=2700)
    parser.add_argument("--trainer-cpus", type=float, default=1)
    args = parser.parse_args()
    asynchronous = measure(args, max_staleness=1, stream=True)
    synchronous = measure(args, max_staleness=0, stream=False)
    print(json.dumps({"peer": "rlsys", **asynchronous, "synchronous": synchronous}))


if __name__ == "__main__":
    main()
