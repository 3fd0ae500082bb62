"""The closed form of the plan that a configuration states."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.config import RunConfig
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.planner.plan_request import PlanRequest, shape_of_run
from rlsys.planner.plan_settings import plan_of
from rlsys.planner.plans import Estimate
from rlsys.planner.run_plan import step_time


def stated_step(
    config: RunConfig, flow: StageGraph, request: PlanRequest
) -> tuple[Estimate, Sequence[str]]:
    """Return the time of a step, and what was assumed for it."""
    request = request.for_run(config)
    shape, assumptions = shape_of_run(config, flow, request)
    plan = plan_of(config, flow)
    return step_time(shape, request.cluster, plan, constants=request.constants), assumptions
