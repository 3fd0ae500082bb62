"""A question to the planner, and the roles and the work of the run that it is about.

    RunConfig + graph + PlanRequest ─► shape_of_run ─► RunShape, assumptions

Lengths that are not given are assumed, and the assumptions are returned as sentences.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlsys.common.option_names import option
from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    GenerateStage,
    InferStage,
    JudgeStage,
    Model,
    PlayStage,
    TrainStage,
)
from rlsys.errors import InvalidValue, require
from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import read_config
from rlsys.planner.cpu_device import CpuProbe, cpu_cluster, cpu_constants
from rlsys.planner.hardware import Cluster
from rlsys.planner.lengths import Lengths, lognormal
from rlsys.planner.model_config import architecture_from_config, model_names, named_model
from rlsys.planner.plan_settings import generation_settings, training_settings
from rlsys.planner.plans import TrainingPlan, Workload
from rlsys.planner.profiles import Constants, fitted_constants
from rlsys.planner.run_plan import Role, RunShape, bound_of
from rlsys.planner.search import STEPS_AHEAD
from rlsys.planner.stack_profile import StackProfile

# Plans that are simulated at most.
MAX_SIMULATED = 6

# Mean lengths that are assumed if none are given, as shares of their limits.
ASSUMED_PROMPT, ASSUMED_COMPLETION = 0.5, 0.4


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A question to the planner.

    Attributes:
        cluster: The devices.
        prompt_tokens: Mean tokens of a prompt; None assumes half of the longest possible.
        completions: Lengths of completions; None assumes a mean of 0.4 sampling.max_tokens.
        max_staleness: Bounds to try; None tries those of 0, 1 and 2 steps ahead.
        num_simulated: Plans to simulate.
        turns: Turns of an episode; None assumes one.
        tool_s: Mean seconds of the tool between two turns.
        chosen: Settings that the plan may not change, by dotted name.
        profile: Profile of the user's stack.
        probe: Rates of this machine's CPUs; None if the cluster has GPUs.
    """

    cluster: Cluster
    prompt_tokens: float | None = None
    completions: Lengths | None = None
    max_staleness: Sequence[int] | None = None
    num_simulated: int = MAX_SIMULATED
    turns: int | None = None
    tool_s: float = 0.0
    chosen: Mapping[str, Any] = field(default_factory=dict)
    profile: StackProfile | None = None
    probe: CpuProbe | None = None

    @property
    def constants(self) -> Constants:
        """Constants and profiles for the cluster and the user's stack."""
        found = fitted_constants()
        if self.probe is not None:
            found = cpu_constants(found, self.probe)
        return found if self.profile is None else self.profile.constants(found)

    def for_run(self, config: RunConfig) -> PlanRequest:
        """Return the request with the rates of a run's dtype."""
        if self.probe is None:
            return replace(self, cluster=self.cluster.in_precision(config.model.dtype))
        nodes, cores = self.cluster.num_nodes, self.cluster.per_node
        return replace(self, cluster=cpu_cluster(self.probe, config.model.dtype, nodes, cores))


def check_planned(config: RunConfig) -> None:
    """Raise an InvalidValue if replicas have a form that plans do not have."""
    stages = config.rollout.pipeline_parallel
    require(
        stages == 1,
        "rollout.vllm.pipeline_parallel_size",
        stages,
        rule="the planner plans replicas without pipeline stages",
        fix="Leave it out, or give the layout without the planner.",
    )
    require(
        not config.rollout.urls,
        "rollout.urls",
        config.rollout.urls,
        rule="the planner plans replicas that the run starts",
        fix="Leave it out, or give the layout without the planner.",
    )


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
    trained = {stage.model.name for stage in flow.all(TrainStage)}
    on_gpus = not request.cluster.gpu.products
    roles = [_role(config, flow, model, trained, on_gpus) for model in flow.models.values()]
    roles.sort(key=lambda role: not role.samples)
    assumptions: list[str] = []
    prompt_tokens = request.prompt_tokens
    if prompt_tokens is None:
        room = roles[0].model.max_context - config.sampling.max_tokens
        longest = max(1, min(config.data.max_prompt_tokens, room))
        prompt_tokens = max(1.0, ASSUMED_PROMPT * longest)
        assumptions.append(
            f"prompts of {prompt_tokens:.0f} tokens, half of the longest possible; "
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
        turns=_turns(flow, request, assumptions),
        tool_s=request.tool_s,
    )
    if on_gpus and config.model.dtype == "float32":
        assumptions.append(
            "float32, which this run computes in (model.dtype); "
            f"{option('model.dtype', 'bfloat16')} takes half of the memory and less than half of "
            "the time on GPUs"
        )
    dtypes = {model.config.model.dtype for model in flow.models.values() if model.config}
    if dtypes - {config.model.dtype}:
        assumptions.append(f"all models compute in {config.model.dtype}, as the policy does")
    is_free = on_gpus and "rollout.engine" not in request.chosen
    engine = "vllm" if is_free else config.rollout.engine
    shape = RunShape(
        roles=tuple(roles),
        workload=workload,
        updates=config.trainer.updates_per_step,
        epochs=config.trainer.num_epochs,
        engine=engine,
        generation=generation_settings(config, engine, on_gpus=on_gpus),
    )
    return shape, assumptions


def _turns(flow: StageGraph, request: PlanRequest, assumptions: list[str]) -> int:
    """Return the turns of an episode. Completions have one."""
    if not isinstance(flow.source, PlayStage):
        for name, given in (
            ("--turns", None if request.turns == 1 else request.turns),
            ("--tool-seconds", request.tool_s or None),
        ):
            require(
                given is None,
                name,
                given,
                rule="is for recipes with an environment, and this one samples completions",
                fix=f"Leave out {name}.",
            )
        return 1
    if request.turns is None:
        assumptions.append(
            "episodes of one turn without tools; --turns and --tool-seconds give the real ones"
        )
    return request.turns or 1


def bounds_of_staleness(config: RunConfig, request: PlanRequest) -> tuple[int, ...]:
    """Return the bounds of staleness to try: the user's, or those of whole steps.

    Raises:
        InvalidValue: The user gave asynchrony.max_staleness, and other bounds to try; or a bound
            to try that no token of the run can reach.
    """
    given = request.chosen.get("asynchrony.max_staleness")
    bounds = request.max_staleness
    if bounds is None:
        updates = config.trainer.updates_per_step
        tried = tuple(bound_of(steps, updates) for steps in STEPS_AHEAD)
        return tried if given is None else (given,)
    most = bound_of(config.num_steps, config.trainer.updates_per_step)
    require(
        max(bounds) <= most,
        "--staleness",
        max(bounds),
        rule=f"allows generation to be more steps ahead than the run has (num_steps="
        f"{config.num_steps}), so it bounds nothing",
        fix=f"Use at most {most}. More than one or two steps ahead rarely helps.",
    )
    require(
        given is None or given in bounds,
        "--staleness",
        " ".join(map(str, bounds)),
        rule=f"lacks the given asynchrony.max_staleness={given}",
        fix="Leave one of the two options out.",
    )
    return tuple(bounds) if given is None else (given,)


def _role(
    config: RunConfig, flow: StageGraph, model: Model, trained: set[str], on_gpus: bool
) -> Role:
    stages: list[InferStage | JudgeStage] = [*flow.all(InferStage), *flow.all(JudgeStage)]
    passes = sum(stage.model is model for stage in stages)
    path = config.model.path if model.config is None else model.config.model.path
    training = TrainingPlan()
    if model.config is None or isinstance(model.config, TrainedRoleConfig):
        training = training_settings(config if model.config is None else model.config, on_gpus)
    architecture = read_architecture(path or config.model.path)
    return Role(
        name=model.name,
        model=replace(architecture, has_scalar_head=model.head != "logits"),
        is_trained=model.name in trained,
        forward_passes=passes,
        samples=model.is_main,
        training=training,
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
    file = Path(os.path.expanduser(path)) / "config.json"
    if _exists(file, path):
        return architecture_from_config(read_config(file), name=Path(path).name)
    try:
        return named_model(path)
    except InvalidValue as error:
        nearest = get_close_matches(Path(path).name, model_names(), n=3, cutoff=0.3)
        names = ", ".join(nearest) or "Qwen3-8B"
        rule = "is a directory without a config.json" if file.parent.is_dir() else error.rule
        fix = f"Give a directory with a config.json, or a known name such as {names}."
        raise InvalidValue("model.path", path, rule=rule, fix=fix) from None


def _exists(file: Path, path: str) -> bool:
    """Return whether a model's directory has a config.json.

    Raises:
        InvalidValue: The directory cannot be read.
    """
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise InvalidValue(
            "model.path",
            path,
            rule=f"cannot be read ({getattr(error, 'strerror', None) or error})",
            fix="Give a directory with a config.json that this user can read.",
        ) from None
    return True
