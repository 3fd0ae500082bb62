"""Simulate `rollout.borrow`: the trainer's devices generate while the trainer would wait.

    python -m scripts.plan.simulate_lending
    python -m scripts.plan.simulate_lending --quick

Qwen3-8B on eight H100, which training and generation divide. Workloads: generation takes from a
third to three times the device time of training; log-normal lengths of two kinds; staleness 0 and
1. The real controller runs in virtual time. For each workload and three splits (4, 6 or 7 of the
devices train), the same run is played without and with lending. All static splits are played too,
and the best one is the last column.

Prints a table of seconds per step and one line of JSON. `gain` is the time without lending over the
time with it: its smallest and its median value. `over_best` is the time with lending over that of
the best static split.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.config import AsyncConfig, RolloutConfig, RunConfig, TrainerConfig
from rlsys.dataflow.scheduling.lending import LendingSettings
from rlsys.planner.hardware import GB, parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.memory import kv_capacity
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_costs import PlannedReplica
from rlsys.planner.run_plan import PROFILES
from rlsys.planner.simulate import ReplicaModel, SimulationResult, TrainerModel, Work, simulate
from rlsys.types import GenerationRequest
from scripts.plan.simulate_published import PacedTraining, grpo

MODEL, CLUSTER, DEVICES = "Qwen3-8B", "1x8xH100", 8
PROMPTS, PROMPT_TOKENS = 24, 250
NUM_STEPS, WARM_UP = 16, 6
RATIOS = (1 / 3, 1 / 2, 1.0, 2.0, 3.0)  # device time of generation : of training
LENGTHS = ((2000, 8192, 0.8), (5000, 24_576, 1.1))  # mean, maximum, spread of the logarithm
STALENESS = (0, 1)
TRAINING_DEVICES = (4, 6, 7)
STATE_BYTES = 16  # of a parameter, with gradients and optimizer
MICRO_BATCH_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths, staleness, and the device time of generation relative to training."""

    ratio: float
    mean: float
    longest: int
    spread: float
    max_staleness: int
    group_size: int = 8

    def __str__(self) -> str:
        ratio = f"{self.ratio:g}:1" if self.ratio >= 1 else f"1:{1 / self.ratio:g}"
        return f"{ratio:>4}  mean {self.mean:,.0f}  η {self.max_staleness}"


@functools.cache
def replica_model(longest: int) -> ReplicaModel:
    """Return a replica on one device; it remembers the times that it has looked up."""
    constants, model, cluster = fitted_constants(), named_model(MODEL), parse_cluster(CLUSTER)
    plan = GenerationPlan(tp=1, max_running=256, profile=PROFILES["vllm"])
    return ReplicaModel(
        costs=PlannedReplica(
            model=replace(model, max_context=max(model.max_context, longest + 512)),
            cluster=cluster,
            plan=plan,
            constants=constants,
            prompt_tokens=PROMPT_TOKENS,
        ),
        cache_tokens=int(kv_capacity(model, cluster, plan, constants=constants)),
        max_running=plan.max_running,
    )


def play(
    load: Workload,
    training_devices: int,
    *,
    token_s: float,
    borrow: int = 0,
    lending: LendingSettings | None = None,
    num_steps: int = NUM_STEPS,
    warm_up: int = WARM_UP,
) -> SimulationResult:
    """Play a run with so many training devices; `token_s` is the training of a token on one."""
    replica = replica_model(load.longest)
    lengths = lognormal(load.mean, load.longest, load.spread)
    size = load.group_size
    sampled = lengths.sample(PROMPTS * size * 37, 0).tolist()

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        return max(1, round(float(sampled[(group_id * size + index) % len(sampled)])))

    states = STATE_BYTES * named_model(MODEL).parameters / training_devices
    release_s = 2 * states / (parse_cluster(CLUSTER).gpu.pcie * GB)
    return simulate(
        RunConfig(
            num_steps=num_steps,
            prompts_per_step=PROMPTS,
            group_size=size,
            asynchrony=AsyncConfig(max_staleness=load.max_staleness),
            rollout=RolloutConfig(
                engine="vllm", num_replicas=DEVICES - training_devices, borrow=borrow
            ),
            trainer=TrainerConfig(
                micro_batch_tokens=MICRO_BATCH_TOKENS,
                layout=f"tp{training_devices}",  # only the number of ranks counts
            ),
        ),
        grpo(size),
        replica=replica,
        trainers={
            "policy": TrainerModel(
                costs=PacedTraining(token_s=token_s, release_s=release_s),
                num_data=training_devices,
            )
        },
        work=Work(prompt_tokens=lambda index: PROMPT_TOKENS, completion_tokens=length),
        num_warm_up=warm_up,
        lending=lending,
    )


def training_token_s(load: Workload) -> float:
    """Return the training time of a token with which the workload has its ratio.

    Generation's device time is that of half of the devices, without training.
    """
    alone = play(replace(load, max_staleness=0), DEVICES // 2, token_s=0.0, num_steps=4, warm_up=1)
    generation = alone.mean_step_s * DEVICES / 2
    return generation / load.ratio / statistics.fmean(alone.trained_tokens)


def compare(load: Workload, lending: LendingSettings | None) -> dict[str, Any]:
    """Return the seconds per step of all splits, and with lending."""
    token_s = training_token_s(load)
    static = {
        devices: play(load, devices, token_s=token_s).mean_step_s for devices in range(1, DEVICES)
    }
    lent = {
        devices: play(load, devices, token_s=token_s, borrow=devices, lending=lending)
        for devices in TRAINING_DEVICES
    }
    return {"static": static, "lent": lent}


def workloads(quick: bool) -> list[Workload]:
    """Return all workloads, or two of them."""
    found = [
        Workload(ratio=ratio, mean=mean, longest=longest, spread=spread, max_staleness=eta)
        for (mean, longest, spread), eta, ratio in itertools.product(LENGTHS, STALENESS, RATIOS)
    ]
    return [replace(one, group_size=2) for one in (found[2], found[9])] if quick else found


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gains and the distances from the best static split, by training devices."""
    result: dict[str, Any] = {"workloads": len(found)}
    for devices in TRAINING_DEVICES:
        gains = [one["static"][devices] / one["lent"][devices].mean_step_s for one in found]
        over = [one["lent"][devices].mean_step_s / min(one["static"].values()) for one in found]
        result[f"train_{devices}_of_{DEVICES}"] = {
            "least_gain": round(min(gains), 3),
            "median_gain": round(statistics.median(gains), 3),
            "median_over_best": round(statistics.median(over), 3),
            "worst_over_best": round(max(over), 3),
        }
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two small workloads")
    parser.add_argument("--margin", type=float, default=LendingSettings().margin)
    given = parser.parse_args(argv)
    settings = LendingSettings(margin=given.margin)
    print(
        f"{'workload':25}"
        + "".join(f"  {devices} train: alone   lent   gain" for devices in TRAINING_DEVICES)
        + "  best static split"
    )
    found = []
    for load in workloads(given.quick):
        one = compare(load, settings)
        found.append(one)
        columns = ""
        for devices in TRAINING_DEVICES:
            alone, lent = one["static"][devices], one["lent"][devices].mean_step_s
            columns += f"  {alone:14.1f} {lent:6.1f} {alone / lent:5.2f}x"
        best = min(one["static"], key=one["static"].__getitem__)
        print(f"{load!s:25}{columns}  {one['static'][best]:6.1f} ({best} train)", flush=True)
    print(dump_json(summary(found)))


if __name__ == "__main__":
    main()
