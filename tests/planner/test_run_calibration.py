"""Calibration finds the factors with which measurements were made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import NOISE, Constants, fitted_constants
from rlsys.planner.run_calibration import (
    DECODING_SPREAD,
    HOST_SPREAD,
    MeasuredRun,
    SimulatedStep,
    calibrated,
    fit_generation,
)
from rlsys.planner.run_measurement import StepMedians
from rlsys.planner.run_plan import (
    Role,
    RunPlan,
    RunShape,
    generation_seconds,
    step_time,
    training_seconds,
)
from rlsys.planner.stack_profile import EngineFactors, Factor, StackProfile
from tests.errors import invalid

CLUSTER = parse_cluster("1x8xH100")


def made_run(
    truth: Constants, *, name: str = "run", prompts: int = 32, model: str = "Qwen3-8B"
) -> MeasuredRun:
    """Return a run whose times are those of `truth`."""
    role = Role(name="policy", model=named_model(model), samples=True)
    shape = RunShape(
        roles=(role,),
        workload=Workload(
            prompts=prompts, group_size=8, prompt_tokens=200, completions=lognormal(500, 2048)
        ),
    )
    training = TrainingPlan(dp=4, row_tokens=8192)
    plan = RunPlan(
        placement="separate",
        max_staleness=0,
        generation=GenerationPlan(profile="vllm-rl"),
        replicas=4,
        trainers={"policy": training},
        frozen_gpus={},
    )
    work = (role.model, CLUSTER, plan.generation, plan.replicas, shape.workload)
    medians = StepMedians(
        num_steps=20,
        step_s=step_time(shape, CLUSTER, plan, constants=truth).seconds,
        train_s=training_seconds(role, CLUSTER, training, shape, truth),
        generation_s=generation_seconds(*work, truth),
        sync_s=0.5,
        reward_s=0.256,
        controller_s=0.512,
        other_s=0.064,
        completion_tokens=500.0,
        spread=0.01,
    )
    return MeasuredRun(
        name=name,
        engine="vllm",
        shape=shape,
        plan=plan,
        cluster=CLUSTER,
        medians=medians,
        versions={"torch": "2.13.0"},
    )


def truth(training: float, decoding: float, host: float, rest_s: float) -> Constants:
    profile = StackProfile(
        versions={},
        devices=("H100",),
        runs=("truth",),
        training=Factor(value=training, runs=1),
        engines={"vllm": EngineFactors(decoding=Factor(value=decoding), host=Factor(value=host))},
        rest_s=rest_s,
    )
    return profile.constants(fitted_constants())


@given(training=st.floats(0.5, 3.0), decoding=st.floats(0.6, 2.0), rest_s=st.floats(0, 1))
def test_one_run_predicts_itself(training: float, decoding: float, rest_s: float) -> None:
    run = made_run(truth(training, decoding, 1.0, rest_s))
    profile = calibrated([run])
    constants = profile.constants(fitted_constants())
    predicted = step_time(run.shape, CLUSTER, run.plan, constants=constants).seconds
    assert predicted == pytest.approx(run.medians.step_s, rel=0.03)
    assert profile.training.value == pytest.approx(training, rel=0.03)
    assert profile.devices == ("H100",)
    assert profile.reward_s == pytest.approx(1e-3)
    assert profile.controller_s == pytest.approx(16e-3)  # a group has eight rollouts
    assert profile.other_s == pytest.approx(2e-3)


def test_models_of_different_sizes_separate_kernels_and_host() -> None:
    real = truth(1.2, 1.6, 0.5, 0.1)
    models = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-14B")
    runs = [made_run(real, name=one, model=one) for one in models]
    profile = calibrated(runs)
    factors = profile.engines["vllm"]
    assert factors.decoding.value == pytest.approx(1.6, rel=0.1)
    assert factors.host.value == pytest.approx(0.5, rel=0.2)
    assert profile.rest_s == pytest.approx(0.1, rel=0.2)
    assert profile.training.runs == 4
    # a fifth run, of another size, is predicted
    other = made_run(real, prompts=64, model="Qwen3-4B")
    constants = profile.constants(fitted_constants())
    predicted = step_time(other.shape, CLUSTER, other.plan, constants=constants).seconds
    assert predicted == pytest.approx(other.medians.step_s, rel=0.03)


@given(
    decoding=st.floats(0.3, 3.0),
    host=st.floats(0.2, 5.0),
    kernels=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
)
def test_the_fit_of_generation_explains_its_rows(
    decoding: float, host: float, kernels: list[float]
) -> None:
    rows = [(one, 1.0, decoding * one + host) for one in kernels]
    a, b = fit_generation(rows)
    for one, rest, measured in rows:
        assert a * one + b * rest == pytest.approx(measured, rel=0.15)


@given(
    rows=st.lists(
        st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.05, 60.0)),
        min_size=1,
        max_size=4,
    )
)
def test_the_fit_of_generation_is_stationary(rows: list[tuple[float, float, float]]) -> None:
    def misfit(x: float, y: float) -> float:
        errors = [
            math.log(measured / (math.exp(x) * kernels + math.exp(y) * host)) / NOISE
            for kernels, host, measured in rows
        ]
        priors = (x / DECODING_SPREAD) ** 2 + (y / HOST_SPREAD) ** 2
        return sum(error**2 for error in errors) + priors

    x, y = (math.log(factor) for factor in fit_generation(rows))
    for dx, dy in ((1e-2, 0.0), (-1e-2, 0.0), (0.0, 1e-2), (0.0, -1e-2)):
        assert misfit(x, y) <= 1.0001 * misfit(x + dx, y + dy)


def test_a_measured_generation_without_a_host_moves_the_kernels_only() -> None:
    a, b = fit_generation([(1.0, 0.0, 2.0)] * 3)
    assert a == pytest.approx(2.0, rel=0.05)
    assert b == pytest.approx(1.0)


def test_more_runs_that_agree_have_a_smaller_spread() -> None:
    real = truth(1.5, 1.0, 1.0, 0.0)
    one = calibrated([made_run(real)])
    four = calibrated([made_run(real, name=f"{n}") for n in range(4)])
    assert four.training.spread < one.training.spread
    assert four.step_spread < one.step_spread


def test_runs_that_contradict_each_other_are_refused() -> None:
    run = made_run(truth(1.0, 1.0, 1.0, 0.0))
    slow = replace(run, medians=replace(run.medians, train_s=5 * run.medians.train_s))
    with invalid("--calibrate"):
        calibrated([run, slow])


def test_dense_models_and_experts_are_calibrated_apart() -> None:
    constants = truth(1.0, 1.0, 1.0, 0.0)
    with invalid("--calibrate"):
        calibrated([made_run(constants), made_run(constants, model="Qwen3-30B-A3B")])


def test_a_simulated_step_corrects_the_factors_and_gives_the_rest() -> None:
    run = made_run(truth(1.0, 1.0, 1.0, 0.0))
    prompts = run.shape.workload.prompts
    times, replica = run.medians, fitted_constants().profile("vllm-rl")

    def simulate(constants: Constants) -> SimulatedStep:
        # training in twice as many micro-batches as the closed form has, and half of the step
        training = constants.profile("rlsys").factor / fitted_constants().profile("rlsys").factor
        decoding = constants.profile("vllm-rl").factor / replica.factor
        return SimulatedStep(
            step_s=times.step_s / 2 + constants.rest_s * prompts,
            train_s=2 * times.train_s * training,
            generation_s=times.generation_s * decoding,
        )

    profile = calibrated([replace(run, simulate=simulate)])
    assert profile.training.value == pytest.approx(0.5)
    assert profile.engines["vllm"].decoding.value == pytest.approx(1.0)
    assert profile.rest_s * prompts == pytest.approx(times.step_s / 2)
