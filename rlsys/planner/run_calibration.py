"""Fit the factors of a user's stack to the steps of its own runs.

    MeasuredRun (settings, shape, medians of its steps) ─► calibrated ─► StackProfile

Three parts are fitted one after the other:

    training    ratio of measured and predicted seconds of rank 0, with the prior of profiles.py
    generation  measured = decoding x (kernels) + host x (engine on the host), least squares of the
                logarithms with priors: one run moves both factors, runs with batches of different
                sizes separate them
    rest        of a step after all others, per group

Rewards are measured per rollout. The controller's process, and the CPU time of actors beyond their
work, are measured per group.

The first two use closed forms. A simulation of the controller then corrects them: it has the run's
micro-batches, batches of rollouts, and shared cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from rlsys.errors import InvalidValue, require
from rlsys.planner.cpu_device import CPU, CpuProbe, cpu_constants
from rlsys.planner.hardware import Cluster
from rlsys.planner.profiles import (
    CONFLICT,
    NOISE,
    Constants,
    fitted_constants,
)
from rlsys.planner.run_measurement import StepMedians
from rlsys.planner.run_plan import (
    PROFILES,
    RunPlan,
    RunShape,
    generation_seconds,
    step_time,
    training_seconds,
)
from rlsys.planner.stack_profile import EngineFactors, Factor, StackProfile

# Standard deviations of the logarithms of the factors before any run.
TRAINING_SPREAD: Final = 0.5
DECODING_SPREAD: Final = 0.3
HOST_SPREAD: Final = 0.7

ITERATIONS: Final = 100
FACTOR_ROUNDS: Final = 2
REST_ROUNDS: Final = 8

MAX_CORRECTION: Final = 4.0  # of a factor per simulation


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Seconds of a simulated step: of all, of the trainer, and of a replica on its own cores."""

    step_s: float
    train_s: float
    generation_s: float


# Constants ─► step of a run with the simulated controller.
SimulateStep = Callable[[Constants], SimulatedStep]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that finished enough steps to calibrate with.

    Attributes:
        name: Name for messages.
        engine: Its generation engine: torch or vllm.
        shape: Its policy and its work, with the measured lengths.
        plan: Its devices and layouts.
        cluster: The devices.
        medians: Measured seconds.
        versions: Versions of its packages.
        simulate: Simulation of its step. None uses the closed form.
    """

    name: str
    engine: str
    shape: RunShape
    plan: RunPlan
    cluster: Cluster
    medians: StepMedians
    versions: Mapping[str, str | None]
    simulate: SimulateStep | None = None

    @property
    def core_share(self) -> float:
        """Share of its wall time in which a process had a core: 1 on GPUs.

        More processes than cores share the cores equally, so each of them takes longer.
        """
        if self.cluster.gpu.name != CPU:
            return 1.0
        times = self.medians
        busy_s = times.train_s * self.plan.trainer_gpus + times.reward_s + times.controller_s
        busy_s += times.other_s + times.generation_s * self.plan.generation_gpus
        if self.plan.max_staleness == 0 or self.plan.placement == "colocated":
            # generation and training take turns, so that only one kind is busy at a time
            most = max(self.plan.trainer_gpus, self.plan.generation_gpus)
            return min(1.0, self.cluster.num_gpus / most)
        return min(1.0, self.cluster.num_gpus / max(busy_s / times.step_s, 1e-9))


def calibrated(
    runs: Sequence[MeasuredRun],
    *,
    probe: CpuProbe | None = None,
    base: Constants | None = None,
) -> StackProfile:
    """Return the profile of the stack that these runs used.

    Args:
        runs: The runs. All have dense models, or all have experts.
        probe: Rates of the CPUs, if the runs used CPUs.
        base: Constants before calibration; those of the package by default.

    Raises:
        InvalidValue: Runs contradict each other, or do not belong together.
    """
    base = base or fitted_constants()
    measured_base = base if probe is None else cpu_constants(base, probe)
    kinds = {run.shape.policy.model.is_moe for run in runs}
    require(
        len(kinds) == 1,
        "--calibrate",
        [run.name for run in runs],
        rule="needs runs of one kind: dense models, or models with experts",
        fix="Calibrate each kind into a file of its own.",
    )
    moe = kinds == {True}
    profile = StackProfile(
        versions=runs[-1].versions,
        devices=tuple(dict.fromkeys(run.cluster.gpu.name for run in runs)),
        runs=tuple(f"{run.name}: {run.medians.num_steps} steps" for run in runs),
        training=_training(runs, measured_base),
        engines=_engines(runs, measured_base),
        reward_s=median(
            run.medians.reward_s * run.core_share / run.shape.workload.rollouts for run in runs
        ),
        controller_s=median(run.medians.controller_s / run.shape.workload.prompts for run in runs),
        other_s=median(run.medians.other_s / run.shape.workload.prompts for run in runs),
        moe=moe,
        probe=probe,
    )
    for _ in range(FACTOR_ROUNDS):
        profile = _corrected(profile, runs, base)
    return _with_rest(profile, runs, base)


def _corrected(profile: StackProfile, runs: Sequence[MeasuredRun], base: Constants) -> StackProfile:
    """Return the profile with factors by which simulated times become the measured ones."""
    constants = profile.constants(base)
    found = [(run, run.simulate(constants)) for run in runs if run.simulate is not None]
    if not found:
        return profile
    training = _correction([run.medians.train_s / step.train_s for run, step in found])
    engines = dict(profile.engines)
    for name, factors in profile.engines.items():
        ratios = [
            run.medians.generation_s * run.core_share / step.generation_s
            for run, step in found
            if run.engine == name and run.medians.generation_s > 0
        ]
        scale = _correction(ratios)
        engines[name] = EngineFactors(
            decoding=replace(factors.decoding, value=factors.decoding.value * scale),
            host=replace(factors.host, value=factors.host.value * scale),
        )
    factor = replace(profile.training, value=profile.training.value * training)
    return replace(profile, training=factor, engines=engines)


def _correction(ratios: Sequence[float]) -> float:
    if not ratios:
        return 1.0
    return min(max(median(ratios), 1 / MAX_CORRECTION), MAX_CORRECTION)


def _training(runs: Sequence[MeasuredRun], base: Constants) -> Factor:
    ratios = []
    for run in runs:
        (plan,) = run.plan.trainers.values()
        predicted = training_seconds(run.shape.policy, run.cluster, plan, run.shape, base)
        ratios.append(run.medians.train_s * run.core_share / predicted)
    _require_agreement(runs, ratios, "training")
    # Bayes with normal logarithms: prior TRAINING_SPREAD, noise NOISE of each run
    weight = TRAINING_SPREAD**2 / (TRAINING_SPREAD**2 + NOISE**2 / len(ratios))
    value = math.exp(weight * median(math.log(ratio) for ratio in ratios))
    return Factor(value=value, spread=_spread(ratios), runs=len(ratios))


def _spread(ratios: Sequence[float]) -> float:
    """Return the spread of a prediction after rows with these ratios: noise and their scatter."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    # one row says nothing about the scatter: the noise of a rerun, and a prior of twice as much
    squares = sum((one - mean) ** 2 for one in logs) + (2 * NOISE) ** 2
    return math.sqrt(squares / len(logs) * (1 + 1 / len(logs)) + NOISE**2)


def _require_agreement(runs: Sequence[MeasuredRun], ratios: Sequence[float], part: str) -> None:
    if max(ratios) <= CONFLICT * min(ratios):
        return
    described = ", ".join(
        f"{run.name} {ratio:.2f} x" for run, ratio in zip(runs, ratios, strict=True)
    )
    raise InvalidValue(
        "--calibrate",
        described,
        rule=f"has runs whose {part} contradicts by more than {CONFLICT:g} x: measured over "
        "predicted seconds differ",
        fix="Leave out the run that had other load on its devices or other software.",
    )


def _engines(runs: Sequence[MeasuredRun], base: Constants) -> dict[str, EngineFactors]:
    found: dict[str, EngineFactors] = {}
    for engine in sorted({run.engine for run in runs}):
        own = [run for run in runs if run.engine == engine and run.medians.generation_s > 0]
        rows = [_generation(run, base) for run in own]
        if not rows:
            continue
        _require_agreement(own, [seconds / (a + b) for a, b, seconds in rows], "generation")
        decoding, host = fit_generation(rows)
        predicted = [decoding * kernels + host * rest for kernels, rest, _ in rows]
        spread = _spread([one[2] / seconds for one, seconds in zip(rows, predicted, strict=True)])
        found[engine] = EngineFactors(
            decoding=Factor(value=decoding, spread=spread, runs=len(rows)),
            host=Factor(value=host, spread=spread, runs=len(rows)),
        )
    return found


def _generation(run: MeasuredRun, base: Constants) -> tuple[float, float, float]:
    """Return the predicted seconds of kernels and of the host, and the measured ones."""
    name = PROFILES[run.engine]
    plan = replace(run.plan.generation, profile=name)
    profile = base.profile(name)
    arguments = (run.shape.policy.model, run.cluster, plan, run.plan.replicas, run.shape.workload)
    whole = generation_seconds(*arguments, base)
    bare = base.with_profile(replace(profile, step_host=0.0, row_host=0.0))
    kernels = generation_seconds(*arguments, bare)
    return kernels, whole - kernels, run.medians.generation_s * run.core_share


def fit_generation(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the factors a and b of measured = a * kernels + b * host.

    Minimises the squared errors of the logarithms, over the noise between runs, plus the squared
    logarithms of the factors, over their priors (Gauss-Newton with two unknowns). A step that
    does not reduce this sum is halved.

    Args:
        rows: Seconds of kernels, of the host, and measured.
    """
    x = y = 0.0  # logarithms of the factors
    for _ in range(ITERATIONS):
        step_x, step_y = _gauss_newton_step(rows, x, y)
        size = max(abs(step_x), abs(step_y), 1.0)  # a step changes a factor by at most e
        step_x, step_y, before = step_x / size, step_y / size, _misfit(rows, x, y)
        while _misfit(rows, x + step_x, y + step_y) > before:
            step_x, step_y = step_x / 2, step_y / 2
        x, y = x + step_x, y + step_y
        if abs(step_x) + abs(step_y) < 1e-6:
            break
    return math.exp(x), math.exp(y)


def _misfit(rows: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    """Return the sum that `fit_generation` minimises, for logarithms x and y of the factors."""
    errors = (
        math.log(measured / (math.exp(x) * kernels + math.exp(y) * host)) / NOISE
        for kernels, host, measured in rows
    )
    return sum(error**2 for error in errors) + (x / DECODING_SPREAD) ** 2 + (y / HOST_SPREAD) ** 2


def _gauss_newton_step(
    rows: Sequence[tuple[float, float, float]], x: float, y: float
) -> tuple[float, float]:
    """Solve the normal equations of the linearised `_misfit`; return the changes of x and y."""
    xx, yy, xy = DECODING_SPREAD**-2, HOST_SPREAD**-2, 0.0
    gx, gy = -x * xx, -y * yy
    for kernels, host, measured in rows:
        first, second = math.exp(x) * kernels, math.exp(y) * host
        total = first + second
        error = math.log(measured / total) / NOISE**2
        share, rest = first / total, second / total
        gx, gy = gx + share * error, gy + rest * error
        xx += share * share / NOISE**2
        yy += rest * rest / NOISE**2
        xy += share * rest / NOISE**2
    determinant = xx * yy - xy * xy
    return (yy * gx - xy * gy) / determinant, (xx * gy - xy * gx) / determinant


def _with_rest(profile: StackProfile, runs: Sequence[MeasuredRun], base: Constants) -> StackProfile:
    """Return the profile with the rest of a step, and the spread of predicted steps."""
    ratios: list[float] = []
    for _ in range(REST_ROUNDS):
        constants = profile.constants(base)
        predicted = [_step_s(run, constants) for run in runs]
        ratios = [
            run.medians.step_s / seconds for run, seconds in zip(runs, predicted, strict=True)
        ]
        pairs = list(zip(runs, predicted, strict=True))
        left = median(
            (run.medians.step_s - seconds) / run.shape.workload.prompts for run, seconds in pairs
        )
        profile = replace(
            profile, rest_s=max(0.0, profile.rest_s + left), step_spread=_spread(ratios)
        )
        if all(abs(run.medians.step_s - seconds) < 0.01 * seconds for run, seconds in pairs):
            break
    return profile


def _step_s(run: MeasuredRun, constants: Constants) -> float:
    if run.simulate is not None:
        return run.simulate(constants).step_s
    return step_time(run.shape, run.cluster, run.plan, constants=constants).seconds
