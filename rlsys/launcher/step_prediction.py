"""Predicted step of a run as it is configured, for --dry-run and for plan.json at its start.

    config, graph, model, first prompts, devices ─► predict_step ─► seconds by part, assumptions

The means of prompts are those of the data. Lengths of completions are assumed. The controller is
simulated, as for the plans of `rlsys plan`, unless this takes too long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlsys.common.installed_versions import versions
from rlsys.common.number_text import counted
from rlsys.config import RunConfig
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import InferStage, PlayStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.launcher.cluster_choice import cores_named
from rlsys.planner.cpu_device import cpu_cluster
from rlsys.planner.cpu_probe import num_cores, saved_probe
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.plan_request import (
    ASSUMED_COMPLETION,
    ASSUMED_PROMPT,
    PlanRequest,
    shape_of_run,
)
from rlsys.planner.plan_settings import plan_of
from rlsys.planner.planning import predicted_step, simulated_estimate
from rlsys.planner.run_plan import RunShape, step_time
from rlsys.planner.run_record import PredictedStep, RecordedRole
from rlsys.planner.run_simulation import num_played
from rlsys.planner.stack_profile import default_profile

MAX_PROMPTS = 64  # whose lengths are averaged

# Rollouts of the steps of a simulation: a few seconds on one core.
MAX_SIMULATED_ROLLOUTS = 12_000


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """A predicted step, what was assumed for it, and how it was predicted, in words."""

    step: PredictedStep
    assumptions: tuple[str, ...]
    method: str


def cores_of_this_machine() -> str:
    """Return the name of a cluster of the cores that this process may use."""
    return f"1x{num_cores()}xCPU"


def recorded_policy(config: RunConfig, flow: RunGraph, shape: ModelShape) -> RecordedRole:
    """Return the policy with the shape of its model."""
    policy = flow.main
    return RecordedRole(
        name=policy.name,
        model=Path(config.model.path).name,
        config=shape.config.to_dict(),
        forward_passes=sum(stage.model is policy for stage in flow.all(InferStage)),
        samples=True,
    )


def mean_prompt_tokens(prompts: RowSource) -> float:
    """Return the mean tokens of the first prompts. 0 for tasks of an environment."""
    lengths = [len(prompts.at(i).token_ids) for i in range(min(MAX_PROMPTS, len(prompts)))]
    return fmean(lengths) if lengths else 0.0


def predict_step(
    config: RunConfig, flow: RunGraph, shape: ModelShape, prompts: RowSource, cluster: str
) -> StepPrediction | None:
    """Return the predicted step of a run that generates.

    It is that of a simulation, or of the closed form where a simulation takes more than a few
    seconds or does not know the run.

    Args:
        config: The configuration, with the path of the model.
        flow: Graph of the run.
        shape: Shape of the main model.
        prompts: Data of the run.
        cluster: Devices such as 2x8xH100 or 1x2xCPU, or "" if they are unknown.

    Returns:
        The prediction; None without devices, or without measured rates of CPUs.

    Raises:
        InvalidValue: A GPU is unknown, a model has no known shape, or lengths exceed its context.
    """
    if not cluster:
        return None
    profile = default_profile(versions())
    cores, probe = cores_named(cluster), None
    if cores is None:
        devices = parse_cluster(cluster)
    else:
        probe = (profile.probe if profile else None) or saved_probe()
        if probe is None:
            return None
        devices = cpu_cluster(probe, config.model.dtype, *cores)
    if profile is not None and devices.gpu.name not in profile.devices:
        profile = None
    limit = config.sampling.max_tokens
    completion_tokens = max(1.0, ASSUMED_COMPLETION * limit)
    prompt_tokens, prompt_text = _prompt_tokens(config, shape, prompts)
    request = PlanRequest(
        cluster=devices,
        prompt_tokens=prompt_tokens,
        completions=lognormal(completion_tokens, limit),
        turns=1,
        profile=profile,
        probe=probe,
    ).for_run(config)
    run, _ = shape_of_run(config, flow, request)
    run = replace(run, roles=(recorded_policy(config, flow, shape).role, *run.roles[1:]))
    devices, plan, constants = request.cluster, plan_of(config, flow), request.constants
    why_not = _not_simulated(config, flow, run)
    if why_not:
        estimate = step_time(run, devices, plan, constants=constants)
        method = f"closed form, {why_not}"
        if plan.placement == "colocated" and plan.max_staleness:
            method += "; it counts no gain from staleness on shared devices"
    else:
        estimate, _ = simulated_estimate(config, flow, run, devices, plan, constants)
        method = "simulation of the controller"
    assumptions = [
        prompt_text,
        f"completions of {completion_tokens:.0f} tokens on average, {ASSUMED_COMPLETION} of "
        "sampling.max_tokens",
    ]
    if flow.all(PlayStage):
        assumptions.append("episodes of one turn without tools")
    return StepPrediction(
        step=predicted_step(run, devices, plan, estimate, constants, simulated=not why_not),
        assumptions=tuple(assumptions),
        method=method,
    )


def _not_simulated(config: RunConfig, flow: RunGraph, run: RunShape) -> str:
    """Return why a run is not simulated; "" if it is."""
    num_steps = num_played(config.asynchrony.max_staleness, run.updates)
    num_rollouts = run.workload.rollouts * num_steps
    if num_rollouts > MAX_SIMULATED_ROLLOUTS:
        return (
            f"since a simulation of {num_steps} steps has {num_rollouts:,} rollouts, more than "
            f"{MAX_SIMULATED_ROLLOUTS:,}"
        )
    if flow.partners:
        return "since other models play seats"
    if config.rollout.replay_routing:
        return "since the run records experts"
    return ""


def _prompt_tokens(config: RunConfig, shape: ModelShape, prompts: RowSource) -> tuple[float, str]:
    """Return the mean tokens of a prompt, and a sentence about where it is from."""
    if mean := mean_prompt_tokens(prompts):
        number = min(MAX_PROMPTS, len(prompts))
        of = f"the mean of the first {number}" if number > 1 else "as the only one"
        return max(1.0, mean), f"prompts of {counted(round(mean), 'token')}, {of}"
    room = shape.max_context - config.sampling.max_tokens
    longest = max(1, min(config.data.max_prompt_tokens, room))
    assumed = max(1.0, ASSUMED_PROMPT * longest)
    return assumed, f"prompts of {assumed:.0f} tokens, half of the longest possible"
