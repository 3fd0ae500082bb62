"""Programs, learned from their unit tests in minutes on two CPU cores; no GPU, no network.

A prompt says in words what a function of one number does, "x plus 7"; a completion is a program
that defines it. A sloppy teacher warms a small Qwen3 up: of ten programs that it shows, seven do
something else. GRPO finds out which do what is asked, by running each in the sandbox against tests
that it does not see.

    pip install 'rlsys[sandbox]'; python recipes/programs.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.arithmetic import ArithmeticConfig, small_trainer
from recipes.grpo import GRPOConfig, grpo
from rlsys import HeldOut, OwnModel, RolloutConfig, SamplingConfig, TrainerConfig, WarmStart
from rlsys.rewards import code_tests

# Share of the teacher's programs that do what is asked.
TEACHER_RIGHT_FRAC = 0.3
NUM_ROWS, NUM_HELD_OUT, NUM_TESTS = 2048, 128, 3

# In words, as an expression, and what it computes; k is a digit.
Family = tuple[str, str, Callable[[int, int], int]]
FAMILIES: Mapping[str, Family] = {
    "plus": ("x plus {k}", "x+{k}", lambda x, k: x + k),
    "minus": ("x minus {k}", "x-{k}", lambda x, k: x - k),
    "times": ("x times {k}", "x*{k}", lambda x, k: x * k),
    "max": ("larger of x and {k}", "max(x,{k})", max),
    "min": ("smaller of x and {k}", "min(x,{k})", min),
    "mod": ("x modulo {k}", "x%{k}", lambda x, k: x % k),
}
DIGITS = range(1, 10)
PROGRAM = "def f(x):\n return {}"


def characters() -> str:
    """All that prompts and programs are made of."""
    texts = [PROGRAM, "\n0123456789"] + [
        text for family in FAMILIES.values() for text in family[:2]
    ]
    return "".join(sorted(set("".join(texts)) - set("{}")))


@dataclass(frozen=True, kw_only=True)
class ProgramsConfig(ArithmeticConfig, GRPOConfig):
    """Sizes that fit two CPU cores: running programs takes about as long as all else."""

    name: str = "programs"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 60
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 16
    """Groups in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=32))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=128))
    trainer: TrainerConfig = field(default_factory=small_trainer)


def row(rng: random.Random) -> dict[str, Any]:
    """A prompt, and asserts on numbers, some of each side of the digit."""
    words, _, function = FAMILIES[rng.choice(list(FAMILIES))]
    k = rng.choice(DIGITS)
    xs = [rng.randint(-9, 0), rng.randint(10, 99), rng.randint(100, 999)][:NUM_TESTS]
    tests = [f"assert f({x}) == {function(x, k)}" for x in xs]
    return {"prompt": f"{words.format(k=k)}\n", "tests": tests}


def rows(seed: object, number: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{seed}")
    return [row(rng) for _ in range(number)]


def lesson(rng: random.Random) -> tuple[str, str]:
    """A prompt and the teacher's program, often with another operation or another digit."""
    name, k = rng.choice(list(FAMILIES)), rng.choice(DIGITS)
    prompt = f"{FAMILIES[name][0].format(k=k)}\n"
    if rng.random() > TEACHER_RIGHT_FRAC:
        if rng.random() < 0.5:
            name = rng.choice([other for other in FAMILIES if other != name])
        else:
            k = rng.choice([digit for digit in DIGITS if digit != k])
    return prompt, PROGRAM.format(FAMILIES[name][1].format(k=k))


def lessons(cfg: ProgramsConfig) -> Iterator[list[tuple[str, str]]]:
    rng = random.Random(cfg.seed)
    while True:
        yield [lesson(rng) for _ in range(cfg.warm_start_batch)]


def warm_start(cfg: ProgramsConfig) -> WarmStart:
    return WarmStart(num_steps=cfg.warm_start_steps, batches=lessons(cfg), learning_rate=1e-3)


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(ProgramsConfig)
    cfg = parsed.config
    passes = code_tests()
    rlsys.launch(
        cfg,
        grpo(cfg, [passes], rows=rows(cfg.seed + 1, NUM_ROWS)),
        own_model=OwnModel(name="programs", characters=characters()),
        warm_start=warm_start(cfg),
        held_out=HeldOut(rows=rows("held out", NUM_HELD_OUT), rewards=[passes]),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
