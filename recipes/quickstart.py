"""Addition, learned from scratch in minutes on two CPU cores; no GPU, no network.

A small Qwen3 with a tokenizer of 12 characters is made on the spot. A sloppy teacher warms it up:
seven of ten sums that it shows are a little off. Asynchronous GRPO, one optimizer step of staleness
at most, finds out which of the answers are right.

    python recipes/quickstart.py --num-steps 50 --name my-first-run
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys import OwnModel, RolloutConfig, SamplingConfig, TrainerConfig, WarmStart, require

CHARACTERS = "0123456789+="
NUM_PROBLEMS = 8192


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(GRPOConfig):
    """Sizes that fit two CPU cores."""

    warm_start_steps: int = 200
    """Supervised steps before GRPO starts."""
    teacher_right_frac: float = 0.3
    """Share of the teacher's sums that are right; the others are off by 1 or 10."""
    warm_start_batch: int = 128
    """Examples in one of them."""
    name: str = "quickstart"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 250
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 64
    """Groups in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=3e-4, warmup_steps=10, schedule="linear", micro_batch_tokens=4096
        )
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.warm_start_steps >= 0,
            f"warm_start_steps={self.warm_start_steps} is negative; use 0 for none.",
        )
        require(
            0 <= self.teacher_right_frac <= 1,
            f"teacher_right_frac={self.teacher_right_frac} is no share; use 0 to 1.",
        )
        require(
            self.warm_start_batch >= 1,
            f"warm_start_batch={self.warm_start_batch} teaches nothing; use at least 1, or "
            "warm_start_steps=0 for no warm start.",
        )


def problem(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(0, 49), rng.randint(0, 9)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


@rlsys.reward(required_columns=("answer",))
def correct(rollout: rlsys.Rollout) -> float:
    """1 for the right sum, else 0."""
    return float(rollout.completion_text == rollout.metadata["answer"])


def lessons(cfg: QuickstartConfig) -> Iterator[list[tuple[str, str]]]:
    """Batches of prompts and the teacher's completions for the warm start."""
    rng = random.Random(cfg.seed)
    while True:
        yield [lesson(rng, cfg.teacher_right_frac) for _ in range(cfg.warm_start_batch)]


def lesson(rng: random.Random, right_frac: float) -> tuple[str, str]:
    row = problem(rng)
    if rng.random() < right_frac:
        return row["prompt"], row["answer"]
    return row["prompt"], str(abs(int(row["answer"]) + rng.choice((-10, -1, 1, 10))))


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(QuickstartConfig)
    cfg = parsed.config
    rng = random.Random(cfg.seed + 1)
    rlsys.launch(
        cfg,
        grpo(cfg, [correct], rows=[problem(rng) for _ in range(NUM_PROBLEMS)]),
        own_model=OwnModel(name="addition", characters=CHARACTERS),
        warm_start=WarmStart(
            num_steps=cfg.warm_start_steps, batches=lessons(cfg), learning_rate=1e-3
        ),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
