"""Check everything before Ray starts: configuration, graph, models, data and machine.

    configuration, recipe's graph ─► complete_graph, run_checks, held_out_checks ─► mistakes
                                  ─► comparison with the machine ─► trial of the rewards ─► Inputs

All mistakes in configuration, graph, models and data are raised together. Demands of memory and
processors are compared with the machine once there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.common.run_sync import run_to_end
from rlsys.config import RunConfig
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import PromptSource, TaskSource, load_policy_tokenizer, load_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.data.source_names import hub_names
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import RunGraph, complete_graph
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import PREFERENCE, DatasetStage, PlayStage, ScoreStage
from rlsys.engines.generation.vllm.vllm_server_checks import CHECK_TIMEOUT_S, check_servers
from rlsys.engines.generation.vllm.vllm_server_config import plain_config
from rlsys.engines.models.export_settings import check_exportable
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.engines.models.routing import replayable_routing
from rlsys.errors import ErrorCollector, require
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launcher.engine_checks import check_engine, sampler_warnings
from rlsys.launcher.held_out_checks import HeldOutSummary, check_held_out, check_warm_start
from rlsys.launcher.launching import WarmStart
from rlsys.launcher.memory_estimate import check_store
from rlsys.launcher.run_checks import check_prompts, check_run
from rlsys.launcher.tiny_models import OwnModel
from rlsys.rewards import as_rewards
from rlsys.rewards.reward_trial import trial_rollout, try_rewards
from rlsys.runs.checkpoint import Checkpoint
from rlsys.runs.model_push import check_target


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Graph, model shape, tokenizer and data of a run, after all checks."""

    graph: RunGraph
    shape: ModelShape
    tokenizer: Any
    prompts: RowSource
    held_out: HeldOutSummary = field(default_factory=HeldOutSummary)
    warnings: tuple[str, ...] = ()


# Raises an InvalidValue if the run does not fit on the machine.
CheckMachine = Callable[[RunGraph, ModelShape], None]


def preflight(
    config: RunConfig,
    flow: Dataflow,
    *,
    held_out: HeldOut,
    warm_start: WarmStart | None,
    check_machine: CheckMachine | None = None,
    lacking: list[str] | None = None,
    show: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Inputs:
    """Complete the graph, read the data, check all of the run, and try its rewards.

    Args:
        config: The configuration, with a path of the model.
        flow: The recipe's graph, which does not change.
        held_out: Data and rewards of the evaluation during training.
        warm_start: Supervised steps before reinforcement learning.
        check_machine: Compares the demands of the run with the machine.
        lacking: For dry runs: collects warnings about reward models without weights, which a recipe
            may train before its run. Without the list they are mistakes.
        show: Returns a context in which an activity of this name is shown to the user.

    Raises:
        ValueError: One or more checks failed. The error has all mistakes.
    """
    shape = model_shape(config.model.path, flow.main.head)
    tokenizer = load_policy_tokenizer(config.model.path, config.data.template_options)
    mistakes = ErrorCollector()
    graph = prompts = None
    summary = HeldOutSummary()
    warnings: list[str] = []
    with mistakes.collect():
        graph = graph_of_run(config, flow, shape, warm_starts=warm_start is not None)
        check_store(config, graph)
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if config.rollout.urls:
        with mistakes.collect():
            _check_servers(config, shape, min(longest, shape.max_context), show)
    if config.push_to:
        with mistakes.collect():
            check_target(config.push_to)
    check_run(config, flow, tokenizer, shape, mistakes, lacking)
    check_engine(config, shape, mistakes)
    with mistakes.collect():
        prompts = _read_prompts(config, flow, tokenizer, shape)
        check_prompts(config, flow, prompts, tokenizer, shape, mistakes)
    if graph is not None and prompts is not None:
        with mistakes.collect():
            summary = check_held_out(config, graph, held_out, tokenizer, shape)
            warnings += summary.warnings
        with mistakes.collect():
            check_warm_start(warm_start, tokenizer)
        with mistakes.collect():
            warnings += _check_exports(config, graph, shape, tokenizer)
        warnings += sampler_warnings(config, graph)
    mistakes.raise_found()
    assert graph is not None
    assert prompts is not None
    if check_machine is not None:
        check_machine(graph, shape)
    warnings += run_to_end(lambda: _try_rewards(config, graph, held_out, prompts, tokenizer))
    return Inputs(
        graph=graph,
        shape=shape,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=summary,
        warnings=tuple(warnings),
    )


def _check_servers(
    config: RunConfig,
    shape: ModelShape,
    max_context: int,
    show: Callable[[str], contextlib.AbstractContextManager[object]],
) -> None:
    """Check the servers of rollout.urls, all at a time.

    Raises:
        InvalidValue: A server does not answer or does not fit the run.
    """
    urls = config.rollout.urls
    with show(f"Checking {', '.join(urls)} (at most {CHECK_TIMEOUT_S:g} s for an answer)"):
        run_to_end(
            partial(
                check_servers,
                urls,
                plain_config(shape.config),
                dtype=config.model.dtype,
                max_context=max_context,
                num_first=config.rollout.num_first,
            )
        )


def graph_of_run(
    config: RunConfig, flow: Dataflow, shape: ModelShape, *, warm_starts: bool
) -> RunGraph:
    """Return the complete graph of a run with a model of this shape.

    Raises:
        ValueError: The graph breaks a rule, or routing cannot be replayed with this model.
    """
    experts = graph = None
    mistakes = ErrorCollector()
    if config.rollout.replay_routing:
        with mistakes.collect():
            routing = replayable_routing(shape.config)
            experts = (routing.width, routing.dtype.itemsize)
    with mistakes.collect():
        graph = complete_graph(
            flow,
            config,
            max_context=shape.max_context,
            experts=experts,
            warm_starts=warm_starts,
        )
    mistakes.raise_found()
    assert graph is not None
    return graph


def _read_prompts(
    config: RunConfig, flow: StageGraph, tokenizer: Any, shape: ModelShape
) -> RowSource:
    """Read the prompts or tasks of a run.

    Raises:
        ValueError: The data cannot be read.
    """
    stage = flow.source
    if isinstance(stage, PlayStage):
        return TaskSource(stage.prompts.config, seed=config.seed, rows=stage.prompts.rows)
    return PromptSource(
        stage.prompts.config,
        tokenizer,
        seed=config.seed,
        max_tokens=config.sampling.max_tokens,
        max_context=shape.max_context,
        rows=stage.prompts.rows,
        completions=(stage.completions, stage.group_size)
        if isinstance(stage, DatasetStage)
        else None,
        preferences=flow.reads(PREFERENCE),
    )


def _check_exports(
    config: RunConfig, flow: StageGraph, shape: ModelShape, tokenizer: Any
) -> list[str]:
    """Check the settings that the exports of all policies contain; return warnings.

    Raises:
        ValueError: A model's settings cannot be exported.
    """
    generates = flow.main.head == "logits"
    warnings = check_exportable(config.model.path, shape.config, tokenizer, generates=generates)
    for name in flow.other_policies:
        role, setting = flow.models[name].config, f"{name}.model.path"
        if role is not None and (path := role.model.path):
            own = model_shape(path, setting=setting).config
            used = load_tokenizer(path, setting=setting)
            warnings += check_exportable(path, own, used, generates=True, setting=setting)
    return warnings


async def _try_rewards(
    config: RunConfig, flow: StageGraph, held_out: HeldOut, prompts: RowSource, tokenizer: Any
) -> list[str]:
    """Call each reward once on the first row; return warnings.

    Held-out rewards are called too if the row has the columns that they require. Episodes of an
    environment are not played.

    Raises:
        ValueError: A reward does not return a number.
    """
    scored = [one for stage in flow.all(ScoreStage) for one in as_rewards(stage.rewards)]
    rewards = {one.name: one for one in scored}
    columns = prompts.metadata_columns
    if config.evaluation.every and held_out.rewards is not None and not flow.all(PlayStage):
        for one in as_rewards(held_out.rewards):
            if all(column in columns for column in one.required_columns):
                rewards.setdefault(one.name, one)
    if not rewards:
        return []
    return await try_rewards(
        [*rewards.values()],
        trial_rollout(prompts.at(0), tokenizer),
        config.reward,
        start_timeout_s=config.cluster.start_timeout_s,
    )


def hub_of(config: RunConfig, flow: StageGraph) -> contextlib.AbstractContextManager[None]:
    """Return a context that works offline if the hub is unreachable for a run's models and data."""
    roles = [model.config.model.path for model in flow.models.values() if model.config]
    names = [config.model.path, *filter(None, roles)]
    names += hub_names(config.data.source) + hub_names(config.evaluation.source)
    return offline_where_unreachable(*names)


def with_model(
    config: RunConfig, own_model: OwnModel | None, make: Callable[[OwnModel], Path]
) -> RunConfig:
    """Return the configuration with a model path; an empty one becomes the recipe's own model."""
    if config.model.path:
        return config
    require(
        own_model is not None,
        "model.path",
        config.model.path,
        rule="must not be empty",
        fix="Give a Hugging Face model directory or hub name.",
    )
    assert own_model is not None
    return at_model(config, make(own_model))


def at_model(config: RunConfig, path: Path) -> RunConfig:
    """Return the configuration with another path of the model."""
    return replace(config, model=replace(config.model, path=str(path)))


def models_written_since(checkpoint: Checkpoint, flow: StageGraph) -> list[str]:
    """Return a warning for each frozen model with files newer than the checkpoint."""
    warnings = []
    written_s = checkpoint.path.stat().st_mtime
    for name, model in flow.models.items():
        if model.config is None or model.may_train or not model.config.model.path:
            continue
        files = Path(model.config.model.path).glob("*")
        if any(file.stat().st_mtime > written_s for file in files):
            warnings.append(
                f"{model.config.model.path} is newer than {checkpoint.path}. If its weights have "
                f"changed, the run continues with another {name} than before."
            )
    return warnings
