"""Programs, learned from their unit tests in minutes on two CPU cores, without GPU or network.

A prompt describes a function of one number, "x plus 7"; a completion is a program that defines it.
A small Qwen3 gets a warm start with programs, of which seven of ten are wrong. GRPO finds out which
programs are right by running each in the sandbox against hidden tests.

    pip install 'rlsys[sandbox]'; python recipes/programs.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.arithmetic import ArithmeticConfig
from recipes.grpo import GRPOConfig, grpo
from rlsys import HeldOut, OwnModel, RolloutConfig, SamplingConfig, WarmStart
from rlsys.rewards import code_tests

# Fraction of right programs in the warm start.
WARM_START_RIGHT_FRAC = 0.3
NUM_ROWS, NUM_HELD_OUT, NUM_TESTS = 2048, 128, 3

# Description, expression and function of x and the digit k.
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
    """Return all characters of prompts and programs."""
    texts = [PROGRAM, "\n0123456789"] + [
        text for family in FAMILIES.values() for text in family[:2]
    ]
    return "".join(sorted(set("".join(texts)) - set("{}")))


@dataclass(frozen=True, kw_only=True)
class ProgramsConfig(ArithmeticConfig, GRPOConfig):
    """Settings for two CPU cores; running programs takes about half of the time."""

    name: str = "programs"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 60
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 16
    """Groups in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=32))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=128))


def row(rng: random.Random) -> dict[str, Any]:
    """Return a prompt with tests on numbers on both sides of the digit."""
    words, _, function = FAMILIES[rng.choice(list(FAMILIES))]
    k = rng.choice(DIGITS)
    xs = [rng.randint(-9, 0), rng.randint(10, 99), rng.randint(100, 999)][:NUM_TESTS]
    tests = [f"assert f({x}) == {function(x, k)}" for x in xs]
    return {"prompt": f"{words.format(k=k)}\n", "tests": tests}


def rows(seed: object, number: int) -> list[dict[str, Any]]:
    """Return random rows."""
    rng = random.Random(f"{seed}")
    return [row(rng) for _ in range(number)]


def warm_start_example(rng: random.Random) -> tuple[str, str]:
    """Return a prompt and a program, often with a wrong operation or digit."""
    name, k = rng.choice(list(FAMILIES)), rng.choice(DIGITS)
    prompt = f"{FAMILIES[name][0].format(k=k)}\n"
    if rng.random() > WARM_START_RIGHT_FRAC:
        if rng.random() < 0.5:
            name = rng.choice([other for other in FAMILIES if other != name])
        else:
            k = rng.choice([digit for digit in DIGITS if digit != k])
    return prompt, PROGRAM.format(FAMILIES[name][1].format(k=k))


def warm_start_batches(cfg: ProgramsConfig) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of examples, forever."""
    rng = random.Random(cfg.seed)
    while True:
        yield [warm_start_example(rng) for _ in range(cfg.warm_start_batch)]


def warm_start(cfg: ProgramsConfig) -> WarmStart:
    """Return the warm start of a run."""
    batches = warm_start_batches(cfg)
    return WarmStart(num_steps=cfg.warm_start_steps, batches=batches, learning_rate=1e-3)


@rlsys.main
def main() -> None:
    """Run the recipe."""
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
