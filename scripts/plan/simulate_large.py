"""Simulate a run on 10,000 GPUs with the real controller, and measure what that takes.

    python -m scripts.plan.simulate_large
    python -m scripts.plan.simulate_large --replicas 100 --steps 10

Qwen3-32B on H100: replicas of four GPUs, half of all GPUs train. Each replica samples eight
rollouts of a step. Prints one line of JSON: seconds, GiB, rollouts per second.
"""

from __future__ import annotations

import argparse
import resource
import time

from rlsys.common.safe_json import dump_json
from rlsys.config import (
    AsyncConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.memory import kv_capacity
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_costs import PlannedReplica, PlannedTrainer
from rlsys.planner.run_plan import PROFILES
from rlsys.planner.simulate import ReplicaModel, TrainerModel, Work, simulate
from rlsys.types import GenerationRequest
from scripts.plan.simulate_published import grpo

GROUP_SIZE, PER_REPLICA, PROMPT_TOKENS, LONGEST = 16, 8, 300, 8192


def main() -> None:
    """Run the simulation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1250)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    constants, model = fitted_constants(), named_model("Qwen3-32B")
    num_gpus = 8 * given.replicas
    cluster = parse_cluster(f"{num_gpus // 8}x8xH100")
    generation = GenerationPlan(tp=4, profile=PROFILES["vllm"])
    training = TrainingPlan(dp=num_gpus // 2 // 8, tp=8, row_tokens=16384, recompute="selective")
    prompts = given.replicas * PER_REPLICA // GROUP_SIZE
    lengths = lognormal(2500, LONGEST).sample(100_003).tolist()

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        return max(1, round(float(lengths[(group_id * GROUP_SIZE + index) % len(lengths)])))

    start = time.perf_counter()
    result = simulate(
        RunConfig(
            num_steps=given.steps,
            prompts_per_step=prompts,
            group_size=GROUP_SIZE,
            asynchrony=AsyncConfig(max_staleness=1),
            rollout=RolloutConfig(num_replicas=given.replicas),
            trainer=TrainerConfig(micro_batch_tokens=16384),
        ),
        grpo(GROUP_SIZE),
        replica=ReplicaModel(
            costs=PlannedReplica(
                model=model,
                cluster=cluster,
                plan=generation,
                constants=constants,
                prompt_tokens=PROMPT_TOKENS,
            ),
            cache_tokens=int(kv_capacity(model, cluster, generation, constants=constants)),
            max_running=generation.max_running,
        ),
        trainers={
            "policy": TrainerModel(
                costs=PlannedTrainer(
                    model=model, cluster=cluster, plan=training, constants=constants
                ),
                num_data=training.dp,
            )
        },
        work=Work(prompt_tokens=lambda index: PROMPT_TOKENS, completion_tokens=length),
        num_warm_up=min(2, given.steps - 2),
    )
    seconds = time.perf_counter() - start
    num_rollouts = given.steps * prompts * GROUP_SIZE
    print(
        dump_json(
            {
                "gpus": num_gpus,
                "steps": given.steps,
                "seconds": round(seconds, 1),
                "gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
                "rollouts_per_s": round(num_rollouts / seconds),
                "step_s": round(result.mean_step_s, 1),
                "trainer_busy": round(result.trainer_busy, 3),
                "generation_busy": round(result.generation_busy, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
