"""Measure the cost of misbehaving reward functions for a run, and of calls of cheap ones.

    python scripts/bench/rewards.py [--num-steps 40] [--pairs 1]

Runs of the quickstart's size alternate between a well-behaved reward and a bad one: one call in a
hundred hangs (limit 2 s), one in a hundred raises, and once per run it allocates 8 GiB, forks,
calls os._exit, and backtracks in `re` for minutes. Prints one line of JSON last: milliseconds of
batches of cheap rewards, the median step time of both kinds of runs, their ratio, and the failed
rollouts by reason.

With five hanging calls per step of two seconds each, about twenty hang at any time.
`--concurrency` must be above that, or quick calls wait.

With `--order issued` a step waits for each hanging call of its groups until the limit; two seconds
are several steps of this model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rlsys
from actors.run.launch import launch
from recipes.grpo import grpo
from recipes.quickstart import CHARACTERS, QuickstartConfig, problem
from rlsys import metrics
from rlsys.config import AsyncConfig, ObserveConfig, RewardConfig
from rlsys.launcher.tiny_models import OwnModel
from rlsys.rewards import RewardRunner, exact_match, pack_rewards
from rlsys.runs.callbacks import Callbacks
from rlsys.runs.observe.metrics_file import read_metrics

LIMIT_S = 2.0
WARM_UP_STEPS = 3

# Groups whose first rollout has the worst behaviour.
ALLOCATES, FORKS, EXITS, BACKTRACKS = 9, 19, 29, 39


def well(rollout: rlsys.Rollout) -> float:
    """Return 1 for the right answer, else 0."""
    return float(rollout.completion_text == rollout.metadata["answer"])


def ill(rollout: rlsys.Rollout) -> float:
    """Misbehave in some calls."""
    number = rollout.group_id * 8 + rollout.index
    if number % 100 == 33:
        time.sleep(3600)
    if number % 100 == 66:
        raise ValueError("one in a hundred")
    if rollout.index == 0 and rollout.group_id == ALLOCATES:
        np.ones(8 * 2**30, np.uint8)
    if rollout.index == 0 and rollout.group_id == FORKS and os.fork() == 0:
        time.sleep(3600)
    if rollout.index == 0 and rollout.group_id == EXITS:
        os._exit(1)
    if rollout.index == 0 and rollout.group_id == BACKTRACKS:
        re.fullmatch(r"(a|aa)+b", "a" * 60)
    return float(rollout.completion_text == rollout.metadata["answer"])


def run(args: argparse.Namespace, reward: Any) -> tuple[list[float], Counter[str]]:
    """Return step times after a warm-up, and failures by reason."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as runs_dir:
        config = QuickstartConfig(
            name="rewards",
            runs_dir=runs_dir,
            num_steps=args.num_steps,
            prompts_per_step=args.prompts_per_step,
            reward=RewardConfig(timeout_s=LIMIT_S, concurrency=args.concurrency),
            asynchrony=AsyncConfig(
                max_staleness=1,
                order=args.order,
                over_issue=args.over_issue if args.order == "complete" else 0,
            ),
            observe=ObserveConfig(print_samples=0, record_groups=0, trace=False),
        )
        rows = [problem(rng) for _ in range(4096)]
        launch(
            config,
            grpo(config, [reward], rows=rows),
            own_model=OwnModel(name="addition", characters=CHARACTERS),
            callbacks=Callbacks(),
        )
        lines = read_metrics(Path(runs_dir) / "rewards" / "metrics.jsonl")
    assert len(lines) == args.num_steps
    failed: Counter[str] = Counter()
    for line in lines:
        failed.update(
            {kind: int(n) for kind, n in metrics.by_reason(line, metrics.REWARDS_FAILED).items()}
        )
    return [line[metrics.TIME_STEP_S] for line in lines[WARM_UP_STEPS:]], failed


async def cheap_ms(size: int) -> float:
    """Return the median time of batches of `size` calls of exact_match in milliseconds."""
    runner = RewardRunner(
        pack_rewards([exact_match()]),
        concurrency=16,
        timeout_s=30.0,
        memory_gib=4.0,
        start_timeout_s=300.0,
    )
    await runner.start()
    batch = [
        rlsys.example_rollout(str(i), metadata={"answer": "7"}, token_ids=range(16))
        for i in range(size)
    ]
    times: list[float] = []
    for _ in range(50):
        started = time.perf_counter()
        await runner.score(batch)
        times.append(time.perf_counter() - started)
    await runner.close()
    return round(1000 * statistics.median(times), 2)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=64, help="reward.concurrency")
    parser.add_argument("--over-issue", type=int, default=12, help="asynchrony.over_issue")
    parser.add_argument("--order", choices=("issued", "complete"), default="complete")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of runs, one of each kind")
    args = parser.parse_args()
    cheap = {f"cheap_{size}_ms": asyncio.run(cheap_ms(size)) for size in (256, 1000)}
    well_s: list[float] = []
    ill_s: list[float] = []
    failed: Counter[str] = Counter()
    for _ in range(args.pairs):
        times, none = run(args, well)
        assert not none.total(), none
        well_s += times
        times, failures = run(args, ill)
        ill_s += times
        failed += failures
    report = {
        **cheap,
        "step_s": round(statistics.median(well_s), 4),
        "step_s_ill": round(statistics.median(ill_s), 4),
        "ratio": round(statistics.median(ill_s) / statistics.median(well_s), 3),
        "failed": dict(failed),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
