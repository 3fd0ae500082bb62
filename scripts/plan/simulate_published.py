"""Compare the simulated controller with published series over the bound of staleness.

    python -m scripts.plan.simulate_published

verl's series (docs/advance/fully_async.md): 128 H20, Qwen2.5-Math-7B, DAPO, 512 prompts x 16, at
most 28,672 tokens. Half of the GPUs generate, half train. The mean length of completions is not
published. It is chosen so that the step without staleness takes as long as the published one. The
time of training is the published one. The other three steps are predictions. A threshold f lets
generation run f of a step ahead. An update drops the keys and values of running rollouts, which
compute them again.

Prints one line of JSON last. scripts/bench/ablation.py plays AsyncFlow's ablation in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlsys.common.safe_json import dump_json
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts
from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.planner.hardware import Cluster, parse_cluster
from rlsys.planner.lengths import Lengths, lognormal
from rlsys.planner.memory import kv_capacity
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_costs import PlannedReplica
from rlsys.planner.run_plan import PROFILES
from rlsys.planner.simulate import (
    ReplicaModel,
    SimulationResult,
    TrainerModel,
    Work,
    simulate,
)
from rlsys.types import GenerationRequest

# verl: seconds of a step by staleness threshold, and of the training in it.
VERL = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}
VERL_TRAINING_S = {0.0: 98.77, 0.1: 109.12, 0.3: 103.22, 0.5: 113.16}
PROMPTS, GROUP_SIZE, LONGEST, PROMPT_TOKENS = 512, 16, 28_672, 250
REPLICAS = 64
NUM_STEPS, WARM_UP = 8, 3
VERSIONS = 4
SCALE = 8  # one of this many replicas is simulated, with its share of the prompts


@dataclass(frozen=True, kw_only=True)
class PacedTraining:
    """A trainer whose time is in proportion to its tokens."""

    token_s: float
    optimizer_s: float = 0.0
    publish_s: float = 0.0
    release_s: float = 0.0

    def train_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of the passes over all completions."""
        return self.token_s * sum(sum(one.completions) for one in groups)

    def infer_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of a forward pass."""
        return self.train_s(groups) / 3


def center(rewards: torch.Tensor) -> torch.Tensor:
    """Return r - mean."""
    return rewards - rewards.mean()


def never_called(*_: Any) -> Any:
    """Raise: the workers are simulated."""
    raise AssertionError("the workers are simulated")


def grpo(group_size: int) -> Dataflow:
    """Return a graph of one model."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=group_size)
    reward = flow.score(rollouts, [never_called])
    advantage = flow.per_group(center, reward)
    flow.train(policy, rollouts, advantage, loss=never_called, aggregation=never_called)
    return flow


def asynchrony(threshold: float, prompts: int) -> AsyncConfig:
    """Return the setting whose gate lets generation run `threshold` of a step ahead."""
    if threshold == 0:
        return AsyncConfig(max_staleness=0, order="complete")
    # verl never cancels a rollout that has become too old, so the bound on versions is wide here.
    found = AsyncConfig(max_staleness=VERSIONS, order="complete")
    # The gate counts groups. A negative allowance is no setting of a run, only of this comparison.
    object.__setattr__(found, "over_issue", round((threshold - VERSIONS) * prompts))
    return found


def verl_step(
    threshold: float, lengths: Lengths, cluster: Cluster, training_s: float
) -> SimulationResult:
    """Return the simulated series of one threshold."""
    constants = fitted_constants()
    model, plan = (
        named_model("Qwen2.5-Math-7B"),
        GenerationPlan(tp=1, max_running=256, profile=PROFILES["vllm"]),
    )
    model = replace(model, max_context=max(model.max_context, LONGEST + PROMPT_TOKENS))
    prompts = PROMPTS // SCALE
    sampled = lengths.sample(prompts * GROUP_SIZE * NUM_STEPS, 0).tolist()
    tokens = lengths.mean * prompts * GROUP_SIZE

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        return max(1, round(float(sampled[(group_id * GROUP_SIZE + index) % len(sampled)])))

    return simulate(
        RunConfig(
            num_steps=NUM_STEPS,
            prompts_per_step=prompts,
            group_size=GROUP_SIZE,
            asynchrony=asynchrony(threshold, prompts),
            rollout=RolloutConfig(num_replicas=REPLICAS // SCALE),
            trainer=TrainerConfig(micro_batch_tokens=LONGEST * 2),
        ),
        grpo(GROUP_SIZE),
        replica=ReplicaModel(
            costs=PlannedReplica(
                model=model,
                cluster=cluster,
                plan=plan,
                constants=constants,
                prompt_tokens=PROMPT_TOKENS,
            ),
            cache_tokens=int(kv_capacity(model, cluster, plan, constants=constants)),
            max_running=plan.max_running,
            forgets=True,
        ),
        trainers={"policy": TrainerModel(costs=PacedTraining(token_s=training_s / tokens))},
        work=Work(prompt_tokens=lambda index: PROMPT_TOKENS, completion_tokens=length),
        num_warm_up=WARM_UP,
    )


def fitted_mean(cluster: Cluster) -> float:
    """Return the mean length with which the step without staleness takes as long as published."""
    low, high = 500.0, 0.6 * LONGEST
    for _ in range(8):
        mean = (low * high) ** 0.5
        result = verl_step(0.0, lognormal(mean, LONGEST), cluster, VERL_TRAINING_S[0.0])
        low, high = (mean, high) if result.mean_step_s < VERL[0.0] else (low, mean)
    return float((low * high) ** 0.5)


def main() -> None:
    """Print the comparison."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    cluster = parse_cluster("8x8xH20")
    mean = fitted_mean(cluster)
    print(f"mean completion {mean:.0f} tokens, fitted to the step without staleness")
    found = {}
    for threshold, published in VERL.items():
        result = verl_step(threshold, lognormal(mean, LONGEST), cluster, VERL_TRAINING_S[threshold])
        found[threshold] = result.mean_step_s
        print(
            f"threshold {threshold:.1f}: {result.mean_step_s:6.1f} s, published {published:.1f} s "
            f"({result.mean_step_s / published - 1:+.0%}); trainer busy {result.trainer_busy:.0%}, "
            f"generation {result.generation_busy:.0%}"
        )
    errors = [found[one] / VERL[one] - 1 for one in VERL if one]
    print(
        dump_json(
            {
                "verl": {str(k): round(v, 1) for k, v in found.items()},
                "worst_error": round(max(map(abs, errors)), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
