"""What a run needs before Ray starts: its model, its prompts, and all that can be told about both.

configuration, graph, recipe's own model ─► read and checked ─► RowSource
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
    require,
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
    Head,
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
from rlsys.errors import ErrorCollector
from rlsys.evaluation.held_out import environment_of, evaluation_config, rewards_of
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.evaluation.held_out_loss import held_out_loss
from rlsys.evaluation.model_evaluation import held_out_prompts, held_out_tasks
from rlsys.launch.launching import WarmStart
from rlsys.launch.memory_estimate import check_store
from rlsys.launch.tiny_models import OwnModel
from rlsys.rewards import as_rewards, pack_rewards
from rlsys.rewards.process.reward_pickle import check_travels
from rlsys.runs.checkpoint import Checkpoint
from rlsys.text.tokenizer_boundary import TokenizerBoundary


def hub_of(config: RunConfig, flow: Dataflow) -> contextlib.AbstractContextManager[None]:
    roles = [model.config.model.path for model in flow.models.values() if model.config]
    names = [config.model.path, *filter(None, roles)]
    names += hub_names(config.data.source) + hub_names(config.evaluation.source)
    return offline_where_unreachable(*names)


def with_model(
    config: RunConfig, own_model: OwnModel | None, make: Callable[[OwnModel], Path]
) -> RunConfig:
    """The configuration with the path of the recipe's own model, where it names none."""
    if config.model.path:
        return config
    require(
        own_model is not None,
        "model.path is empty; give a Hugging Face model directory or hub name.",
    )
    assert own_model is not None
    return replace(config, model=replace(config.model, path=str(make(own_model))))


def models_written_since(checkpoint: Checkpoint, flow: Dataflow) -> list[str]:
    """What is told of frozen models that may be others than before, by the times of their files."""
    told = []
    written_s = checkpoint.path.stat().st_mtime
    for name, model in flow.models.items():
        if model.config is None or model.may_train or not model.config.model.path:
            continue
        files = Path(model.config.model.path).glob("*")
        if any(file.stat().st_mtime > written_s for file in files):
            told.append(
                f"{model.config.model.path} was written after {checkpoint.path}: if these are "
                f"other weights than before, the run goes on with another {name}"
            )
    return told


def load_prompts(
    config: RunConfig,
    flow: Dataflow,
    tokenizer: Any,
    shape: ModelShape,
    lacking: list[str] | None = None,
) -> RowSource:
    """The data, after all that can be told about it and the graph has been checked. Raises
    ValueError with every mistake that was found; but that a judge has no weights, which a recipe
    may make before its run, goes to `lacking` where there is such a list.
    """
    mistakes = ErrorCollector()
    num_tokens = shape.config.get_text_config().vocab_size
    with mistakes.collect():
        check_vocabulary(tokenizer, num_tokens, config.model.path)
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
                f"placement=colocated: {[one.name for one in played.partners]} play seats, and "
                "keep their engines' memory while the trainer has the devices of the replicas; "
                "leave placement out.",
            )
        for partner in played.partners:
            role = partner.config
            if isinstance(role, TrainedRoleConfig) and role.model.path not in usable:
                continue  # told already
            with mistakes.collect():
                _check_partner(config, played, partner, tokenizer, shape)
    for stage in flow.all(InferStage):
        with mistakes.collect():
            require(
                stage.top_k <= num_tokens,
                f"flow.infer({stage.model.name!r}, top_k={stage.top_k}) asks for more than the "
                f"{num_tokens} tokens of the vocabulary; use at most that.",
            )
            role = stage.model.config
            its = config.model if role is None else role.model
            require(
                stage.adapters or bool(isinstance(its, ModelConfig) and its.lora),
                f"flow.infer({stage.model.name!r}, adapters=False) leaves out adapters that the "
                "model does not have; set model.lora, or give flow.infer a reference of its own.",
            )
    with mistakes.collect():
        require(
            config.placement == "separate" or not isinstance(flow.source, DatasetStage),
            "placement=colocated: replicas that read a dataset have no model, and nothing to take "
            "turns for; leave it out.",
        )
    if (shared := flow.source.prompts.shared) is not None:
        with mistakes.collect():
            shared.check(config)
    with mistakes.collect():
        retire_at = flow.source.prompts.config.retire_at
        require(
            retire_at is None or bool(flow.all(ScoreStage) or flow.all(PlayStage)),
            f"data.retire_at={retire_at} goes by rewards, and the dataflow has no flow.score; "
            "leave it out.",
        )
    with mistakes.collect():
        flow.check_groups(config.group_size)
        flow.hold_proximal(config.trainer.updates_per_step)
        if config.rollout.replay_routing:
            routing = replayable_routing(shape.config)
            flow.replay_routing(routing.width, routing.dtype.itemsize)
        flow.check()
        check_store(config, flow)
    for scored in flow.all(ScoreStage):
        with mistakes.collect():
            pack_rewards(scored.rewards)  # raises for those that cannot travel
    for judged in flow.all(JudgeStage):
        with mistakes.collect():
            _check_judge(judged, shape)
    with mistakes.collect():
        interruption_of(config.sampling, tokenizer)
    prompts = None
    with mistakes.collect():
        prompts = _read_prompts(config, flow, tokenizer, shape)
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
    mistakes.raise_found()
    assert prompts is not None
    return prompts


def _read_prompts(
    config: RunConfig, flow: Dataflow, tokenizer: Any, shape: ModelShape
) -> RowSource:
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


def _check_environment(
    config: RunConfig, environment: Environment, tokenizer: Any, shape: ModelShape
) -> None:
    """Raise ValueError for an environment that cannot travel or has no use for this run's model."""
    named = f"environment {environment.name!r}"
    check_travels(named, environment.function)
    if environment.group_reward is not None:
        check_travels(f"group_reward of {named}", environment.group_reward)
    for tool in environment.tools:
        check_travels(f"a tool of {named}", tool)
    needed = config.data.max_prompt_tokens + config.sampling.max_tokens
    require(
        needed <= shape.max_context,
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} and sampling.max_tokens="
        f"{config.sampling.max_tokens}, of a whole episode, are more than the model's context of "
        f"{shape.max_context} tokens; lower one of them.",
    )
    require(
        not config.rollout.replay_routing,
        "rollout.replay_routing=True with flow.play: episodes do not keep which experts their "
        "tokens went to; use flow.generate, or replay_routing=False.",
    )
    ToolUse(environment, environment_template(environment, tokenizer), asyncio.to_thread)


def _check_settings_of_tasks(data: DataConfig) -> None:
    """Raise ValueError for what is said of prompts, where an environment makes its own."""
    default = DataConfig()
    for field, instead in (
        ("system_prompt", 'say it in the environment, with chat.system("...")'),
        ("chat_template", "environments follow the model's unless they say plain_text=True"),
        ("prompt_column", "the environment finds it in its task, by its name"),
        ("skip_long_prompts", "a task has no prompt; leave rows out yourself"),
    ):
        given = getattr(data, field)
        require(
            given == getattr(default, field),
            f"data.{field}={given!r} is of prompts, and flow.play has tasks: {instead}.",
        )


def _usable_paths(
    flow: Dataflow, tokenizer: Any, mistakes: ErrorCollector, lacking: list[str] | None
) -> set[str]:
    """Of the models beside the main one; an empty path takes the main one's weights. Notes a path
    that holds no model, one of another vocabulary, or one without the head of its role; what is
    wrong with a path of several roles is told of the first.
    """
    usable, seen = {""}, {""}
    # Which read text, not tokens:
    judges = {stage.model.name for stage in flow.all(JudgeStage)}
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
                    _note_no_head(setting, model.head, lacking)
    return usable


def _check_judge(stage: JudgeStage, shape: ModelShape) -> None:
    """Raise ValueError for a path without a model that writes, for replies that leave no room for a
    question, and for functions that cannot travel. `shape`: the main model's.
    """
    assert stage.model.config is not None
    path, setting = stage.model.config.model.path, f"{stage.model.name}.model.path"
    if path:
        shape = model_shape(path, setting=setting)
        load_tokenizer(path, setting=setting)
    require(
        stage.max_tokens < shape.max_context,
        f"flow.judge({stage.model.name!r}): max_tokens={stage.max_tokens} leaves no room for a "
        f"question in the judge's context of {shape.max_context} tokens; use less.",
    )
    for name, function in (("ask", stage.ask), ("parse", stage.parse)):
        check_travels(f"flow.judge({stage.model.name!r}): {name} {name_of(function)}", function)


def _check_partner(
    config: RunConfig, stage: PlayStage, model: Model, tokenizer: Any, shape: ModelShape
) -> None:
    """Raise ValueError for a model that cannot play a seat: without weights, with too short a
    context, in a precision that its engine does not quantize, or with another chat template where
    tools are called by the policy's. `tokenizer` and `shape` are the policy's.
    """
    role, environment = model.config, stage.environment
    assert role is not None
    path, setting = role.model.path, f"{model.name}.model.path"
    named = f"{model.name!r}, which plays a seat of environment {environment.name!r}"
    own = tokenizer
    if path:
        shape = model_shape(path, setting=setting)
        own = load_tokenizer(path, setting=setting)
    needed = config.data.max_prompt_tokens + config.sampling.max_tokens
    room, of_what = shape.max_context, "its context"
    if isinstance(role, RoleConfig) and role.pass_tokens < room:
        room, of_what = role.pass_tokens, "its pass_tokens, which you may raise"
    require(
        needed <= room,
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} and sampling.max_tokens="
        f"{config.sampling.max_tokens}, of a whole conversation, are more than the {room} tokens "
        f"of {named} ({of_what}); lower one of them.",
    )
    if isinstance(role, TrainedRoleConfig):  # whose engines are as the policy's
        check_quantized(config.rollout, role.model.dtype, f"{model.name}.model.dtype")
    require(
        model.may_train  # with the policy's tokens, and so its template
        or not environment.tools
        or environment.plain_text
        or own.chat_template == tokenizer.chat_template,
        f"{setting}={path!r} has another chat template than the policy, and {environment.name!r} "
        "has tools, whose calls are written as the policy's template does; give a model with the "
        "same template, or an environment without tools.",
    )


def _note_no_head(setting: str, head: Head, lacking: list[str] | None) -> None:
    told = (
        f"{setting} is empty, and the policy's weights, which it would take, have no trained "
        f"{head} head; give it the directory of a model that has one, such as "
        "recipes/reward_model.py makes"
    )
    require(lacking is not None, f"{told}.")
    assert lacking is not None
    lacking.append(f"{told}, or run a recipe that trains one first. It is not counted here.")


def check_held_out(
    config: RunConfig, flow: Dataflow, held_out: HeldOut, tokenizer: Any, shape: ModelShape
) -> None:
    """Raise ValueError for an evaluation that could not be done."""
    if not config.evaluation.every:
        return
    for played in flow.all(PlayStage):
        require(
            not played.seats,
            f"evaluation.every={config.evaluation.every} has {flow.main.name!r} play alone, and in "
            f"{played.environment.name!r} the seats {[seat for seat, _ in played.seats]} are other "
            "models'; use evaluation.every=0.",
        )
    require(
        held_out.rows is None or not config.evaluation.source,
        f"evaluation.source={config.evaluation.source!r} would not be read: the recipe makes its "
        "own held-out rows; leave it out.",
    )
    require(
        held_out.rows is None or config.evaluation.split == HeldOutConfig().split,
        f"evaluation.split={config.evaluation.split!r}: the recipe makes its own held-out rows. "
        "Remove the option.",
    )
    rewards, loss = rewards_of(flow, held_out), held_out_loss(config, flow)
    environment = environment_of(flow)
    if rewards:
        names = [one.name for one in as_rewards(rewards)]
        require(
            environment is None,
            f"HeldOut(rewards={names}) scores completions of prompts, and flow.play has tasks: its "
            "environment says what an episode is worth. Leave the rewards out, or return what they "
            "say from the environment, by a name of its own.",
        )
    require(
        bool(rewards) or loss is not None or environment is not None,
        f"evaluation.every={config.evaluation.every}, and nothing says what a model is told by: "
        "the dataflow has no flow.score or flow.play, and its loss is not of a dataset's "
        "completions alone. "
        "Give launch(held_out=rlsys.HeldOut(rewards=[...])), or use evaluation.every=0.",
    )
    require(
        flow.main.head == "logits" or not rewards,
        f"evaluation.every={config.evaluation.every} samples from {flow.main.name!r}, whose head "
        f"is {flow.main.head!r}; give HeldOut no rewards, or use evaluation.every=0.",
    )
    has_split = flow.source.prompts.rows is None and (
        may_have_splits(config.data.source) or "[" in config.evaluation.split
    )
    require(
        held_out.rows is not None or bool(config.evaluation.source) or has_split,
        f"evaluation.every={config.evaluation.every}, and nothing is held out: give a file or a "
        "dataset as evaluation.source, or rows as launch(held_out=rlsys.HeldOut(rows=...)).",
    )
    evaluated = evaluation_config(config, config.model.path)
    if rewards:
        pack_rewards(rewards)  # raises for those that cannot travel
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
    """Raise ValueError for a first lesson that cannot be taught."""
    if warm_start is None or not warm_start.num_steps:
        return
    encode_examples(TokenizerBoundary(tokenizer), warm_start.batch(1), step=1)
