"""Plan the run that a recipe states, and the configuration of a plan.

    recipe ─► launch(config, flow) ─► shape_of_run ─► search ─► simulate ─► RunPlanning
                                                                   └─► settings: plan.toml

A recipe is not changed for this: while `requested` is active, rlsys.launch plans the run instead of
starting it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.config.fields import build, flatten, to_dict
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    GenerateStage,
    InferStage,
    JudgeStage,
    Model,
    TrainStage,
)
from rlsys.errors import InvalidValue, require
from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import Cluster
from rlsys.planner.lengths import Lengths, lognormal
from rlsys.planner.memory import kv_capacity
from rlsys.planner.model_config import (
    architecture_from_config,
    model_names,
    named_model,
)
from rlsys.planner.plans import Estimate, GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import Constants, fitted_constants, interval
from rlsys.planner.run_costs import PlannedReplica, PlannedTrainer
from rlsys.planner.run_plan import PROFILE, Role, RunPlan, RunShape, step_time
from rlsys.planner.search import (
    MAX_STALENESS,
    RankedPlan,
    as_layout,
    as_training_plan,
    ranked,
    search,
)
from rlsys.planner.simulate import (
    ReplicaModel,
    SimulationResult,
    TrainerModel,
    Work,
    simulate,
)
from rlsys.types import GenerationRequest

# Steps of a simulation, and the first ones, which fill the pipeline.
NUM_STEPS, NUM_WARM_UP = 9, 3

# Rollouts that all simulations of a search play together: about 30 s on one core.
MAX_ROLLOUTS = 60_000

# Plans that are simulated at most.
MAX_SIMULATED = 6

# Mean lengths that are assumed if none are given, as shares of their limits.
ASSUMED_PROMPT, ASSUMED_COMPLETION = 0.5, 0.4


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A question to the planner.

    Attributes:
        cluster: The devices.
        prompt_tokens: Mean tokens of a prompt; None assumes half of data.max_prompt_tokens.
        completions: Lengths of completions; None assumes a mean of 0.4 sampling.max_tokens.
        max_staleness: Bounds to try.
        num_simulated: Plans to simulate.
        constants: Constants and profiles.
    """

    cluster: Cluster
    prompt_tokens: float | None = None
    completions: Lengths | None = None
    max_staleness: Sequence[int] = MAX_STALENESS
    num_simulated: int = MAX_SIMULATED
    constants: Constants | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A ranked plan, what its simulation found, and the settings of the run that it needs."""

    ranked: RankedPlan
    settings: Mapping[str, Any]
    result: SimulationResult | None = None


@dataclass(frozen=True, kw_only=True)
class RunPlanning:
    """The planner's answer: plans, fastest first, and the assumptions behind them."""

    shape: RunShape
    cluster: Cluster
    plans: Sequence[SimulatedPlan]
    num_found: int
    assumptions: Sequence[str]


# Set by `requested`, read by rlsys.launch.
_request: PlanRequest | None = None
_answers: list[RunPlanning] = []


@contextlib.contextmanager
def requested(request: PlanRequest) -> Iterator[list[RunPlanning]]:
    """Let rlsys.launch plan runs instead of starting them; yield the list of its answers."""
    global _request
    _request = request
    _answers.clear()
    try:
        yield _answers
    finally:
        _request = None


def is_requested() -> bool:
    """Return whether rlsys.launch shall plan the run."""
    return _request is not None


def answer_request(config: RunConfig, flow: Dataflow) -> None:
    """Plan a run as requested. A run that does not generate, such as SFT, has no plan."""
    assert _request is not None
    if isinstance(flow.source, GenerateStage):
        _answers.append(plan_run(config, flow, _request))


def plan_run(config: RunConfig, flow: Dataflow, request: PlanRequest) -> RunPlanning:
    """Return the best plans of a run.

    Raises:
        InvalidValue: The model has no known shape, lengths exceed its context, the algorithm does
            not generate, or no plan fits.
    """
    constants = request.constants or fitted_constants()
    shape, assumptions = shape_of_run(config, flow, request)
    found = search(
        shape,
        request.cluster,
        max_staleness=request.max_staleness,
        constants=constants,
        allows=lambda plan: _is_accepted(config, flow, plan),
    )
    plans = [SimulatedPlan(ranked=one, settings=settings(config, flow, one.plan)) for one in found]
    budget = MAX_ROLLOUTS // (NUM_STEPS * shape.workload.rollouts)
    num_simulated = min(request.num_simulated, budget, len(plans))
    simulated = [
        simulate_plan(config, flow, shape, request.cluster, one, constants)
        for one in plans[:num_simulated]
    ]
    return RunPlanning(
        shape=shape,
        cluster=request.cluster,
        plans=[*_sorted(simulated), *plans[num_simulated:]],
        num_found=len(found),
        assumptions=assumptions,
    )


def _sorted(plans: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    if not plans:
        return []
    by_plan = {id(one.ranked.plan): one for one in plans}
    return [
        replace(by_plan[id(one.plan)], ranked=one) for one in ranked([one.ranked for one in plans])
    ]


def shape_of_run(
    config: RunConfig, flow: StageGraph, request: PlanRequest
) -> tuple[RunShape, list[str]]:
    """Return the roles and the work of a run, and what was assumed about its lengths."""
    require(
        isinstance(flow.source, GenerateStage),
        "recipe",
        config.name,
        rule="does not generate rollouts, and the planner plans generation and training",
        fix="Plan a recipe of reinforcement learning.",
    )
    assumptions: list[str] = []
    prompt_tokens = request.prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = max(1.0, ASSUMED_PROMPT * config.data.max_prompt_tokens)
        assumptions.append(
            f"prompts of {prompt_tokens:.0f} tokens, half of data.max_prompt_tokens; "
            "--prompt-tokens gives the real mean"
        )
    completions = request.completions
    if completions is None:
        mean = max(1.0, ASSUMED_COMPLETION * config.sampling.max_tokens)
        completions = lognormal(mean, config.sampling.max_tokens)
        assumptions.append(
            f"completions of {mean:.0f} tokens on average, 0.4 of sampling.max_tokens; "
            "--completion-tokens gives the real mean"
        )
    require(
        completions.maximum <= config.sampling.max_tokens,
        "completion_tokens",
        f"max={completions.maximum}",
        rule=f"is above sampling.max_tokens={config.sampling.max_tokens} of the recipe",
        fix="Give both the same limit.",
    )
    workload = Workload(
        prompts=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=prompt_tokens,
        completions=completions,
    )
    trained = {stage.model.name for stage in flow.all(TrainStage)}
    roles = [_role(config, flow, model, trained) for model in flow.models.values()]
    roles.sort(key=lambda role: not role.samples)
    updates = config.trainer.updates_per_step
    return RunShape(roles=tuple(roles), workload=workload, updates=updates), assumptions


def _role(config: RunConfig, flow: StageGraph, model: Model, trained: set[str]) -> Role:
    stages: list[InferStage | JudgeStage] = [*flow.all(InferStage), *flow.all(JudgeStage)]
    passes = sum(stage.model is model for stage in stages)
    path = config.model.path if model.config is None else model.config.model.path
    return Role(
        name=model.name,
        model=read_architecture(path or config.model.path),
        is_trained=model.name in trained,
        forward_passes=passes,
        samples=model.is_main,
    )


def read_architecture(path: str) -> Architecture:
    """Return the shape of a model: a directory with a config.json, or a name of the table.

    Raises:
        InvalidValue: The path is empty, or neither of the two.
    """
    require(
        bool(path),
        "model.path",
        path,
        rule="the planner needs the shape of a model",
        fix="Give a directory with a config.json, or a name such as Qwen/Qwen3-8B.",
    )
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        return architecture_from_config(parse_json(file.read_text()), name=Path(path).name)
    try:
        return named_model(path)
    except InvalidValue as error:
        nearest = get_close_matches(Path(path).name, model_names(), n=3, cutoff=0.3)
        names = ", ".join(nearest) or "Qwen3-8B"
        fix = f"Give a directory with a config.json, or a known name such as {names}."
        raise InvalidValue("model.path", path, rule=error.rule, fix=fix) from None


def settings(config: RunConfig, flow: StageGraph, plan: RunPlan) -> dict[str, Any]:
    """Return the options of a plan, by dotted name, as the file for --config has them."""
    tp = plan.generation.tp
    found: dict[str, Any] = {
        "placement": plan.placement,
        "asynchrony.max_staleness": plan.max_staleness,
        "rollout.engine": "vllm",
        "rollout.num_replicas": plan.replicas,
        "rollout.tensor_parallel": tp,
        "rollout.num_gpus": float(tp),
        "rollout.max_running": plan.generation.max_running,
        "rollout.gpu_memory_frac": plan.generation.memory_fraction,
    }
    for name, trainer in plan.trainers.items():
        model = flow.models[name]
        prefix = "" if model.config is None else f"{_section_of(config, model)}."
        found |= {
            f"{prefix}trainer.layout": str(as_layout(trainer)),
            f"{prefix}trainer.num_gpus": 1.0,
            f"{prefix}trainer.micro_batch_tokens": int(trainer.row_tokens),
            f"{prefix}model.gradient_checkpointing": trainer.recompute,
        }
    for name, num_gpus in plan.frozen_gpus.items():
        prefix = _section_of(config, flow.models[name])
        found |= {f"{prefix}.num_gpus": 1.0, f"{prefix}.num_workers": num_gpus}
    return found


def plan_of(config: RunConfig, flow: StageGraph) -> RunPlan:
    """Return the plan that a configuration states: the inverse of `settings`."""
    rollout = config.rollout
    trainers: dict[str, TrainingPlan] = {}
    frozen: dict[str, int] = {}
    for name, model in flow.models.items():
        if model.config is not None and not isinstance(model.config, TrainedRoleConfig):
            frozen[name] = model.config.num_workers
            continue
        role = config if model.config is None else model.config
        recompute = role.model.gradient_checkpointing
        trainers[name] = as_training_plan(
            role.trainer.parallel,
            row_tokens=float(role.trainer.micro_batch_tokens),
            recompute="selective" if recompute == "auto" else recompute,
        )
    return RunPlan(
        placement=config.placement,
        max_staleness=config.asynchrony.max_staleness,
        generation=GenerationPlan(
            tp=rollout.tensor_parallel,
            max_running=rollout.max_running,
            memory_fraction=rollout.gpu_memory_frac,
            profile=PROFILE,
        ),
        replicas=rollout.num_replicas,
        trainers=trainers,
        frozen_gpus=frozen,
    )


def predict(
    config: RunConfig, flow: StageGraph, request: PlanRequest
) -> tuple[Estimate, Sequence[str]]:
    """Return the time of a step of a configuration as it is, and what was assumed.

    Raises:
        InvalidValue: The model has no known shape, or lengths exceed its context.
    """
    constants = request.constants or fitted_constants()
    shape, assumptions = shape_of_run(config, flow, request)
    plan = plan_of(config, flow)
    return step_time(shape, request.cluster, plan, constants=constants), assumptions


def _section_of(config: RunConfig, model: Model) -> str:
    """Return the name of the configuration's section that a model of the graph uses."""
    for field in dataclasses.fields(config):
        if getattr(config, field.name) is model.config:
            return field.name
    raise InvalidValue(
        "model",
        model.name,
        rule="its configuration is not a section of the recipe's configuration",
        fix="Pass a field of the configuration to flow.model.",
    )


def configured(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with other values, by dotted name.

    Raises:
        InvalidValue: The configuration does not allow them together.
    """
    flat = flatten(type(config), to_dict(config))
    return build(type(config), {**flat, **changes})


def _is_accepted(config: RunConfig, flow: Dataflow, plan: RunPlan) -> bool:
    """Return whether the configuration allows a plan's settings together."""
    try:
        configured(config, settings(config, flow, plan))
    except ValueError:
        return False
    return True


def simulate_plan(
    config: RunConfig,
    flow: Dataflow,
    shape: RunShape,
    cluster: Cluster,
    one: SimulatedPlan,
    constants: Constants,
) -> SimulatedPlan:
    """Return the plan with the time that the simulated controller takes."""
    plan = one.ranked.plan
    policy, workload = shape.policy, shape.workload
    lengths = workload.completions.sample(workload.rollouts * NUM_STEPS, config.seed).tolist()

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        tokens: float = lengths[(group_id * workload.group_size + index) % len(lengths)]
        return max(1, round(tokens))

    roles = {role.name: role for role in shape.roles}
    changes = {**one.settings, "num_steps": NUM_STEPS}
    result = simulate(
        configured(config, changes),
        flow,
        replica=ReplicaModel(
            costs=PlannedReplica(
                model=policy.model,
                cluster=cluster,
                plan=plan.generation,
                constants=constants,
                prompt_tokens=workload.prompt_tokens,
            ),
            cache_tokens=int(
                kv_capacity(policy.model, cluster, plan.generation, constants=constants)
            ),
            max_running=plan.generation.max_running,
        ),
        trainers={
            name: _trainer_model(roles[name], cluster, trainer, constants)
            for name, trainer in plan.trainers.items()
        },
        frozen={
            name: _trainer_model(
                roles[name], cluster, TrainingPlan(dp=num_gpus, shard="none"), constants
            )
            for name, num_gpus in plan.frozen_gpus.items()
        },
        work=Work(
            prompt_tokens=lambda index: max(1, round(workload.prompt_tokens)),
            completion_tokens=length,
        ),
        num_warm_up=NUM_WARM_UP,
    )
    seconds = result.mean_step_s
    low, high = interval(seconds, constants.spreads.get("rl_step", 0.3))
    breakdown = {
        "trainer_idle": (1 - result.trainer_busy) * seconds,
        "trainer_busy": result.trainer_busy * seconds,
    }
    estimate = Estimate(seconds=seconds, low=low, high=high, breakdown=breakdown)
    return replace(
        one, ranked=replace(one.ranked, estimate=estimate, simulated=True), result=result
    )


def _trainer_model(
    role: Role, cluster: Cluster, plan: TrainingPlan, constants: Constants
) -> TrainerModel:
    model, length = role.model, 4096.0
    fixed = model.model_flops(1.0)
    growth = (model.model_flops(length) - fixed) / length  # per token of the row's length
    return TrainerModel(
        costs=PlannedTrainer(model=model, cluster=cluster, plan=plan, constants=constants),
        num_data=plan.dp,
        num_stages=plan.pp,
        attention_tokens=fixed / (2 * growth) if growth > 0 else 1e9,
    )
