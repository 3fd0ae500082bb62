"""Measure the value of streaming and asynchrony with the real controller and simulated workers.

    python scripts/bench/ablation.py

Generation and training take equally long, on separate resources; lengths are long-tailed. The
clock jumps, so the result depends only on the controller's decisions and repeats exactly. Prints
one line of JSON last: speed-ups over the sequential mode, the best asynchronous bound, and its
ratio to max(generation, training).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlsys.config import AsyncConfig, DataConfig, RolloutConfig, RunConfig, TrainerConfig
from rlsys.controller.controller import Controller
from rlsys.controller.simulation.event_record import Record
from rlsys.controller.simulation.simulated_replicas import SimulatedFleet, SimulatedReplica
from rlsys.controller.simulation.simulated_workers import (
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import OpenWork
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import Prompts
from rlsys.dataflow.graph.store_layout import open_store
from rlsys.dataflow.scheduling.ledger import Ledger

NUM_STEPS, WARM_UP = 24, 6
GROUPS, GROUP_SIZE = 32, 8
REPLICAS, SLOTS = 4, 16
MEAN_S, SIGMA = 1.0, 0.6  # log-normal lengths: the longest of 256 takes about 4.5 s
SCORE_S, LOAD_S = 0.01, 0.02
# Generation at full slots takes as long as training.
ROW_S = MEAN_S / (REPLICAS * SLOTS)

MODES = {
    "sequential": AsyncConfig(max_staleness=0, stream=False),
    "streaming": AsyncConfig(max_staleness=0, stream=True, order="complete"),
    "asynchronous, bound 1": AsyncConfig(max_staleness=1),
    "asynchronous, bound 2": AsyncConfig(max_staleness=2),
}


@dataclass
class Lengths:
    """Long-tailed latencies, and their sum."""

    rng: random.Random
    total_s: float = 0.0

    def __call__(self) -> float:
        """Return a random latency in seconds."""
        length = self.rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA) * MEAN_S
        self.total_s += length
        return length


def center(rewards: torch.Tensor) -> torch.Tensor:
    """Return r − mean."""
    return rewards - rewards.mean()


def never_called(*_: Any) -> Any:
    """Raise: the trainer is simulated."""
    raise AssertionError("the learner is simulated")


async def simulate(asynchrony: AsyncConfig) -> tuple[float, float]:
    """Return the median seconds of a step, and the bound max(generation, training)."""
    config = RunConfig(
        num_steps=NUM_STEPS,
        prompts_per_step=GROUPS,
        group_size=GROUP_SIZE,
        asynchrony=asynchrony,
        rollout=RolloutConfig(num_replicas=REPLICAS),
        trainer=TrainerConfig(micro_batch_tokens=128),  # two groups of rollouts with 7 tokens
    )
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=GROUP_SIZE)
    reward = flow.score(rollouts, [never_called])
    advantage = flow.per_group(center, reward)
    flow.train(policy, rollouts, advantage, loss=never_called, aggregation=never_called)

    async def no_checkpoint(step: int, work: OpenWork, on_read: Callable[[], None]) -> None:
        pass

    clock = asyncio.get_running_loop().time
    lengths = Lengths(random.Random(0))
    ends: list[float] = []

    class Times(Record):
        def step_trained(self, trained: Any) -> None:
            ends.append(clock())

    graph = complete_graph(flow, config)
    await Controller(
        flow=graph,
        config=config,
        prompts=SimulatedPrompts(),
        store=open_store(
            graph, max_bytes=1 << 26, max_row_bytes=1 << 8, on_free=lambda freed: None
        ),
        ledger=Ledger(lambda event: None, groups_per_step=config.prompts_per_step),
        fleet=SimulatedFleet(),
        replicas={
            i: SimulatedReplica(
                name=f"rollout-{i}", latency_s=lengths, load_s=LOAD_S, num_slots=SLOTS
            )
            for i in range(REPLICAS)
        },
        scorer=SimulatedScorer(latency_s=lambda: SCORE_S),
        trainer_proxies={"policy": SimulatedTrainer(row_s=ROW_S)},
        observer=Times(),
        checkpoint=no_checkpoint,
        clock=clock,
    ).run()
    steps = [b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    generation_s = lengths.total_s / NUM_STEPS / (REPLICAS * SLOTS)
    return statistics.fmean(steps), max(generation_s, ROW_S * GROUPS * GROUP_SIZE)


def main() -> None:
    """Run the benchmark."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    step_s: dict[str, float] = {}
    bound_s = 0.0
    for mode, asynchrony in MODES.items():
        step_s[mode], bound_s = run_in_virtual_time(simulate(asynchrony))
        speed_up = step_s["sequential"] / step_s[mode]
        print(f"{mode:<22} {step_s[mode]:6.2f} s a step  {speed_up:.2f} x")
    best = min(step_s[mode] for mode in MODES if mode.startswith("asynchronous"))
    print(
        json.dumps(
            {
                "streaming": round(step_s["sequential"] / step_s["streaming"], 3),
                "asynchronous": round(step_s["sequential"] / best, 3),
                "of_bound": round(best / bound_s, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
