"""Plan of a whole run: which devices do what, in which layouts, and how stale data may be.

    RunShape   the roles of an algorithm's graph, their models, and the work of a step
    RunPlan    devices and layouts of every role
    step_time  closed form of a step's time, for the search; simulate_plan plays it

Roles are placed on devices of their own. In the colocated placement the policy's ranks and its
replicas share all devices and take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import Cluster
from rlsys.planner.plans import Estimate, GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import Constants, interval
from rlsys.planner.rl_step import generation_time, packed_plan
from rlsys.planner.run_costs import (
    FORWARD_SHARE,
    PLAIN_FORWARD_SHARE,
    load_seconds,
    release_seconds,
)
from rlsys.planner.training_time import train_step_time

# Software profile of replicas by engine: the host's work per step of an engine in a trainer's loop.
PROFILES = {"vllm": "vllm-rl", "torch": "torch-rl"}

ENGINES = {profile: engine for engine, profile in PROFILES.items()}

# Profile of training.
TRAINING_PROFILE = "rlsys"

# Settings of a run that gives none: all weights, float32 moments, vLLM.
PLAIN_TRAINING = TrainingPlan()
PLAIN_GENERATION = GenerationPlan(profile=PROFILES["vllm"])

Placement = Literal["separate", "colocated"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of the graph.

    Attributes:
        name: Name in the graph.
        model: Its shape.
        is_trained: Whether a stage trains it.
        forward_passes: Forward passes over all rows of a step besides training.
        samples: Whether replicas of it generate the rollouts.
        training: Settings of training that no search changes: adapters and the optimizer's state.
    """

    name: str
    model: Architecture
    is_trained: bool = True
    forward_passes: int = 0
    samples: bool = False
    training: TrainingPlan = PLAIN_TRAINING


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The roles of a run and the work of a step. The first role is the policy.

    Attributes:
        roles: The models.
        workload: Rollouts of a step.
        updates: Optimizer steps that share them.
        epochs: Passes over them.
        engine: Engine of the replicas.
        generation: Settings of replicas that no search changes: rows at once, size of the cache.
    """

    roles: tuple[Role, ...]
    workload: Workload
    updates: int = 1
    epochs: int = 1
    engine: str = "vllm"
    generation: GenerationPlan = PLAIN_GENERATION

    @property
    def policy(self) -> Role:
        """The role that generates."""
        return self.roles[0]

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a rollout with its prompt."""
        return self.workload.prompt_tokens + self.workload.completions.mean

    @property
    def step_tokens(self) -> float:
        """Tokens of a step's micro-batches: the rows of a group share their prompt."""
        workload = self.workload
        return workload.prompts * (
            workload.prompt_tokens + workload.group_size * workload.completions.mean
        )


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Devices and layouts of a run.

    Attributes:
        placement: Whether generation has devices of its own.
        max_staleness: Bound of the controller, in optimizer steps.
        generation: Layout of a replica.
        replicas: Number of replicas.
        trainers: Layout of each trained role.
        frozen_gpus: Devices of each frozen role.
    """

    placement: Placement
    max_staleness: int
    generation: GenerationPlan
    replicas: int
    trainers: Mapping[str, TrainingPlan]
    frozen_gpus: Mapping[str, int]

    @property
    def trainer_gpus(self) -> int:
        """Devices of all trained roles."""
        return sum(plan.num_gpus for plan in self.trainers.values())

    @property
    def generation_gpus(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.generation.num_gpus

    @property
    def num_gpus(self) -> int:
        """Devices of the run."""
        frozen = sum(self.frozen_gpus.values())
        if self.placement == "colocated":
            return max(self.trainer_gpus, self.generation_gpus) + frozen
        return self.trainer_gpus + self.generation_gpus + frozen


@lru_cache(maxsize=1 << 14)
def generation_seconds(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    replicas: int,
    workload: Workload,
    constants: Constants,
) -> float:
    """Return the seconds in which all rollouts of a step are generated."""
    return generation_time(model, cluster, plan, replicas, workload, constants=constants).seconds


@lru_cache(maxsize=1 << 16)
def training_seconds(
    role: Role, cluster: Cluster, plan: TrainingPlan, shape: RunShape, constants: Constants
) -> float:
    """Return the seconds of the passes and updates of a trained role in a step."""
    tokens = shape.step_tokens * shape.epochs / shape.updates
    update = packed_plan(plan, tokens, shape.row_tokens)
    if cluster.gpu.products:  # on a core, a half-full micro-batch takes half of the time
        row_tokens = tokens / update.dp / update.micro_batches
        attended = min(update.attended_tokens, row_tokens)
        update = replace(update, row_tokens=row_tokens, attended_tokens=attended)
    seconds = train_step_time(role.model, cluster, update, constants=constants).seconds
    seconds *= shape.updates
    share = FORWARD_SHARE.get(plan.recompute, PLAIN_FORWARD_SHARE)
    return seconds * (constants["rl_training"] + share * role.forward_passes / shape.epochs)


@lru_cache(maxsize=1 << 14)
def frozen_seconds(
    role: Role, cluster: Cluster, num_gpus: int, shape: RunShape, constants: Constants
) -> float:
    """Return the seconds of a frozen role's forward passes over a step on its devices."""
    row = max(shape.row_tokens, 1.0)
    one = TrainingPlan(row_tokens=row, micro_batch=1, shard="none")
    two = TrainingPlan(row_tokens=row, micro_batch=1, micro_batches=2, shard="none")
    each = (
        train_step_time(role.model, cluster, two, constants=constants).seconds
        - train_step_time(role.model, cluster, one, constants=constants).seconds
    )
    rows = shape.step_tokens / row / num_gpus
    return PLAIN_FORWARD_SHARE * role.forward_passes * rows * each


def steps_ahead(max_staleness: int, updates: int) -> float:
    """Return the steps that generation may be ahead of training.

    The last update of a step trains on tokens that are `updates` - 1 updates old already.
    """
    return (max_staleness + 1) / updates - 1


def bound_of(steps: int, updates: int) -> int:
    """Return the bound of staleness with which generation may be `steps` steps ahead."""
    return (steps + 1) * updates - 1


def step_time(
    shape: RunShape, cluster: Cluster, plan: RunPlan, *, constants: Constants
) -> Estimate:
    """Return the time of a step in closed form.

    If the bound of staleness allows no step ahead, or devices are shared, generation, frozen
    models, training and the transfer of weights follow one another. On shared devices the
    trainer's states move to the host and back too. Otherwise the slowest of them decides. A bound
    below one step ahead has its share of the gain. The controller overlaps more than that: the
    simulation says how much.
    """
    policy = shape.policy
    generated = generation_seconds(
        policy.model, cluster, plan.generation, plan.replicas, shape.workload, constants
    )
    trained = max(
        training_seconds(role, cluster, plan.trainers[role.name], shape, constants)
        for role in shape.roles
        if role.is_trained
    )
    scored = max(
        (
            frozen_seconds(role, cluster, plan.frozen_gpus[role.name], shape, constants)
            for role in shape.roles
            if not role.is_trained
        ),
        default=0.0,
    )
    generated += shape.workload.waiting_s
    load = load_seconds(policy.model, cluster, plan.generation, constants)
    received = constants.controller_s * shape.workload.prompts
    parts = {
        "generation": generated,
        "frozen_models": scored,
        "training": trained,
        "weights": load,
        "controller": received,
    }
    if plan.placement == "colocated":
        trainer = plan.trainers[policy.name]
        parts["hand_over"] = release_seconds(policy.model, trainer, cluster)
    elif (ahead := min(1.0, steps_ahead(plan.max_staleness, shape.updates))) > 0:
        slowest = max(generated + load, trained, scored, received)
        overlapped = {
            "generation": generated if generated + load == slowest else 0.0,
            "weights": load if generated + load == slowest else 0.0,
            "training": trained if trained == slowest else 0.0,
            "frozen_models": scored if scored == slowest else 0.0,
            "controller": received if received == slowest else 0.0,
            "contention": (constants["rl_overlap"] - 1) * slowest,
        }
        parts = {
            name: ahead * seconds + (1 - ahead) * parts.get(name, 0.0)
            for name, seconds in overlapped.items()
        }
    parts["rest"] = constants.rest_s * shape.workload.prompts
    if cluster.gpu.products:
        busy_s = plan.trainer_gpus * trained + plan.generation_gpus * generated
        busy_s += constants.reward_s * shape.workload.rollouts + received
        busy_s += constants.other_s * shape.workload.prompts
        parts["shared_cores"] = max(0.0, busy_s / cluster.num_gpus - sum(parts.values()))
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    seconds = sum(parts.values())
    low, high = interval(seconds, constants.spreads.get("rl_step", 0.3))
    return Estimate(seconds=seconds, low=low, high=high, breakdown=parts)
