"""Guessing a number, in several turns: what to ask next follows from what was answered.

A number from 1 to 63 is to be found in at most six turns; the environment says whether it is larger
or smaller. One guess alone is right 1.6 % of the time; halving what is left always wins. A small
Qwen3 with a tokenizer of 14 characters learns it from random weights, by GRPO over episodes, in
minutes on two CPU cores.

    python recipes/guess.py --name guess
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import rlsys
from rlsys import OwnModel, RolloutConfig, RunConfig, SamplingConfig, TrainerConfig
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean

LARGEST = 63


@rlsys.environment(max_turns=6, turn_tokens=3, plain_text=True, timeout_s=30)
async def guess(chat: Any, task: Any) -> float:
    number = await chat("?", parse=int)
    while number != task["number"] and not chat.done:
        number = await chat("<" if number > task["number"] else ">", parse=int)
    return float(number == task["number"])


@dataclass(frozen=True, kw_only=True)
class GuessConfig(RunConfig):
    """Sizes that fit two CPU cores."""

    name: str = "guess"
    num_steps: int = 200
    prompts_per_step: int = 32
    group_size: int = 16
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=32))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(learning_rate=1e-3, micro_batch_tokens=4096)
    )


def tasks() -> list[dict[str, Any]]:
    return [{"number": number} for number in range(1, LARGEST + 1)]


def graph(cfg: GuessConfig) -> rlsys.Dataflow:
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    episodes = flow.play(
        policy,
        guess,
        rlsys.Prompts(config=cfg.data, rows=tasks()),
        group_size=cfg.group_size,
    )
    advantages = flow.per_group(grpo_advantage, episodes.reward)
    flow.train(
        policy,
        episodes.rollouts,
        advantages,
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
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
