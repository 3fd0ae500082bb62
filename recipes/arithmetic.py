"""The task of the small recipes: sums, learned from scratch on two CPU cores.

The model is a small Qwen3 with a tokenizer of 12 characters, created when the run starts. A warm
start with supervised examples, of which seven of ten are wrong, teaches it the format. The recipe's
algorithm then learns which answers are right.

A recipe's configuration inherits from `ArithmeticConfig` first and then from the configuration of
its algorithm. Its main is `train(Config, algorithm)`.
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
)
from rlsys.errors import InvalidValue, require
from rlsys.runs.run_files import RunFiles

CHARACTERS = "0123456789+="
# Fraction of right sums in the warm start; the others are off by 1 or 10.
WARM_START_RIGHT_FRAC = 0.3
NUM_PROBLEMS, NUM_HELD_OUT = 8192, 256
MODEL = OwnModel(name="addition", characters=CHARACTERS)


def small_trainer(**changes: Any) -> TrainerConfig:
    """Return the settings of the optimizer for this task, with changes."""
    sizes = {
        "learning_rate": 3e-4,
        "warmup_steps": 10,
        "schedule": "linear",
        "micro_batch_tokens": 4096,
    }
    return TrainerConfig(**{**sizes, **changes})


# ArithmeticConfig is a mixin for subclasses of RunConfig. It does not inherit from RunConfig at run
# time, because the defaults of RunConfig would then replace those of the algorithm.
if TYPE_CHECKING:
    Base = RunConfig
else:
    Base = object


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(Base):
    """Settings for two CPU cores."""

    warm_start_steps: int = 200
    """Supervised steps before reinforcement learning starts."""
    warm_start_batch: int = 128
    """Examples in one supervised step."""
    num_steps: int = 200
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 64
    """Groups in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
    trainer: TrainerConfig = field(default_factory=small_trainer)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.warm_start_steps >= 0,
            "warm_start_steps",
            self.warm_start_steps,
            rule="must not be negative",
            fix="Use 0 for no warm start.",
        )
        require(
            self.warm_start_batch >= 1,
            "warm_start_batch",
            self.warm_start_batch,
            rule="must be at least 1",
            fix="Use at least 1, or warm_start_steps=0 for no warm start.",
        )


def problem(rng: random.Random) -> dict[str, Any]:
    """Return a random sum as a row of the dataset."""
    a, b = rng.randint(0, 49), rng.randint(0, 9)
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def problems(cfg: RunConfig) -> list[dict[str, Any]]:
    """Return the rows of the training set."""
    rng = random.Random(cfg.seed + 1)
    return [problem(rng) for _ in range(NUM_PROBLEMS)]


def held_out() -> HeldOut:
    """Return the held-out rows, drawn from the same 500 sums as the training set."""
    rng = random.Random("held out")
    return HeldOut(rows=[problem(rng) for _ in range(NUM_HELD_OUT)], rewards=[correct])


@rlsys.reward(required_columns=("answer",), column_types=(str,))
def correct(rollout: rlsys.Rollout) -> float:
    """1 for the right sum, else 0."""
    return float(rollout.completion_text == rollout.metadata["answer"])


def warm_start_batches(cfg: ArithmeticConfig) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of prompts and completions for the warm start, forever."""
    rng = random.Random(cfg.seed)
    while True:
        yield [warm_start_example(rng, WARM_START_RIGHT_FRAC) for _ in range(cfg.warm_start_batch)]


def warm_start_example(rng: random.Random, right_frac: float) -> tuple[str, str]:
    """Return a prompt and a completion that is right with probability `right_frac`."""
    row = problem(rng)
    if rng.random() < right_frac:
        return row["prompt"], row["answer"]
    return row["prompt"], str(abs(int(row["answer"]) + rng.choice((-10, -1, 1, 10))))


def warm_start(cfg: ArithmeticConfig) -> WarmStart:
    """Return the warm start of a run."""
    return WarmStart(
        num_steps=cfg.warm_start_steps, batches=warm_start_batches(cfg), learning_rate=1e-3
    )


A = TypeVar("A", bound=ArithmeticConfig)
C = TypeVar("C", bound=RunConfig)
Algorithm = Callable[..., Dataflow]  # (cfg, rewards, *, rows)


def graph(cfg: ArithmeticConfig, algorithm: Algorithm) -> Dataflow:
    """Return the graph of the algorithm on this task."""
    return algorithm(cfg, [correct], rows=problems(cfg))


def model_of_previous_run(cfg: C, name: str, train: Callable[[], RunResult]) -> tuple[C, str]:
    """Return the configuration of this run and the path of a model that another run trains first.

    The other run trains once; later starts find its model. If this run has a checkpoint, the model
    is not trained again. `resume` becomes "auto" if this run was killed before it started.
    """
    previous, own = (RunFiles(Path(cfg.runs_dir) / run) for run in (name, cfg.name))
    if own.has_checkpoint and previous.hf.is_dir():
        return cfg, str(previous.hf)
    if previous.path.is_dir() and cfg.resume is True and not own.path.exists():
        cfg = replace(cfg, resume="auto")
    try:
        return cfg, str(train().model)
    except InvalidValue as error:
        raise error.within(f"run {name}: ") from error
    except ValueError as error:
        raise ValueError(f"run {name}: {error}") from error


def train(config_class: type[A], algorithm: Algorithm) -> None:
    """Read the command line and run the algorithm on this task; the main of a recipe."""
    parsed = rlsys.parse(config_class)
    run(parsed.config, algorithm, dry_run=parsed.dry_run)


def run(
    cfg: ArithmeticConfig,
    algorithm: Algorithm,
    *,
    own_model: OwnModel = MODEL,
    dry_run: bool | str | None = None,
) -> RunResult:
    """Run the algorithm on this task."""
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
