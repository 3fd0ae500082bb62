"""The task that the small recipes share: sums, learned from scratch on two CPU cores.

A small Qwen3 with a tokenizer of 12 characters is made on the spot. A sloppy teacher warms it up:
seven of ten sums that it shows are a little off. The recipe's algorithm finds out which of the
answers are right.

A recipe's own configuration is `ArithmeticConfig` before that of its algorithm, and its main is
`train(Config, algorithm)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rlsys
from rlsys import (
    Dataflow,
    HeldOut,
    OwnModel,
    RolloutConfig,
    RunConfig,
    RunResult,
    SamplingConfig,
    TrainerConfig,
    WarmStart,
    require,
)
from rlsys.runs.run_directory import RunFiles

CHARACTERS = "0123456789+="
# Share of the teacher's sums that are right; the others are off by 1 or 10.
TEACHER_RIGHT_FRAC = 0.3
NUM_PROBLEMS, NUM_HELD_OUT = 8192, 256
MODEL = OwnModel(name="addition", characters=CHARACTERS)


def small_trainer(**changes: Any) -> TrainerConfig:
    """Sizes of the optimizer that fit the task, with changes."""
    sizes = {
        "learning_rate": 3e-4,
        "warmup_steps": 10,
        "schedule": "linear",
        "micro_batch_tokens": 4096,
    }
    return TrainerConfig(**{**sizes, **changes})


# What has these fields is a RunConfig, through its algorithm's configuration. It is no base here,
# because a dataclass takes over all defaults of its bases, and would set back those that the
# algorithm has set.
if TYPE_CHECKING:
    Base = RunConfig
else:
    Base = object


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(Base):
    """Sizes that fit two CPU cores."""

    warm_start_steps: int = 200
    """Supervised steps before reinforcement learning starts."""
    warm_start_batch: int = 128
    """Examples in one of them."""
    num_steps: int = 200
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 64
    """Groups in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
    trainer: TrainerConfig = field(default_factory=small_trainer)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.warm_start_steps >= 0,
            f"warm_start_steps={self.warm_start_steps} is negative; use 0 for none.",
        )
        require(
            self.warm_start_batch >= 1,
            f"warm_start_batch={self.warm_start_batch} teaches nothing; use at least 1, or "
            "warm_start_steps=0 for no warm start.",
        )


def problem(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(0, 49), rng.randint(0, 9)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def problems(cfg: RunConfig) -> list[dict[str, Any]]:
    rng = random.Random(cfg.seed + 1)
    return [problem(rng) for _ in range(NUM_PROBLEMS)]


def held_out() -> HeldOut:
    """All 500 problems are trained on, most of them many times; these are drawn as those are."""
    rng = random.Random("held out")
    return HeldOut(rows=[problem(rng) for _ in range(NUM_HELD_OUT)], rewards=[correct])


@rlsys.reward(required_columns=("answer",), column_types=(str,))
def correct(rollout: rlsys.Rollout) -> float:
    """1 for the right sum, else 0."""
    return float(rollout.completion_text == rollout.metadata["answer"])


def lessons(cfg: ArithmeticConfig) -> Iterator[list[tuple[str, str]]]:
    """Batches of prompts and the teacher's completions for the warm start."""
    rng = random.Random(cfg.seed)
    while True:
        yield [lesson(rng, TEACHER_RIGHT_FRAC) for _ in range(cfg.warm_start_batch)]


def lesson(rng: random.Random, right_frac: float) -> tuple[str, str]:
    row = problem(rng)
    if rng.random() < right_frac:
        return row["prompt"], row["answer"]
    return row["prompt"], str(abs(int(row["answer"]) + rng.choice((-10, -1, 1, 10))))


def warm_start(cfg: ArithmeticConfig) -> WarmStart:
    return WarmStart(num_steps=cfg.warm_start_steps, batches=lessons(cfg), learning_rate=1e-3)


A = TypeVar("A", bound=ArithmeticConfig)
C = TypeVar("C", bound=RunConfig)
Algorithm = Callable[..., Dataflow]  # (cfg, rewards, *, rows)


def graph(cfg: ArithmeticConfig, algorithm: Algorithm) -> Dataflow:
    """The algorithm on the task. Raises ValueError for settings that it cannot work with."""
    return algorithm(cfg, [correct], rows=problems(cfg))


def model_of_run_before(cfg: C, name: str, train: Callable[[], RunResult]) -> tuple[C, str]:
    """The path of a model that another run makes for this one, once: a second time finds it, and
    one that this run has begun with stays what it is. Also the configuration of this run, which
    may have been killed before it began.
    """
    before, own = (RunFiles(Path(cfg.runs_dir) / run) for run in (name, cfg.name))
    if own.has_checkpoint and before.hf.is_dir():
        return cfg, str(before.hf)
    if before.path.is_dir() and cfg.resume is True and not own.path.exists():
        cfg = replace(cfg, resume="auto")
    try:
        return cfg, str(train().model)
    except ValueError as error:
        raise ValueError(f"{name}, the run before this one: {error}") from error


def train(config_class: type[A], algorithm: Algorithm) -> None:
    """What a recipe's main does: read the command line, run the algorithm on the task."""
    parsed = rlsys.parse(config_class)
    run(parsed.config, algorithm, dry_run=parsed.dry_run)


def run(
    cfg: ArithmeticConfig,
    algorithm: Algorithm,
    *,
    own_model: OwnModel = MODEL,
    dry_run: bool | str = False,
) -> RunResult:
    return rlsys.launch(
        cfg,
        graph(cfg, algorithm),
        own_model=own_model,
        warm_start=warm_start(cfg),
        held_out=held_out(),
        dry_run=dry_run,
    )


if __name__ == "__main__":
    raise SystemExit(
        "recipes/arithmetic.py is the task of the small recipes. Run one of them, such as "
        "`python recipes/quickstart.py`."
    )
