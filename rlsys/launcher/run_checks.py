"""Checks of a run's parts against each other: configuration, graph, models, functions and data.

In: the parts. Each check that does not depend on another adds its mistakes to an ErrorCollector.
`preflight` calls them. Rules about the configuration alone are in rlsys.config, rules about the
graph alone in rlsys.dataflow.graph.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlsys.common.user_functions import name_of
from rlsys.config import (
    DataConfig,
    ModelConfig,
    RoleConfig,
    RunConfig,
    TrainedRoleConfig,
    check_quantized,
    check_sent_adapters,
)
from rlsys.config.layout_fits_model import check_fits, check_replica_fits
from rlsys.config.lora import check_lora
from rlsys.data.prompts import load_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.data.vocabulary_check import check_vocabularies, check_vocabulary
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    DatasetStage,
    GenerateStage,
    InferStage,
    JudgeStage,
    Model,
    PlayStage,
    ScoreStage,
)
from rlsys.engines.generation.interruption import interruption_of
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.engines.models.scalar_lm import check_scalar_head
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import codec_of, environment_template
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.errors import ErrorCollector, InvalidValue, require
from rlsys.rewards import pack_rewards
from rlsys.rewards.process.reward_pickle import check_picklable
from rlsys.runs.observe.trackers.tracker_kinds import check_trackers


def check_run(
    config: RunConfig,
    flow: StageGraph,
    tokenizer: Any,
    shape: ModelShape,
    mistakes: ErrorCollector,
    lacking: list[str] | None = None,
) -> None:
    """Check configuration, graph, models and functions against each other.

    The mistakes are added to `mistakes`. `preflight` explains `lacking`.
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
    with mistakes.collect():
        require(
            not config.rollout.borrow
            or (isinstance(flow.source, GenerateStage) and not flow.all(PlayStage)),
            "rollout.borrow",
            config.rollout.borrow,
            rule="only sampled completions can move between replicas, not the episodes of an "
            "environment or the rows of a dataset",
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


def _check_main_model(
    config: RunConfig, flow: StageGraph, tokenizer: Any, shape: ModelShape, mistakes: ErrorCollector
) -> None:
    """Check the policy against tokenizer, layouts, adapters and head."""
    with mistakes.collect():
        check_vocabulary(tokenizer, shape.config.get_text_config().vocab_size, config.model.path)
    for layout in config.trainer.layouts:
        with mistakes.collect():
            check_fits(layout, shape.config)
    with mistakes.collect():
        check_replica_fits(config.rollout.tensor_parallel, shape.config)
    with mistakes.collect():
        check_lora(config.model.lora, shape.linear_layers)
    with mistakes.collect():
        if flow.main.head != "logits" and config.model.path:
            check_scalar_head(config.model.path, fresh_head=True)


def _check_other_models(
    config: RunConfig,
    flow: StageGraph,
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
                for layout in role.trainer.layouts:
                    check_fits(layout, own.config, setting=f"{name}.trainer.layout")
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
        with mistakes.collect():
            trained = [one.name for one in played.partners if one.may_train]
            require(
                not config.rollout.urls or not trained,
                "rollout.urls",
                config.rollout.urls,
                rule=f"servers have the policy's weights, and {trained} need engines of their own",
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


def check_prompts(
    config: RunConfig,
    flow: StageGraph,
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
    tools = ToolUse(environment, environment_template(environment, tokenizer), asyncio.to_thread)
    codec_of(environment, tokenizer).check_template(tools.schemas)


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
    flow: StageGraph, tokenizer: Any, mistakes: ErrorCollector, lacking: list[str] | None
) -> set[str]:
    """Return the paths of other models that have a model with the policy's vocabulary.

    Missing models, other vocabularies and missing heads are added to `mistakes`, once per path and
    for the first model with this path. The empty path means the policy's weights.
    """
    usable, seen = {""}, {""}
    judges = {stage.model.name for stage in flow.all(JudgeStage)}  # they read text, not tokens
    partners = {model.name for model in flow.partners if not model.may_train}
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
        if config.rollout.sends_adapters and role.model.lora:
            check_sent_adapters(role.model.adapters, f"{model.name}.model.lora")
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
