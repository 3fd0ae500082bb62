"""Directories of runs as measurements for the planner's calibration.

    runs/NAME/{config.json, plan.json, metrics.jsonl, rollouts.jsonl} ─► measured_run ─► MeasuredRun

A run without plan.json is read too if its model has a config.json and it trained on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.config import RunConfig
from rlsys.config.fields import build, leaves
from rlsys.controller.controller import StallError
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts
from rlsys.errors import InvalidValue, require
from rlsys.launcher.cluster_choice import cores_named, plans_gpus
from rlsys.planner.cpu_device import CpuProbe, cpu_cluster
from rlsys.planner.cpu_probe import known_probe
from rlsys.planner.hardware import Cluster, parse_cluster
from rlsys.planner.lengths import Lengths, lognormal, measured
from rlsys.planner.plan_request import ASSUMED_PROMPT, read_architecture
from rlsys.planner.plan_settings import plan_of_settings
from rlsys.planner.plans import Workload
from rlsys.planner.profiles import Constants
from rlsys.planner.run_calibration import MeasuredRun, SimulatedStep, calibrated
from rlsys.planner.run_measurement import step_medians
from rlsys.planner.run_plan import Role, RunPlan, RunShape
from rlsys.planner.run_record import RunRecord, read_record
from rlsys.planner.run_simulation import MAX_ROLLOUTS, num_played, simulate_run
from rlsys.planner.stack_profile import StackProfile, check_profile
from rlsys.runs.observe.metrics_file import read_every_step
from rlsys.runs.observe.records import read_rollouts
from rlsys.runs.run_files import RunFiles

# Completions whose lengths are read, and the fewest that describe a distribution.
MAX_LENGTHS, MIN_LENGTHS = 4096, 32

POLICY = "policy"


def calibrated_profile(runs: Sequence[Path], prompt_tokens: float | None = None) -> StackProfile:
    """Return the profile of the stack of these runs.

    CPUs are measured if a run trained on them and no probe was saved.

    Args:
        runs: Directories of runs.
        prompt_tokens: Mean tokens of a prompt, for runs that did not record it.

    Raises:
        InvalidValue: A directory is no run, has too few steps or wrong numbers, or the runs
            contradict each other.
    """
    _check_different(runs)
    uses_cpus = any(not plans_gpus(_config(RunFiles(run))[0]) for run in runs)
    rates = known_probe() if uses_cpus else None
    measured = [measured_run(run, rates, prompt_tokens) for run in runs]
    try:
        profile = calibrated(measured, probe=rates)
        check_profile(profile)
    except InvalidValue:
        raise
    except (ValueError, ArithmeticError, StallError) as error:  # StallError: of a simulated step
        raise InvalidValue(
            "--calibrate",
            [str(run) for run in runs],
            rule=f"gives a profile that no stack has ({error})",
            fix="Leave out runs whose times were edited, or whose devices had other load.",
        ) from None
    return profile


def _check_different(runs: Sequence[Path]) -> None:
    """Check that no run is given twice: it would count as two measurements that agree.

    Copies of a run have its run_id.

    Raises:
        InvalidValue: Two paths have the same run.
    """
    seen: dict[str, Path] = {}
    for run in runs:
        stored = _stored(RunFiles(run)).get("run_id")
        run_id = stored if isinstance(stored, str) and stored else str(run.resolve())
        require(
            run_id not in seen,
            "--calibrate",
            [str(seen.get(run_id)), str(run)],
            rule=f"gives the same run twice ({run_id})",
            fix="Leave out one of the two: a second copy measures nothing new.",
        )
        seen[run_id] = run


def measured_run(
    path: Path, rates: CpuProbe | None = None, prompt_tokens: float | None = None
) -> MeasuredRun:
    """Return a run as a measurement.

    Raises:
        InvalidValue: The directory is no run, or has too few steps or wrong numbers.
    """
    files = RunFiles(path)
    config, versions = _config(files)
    record = read_record(files.plan) if files.plan.exists() else None
    role = _policy(files, config, record)
    lines = _metrics(files)
    ahead = config.max_version_lag  # steps; during the last ones, no replica samples
    num_last = max(0, len(lines) - (config.num_steps - ahead))
    medians = step_medians(str(path), lines, num_last=num_last, period=ahead + 1)
    prompt = (record.prompt_tokens if record else 0.0) or prompt_tokens
    shape = RunShape(
        roles=(role,),
        workload=Workload(
            prompts=config.prompts_per_step,
            group_size=config.group_size,
            prompt_tokens=prompt or max(1.0, ASSUMED_PROMPT * config.data.max_prompt_tokens),
            completions=_lengths(files, config, medians.completion_tokens),
        ),
        updates=config.trainer.updates_per_step,
        epochs=config.trainer.num_epochs,
        engine=config.rollout.engine,
    )
    plan = plan_of_settings(config, POLICY)
    cluster = _cluster(path, config, record, rates)
    num_steps = num_played(plan.max_staleness, shape.updates)
    few = shape.workload.rollouts * num_steps <= MAX_ROLLOUTS
    simulate = functools.partial(simulated_step, config, shape, cluster, plan)
    return MeasuredRun(
        name=str(path),
        engine=config.rollout.engine,
        shape=shape,
        plan=plan,
        cluster=cluster,
        medians=medians,
        versions=versions,
        simulate=simulate if few else None,
    )


def simulated_step(
    config: RunConfig, shape: RunShape, cluster: Cluster, plan: RunPlan, constants: Constants
) -> SimulatedStep:
    """Return a step of a run with the simulated controller."""
    result = simulate_run(config, policy_flow(config), shape, cluster, plan, constants)
    return SimulatedStep(
        step_s=result.mean_step_s,
        train_s=result.trainer_busy * result.mean_step_s,
        generation_s=result.generation_busy * result.mean_step_s,
    )


def policy_flow(config: RunConfig) -> Dataflow:
    """Return the graph of a run that trains one policy on rewards, for a simulation."""
    flow = Dataflow()
    policy = flow.model(POLICY)
    prompts = Prompts(config=config.data)
    rollouts = flow.generate(policy, prompts, group_size=config.group_size)
    reward = flow.score(rollouts, [_not_called])
    advantage = flow.per_group(_centered, reward)
    flow.train(policy, rollouts, advantage, loss=_not_called, aggregation=_not_called)
    return flow


def _centered(rewards: Any) -> Any:
    return rewards - rewards.mean()


def _not_called(*_: Any) -> Any:
    raise AssertionError("the workers are simulated")


def _config(files: RunFiles) -> tuple[RunConfig, Mapping[str, str | None]]:
    """Return the settings of a run that every recipe has, and the versions of its packages."""
    stored = _stored(files)
    for name in ("config", "versions"):
        if not isinstance(stored.get(name), dict):
            raise _unreadable(files, f"its config.json has no {name}")
    known = {leaf.name for leaf in leaves(RunConfig)}
    flat = {name: value for name, value in _flat(stored["config"]) if name in known}
    versions = stored["versions"]
    if any(not isinstance(version, str | None) for version in versions.values()):
        raise _unreadable(files, "the versions in its config.json are not texts")
    try:
        return build(RunConfig, flat), versions
    except (ValueError, TypeError) as error:
        raise _unreadable(files, str(error)) from None


def _stored(files: RunFiles) -> Mapping[str, Any]:
    """Return the content of a run's config.json.

    Raises:
        InvalidValue: It cannot be read, or is not a JSON object.
    """
    try:
        stored = parse_json(files.config.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(files, str(error)) from None
    if not isinstance(stored, dict):
        raise _unreadable(files, "its config.json is not a JSON object")
    return stored


def _unreadable(files: RunFiles, reason: str) -> InvalidValue:
    return InvalidValue(
        "--calibrate",
        str(files.path),
        rule=f"is not a readable run directory ({reason})",
        fix="Give directories such as runs/NAME.",
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        inner = isinstance(value, dict)
        found += _flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return found


def _metrics(files: RunFiles) -> Sequence[Mapping[str, float]]:
    require(
        files.metrics.exists(),
        "--calibrate",
        str(files.path),
        rule="has no metrics.jsonl",
        fix="Give the directory of a run that has trained.",
    )
    try:
        return read_every_step(files.metrics)
    except InvalidValue as error:  # other readers need not have each step
        raise InvalidValue(
            error.field,
            error.value,
            rule=error.rule,
            fix="Restore the file from a copy, or calibrate with another run: a calibration needs "
            "each step from 1 on.",
        ) from None


def _policy(files: RunFiles, config: RunConfig, record: RunRecord | None) -> Role:
    if record is not None:
        return replace(record.roles[0].role, name=POLICY)
    path = str(files.hf) if (files.hf / "config.json").exists() else config.model.path
    try:
        return Role(name=POLICY, model=read_architecture(path), samples=True)
    except InvalidValue as error:
        raise InvalidValue(
            f"{files.path}: {error.field}",
            error.value,
            rule=f"{error.rule}, and the run has no plan.json with it",
            fix="Calibrate with a run that this version of rlsys started: its plan.json has the "
            "shape of its model.",
        ) from None


def _lengths(files: RunFiles, config: RunConfig, mean: float) -> Lengths:
    """Return the run's own lengths, with the mean that its metrics have."""
    maximum = config.sampling.max_tokens
    lengths: list[int] = []
    if files.rollouts.exists():
        lengths = [len(one.token_ids) for one in read_rollouts(files.rollouts)][-MAX_LENGTHS:]
        lengths = [one for one in lengths if one > 0]
    if len(lengths) < MIN_LENGTHS:
        return lognormal(min(mean, maximum), maximum)
    scale = mean * len(lengths) / sum(lengths)
    scaled = [min(max(1.0, one * scale), maximum) for one in lengths]
    return measured(scaled, maximum)


def _cluster(
    path: Path, config: RunConfig, record: RunRecord | None, rates: CpuProbe | None
) -> Cluster:
    name = record.cluster if record else ""
    file = str(RunFiles(path).plan)
    if not plans_gpus(config):
        assert rates is not None
        cores = cores_named(name or "cpu")
        if cores is None:
            raise InvalidValue(
                file,
                name,
                rule="is not a cluster of CPUs, such as 1x2xCPU, and the run's config.json "
                "reserves no GPUs",
                fix="Use a run whose files were not edited.",
            )
        return cpu_cluster(rates, config.model.dtype, *cores)
    require(
        bool(name),
        "--calibrate",
        str(path),
        rule="does not say which GPUs it used",
        fix="Use a run that this version of rlsys started: plan.json names them.",
    )
    try:
        return parse_cluster(name).in_precision(config.model.dtype)
    except InvalidValue as error:
        raise InvalidValue(
            file,
            name,
            rule=f"is not a cluster that the planner knows: {error.rule}",
            fix="Use a run on GPUs that the planner knows, whose files were not edited.",
        ) from None
