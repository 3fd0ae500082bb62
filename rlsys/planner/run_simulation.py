"""Simulation of a planned run: the real controller with the costs of the plan's devices.

    RunConfig + RunShape + RunPlan + Constants ─► simulate_run ─► SimulationResult

The closed forms of the planner give the times of replicas and trainers.
"""

from __future__ import annotations

import math
import random

from rlsys.config import RunConfig
from rlsys.controller.simulation.timed_workers import DrawTools, no_tools
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.planner.hardware import Cluster
from rlsys.planner.memory import kv_capacity
from rlsys.planner.plan_settings import configured
from rlsys.planner.plans import TrainingPlan, Workload
from rlsys.planner.profiles import Constants
from rlsys.planner.run_costs import PlannedReplica, PlannedTrainer
from rlsys.planner.run_plan import Role, RunPlan, RunShape, bound_of
from rlsys.planner.simulate import (
    ReplicaModel,
    SimulationResult,
    TrainerModel,
    Work,
    simulate,
)
from rlsys.types import GenerationRequest

# First steps, which fill the pipeline, and the fewest steps after them. Generation that may be
# ahead completes several steps at once, so both grow with the steps that it may be ahead.
NUM_WARM_UP, NUM_MEASURED = 3, 5

# Steps that generation may be ahead in a simulation. A larger bound is played as this one.
MAX_AHEAD = 16

# Rollouts that all simulations of a search play together: about 30 s on one core.
MAX_ROLLOUTS = 60_000

# Standard deviation of the logarithm of a tool's time.
TOOL_SPREAD = 0.5


def measured_steps(ahead: int) -> tuple[int, int]:
    """Return the steps of a simulation, and the first ones of them, which do not count.

    The others are a multiple of `ahead` + 1: generation may complete so many steps at once.
    """
    warm_up, period = NUM_WARM_UP + ahead, ahead + 1
    return warm_up + 1 + period * math.ceil(NUM_MEASURED / period), warm_up


def num_played(max_staleness: int, updates: int) -> int:
    """Return the steps that the simulation of a run plays. `updates` are those of a step."""
    ahead = min((max_staleness + 1) // updates - 1, MAX_AHEAD)
    return measured_steps(ahead)[0] + ahead


def simulate_run(
    config: RunConfig,
    flow: StageGraph,
    shape: RunShape,
    cluster: Cluster,
    plan: RunPlan,
    constants: Constants,
) -> SimulationResult:
    """Return the steps of a configuration with the simulated controller.

    `plan` is the plan that the configuration states.
    """
    policy, workload = shape.policy, shape.workload
    bound = min(config.asynchrony.max_staleness, bound_of(MAX_AHEAD, shape.updates))
    config = configured(config, {"asynchrony.max_staleness": bound})
    num_steps, num_warm_up = measured_steps(config.max_version_lag)
    num_lengths = workload.rollouts * (num_steps + config.max_version_lag)
    lengths = workload.completions.sample(num_lengths, config.seed).tolist()

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        tokens: float = lengths[(group_id * workload.group_size + index) % len(lengths)]
        return max(1, round(tokens))

    roles = {role.name: role for role in shape.roles}
    return simulate(
        configured(config, {"num_steps": num_steps}),
        flow,
        replica=ReplicaModel(
            costs=PlannedReplica(
                model=policy.model,
                cluster=cluster,
                plan=plan.generation,
                constants=constants,
                prompt_tokens=workload.prompt_tokens,
            ),
            cache_tokens=_cache_tokens(shape, cluster, plan, constants),
            max_running=plan.generation.max_running,
            num_processes=plan.generation.tp,
        ),
        trainers={
            name: _trainer_model(roles[name], cluster, trainer, constants, workload.prompts)
            for name, trainer in plan.trainers.items()
        },
        frozen={
            name: _trainer_model(
                roles[name], cluster, TrainingPlan(dp=num_gpus, shard="none"), constants, 0
            )
            for name, num_gpus in plan.frozen_gpus.items()
        },
        work=Work(
            prompt_tokens=lambda index: max(1, round(workload.prompt_tokens)),
            completion_tokens=length,
            reward_s=lambda: constants.reward_s,
            tools_s=tool_times(workload, config.seed),
            controller_s=constants.controller_s / workload.group_size,
            other_s=constants.other_s / workload.group_size if cluster.gpu.products else 0.0,
        ),
        num_warm_up=num_warm_up,
        num_cores=cluster.num_gpus if cluster.gpu.products else math.inf,
    )


def tool_times(workload: Workload, seed: int) -> DrawTools:
    """Return a function that draws the seconds of the tools of an episode, log-normal."""
    if workload.turns == 1:
        return no_tools
    scale = workload.tool_s * math.exp(-(TOOL_SPREAD**2) / 2)  # so that the mean is tool_s

    def draw(request: GenerationRequest) -> list[float]:
        numbers = random.Random(f"{seed} {request.request_id}")
        return [
            scale * math.exp(TOOL_SPREAD * numbers.gauss(0, 1)) for _ in range(workload.turns - 1)
        ]

    return draw


def _cache_tokens(shape: RunShape, cluster: Cluster, plan: RunPlan, constants: Constants) -> int:
    """Return the tokens whose keys and values a replica holds, at least one rollout's."""
    model, longest = shape.policy.model, shape.workload.completions.maximum
    tokens = kv_capacity(
        model, cluster, plan.generation, row_tokens=shape.row_tokens, constants=constants
    )
    return max(int(tokens), longest + round(shape.workload.prompt_tokens) + 2)


def _trainer_model(
    role: Role, cluster: Cluster, plan: TrainingPlan, constants: Constants, num_groups: int
) -> TrainerModel:
    model, length = role.model, 4096.0
    fixed = model.model_flops(1.0)
    growth = (model.model_flops(length) - fixed) / length  # per token of the row's length
    return TrainerModel(
        costs=PlannedTrainer(
            model=model, cluster=cluster, plan=plan, constants=constants, num_groups=num_groups
        ),
        num_data=plan.dp,
        num_stages=plan.pp,
        num_ranks=plan.num_gpus,
        attention_tokens=fixed / (2 * growth) if growth > 0 else 1e9,
    )
