"""Plan the run that a recipe states, and the configuration of a plan.

    recipe ─► launch(config, flow) ─► shape_of_run ─► search ─► simulate ─► RunPlanning
                                                                   └─► settings: plan.toml

A recipe is not changed for this: while `requested` is active, rlsys.launch plans the run instead of
starting it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlsys.common.option_names import option
from rlsys.config import RunConfig
from rlsys.config.plan_session import request_plan
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.errors import InvalidValue
from rlsys.planner.hardware import Cluster
from rlsys.planner.plan_request import (
    PlanRequest,
    bounds_of_staleness,
    check_planned,
    shape_of_run,
)
from rlsys.planner.plan_settings import configured, fixed_settings, plan_of, settings
from rlsys.planner.plans import Estimate
from rlsys.planner.profiles import Constants, interval
from rlsys.planner.run_costs import load_seconds
from rlsys.planner.run_plan import (
    RunPlan,
    RunShape,
    generation_seconds,
    training_seconds,
)
from rlsys.planner.run_record import PredictedStep
from rlsys.planner.run_simulation import MAX_ROLLOUTS, num_played, simulate_run
from rlsys.planner.search import RankedPlan, ranked, search
from rlsys.planner.simulate import SimulationResult


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A ranked plan, what its simulation found, and the settings of the run that it needs."""

    ranked: RankedPlan
    settings: Mapping[str, Any]
    result: SimulationResult | None = None


@dataclass(frozen=True, kw_only=True)
class RunPlanning:
    """The planner's answer: plans, fastest first, and the assumptions behind them.

    `bounds` are the bounds of staleness that were tried.
    """

    shape: RunShape
    cluster: Cluster
    constants: Constants
    plans: Sequence[SimulatedPlan]
    num_found: int
    assumptions: Sequence[str]
    bounds: Sequence[int] = (0,)


# Settings that no search changes: a plan repeats those of the configuration.
UNSEARCHED = ("dtype", "lora", "optimizer_state", "max_running", "kv_cache_gib")

# Function of a run's configuration and graph.
A = TypeVar("A")
Answer = Callable[[RunConfig, Dataflow], A]

# Set by `requested`, read by rlsys.launch.
_answer: Answer[Any] | None = None
_answers: list[Any] = []


@contextlib.contextmanager
def requested(answer: Answer[A]) -> Iterator[list[A]]:
    """Let rlsys.launch call `answer` instead of starting runs; yield the list of its results.

    launch ends the recipe at its first run that generates. Others, such as SFT, give no result.
    """
    global _answer
    _answer = answer
    _answers.clear()
    request_plan(True)
    try:
        yield _answers
    finally:
        request_plan(False)
        _answer = None


def answer_request(config: RunConfig, flow: Dataflow) -> None:
    """Answer the request for a run that generates."""
    assert _answer is not None
    _answers.append(_answer(config, flow))


def plan_run(
    config: RunConfig,
    flow: Dataflow,
    request: PlanRequest,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunPlanning:
    """Return the best plans of a run.

    `on_progress` gets the number of simulated plans and that of all to simulate.

    Raises:
        InvalidValue: The model has no known shape, lengths exceed its context, the algorithm does
            not generate, or no plan fits.
    """
    request = request.for_run(config)
    constants = request.constants
    check_planned(config)
    shape, assumptions = shape_of_run(config, flow, request)
    found = _search(config, flow, shape, request)
    plans = [
        SimulatedPlan(ranked=one, settings=chosen_settings(config, flow, one.plan, request))
        for one in found
    ]
    most = max(num_played(one.ranked.plan.max_staleness, shape.updates) for one in plans)
    budget = MAX_ROLLOUTS // (most * shape.workload.rollouts)
    num_simulated = min(request.num_simulated, budget, len(plans))
    simulated: list[SimulatedPlan] = []
    played = _of_each_kind(plans)[:num_simulated]
    for one in played:
        on_progress(len(simulated), num_simulated)
        simulated.append(simulate_plan(config, flow, shape, request.cluster, one, constants))
    others = [one for one in plans if not any(one is each for each in played)]
    return RunPlanning(
        shape=shape,
        cluster=request.cluster,
        constants=constants,
        plans=[*_sorted(simulated), *map(_untied, others)] if simulated else others,
        num_found=len(found),
        assumptions=assumptions,
        bounds=bounds_of_staleness(config, request),
    )


def _of_each_kind(plans: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """Return the best plan of each placement and bound of staleness, then the second best, etc.

    Only the simulation finds how much a bound gains.
    """
    turns: Counter[tuple[str, int]] = Counter()
    keyed: list[tuple[int, SimulatedPlan]] = []
    for one in plans:
        kind = one.ranked.plan.placement, one.ranked.plan.max_staleness
        keyed.append((turns[kind], one))
        turns[kind] += 1
    return [one for _, one in sorted(keyed, key=lambda pair: pair[0])]  # stable


def _untied(plan: SimulatedPlan) -> SimulatedPlan:
    """Return a plan by its closed form, which does not tie with simulated ones."""
    return replace(plan, ranked=replace(plan.ranked, is_tied=False))


def _sorted(plans: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    if not plans:
        return []
    by_plan = {id(one.ranked.plan): one for one in plans}
    return [
        replace(by_plan[id(one.plan)], ranked=one) for one in ranked([one.ranked for one in plans])
    ]


def predicted_step(
    shape: RunShape,
    cluster: Cluster,
    plan: RunPlan,
    estimate: Estimate,
    constants: Constants,
    *,
    simulated: bool = False,
) -> PredictedStep:
    """Return a predicted step by parts that the run measures."""
    policy, workload = shape.policy, shape.workload
    return PredictedStep(
        step_s=estimate.seconds,
        low_s=estimate.low,
        high_s=estimate.high,
        train_s=training_seconds(policy, cluster, plan.trainers[policy.name], shape, constants),
        generation_s=generation_seconds(
            policy.model, cluster, plan.generation, plan.replicas, workload, constants
        ),
        sync_s=load_seconds(policy.model, cluster, plan.generation, constants),
        reward_s=constants.reward_s * workload.rollouts,
        controller_s=constants.controller_s * workload.prompts,
        completion_tokens=workload.completions.mean,
        simulated=simulated,
    )


def _search(
    config: RunConfig, flow: Dataflow, shape: RunShape, request: PlanRequest
) -> list[RankedPlan]:
    """Return the plans that fit and that the user's options allow.

    Raises:
        InvalidValue: There is none. The error names an option that excludes all plans, the
            setting of the configuration that does not allow the first plan, or the cluster.
    """
    refused: list[InvalidValue] = []

    def allows(plan: RunPlan, request: PlanRequest) -> bool:
        try:
            return _is_accepted(config, flow, plan, request)
        except InvalidValue as error:
            refused.append(error)
            return False

    def found(request: PlanRequest) -> list[RankedPlan]:
        on_gpus = not request.cluster.gpu.products
        return search(
            shape,
            request.cluster,
            max_staleness=bounds_of_staleness(config, request),
            constants=request.constants,
            fixed=fixed_settings(config, flow, request.chosen, on_gpus=on_gpus),
            allows=lambda plan: allows(plan, request),
        )

    try:
        return found(request)
    except InvalidValue as error:
        if error.field != "cluster":
            raise
        nothing = error
    names = settings(config, flow, plan_of(config, flow), request.cluster)
    given = {
        name: value
        for name, value in request.chosen.items()
        if name in names and name.rpartition(".")[2] not in UNSEARCHED
    }
    text = ", ".join(f"{option(name)} {value}" for name, value in given.items())
    for left_out in [*((name,) for name in given), tuple(given)]:
        kept = {name: value for name, value in request.chosen.items() if name not in left_out}
        with contextlib.suppress(InvalidValue):
            found(replace(request, chosen=kept))
            break
    else:
        raise refused[0] if refused else nothing
    options = ", ".join(map(option, left_out))
    raise InvalidValue(
        left_out[0] if len(left_out) == 1 else "options",
        given[left_out[0]] if len(left_out) == 1 else text,
        rule=f"no plan for {request.cluster} has the options {text}",
        fix=f"Leave out {options}, or use other values.",
    ) from None


def chosen_settings(
    config: RunConfig, flow: Dataflow, plan: RunPlan, request: PlanRequest
) -> dict[str, Any]:
    """Return the settings of a plan, as the user wrote those that the user gave."""
    found = settings(config, flow, plan, request.cluster)
    return found | {name: value for name, value in request.chosen.items() if name in found}


def _is_accepted(config: RunConfig, flow: Dataflow, plan: RunPlan, request: PlanRequest) -> bool:
    """Return whether the run states exactly this plan with the options that the user gave.

    Raises:
        InvalidValue: The configuration does not allow the plan's settings.
    """
    found = settings(config, flow, plan, request.cluster)
    given = {name: value for name, value in request.chosen.items() if name in found}
    exact = ("num_gpus", "num_workers")
    if any(
        found[name] != value for name, value in given.items() if name.rpartition(".")[2] in exact
    ):
        return False
    return plan_of(config, flow, found | given) == plan


def simulate_plan(
    config: RunConfig,
    flow: Dataflow,
    shape: RunShape,
    cluster: Cluster,
    one: SimulatedPlan,
    constants: Constants,
) -> SimulatedPlan:
    """Return the plan with the time that the simulated controller takes."""
    changed = configured(config, one.settings)
    estimate, result = simulated_estimate(changed, flow, shape, cluster, one.ranked.plan, constants)
    return replace(
        one, ranked=replace(one.ranked, estimate=estimate, simulated=True), result=result
    )


def simulated_estimate(
    config: RunConfig,
    flow: StageGraph,
    shape: RunShape,
    cluster: Cluster,
    plan: RunPlan,
    constants: Constants,
) -> tuple[Estimate, SimulationResult]:
    """Return the time of a step with the simulated controller, and what it found.

    `plan` is the plan that the configuration states.
    """
    result = simulate_run(config, flow, shape, cluster, plan, constants)
    seconds = result.mean_step_s
    low, high = interval(seconds, constants.spreads.get("rl_step", 0.3))
    breakdown = {
        "trainer_idle": (1 - result.trainer_busy) * seconds,
        "trainer_busy": result.trainer_busy * seconds,
    }
    return Estimate(seconds=seconds, low=low, high=high, breakdown=breakdown), result
