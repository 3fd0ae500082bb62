"""Addition, learned from scratch in minutes on two CPU cores, without GPU or network.

The model is a small Qwen3 with a tokenizer of 12 characters, created when the run starts. A warm
start with examples, of which seven of ten sums are wrong, teaches it the format. Asynchronous GRPO,
with at most one optimizer step of staleness, learns which answers are right. The task is in
recipes/arithmetic.py.

    python recipes/quickstart.py --num-steps 50 --name my-first-run
"""

from __future__ import annotations

from dataclasses import dataclass

import rlsys
from recipes.arithmetic import (
    CHARACTERS,
    ArithmeticConfig,
    correct,
    held_out,
    problem,
    problems,
    warm_start,
)
from recipes.grpo import GRPOConfig, grpo
from rlsys import OwnModel

__all__ = ["CHARACTERS", "QuickstartConfig", "correct", "main", "problem"]


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(ArithmeticConfig, GRPOConfig):
    """Settings for two CPU cores."""

    name: str = "quickstart"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 250
    """Optimizer steps of the whole run."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(QuickstartConfig)
    cfg = parsed.config
    rlsys.launch(
        cfg,
        grpo(cfg, [correct], rows=problems(cfg)),
        own_model=OwnModel(name="addition", characters=CHARACTERS),
        warm_start=warm_start(cfg),
        held_out=held_out(),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
