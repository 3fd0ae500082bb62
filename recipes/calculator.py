"""Learn when to call a tool: for products, which the model cannot compute, but not for sums.

Half of the tasks are sums of two digits, half are products of two-digit numbers. A call of the
calculator costs three tenths of a right answer. The model, with 0.8 million parameters and random
weights, gets a warm start with both ways of answering every kind of task: for `7+5=` both `12` and
`[7+5]`. Reinforcement learning finds out which of them pays.

    python recipes/calculator.py --name calculator
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import rlsys
from recipes.calculator_tasks import CHARACTERS, HELD_OUT, SUMS, TRAINED, warm_start_batches
from rlsys import OwnModel, RolloutConfig, RunConfig, SamplingConfig, TrainerConfig, WarmStart
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean
from rlsys.environments.tools.tool_call import Piece, RawCall
from rlsys.environments.tools.tool_formats import ToolFormat

COST = 0.3  # price of a call; a right answer is worth 1
CALL = re.compile(r"\[(\d+)([+*])(\d+)\]")


@rlsys.tool
async def calculator(left: int, sign: Literal["+", "*"], right: int) -> int:
    """Add or multiply."""
    return left + right if sign == "+" else left * right


def in_brackets(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Parse a reply as a call, `[37*84]`, or as an answer."""
    if call := CALL.fullmatch(text):
        left, sign, right = call.groups()
        yield RawCall("calculator", {"left": int(left), "sign": sign, "right": int(right)})
    else:
        yield text


@rlsys.environment(
    tools=[calculator],
    tool_format=ToolFormat("brackets", in_brackets),
    max_turns=2,
    turn_tokens=8,
    stop=["]"],
    plain_text=True,
)
async def sums_and_products(chat: Any, task: Any) -> dict[str, float]:
    """Return 1 for a right answer, minus the costs of calls."""
    answer = await chat.until_answer(task["question"])
    right = float(answer == task["answer"])
    return {"right": right, "calls": -COST * chat.num_tool_calls}


@rlsys.environment(max_turns=2, turn_tokens=8, stop=["]"], plain_text=True)
async def without_tool(chat: Any, task: Any) -> float:
    """Play the same tasks without a tool: after a call, the next reply counts."""
    answer = await chat(task["question"])
    if answer.endswith("]"):
        answer = await chat()
    return float(answer == task["answer"])


@dataclass(frozen=True, kw_only=True)
class CalculatorConfig(RunConfig):
    """Settings for two CPU cores."""

    name: str = "calculator"
    """Name of the run's directory below runs_dir."""
    warm_start_steps: int = 500
    """Supervised steps before reinforcement learning starts."""
    num_steps: int = 80
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 64
    """Groups in one optimizer step."""
    group_size: int = 8
    """Episodes of each task."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=24))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=512))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=3e-4, warmup_steps=5, schedule="linear", micro_batch_tokens=8192
        )
    )


def graph(cfg: CalculatorConfig) -> rlsys.Dataflow:
    """Return the graph: play episodes, compare rewards within groups, train."""
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    sums = SUMS * (len(TRAINED) // len(SUMS))
    tasks = rlsys.Prompts(config=cfg.data, rows=[*sums, *TRAINED])
    episodes = flow.play(
        policy, sums_and_products, tasks, group_size=cfg.group_size, parts=["right", "calls"]
    )
    advantages = flow.per_group(grpo_advantage, episodes.reward)
    flow.train(
        policy,
        episodes.rollouts,
        advantages,
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        watch=[episodes.reward, *episodes.parts],
    )
    return flow


def report(model: Path, cfg: CalculatorConfig) -> str:
    """Return the results on all sums and on held-out products."""
    of_sums, of_products, alone = (
        [one.components for one in rlsys.play(model, played, tasks, sampling=cfg.sampling)]
        for played, tasks in (
            (sums_and_products, SUMS * (len(HELD_OUT) // len(SUMS))),
            (sums_and_products, HELD_OUT),
            (without_tool, HELD_OUT),
        )
    )
    right = fmean(one["right"] for one in [*of_sums, *of_products])
    called_easy, called_hard = (
        fmean(one["calls"] < 0 for one in played) for played in (of_sums, of_products)
    )
    by_itself = fmean(one["final"] for one in alone)
    return (
        f"right: {right:.3f}; calls the calculator: for {called_hard:.3f} of the products and "
        f"{called_easy:.3f} of the sums; right products without it: {by_itself:.3f}"
    )


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(CalculatorConfig)
    cfg = parsed.config
    result = rlsys.launch(
        cfg,
        graph(cfg),
        own_model=OwnModel(name="calculator", characters=CHARACTERS),
        warm_start=WarmStart(
            num_steps=cfg.warm_start_steps, batches=warm_start_batches(cfg.seed), learning_rate=1e-3
        ),
        dry_run=parsed.dry_run,
    )
    if not parsed.dry_run:
        print(report(result.model, cfg))


if __name__ == "__main__":
    main()
