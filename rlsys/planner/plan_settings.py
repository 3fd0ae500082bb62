"""Settings of a plan, and the plan that settings state.

    RunPlan ─► settings ─► options by dotted name ─► configured ─► RunConfig ─► plan_of ─► RunPlan

A plan that `settings` writes is the plan that `plan_of` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.config.fields import build, flatten, to_dict
from rlsys.config.parallel_layout import parse_layouts
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import Model
from rlsys.errors import InvalidValue
from rlsys.planner.fixed_settings import FixedSettings, FixedTraining
from rlsys.planner.hardware import Cluster
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.run_plan import ENGINES, PROFILES, RunPlan
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
        "rollout.max_running": plan.generation.max_running,
    }
    if on_gpus:
        found |= {
            "rollout.engine": ENGINES[plan.generation.profile],
            "rollout.num_gpus": float(tp),
            "rollout.gpu_memory_frac": plan.generation.memory_fraction,
        }
    if plan.generation.cache_gib:
        found["rollout.kv_cache_gib"] = plan.generation.cache_gib
    for name, trainer in plan.trainers.items():
        prefix, section = _trained_section(config, flow.models[name])
        found |= {
            f"{prefix}model.dtype": section.model.dtype,
            f"{prefix}model.lora": section.model.lora,
            f"{prefix}trainer.optimizer_state": section.trainer.optimizer_state,
            f"{prefix}trainer.layout": str(as_layout(trainer)),
            f"{prefix}trainer.num_gpus": float(on_gpus),
            f"{prefix}trainer.micro_batch_tokens": int(trainer.row_tokens),
            f"{prefix}model.gradient_checkpointing": trainer.recompute,
        }
    for name, num_workers in plan.frozen_gpus.items():
        prefix = _section_of(config, flow.models[name])
        found |= {f"{prefix}.num_gpus": float(on_gpus), f"{prefix}.num_workers": num_workers}
    return found


def _trained_section(config: RunConfig, model: Model) -> tuple[str, RunConfig | TrainedRoleConfig]:
    """Return the prefix of a trained model's options, and its section of the configuration."""
    if model.config is None:
        return "", config
    assert isinstance(model.config, TrainedRoleConfig)
    return f"{_section_of(config, model)}.", model.config


def fixed_settings(
    config: RunConfig, flow: StageGraph, chosen: Mapping[str, Any], *, on_gpus: bool
) -> FixedSettings:
    """Return the settings that the user gave, which a plan may not change.

    Args:
        config: Configuration of the run.
        flow: Its graph.
        chosen: Options that the user gave, by dotted name.
        on_gpus: Whether the plan is for GPUs.
    """
    trainers: dict[str, FixedTraining] = {}
    workers: dict[str, int] = {}
    ranks = chosen.get("rollout.tensor_parallel")
    if ranks is None and on_gpus and chosen.get("rollout.num_gpus", 0) >= 1:
        ranks = int(chosen["rollout.num_gpus"])  # a replica has one rank on each of its GPUs
    for name, model in flow.models.items():
        if model.config is not None and not isinstance(model.config, TrainedRoleConfig):
            given = chosen.get(f"{_section_of(config, model)}.num_workers")
            workers |= {} if given is None else {name: given}
            continue
        prefix, section = _trained_section(config, model)
        layout = chosen.get(f"{prefix}trainer.layout")
        recompute = chosen.get(f"{prefix}model.gradient_checkpointing")
        if recompute is not None:
            again = replace(section.model, gradient_checkpointing=recompute)
            recompute = again.checkpointing(on_gpu=on_gpus)
        trainers[name] = FixedTraining(
            layout=None if layout is None else parse_layouts(layout)[0],
            micro_batch_tokens=chosen.get(f"{prefix}trainer.micro_batch_tokens"),
            recompute=recompute,
        )
    return FixedSettings(
        placement=chosen.get("placement"),
        replicas=chosen.get("rollout.num_replicas"),
        tensor_parallel=ranks,
        memory_fraction=chosen.get("rollout.gpu_memory_frac"),
        trainers=trainers,
        workers=workers,
    )


def training_settings(role: RunConfig | TrainedRoleConfig, on_gpus: bool) -> TrainingPlan:
    """Return the settings of a trained role's memory and time that no search changes."""
    adapters, trainer = role.model.adapters, role.trainer
    return TrainingPlan(
        lora_rank=0 if adapters is None else adapters.rank,
        lora_targets=None if adapters is None else adapters.targets,
        moment_bytes=4.0 if trainer.moments_dtype == "bfloat16" else 8.0,
        offload_optimizer=trainer.offloads_moments and on_gpus,
    )


def generation_settings(config: RunConfig, engine: str, *, on_gpus: bool) -> GenerationPlan:
    """Return the settings of the replicas that no search changes."""
    rollout = config.rollout
    return GenerationPlan(
        max_running=rollout.max_running,
        memory_fraction=rollout.gpu_memory_frac,
        cache_gib=0.0 if engine == "vllm" and on_gpus else rollout.kv_cache_gib,
        keeps_windows=engine == "vllm",
        profile=PROFILES[engine],
    )


def plan_of(
    config: RunConfig, flow: StageGraph, changes: Mapping[str, Any] | None = None
) -> RunPlan:
    """Return the plan that a configuration states: the inverse of `settings`.

    Args:
        config: Configuration of the run.
        flow: Graph of this configuration.
        changes: Other values, by dotted name.

    Raises:
        InvalidValue: The configuration does not allow these values together.
    """
    changed = config if changes is None else configured(config, changes)
    trainers: dict[str, TrainingPlan] = {}
    frozen: dict[str, int] = {}
    for name, model in flow.models.items():
        role = changed if model.config is None else model.config
        if changes is not None and model.config is not None:  # the graph has the old section
            role = getattr(changed, _section_of(config, model))
        if isinstance(role, RunConfig | TrainedRoleConfig):
            trainers[name] = _training_plan(role)
        else:
            frozen[name] = role.num_workers
    config = changed
    return _run_plan(config, trainers, frozen)


def plan_of_settings(config: RunConfig, policy: str) -> RunPlan:
    """Return the plan of a run's policy alone, for a configuration without its graph."""
    return _run_plan(config, {policy: _training_plan(config)}, {})


def _training_plan(role: RunConfig | TrainedRoleConfig) -> TrainingPlan:
    trainer = role.trainer
    return as_training_plan(
        trainer.parallel,
        training_settings(role, on_gpus=bool(trainer.num_gpus)),
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
        generation=replace(
            generation_settings(config, rollout.engine, on_gpus=rollout.num_gpus > 0),
            tp=rollout.tensor_parallel,
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
