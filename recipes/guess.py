"""Guessing a number, in several turns: what to ask next follows from what was answered.

A number from 1 to 63 is to be found in at most six turns; the environment says whether it is larger
or smaller. One guess alone is right 1.6 % of the time; halving what is left always wins. Each turn
costs the more, the farther its guess is from the middle of what is left. A small Qwen3 with a
tokenizer of 13 characters begins with random weights.

    python recipes/guess.py --name guess
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import log2
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
from rlsys.algorithms import clipped_surrogate, token_mean, turn_batch_advantage

LARGEST = 63


@rlsys.environment(max_turns=6, turn_tokens=3, plain_text=True, format_reward=-1.0)
async def guess(chat: Any, task: Any) -> dict[str, float]:
    low, high, hint = 1, LARGEST, "?"
    while not chat.done:
        number = await chat(hint, parse=int)
        chat.reward(-log2(1 + abs(number - (low + high) // 2)) / 6, "halving")
        if number == task["number"]:
            return {"found": 1.0}
        hint = "<" if number > task["number"] else ">"
        low, high = (low, min(high, number - 1)) if hint == "<" else (max(low, number + 1), high)
    return {"found": 0.0}


@dataclass(frozen=True, kw_only=True)
class GuessConfig(RunConfig):
    """Sizes that fit two CPU cores."""

    name: str = "guess"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 240
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 63
    """Groups in one optimizer step."""
    group_size: int = 8
    """Episodes of each number."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=32))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
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


def graph(cfg: GuessConfig) -> rlsys.Dataflow:
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    rows = [{"number": number} for number in range(1, LARGEST + 1)]
    tasks = rlsys.Prompts(config=cfg.data, rows=rows)
    episodes = flow.play(policy, guess, tasks, group_size=cfg.group_size, parts=["found"])
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
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        watch=[episodes.reward, *episodes.parts],
    )
    return flow


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(GuessConfig)
    rlsys.launch(
        parsed.config,
        graph(parsed.config),
        own_model=OwnModel(name="guess", characters="0123456789?<>"),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
