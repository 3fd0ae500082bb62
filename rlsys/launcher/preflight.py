"""Preparation of a run before Ray starts: its model, its prompts, and checks of both.

    configuration, graph, model ─► complete_graph, check_run ─► read_prompts ─► RowSource

All mistakes that can be found without starting a process are raised together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.common.user_functions import name_of
from rlsys.config import (
    DataConfig,
    HeldOutConfig,
    ModelConfig,
    RoleConfig,
    RunConfig,
    TrainedRoleConfig,
    check_quantized,
)
from rlsys.config.layout_fits_model import check_fits, check_replica_fits
from rlsys.config.lora import check_lora
from rlsys.data.completions import encode_examples
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import PromptSource, TaskSource, load_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.data.source_names import hub_names, may_have_splits
from rlsys.data.vocabulary_check import check_vocabularies, check_vocabulary
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import (
    PREFERENCE,
    DatasetStage,
    InferStage,
    JudgeStage,
    Model,
    PlayStage,
    ScoreStage,
)
from rlsys.engines.generation.interruption import interruption_of
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.engines.models.routing import replayable_routing
from rlsys.engines.models.scalar_lm import check_scalar_head
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import environment_template
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.errors import ErrorCollector, InvalidValue, require
from rlsys.evaluation.held_out import environment_of, evaluation_config, rewards_of
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.evaluation.held_out_loss import held_out_loss
from rlsys.evaluation.model_evaluation import held_out_prompts, held_out_tasks
from rlsys.launcher.launching import WarmStart
from rlsys.launcher.memory_estimate import check_store
from rlsys.launcher.tiny_models import OwnModel
from rlsys.rewards import as_rewards, pack_rewards
from rlsys.rewards.process.reward_pickle import check_picklable
from rlsys.runs.checkpoint import Checkpoint
from rlsys.runs.observe.trackers.tracker_kinds import check_trackers
from rlsys.text.tokenizer_boundary import TokenizerBoundary


def hub_of(config: RunConfig, flow: Dataflow) -> contextlib.AbstractContextManager[None]:
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
    return replace(config, model=replace(config.model, path=str(make(own_model))))


def models_written_since(checkpoint: Checkpoint, flow: Dataflow) -> list[str]:
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


def load_prompts(
    config: RunConfig,
    flow: Dataflow,
    tokenizer: Any,
    shape: ModelShape,
    lacking: list[str] | None = None,
) -> RowSource:
    """Complete the graph, check the run, and return its prompts.

    `lacking` is for dry runs: it collects warnings about reward models without weights, which a
    recipe may train before its run. Without the list they are mistakes.

    Raises:
        ValueError: One or more checks failed. The error has all mistakes.
    """
    mistakes = ErrorCollector()
    with mistakes.collect():
        complete_graph(config, flow, shape)
    check_run(config, flow, tokenizer, shape, mistakes, lacking)
    prompts = None
    with mistakes.collect():
        prompts = read_prompts(config, flow, tokenizer, shape)
        _check_prompts(config, flow, prompts, tokenizer, shape, mistakes)
    mistakes.raise_found()
    assert prompts is not None
    return prompts


def complete_graph(config: RunConfig, flow: Dataflow, shape: ModelShape) -> None:
    """Add what the configuration and the model require.

    These are the model's context, the stage that computes π_prox, if a step makes several updates,
    and the column of experts, if routing is replayed.

    Raises:
        ValueError: Routing cannot be replayed with this model or these rows.
    """
    flow.max_context = shape.max_context
    flow.hold_proximal(config.trainer.updates_per_step)
    if config.rollout.replay_routing:
        routing = replayable_routing(shape.config)
        flow.replay_routing(routing.width, routing.dtype.itemsize)


def check_run(
    config: RunConfig,
    flow: Dataflow,
    tokenizer: Any,
    shape: ModelShape,
    mistakes: ErrorCollector,
    lacking: list[str] | None = None,
) -> None:
    """Check configuration, complete graph, models, functions and machine against each other.

    The arguments are those of `load_prompts`. The mistakes are added to `mistakes`.
    """
    _check_main_model(config, flow, tokenizer, shape, mistakes)
    _check_other_models(config, flow, tokenizer, shape, mistakes, lacking)
    for stage in flow.all(InferStage):
        with mistakes.collect():
            _check_infer(config, stage, shape.config.get_text_config().vocab_size)
    with mistakes.collect():
        require(
            config.placement == "separate" or not isinstance(flow.source, DatasetStage),
            "placement",
            config.placement,
            rule="the rows come from a dataset, so that no replica has a model",
            fix="Leave it out.",
        )
    if (shared := flow.source.prompts.shared) is not None:
        with mistakes.collect():
            shared.check(config)
    with mistakes.collect():
        retire_at = flow.source.prompts.config.retire_at
        require(
            retire_at is None or bool(flow.all(ScoreStage) or flow.all(PlayStage)),
            "data.retire_at",
            retire_at,
            rule="needs rewards, and the dataflow has no flow.score",
            fix="Leave it out.",
        )
    with mistakes.collect():
        flow.check_groups(config.group_size)
        flow.check()
        check_store(config, flow)
    for scored in flow.all(ScoreStage):
        with mistakes.collect():
            pack_rewards(scored.rewards)  # raises if a function cannot be pickled
    for judged in flow.all(JudgeStage):
        with mistakes.collect():
            _check_judge(judged, shape)
    with mistakes.collect():
        interruption_of(config.sampling, tokenizer)
    with mistakes.collect():
        check_trackers(config.trackers)


def read_prompts(config: RunConfig, flow: Dataflow, tokenizer: Any, shape: ModelShape) -> RowSource:
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


def _check_main_model(
    config: RunConfig, flow: Dataflow, tokenizer: Any, shape: ModelShape, mistakes: ErrorCollector
) -> None:
    """Check the policy against tokenizer, layouts, adapters and head."""
    with mistakes.collect():
        check_vocabulary(tokenizer, shape.config.get_text_config().vocab_size, config.model.path)
    for trainer in config.trainer.in_each_layout:
        with mistakes.collect():
            check_fits(trainer.layout, shape.config)
    with mistakes.collect():
        check_replica_fits(config.rollout.tensor_parallel, shape.config)
    with mistakes.collect():
        check_lora(config.model.lora, shape.linear_layers)
    with mistakes.collect():
        if flow.main.head != "logits" and config.model.path:
            check_scalar_head(config.model.path, fresh_head=True)


def _check_other_models(
    config: RunConfig,
    flow: Dataflow,
    tokenizer: Any,
    shape: ModelShape,
    mistakes: ErrorCollector,
    lacking: list[str] | None,
) -> None:
    """Check the other models: paths, heads, layouts and adapters, and seats of environments."""
    usable = _usable_paths(flow, tokenizer, mistakes, lacking)
    for name, model in flow.models.items():
        if isinstance(role := model.config, TrainedRoleConfig) and role.model.path in usable:
            with mistakes.collect():
                path = role.model.path
                setting = f"{name}.model.path"
                own = model_shape(path, model.head, setting=setting) if path else shape
                for one in role.trainer.in_each_layout:
                    check_fits(one.layout, own.config, setting=f"{name}.trainer.layout")
                check_lora(role.model.lora, own.linear_layers, setting=f"{name}.model.lora")
    for played in flow.all(PlayStage):
        with mistakes.collect():
            require(
                config.placement == "separate" or not played.seats,
                "placement",
                config.placement,
                rule=f"{[one.name for one in played.partners]} play seats, and their engines keep "
                "their memory while the trainer uses the devices of the replicas",
                fix="Leave it out.",
            )
        for partner in played.partners:
            role = partner.config
            if isinstance(role, TrainedRoleConfig) and role.model.path not in usable:
                continue  # reported by _usable_paths
            with mistakes.collect():
                _check_partner(config, played, partner, tokenizer, shape)


def _check_infer(config: RunConfig, stage: InferStage, num_tokens: int) -> None:
    """Check that the model of flow.infer has as many tokens, and the adapters to leave out."""
    setting, role = f"flow.infer({stage.model.name!r})", stage.model.config
    require(
        stage.top_k <= num_tokens,
        f"{setting}: top_k",
        stage.top_k,
        rule=f"the vocabulary has only {num_tokens} tokens",
        fix="Use at most that many.",
    )
    model = config.model if role is None else role.model
    require(
        stage.adapters or bool(isinstance(model, ModelConfig) and model.lora),
        f"{setting}: adapters",
        stage.adapters,
        rule="the model has no adapters to leave out",
        fix="Set model.lora, or give flow.infer a separate reference.",
    )


def _check_prompts(
    config: RunConfig,
    flow: Dataflow,
    prompts: RowSource,
    tokenizer: Any,
    shape: ModelShape,
    mistakes: ErrorCollector,
) -> None:
    """Check the rows against the size of a step, and against rewards and environments."""
    with mistakes.collect():
        prompts.check_size(config.prompts_per_step)
    for scored in flow.all(ScoreStage):
        with mistakes.collect():
            prompts.check_rewards(scored.rewards)
    for played in flow.all(PlayStage):
        environment = played.environment
        with mistakes.collect():
            prompts.check_required(
                environment.required_columns, f"environment {environment.name!r}"
            )
        with mistakes.collect():
            _check_environment(config, environment, tokenizer, shape)
        with mistakes.collect():
            _check_settings_of_tasks(played.prompts.config)


def _check_environment(
    config: RunConfig, environment: Environment, tokenizer: Any, shape: ModelShape
) -> None:
    """Check that an environment can be pickled and works with the model and the options."""
    named = f"environment {environment.name!r}"
    check_picklable(named, environment.function)
    if environment.group_reward is not None:
        check_picklable(f"group_reward of {named}", environment.group_reward)
    for tool in environment.tools:
        check_picklable(f"a tool of {named}", tool)
    _check_context(config, shape.max_context, "the model's context")
    require(
        not config.rollout.replay_routing,
        "rollout.replay_routing",
        config.rollout.replay_routing,
        rule="episodes of flow.play do not record the experts of their tokens",
        fix="Use flow.generate, or rollout.replay_routing=False.",
    )
    ToolUse(environment, environment_template(environment, tokenizer), asyncio.to_thread)


def _check_context(config: RunConfig, num_tokens: int, whose: str) -> None:
    """Raise an InvalidValue if a whole episode does not fit into `num_tokens`."""
    max_prompt_tokens, max_tokens = config.data.max_prompt_tokens, config.sampling.max_tokens
    require(
        max_prompt_tokens + max_tokens <= num_tokens,
        "data.max_prompt_tokens",
        max_prompt_tokens,
        rule=f"with sampling.max_tokens={max_tokens} a whole episode exceeds the {num_tokens} "
        f"tokens of {whose}",
        fix="Lower one of them.",
    )


def _check_settings_of_tasks(data: DataConfig) -> None:
    """Raise an InvalidValue for options of prompts, which tasks of flow.play do not have."""
    default = DataConfig()
    for field, fix in (
        ("system_prompt", 'Use chat.system("...") in the environment.'),
        ("chat_template", "Environments use the chat template unless plain_text=True."),
        ("prompt_column", "The environment reads the columns of its task by name."),
        ("skip_long_prompts", "Remove long tasks from the dataset."),
    ):
        value = getattr(data, field)
        require(
            value == getattr(default, field),
            f"data.{field}",
            value,
            rule="applies to prompts, and flow.play has tasks",
            fix=fix,
        )


def _usable_paths(
    flow: Dataflow, tokenizer: Any, mistakes: ErrorCollector, lacking: list[str] | None
) -> set[str]:
    """Return the paths of other models that have a model with the policy's vocabulary.

    Missing models, other vocabularies and missing heads are added to `mistakes`, once per path and
    for the first model with this path. The empty path means the policy's weights.
    """
    usable, seen = {""}, {""}
    judges = {stage.model.name for stage in flow.all(JudgeStage)}  # they read text, not tokens
    played = [one for stage in flow.all(PlayStage) for one in stage.partners]
    partners = {model.name for model in played if not model.may_train}
    for name, model in flow.models.items():
        if model.config is None or name in judges | partners:
            continue
        path, setting = model.config.model.path, f"{name}.model.path"
        if path not in seen:
            seen.add(path)
            with mistakes.collect():
                check_vocabularies(tokenizer, {name: path})
                if model.head == "logits":
                    model_shape(path, setting=setting)
                usable.add(path)
        if path in usable and model.head != "logits":
            with mistakes.collect():
                if path:
                    check_scalar_head(path, fresh_head=model.may_train, setting=setting)
                elif not model.may_train:
                    missing = InvalidValue(
                        setting,
                        path,
                        rule=f"the policy's weights, which an empty path takes, have no trained "
                        f"{model.head} head",
                        fix="Give the directory of a model that has one, for example one that "
                        "recipes/reward_model.py made.",
                    )
                    if lacking is None:
                        raise missing
                    lacking.append(
                        f"{missing} If the recipe trains it before the run, ignore this warning. "
                        "This model is not part of the estimates."
                    )
    return usable


def _check_judge(stage: JudgeStage, shape: ModelShape) -> None:
    """Check that a judge has a model that generates, room for a question, and usable functions.

    `shape` is the policy's.
    """
    assert stage.model.config is not None
    path, setting = stage.model.config.model.path, f"{stage.model.name}.model.path"
    if path:
        shape = model_shape(path, setting=setting)
        load_tokenizer(path, setting=setting)
    require(
        stage.max_tokens < shape.max_context,
        f"flow.judge({stage.model.name!r}): max_tokens",
        stage.max_tokens,
        rule=f"leaves no room for a question in the judge's context of {shape.max_context} tokens",
        fix="Use less.",
    )
    for name, function in (("ask", stage.ask), ("parse", stage.parse)):
        check_picklable(f"flow.judge({stage.model.name!r}): {name} {name_of(function)}", function)


def _check_partner(
    config: RunConfig, stage: PlayStage, model: Model, tokenizer: Any, shape: ModelShape
) -> None:
    """Check that a model can play a seat: weights, context, precision and chat template.

    `tokenizer` and `shape` are the policy's.
    """
    role, environment = model.config, stage.environment
    assert role is not None
    path, setting = role.model.path, f"{model.name}.model.path"
    own = tokenizer
    if path:
        shape = model_shape(path, setting=setting)
        own = load_tokenizer(path, setting=setting)
    num_tokens = shape.max_context
    whose = f"the context of {model.name!r}, which plays a seat of {environment.name!r}"
    if isinstance(role, RoleConfig) and role.pass_tokens < num_tokens:
        num_tokens, whose = role.pass_tokens, f"{model.name}.pass_tokens, which you can increase"
    _check_context(config, num_tokens, whose)
    if isinstance(role, TrainedRoleConfig):  # its engines have the settings of the policy's
        check_quantized(config.rollout, role.model.dtype, f"{model.name}.model.dtype")
    require(
        model.may_train  # then it has the policy's tokens, and so its template
        or not environment.tools
        or environment.plain_text
        or own.chat_template == tokenizer.chat_template,
        setting,
        path,
        rule=f"has another chat template than the policy, in whose format {environment.name!r} "
        "calls its tools",
        fix="Give a model with the same template, or use an environment without tools.",
    )


def check_held_out(
    config: RunConfig, flow: Dataflow, held_out: HeldOut, tokenizer: Any, shape: ModelShape
) -> None:
    """Check that the evaluation during training has data and a score, and can be run.

    Raises:
        ValueError: A check failed.
    """
    every = config.evaluation.every
    if not every:
        return
    for played in flow.all(PlayStage):
        require(
            not played.seats,
            "evaluation.every",
            every,
            rule=f"only {flow.main.name!r} plays in an evaluation, and the seats "
            f"{[seat for seat, _ in played.seats]} of {played.environment.name!r} belong to other "
            "models",
            fix="Use evaluation.every=0.",
        )
    for field in ("source", "split"):
        value = getattr(config.evaluation, field)
        require(
            held_out.rows is None or value == getattr(HeldOutConfig(), field),
            f"evaluation.{field}",
            value,
            rule="has no effect, since the recipe makes its own held-out rows",
            fix="Remove the option.",
        )
    rewards, loss = rewards_of(flow, held_out), held_out_loss(config, flow)
    environment = environment_of(flow)
    if rewards:
        require(
            environment is None,
            "HeldOut.rewards",
            [one.name for one in as_rewards(rewards)],
            rule="these score completions, but episodes of flow.play have the reward of their "
            "environment",
            fix="Leave the rewards out, or return further metrics from the environment.",
        )
    require(
        bool(rewards) or loss is not None or environment is not None,
        "evaluation.every",
        every,
        rule="there is no score: the dataflow has no flow.score or flow.play, and its loss uses "
        "more than the completions of a dataset",
        fix="Give launch(held_out=rlsys.HeldOut(rewards=[...])), or use evaluation.every=0.",
    )
    require(
        flow.main.head == "logits" or not rewards,
        "evaluation.every",
        every,
        rule=f"{flow.main.name!r} cannot generate completions, since its head is "
        f"{flow.main.head!r}",
        fix="Give HeldOut no rewards, or use evaluation.every=0.",
    )
    has_split = flow.source.prompts.rows is None and (
        may_have_splits(config.data.source) or "[" in config.evaluation.split
    )
    require(
        held_out.rows is not None or bool(config.evaluation.source) or has_split,
        "evaluation.every",
        every,
        rule="there is no held-out data",
        fix="Give a file or dataset as evaluation.source, or rows as "
        "launch(held_out=rlsys.HeldOut(rows=...)).",
    )
    evaluated = evaluation_config(config, config.model.path)
    if rewards:
        pack_rewards(rewards)  # raises if a function cannot be pickled
    if environment is not None:
        held_out_tasks(evaluated, environment, held_out.rows, of_a_run=True)
    if loss is not None:
        loss.prompts(evaluated, tokenizer, held_out.rows)
    if rewards:
        held_out_prompts(
            evaluated,
            tokenizer,
            shape.max_context,
            as_rewards(rewards),
            held_out.rows,
            of_a_run=True,
        )


def check_warm_start(warm_start: WarmStart | None, tokenizer: Any) -> None:
    """Check the first batch of a warm start.

    Raises:
        ValueError: Its examples are invalid or cannot be encoded.
    """
    if warm_start is None or not warm_start.num_steps:
        return
    encode_examples(TokenizerBoundary(tokenizer), warm_start.batch(1), step=1)
