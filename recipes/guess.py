"""Guess a number in several turns: the best next guess depends on the previous answers.

A number from 1 to 63 is to be found in at most six turns. The environment shows how many numbers
are left, and the model guesses one of them, counted from the smallest. A single guess is right 1.6
% of the time; halving the range always wins. A turn's reward is larger the closer its guess is to
the middle of the range. A small Qwen3 starts from random weights. Numbers are digits of base 64, so
that each is one token.

    python recipes/guess.py --name guess
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import rlsys
from rlsys import (
    AsyncConfig,
    OwnModel,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.algorithms import clipped_surrogate, entropy_bonus, token_mean, turn_batch_advantage

LARGEST = 63
DIGITS = string.digits + string.ascii_letters + "+-"
VALUES = {digit: value for value, digit in enumerate(DIGITS)}  # does not contain the empty reply


@rlsys.environment(max_turns=6, turn_tokens=1, plain_text=True)
async def guess(chat: Any, task: Any) -> dict[str, float]:
    """Play one episode: 1 if the number is found, and a reward per turn for halving the range."""
    low, high = 1, LARGEST
    while not chat.done:
        number = low - 1 + await chat(DIGITS[high - low + 1], parse=VALUES.__getitem__)
        chat.reward(1 / (1 + abs(number - (low + high) // 2)), "halving")
        if number == task["number"]:
            return {"found": 1.0}
        is_larger = number < task["number"]
        low, high = (max(low, number + 1), high) if is_larger else (low, min(high, number - 1))
    return {"found": 0.0}


@dataclass(frozen=True, kw_only=True)
class GuessConfig(RunConfig):
    """Settings for two CPU cores."""

    name: str = "guess"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 70
    """Optimizer steps of the whole run."""
    prompts_per_step: int = LARGEST
    """Groups in one optimizer step."""
    group_size: int = 8
    """Episodes of each number."""
    entropy_coefficient: float = 0.05
    """Coefficient of the entropy in the loss, which keeps the policy exploring."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=12))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=1024))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=2e-3,
            warmup_steps=5,
            schedule="linear",
            micro_batch_tokens=8192,
            num_minibatches=3,
        )
    )
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=6))


def tasks() -> list[dict[str, Any]]:
    """Return a task for each number."""
    return [{"number": number} for number in range(1, LARGEST + 1)]


def graph(cfg: GuessConfig) -> rlsys.Dataflow:
    """Return the graph: play episodes, compute advantages per turn, train."""
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    numbers = rlsys.Prompts(config=cfg.data, rows=tasks())
    episodes = flow.play(policy, guess, numbers, group_size=cfg.group_size, parts=["found"])
    # discount=0: a turn's advantage uses only its own reward.
    (advantages,) = flow.per_batch(
        partial(turn_batch_advantage, discount=0.0),
        episodes.turn_rewards,
        episodes.turns,
        per="token",
    )
    flow.train(
        policy,
        episodes.rollouts,
        advantages,
        loss=entropy_bonus(clipped_surrogate(0.2, 0.28), cfg.entropy_coefficient),
        aggregation=token_mean,
        watch=[episodes.reward, *episodes.parts],
    )
    return flow


def report(model: Path, cfg: GuessConfig) -> str:
    """Return the fraction of the numbers that the model finds."""

    def found(**how: Any) -> float:
        episodes = rlsys.play(model, guess, tasks(), sampling=cfg.sampling, seed=cfg.seed, **how)
        return fmean(episode.components.get("found", 0.0) for episode in episodes)

    return (
        f"found {found(num_episodes=16):.3f} of the numbers, {found(greedy=True):.3f} with the "
        "likeliest guess each time"
    )


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(GuessConfig)
    cfg = parsed.config
    own_model = OwnModel(name="guess", characters=DIGITS, width=64, num_layers=2)
    result = rlsys.launch(cfg, graph(cfg), own_model=own_model, dry_run=parsed.dry_run)
    if not parsed.dry_run:
        print(report(result.model, cfg))


if __name__ == "__main__":
    main()
