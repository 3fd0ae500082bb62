"""Plan of a recipe's run for the cluster where it starts: --plan auto.

    config, graph ─► kept plan of a resumed run, or a new one ─► PlanSession.settings

A resumed run keeps its plan. If the cluster is another one since, --plan again plans it anew within
what a resumed run may change.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlsys.common.installed_versions import versions
from rlsys.config import RunConfig
from rlsys.config.plan_session import AGAIN, PlanSession
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import PromptSource, load_policy_tokenizer
from rlsys.data.source_names import hub_names
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.engines.models.model_shape import model_shape
from rlsys.errors import InvalidValue
from rlsys.launcher.cluster_choice import AUTO, FindNodes, chosen_cluster
from rlsys.launcher.tiny_models import OwnModel
from rlsys.planner.plan_report import lines
from rlsys.planner.plan_request import PlanRequest
from rlsys.planner.planning import plan_run
from rlsys.planner.run_record import RunRecord, read_record
from rlsys.planner.stack_profile import default_profile
from rlsys.runs.config_changes import MAY_CHANGE
from rlsys.runs.observe.phases import progress_on_stderr
from rlsys.runs.run_files import RunFiles

# Plans that are printed, and prompts whose lengths are averaged.
NUM_SHOWN, MAX_PROMPTS = 3, 64

# Plans that are simulated before a run starts.
NUM_SIMULATED = 3


def plan_session_run(
    config: RunConfig,
    flow: Dataflow,
    own_model: OwnModel | None,
    session: PlanSession,
    *,
    find_nodes: FindNodes,
) -> None:
    """Plan a run, print the plan, and keep its settings in the session.

    Raises:
        InvalidValue: No plan fits, or a resumed run was planned for another cluster.
    """
    address = config.cluster.address if config.cluster.address != "local" else None
    profile = default_profile(versions())
    cluster, probe = chosen_cluster(AUTO, profile, find_nodes, address=address)
    chosen = dict(session.given)
    record = _kept_record(config)
    if record is not None:
        if record.cluster == str(cluster):
            session.settings = record.settings
            print(f"Plan of the run, for {record.cluster}: {_described(record.settings)}")
            return
        if session.mode != AGAIN:
            raise InvalidValue(
                "--plan",
                session.mode,
                rule=f"the run was planned for {record.cluster}, and the cluster is {cluster}",
                fix="Use --plan again to plan the rest of the run for this cluster, or leave out "
                "--plan and give the layout.",
            )
        chosen |= {name: value for name, value in record.settings.items() if not _may_change(name)}
    with planned_model(config, own_model) as ready:
        request = PlanRequest(
            cluster=cluster,
            prompt_tokens=mean_prompt_tokens(ready, flow),
            chosen=chosen,
            num_simulated=NUM_SIMULATED,
            profile=profile,
            probe=probe,
        )
        with progress_on_stderr("Planning") as phase:
            planning = plan_run(ready, flow, request, on_progress=phase.update)
    for line in lines(planning, NUM_SHOWN):
        print(line)
    session.planning = planning
    session.settings = planning.plans[0].settings


@contextlib.contextmanager
def planned_model(config: RunConfig, own_model: OwnModel | None) -> Iterator[RunConfig]:
    """Yield the configuration with a model that the planner can read.

    The recipe's own model is built in a directory that is removed at the end of the block.
    """
    if config.model.path or own_model is None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="rlsys-") as directory:
        path = Path(directory, own_model.name)
        own_model.build(path, seed=config.seed)
        yield replace(config, model=replace(config.model, path=str(path)))


def mean_prompt_tokens(config: RunConfig, flow: Dataflow) -> float | None:
    """Return the mean tokens of a run's first prompts; None for tasks of an environment."""
    stage, path = flow.source, config.model.path
    if isinstance(stage, PlayStage):
        return None
    with offline_where_unreachable(path, *hub_names(config.data.source)):
        prompts = PromptSource(
            stage.prompts.config,
            load_policy_tokenizer(path, config.data.template_options),
            seed=config.seed,
            max_tokens=config.sampling.max_tokens,
            max_context=model_shape(path, flow.main.head).max_context,
            rows=stage.prompts.rows,
        )
    num_read = min(MAX_PROMPTS, len(prompts))
    return fmean(len(prompts.at(index).token_ids) for index in range(num_read))


def _kept_record(config: RunConfig) -> RunRecord | None:
    """Return the record of a run that resumes with a plan, or None."""
    files = RunFiles(Path(config.runs_dir) / config.name)
    if config.resume is False or not files.has_checkpoint or not files.plan.exists():
        return None
    record = read_record(files.plan)
    return record if record.settings else None


def _may_change(name: str) -> bool:
    """Return whether a resumed run may change a setting."""
    return name in MAY_CHANGE or name.partition(".")[0] in MAY_CHANGE


def _described(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
