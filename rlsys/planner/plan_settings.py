"""Settings of a plan, and the plan that settings state.

    RunPlan ─► settings ─► options by dotted name ─► configured ─► RunConfig ─► plan_of ─► RunPlan

A plan that `settings` writes is the plan that `plan_of` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.config.fields import build, flatten, to_dict
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import Model
from rlsys.errors import InvalidValue
from rlsys.planner.hardware import Cluster
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.run_plan import PROFILES, RunPlan
from rlsys.planner.search import as_layout, as_training_plan


def settings(
    config: RunConfig, flow: StageGraph, plan: RunPlan, cluster: Cluster
) -> dict[str, Any]:
    """Return the options of a plan, by dotted name, as the file for --config has them."""
    tp, on_gpus = plan.generation.tp, not cluster.gpu.products
    found: dict[str, Any] = {
        "placement": plan.placement,
        "asynchrony.max_staleness": plan.max_staleness,
        "rollout.num_replicas": plan.replicas,
        "rollout.tensor_parallel": tp,
    }
    if on_gpus:
        found |= {
            "rollout.engine": "vllm",
            "rollout.num_gpus": float(tp),
            "rollout.max_running": plan.generation.max_running,
            "rollout.gpu_memory_frac": plan.generation.memory_fraction,
        }
    for name, trainer in plan.trainers.items():
        model = flow.models[name]
        prefix = "" if model.config is None else f"{_section_of(config, model)}."
        found |= {
            f"{prefix}trainer.layout": str(as_layout(trainer)),
            f"{prefix}trainer.num_gpus": float(on_gpus),
            f"{prefix}trainer.micro_batch_tokens": int(trainer.row_tokens),
            f"{prefix}model.gradient_checkpointing": trainer.recompute,
        }
    for name, num_workers in plan.frozen_gpus.items():
        prefix = _section_of(config, flow.models[name])
        found |= {f"{prefix}.num_gpus": float(on_gpus), f"{prefix}.num_workers": num_workers}
    return found


def plan_of(config: RunConfig, flow: StageGraph) -> RunPlan:
    """Return the plan that a configuration states: the inverse of `settings`."""
    trainers: dict[str, TrainingPlan] = {}
    frozen: dict[str, int] = {}
    for name, model in flow.models.items():
        if model.config is not None and not isinstance(model.config, TrainedRoleConfig):
            frozen[name] = model.config.num_workers
            continue
        trainers[name] = _training_plan(config if model.config is None else model.config)
    return _run_plan(config, trainers, frozen)


def plan_of_settings(config: RunConfig, policy: str) -> RunPlan:
    """Return the plan of a run's policy alone, for a configuration without its graph."""
    return _run_plan(config, {policy: _training_plan(config)}, {})


def _training_plan(role: RunConfig | TrainedRoleConfig) -> TrainingPlan:
    trainer = role.trainer
    return as_training_plan(
        trainer.parallel,
        row_tokens=float(trainer.micro_batch_tokens),
        recompute=role.model.checkpointing(on_gpu=bool(trainer.num_gpus)),
    )


def _run_plan(
    config: RunConfig, trainers: Mapping[str, TrainingPlan], frozen: Mapping[str, int]
) -> RunPlan:
    rollout = config.rollout
    return RunPlan(
        placement=config.placement,
        max_staleness=config.asynchrony.max_staleness,
        generation=GenerationPlan(
            tp=rollout.tensor_parallel,
            max_running=rollout.max_running,
            memory_fraction=rollout.gpu_memory_frac,
            profile=PROFILES[rollout.engine],
        ),
        replicas=rollout.num_replicas,
        trainers=trainers,
        frozen_gpus=frozen,
    )


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
