"""Addition, learned from scratch in minutes on two CPU cores; no GPU, no network.

A small Qwen3 with a tokenizer of 12 characters is made on the spot. A sloppy teacher warms it up:
seven of ten sums that it shows are a little off. Asynchronous GRPO, one optimizer step of staleness
at most, finds out which of the answers are right. The task: recipes/arithmetic.py.

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
    """Sizes that fit two CPU cores."""

    name: str = "quickstart"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 250
    """Optimizer steps of the whole run, resumed parts included."""


@rlsys.main
def main() -> None:
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
