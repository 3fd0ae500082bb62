"""plan.json of a run: written when the run starts, read for the closing summary.

    configuration, graph, model, prompts, devices ─► write_plan_record (in a thread of its own)
    plan.json + metrics.jsonl                     ─► prediction_rows

Nothing here delays or fails a run: a prediction that is not possible is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray

from rlsys.common.atomic_files import write_atomically
from rlsys.common.background_tasks import start_thread
from rlsys.config import RunConfig
from rlsys.config.plan_session import current_session
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.launcher.cluster_choice import cluster_of_nodes, plans_gpus
from rlsys.launcher.step_prediction import (
    cores_of_this_machine,
    mean_prompt_tokens,
    predict_step,
    recorded_policy,
)
from rlsys.planner.plan_file import plan_toml
from rlsys.planner.planning import RunPlanning, predicted_step
from rlsys.planner.prediction_check import compared
from rlsys.planner.run_measurement import step_medians
from rlsys.planner.run_record import (
    PredictedStep,
    RunRecord,
    read_record,
    record_text,
)
from rlsys.runs.run_files import RunFiles

from .capacity import joins_cluster

logger = logging.getLogger(__name__)


def start_plan_record(
    files: RunFiles,
    config: RunConfig,
    flow: RunGraph,
    shape: Callable[[], ModelShape],
    prompts: RowSource,
    *,
    resumes: bool,
) -> None:
    """Write plan.json in a thread. A failure is logged, and the run goes on without the file."""
    if not isinstance(flow.source, GenerateStage):
        return
    nodes = live_nodes()
    session = current_session()
    planning = session.planning if session is not None else None

    def write() -> None:
        record = run_record(config, flow, shape(), prompts, nodes, planning)
        if planning is None and resumes:
            record = _with_kept_plan(record, files)
        write_atomically(files.plan, record_text(record))
        if planning is not None:
            write_atomically(files.plan_settings, plan_toml(planning))

    start_thread(write, name="plan record", fail=_log)


def _log(error: BaseException) -> None:
    logger.info("no prediction for this run: %s", error)


def _with_kept_plan(record: RunRecord, files: RunFiles) -> RunRecord:
    """Return the record with the plan that a resumed run has had on this cluster, if any."""
    try:
        found = read_record(files.plan)
    except ValueError:
        return record
    if not found.settings or found.cluster != record.cluster:
        return record
    return replace(record, settings=found.settings, prediction=found.prediction)


def run_record(
    config: RunConfig,
    flow: RunGraph,
    shape: ModelShape,
    prompts: RowSource,
    nodes: Sequence[Mapping[str, float]],
    planning: RunPlanning | None,
) -> RunRecord:
    """Return the record of a run, with a prediction if one is possible."""
    cluster = cluster_of_run(config, nodes)
    record = RunRecord(
        cluster=cluster,
        prompt_tokens=mean_prompt_tokens(prompts),
        roles=(recorded_policy(config, flow, shape),),
    )
    if planning is not None:
        best = planning.plans[0]
        return replace(
            record,
            cluster=str(planning.cluster),
            settings=best.settings,
            prediction=_planned_step(planning),
        )
    try:
        found = predict_step(config, flow, shape, prompts, cluster)
        return record if found is None else replace(record, prediction=found.step)
    except ValueError as error:  # a model without a known shape, lengths beyond its context
        _log(error)
        return record


def live_nodes() -> list[Mapping[str, float]]:
    """Return the resources of Ray's nodes."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cluster_of_run(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the devices of a run, such as 1x2xCPU, or "" if they are unknown."""
    is_known = plans_gpus(config) or joins_cluster(config)
    return _named(nodes) if is_known else cores_of_this_machine()


def _named(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the name of a cluster, or "" if its devices are unknown or differ."""
    try:
        return cluster_of_nodes(nodes)
    except ValueError as error:
        _log(error)
        return ""


def _planned_step(planning: RunPlanning) -> PredictedStep:
    best = planning.plans[0]
    return predicted_step(
        planning.shape,
        planning.cluster,
        best.ranked.plan,
        best.ranked.estimate,
        planning.constants,
        simulated=best.result is not None,
    )


def prediction_rows(files: RunFiles, lines: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return rows of the closing summary that compare the prediction with the run.

    Return none without a prediction, or after too few steps.
    """
    try:
        predicted = read_record(files.plan).prediction
        if predicted is None:
            return []
        return compared(predicted, step_medians(os.fspath(files.path), lines)).rows
    except (ValueError, ArithmeticError, IndexError):
        return []
