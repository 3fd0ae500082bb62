"""Checks of the arguments of single stages: types, ranges, functions and their columns.

Rules that need other stages are in validation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlsys.common.user_functions import is_deferred, misfit, name_of
from rlsys.config import JudgeConfig, RoleConfig
from rlsys.config.checks import check_at_least, check_vllm_temperature
from rlsys.config.fields import checked
from rlsys.dataflow.graph.stages import (
    PROMPT_COLUMN,
    PROXIMAL_COLUMN,
    ROW_COLUMNS,
    SAMPLER_COLUMN,
    Column,
    Episodes,
    Head,
    Model,
    PerBatchStage,
    Prompts,
    names_of,
)
from rlsys.environments.environment import Environment
from rlsys.errors import InvalidValue, require
from rlsys.rewards.reward import takes_rollout

if TYPE_CHECKING:  # --help of a recipe must not import torch, which takes seconds
    from rlsys.algorithms.registry import Kind

# By a model's output per row: the kind of losses that train it, and their argument.
LOSSES: dict[Head, tuple[Kind, str]] = {
    "logits": ("loss", "LossInputs"),
    "value": ("value_loss", "ValueInputs"),
    "score": ("score_loss", "ScoreInputs"),
}


def check_type(stage: str, argument: str, given: Any, kind: Any, expected: str) -> None:
    """Raise InvalidValue unless `given` is of a class, or one of several classes."""
    field = f"flow.{stage}: {argument}"
    require(
        isinstance(given, kind) or not isinstance(given, Environment),
        field,
        getattr(given, "name", given),
        rule="is an environment",
        fix="Play it: flow.play(policy, environment, tasks, group_size=...).",
    )
    rule = f"has the type {type(given).__name__}"
    require(isinstance(given, kind), field, given, rule=rule, fix=f"Give {expected}.")


def check_prompts(stage: str, argument: str, prompts: Any) -> None:
    """Raise InvalidValue for anything but a Prompts object."""
    expected = "Prompts(config=cfg.data), with rows=... for rows of your own"
    check_type(stage, argument, prompts, Prompts, expected)


def check_not_shared(stage: str, prompts: Prompts) -> None:
    """Raise InvalidValue for prompts that include groups of other runs."""
    require(
        prompts.shared is None,
        f"flow.{stage}: Prompts.shared",
        rule="this stage has no groups that other runs share",
        fix="Leave Prompts.shared out.",
    )


def check_columns(stage: str, argument: str, columns: Any) -> None:
    """Raise InvalidValue for anything but a list or tuple of columns."""
    field = f"flow.{stage}: {argument}"
    require(
        isinstance(columns, list | tuple),
        field,
        columns,
        rule="is not a list of columns",
        fix="Give a list, such as [reward].",
    )
    require(
        not any(isinstance(one, Episodes) for one in (columns, *columns)),
        field,
        rule="is everything that flow.play returns",
        fix="Give a part of it: episodes.rollouts, or a column such as episodes.reward.",
    )
    for column in columns:
        require(
            isinstance(column, Column),
            field,
            column,
            rule="is not a column",
            fix="Give what another stage returns (flow.generate, flow.dataset and flow.per_batch "
            "return a tuple of columns).",
        )


def check_names(stage: str, argument: str, names: Any, example: str) -> None:
    """Raise InvalidValue for anything but a list of different, non-empty names."""
    require(
        isinstance(names, list | tuple)
        and all(isinstance(name, str) and name for name in names)
        and len(set(names)) == len(names),
        f"flow.{stage}: {argument}",
        names,
        rule="is not a list of different names",
        fix=f"Give a list such as {[example]}.",
    )


def check_rollouts(stage: str, rollouts: Any) -> None:
    """Raise InvalidValue for columns that are not complete rollouts."""
    check_columns(stage, "rollouts", rollouts)
    missing = [name for name in ROW_COLUMNS if name not in names_of(rollouts)]
    require(
        not missing,
        f"flow.{stage}: rollouts",
        [*names_of(rollouts)],
        rule=f"the columns {missing} are missing",
        fix="Give all that flow.generate or flow.dataset returns.",
    )


def check_group_size(stage: str, group_size: int) -> None:
    """Raise InvalidValue for a group size that is not a positive integer."""
    field = f"flow.{stage}: group_size"
    checked(group_size, int, field)
    check_at_least(field, group_size, 1)


def check_sampler(stage: str, model: Model) -> None:
    """Raise InvalidValue for a model that the replicas do not sample."""
    require(
        model.is_main and model.head == "logits",
        f"flow.{stage}: model",
        model.name,
        rule=f"only the main language model samples; this one has head {model.head!r} and "
        f"{'no' if model.is_main else 'a'} configuration of its own",
        fix='Give flow.model("policy").',
    )


def check_greedy_baseline(group_size: int, greedy_baseline: bool, prompts: Prompts) -> None:
    """Raise InvalidValue for a greedy baseline that cannot be sampled or compared with."""
    field = "flow.generate: greedy_baseline"
    checked(greedy_baseline, bool, field)
    require(
        group_size >= 2 or not greedy_baseline,
        "flow.generate: group_size",
        group_size,
        rule="counts the greedy rollout, which is not trained on",
        fix="Use at least 2 with greedy_baseline=True.",
    )
    require(
        not (greedy_baseline and prompts.may_be_external),
        field,
        greedy_baseline,
        rule="groups that other runs share have no greedy rollout",
        fix="Leave Prompts.shared out, or greedy_baseline.",
    )


def check_parts_of_play(parts: Sequence[str], own_columns: set[str]) -> None:
    """Raise InvalidValue for parts with the names of other columns of the stage."""
    check_names("play", "parts", parts, "calls")
    clash = sorted(own_columns.intersection(parts))
    require(
        not clash,
        "flow.play: parts",
        clash,
        rule="the stage writes columns of these names itself",
        fix="Use other names for the numbers that the environment returns or gives to chat.reward.",
    )


def check_infer(model: Model, rollouts: Any, *, top_k: int, adapters: bool) -> None:
    """Raise InvalidValue for arguments that flow.infer cannot use."""
    require(
        not isinstance(model.config, JudgeConfig),
        "flow.infer: model",
        model.name,
        rule="has a JudgeConfig, which is for models that generate",
        fix="Give flow.model a RoleConfig, or use flow.judge.",
    )
    check_rollouts("infer", rollouts)
    field = "flow.infer: top_k"
    checked(top_k, int, field)
    check_at_least(field, top_k, 0, fix="Use 0 for none.")
    require(
        not top_k or (model.head == "logits" and not model.may_train),
        field,
        top_k,
        rule=f"only a frozen language model gives its likeliest tokens, and {model.name!r} is none",
        fix="Give flow.model a RoleConfig and no head.",
    )
    field = "flow.infer: adapters"
    checked(adapters, bool, field)
    require(
        adapters or (model.head == "logits" and model.may_train),
        field,
        adapters,
        rule=f"{model.name!r} is no trained language model, which could leave its adapters out",
        fix="Leave adapters out.",
    )


def check_rewards(rewards: Any) -> None:
    """Raise InvalidValue for anything but a non-empty list of rewards."""
    require(
        isinstance(rewards, Sequence) and not isinstance(rewards, str),
        "flow.score: rewards",
        rewards,
        rule="is not a list",
        fix="Give a list, such as [correct].",
    )
    require(
        len(rewards) > 0,
        "flow.score: rewards",
        rewards,
        rule="is empty",
        fix="Give at least one reward function.",
    )


def check_parts_of_score(parts: Any, rewards: Sequence[str]) -> None:
    """Raise InvalidValue for parts that none of the named rewards returns."""
    check_names("score", "parts", parts, rewards[0])
    for part in parts:
        require(
            part.partition("/")[0] in rewards,
            "flow.score: parts",
            part,
            rule=f"is none of the rewards {[*rewards]}",
            fix="Give the name of one of them, or 'name/key' for a part of its dictionary.",
        )


def check_function(stage: str, argument: str, given: Any, *kinds: Kind) -> None:
    """Raise InvalidValue for a value that is not a plain function of tensors.

    Functions of rlsys must be of one of these kinds. A user's function may be any.
    """
    field = f"flow.{stage}: {argument}"
    require(
        callable(given),
        field,
        given,
        rule="is not a function",
        fix="Turn names into functions with rlsys.algorithms.registry.parse.",
    )
    name = name_of(given)
    rule = "is a class and not an object of it"
    require(not isinstance(given, type), field, name, rule=rule, fix=f"Give {name}(...).")
    _check_not_deferred(field, given)
    require(
        not takes_rollout(given),
        field,
        name,
        rule="is a reward function, which takes a rollout",
        fix="Give it to flow.score, and a function of tensors here.",
    )
    from rlsys.algorithms.registry import check_kind

    check_kind(f"flow.{stage}", given, argument, kinds)


def check_group_columns(function: Callable[..., Any], columns: Sequence[Column]) -> None:
    """Raise InvalidValue for columns with a value per token."""
    for column in columns:
        require(
            column.per == "row",
            f"flow.per_group({name_of(function)})",
            column.name,
            rule="the column has a value per token; a function over a group takes one per row",
            fix="Use flow.per_batch, whose functions get tokens too.",
        )


def check_batch_columns(function: Callable[..., Any], columns: Sequence[Column]) -> None:
    """Raise InvalidValue for columns that a function over a step cannot use."""
    field = f"flow.per_batch({name_of(function)})"
    require(
        PROMPT_COLUMN not in names_of(columns),
        field,
        PROMPT_COLUMN,
        rule="a function over a step gets the tokens of completions, not of prompts",
        fix="Leave the column out.",
    )
    from rlsys.algorithms.registry import needs_row_offsets

    require(
        not needs_row_offsets(function) or any(column.per == "token" for column in columns),
        field,
        [*names_of(columns)],
        rule="the function works along tokens, and these columns have a value per row",
        fix="Give it a column with a value per token, such as the values that flow.infer writes.",
    )


def check_batch_stage(stage: PerBatchStage) -> None:
    """Raise InvalidValue for a function that does not take the columns of its stage."""
    from rlsys.algorithms.batch_functions import check_batch_function

    check_batch_function(stage.function, len(stage.reads), has_tokens=stage.has_tokens)


def check_controller(controller: Any, column: Any) -> None:
    """Raise InvalidValue for arguments that flow.control cannot use."""
    require(
        callable(getattr(controller, "next", None)) and hasattr(controller, "initial"),
        "flow.control: controller",
        controller,
        rule="has no attributes initial and next",
        fix="Give a controller such as rlsys.algorithms.adaptive_kl(0.2, target=6.0).",
    )
    check_columns("control", "column", [column])
    require(
        column.per == "row",
        "flow.control: column",
        column.name,
        rule="has a value per token",
        fix='Make one value per row with flow.per_batch(..., per="row").',
    )


def check_judge(model: Model, *, ask: Any, parse: Any, max_tokens: int, temperature: float) -> None:
    """Raise InvalidValue for a model that is no judge, and for questions that it cannot answer."""
    stage = f"flow.judge({model.name!r})"
    role = _generating_role(stage, "a judge", model)
    field = f"{stage}: max_tokens"
    checked(max_tokens, int, field)
    require(
        1 <= max_tokens < role.pass_tokens,
        field,
        max_tokens,
        rule=f"must be from 1 to {role.pass_tokens - 1}, since pass_tokens={role.pass_tokens} "
        "includes the question",
        fix="Use one of these, or raise pass_tokens.",
    )
    field = f"{stage}: temperature"
    checked(temperature, float, field)
    check_at_least(field, temperature, 0, fix="Use 0 for the likeliest tokens.")
    if temperature and isinstance(role, JudgeConfig) and role.engine == "vllm":
        check_vllm_temperature(field, temperature)
    check_text_function(f"{stage}: ask", ask, "a rollout")
    check_text_function(f"{stage}: parse", parse, "the reply")


def check_seats(environment: Environment, seats: Any) -> None:
    """Raise InvalidValue for unknown seats, and for models that cannot play one.

    At least one seat must be left to the policy.
    """
    require(
        isinstance(seats, Mapping),
        "flow.play: seats",
        seats,
        rule="is not a mapping",
        fix="Give models by the names of their seats, such as seats={'second': opponent}.",
    )
    environment.check_seats("flow.play: seats", seats)
    for name, model in seats.items():
        stage = f"flow.play(seats={{{name!r}: ...}})"
        check_type(stage.removeprefix("flow."), "model", model, Model, "what flow.model returns")
        field = f"{stage}: model"
        require(
            not model.is_main,
            field,
            model.name,
            rule="plays every seat without another model",
            fix="Leave the seat out.",
        )
        if model.may_train:
            require(
                model.head == "logits",
                field,
                model.name,
                rule=f"a model that plays writes text, and this one has head {model.head!r}",
                fix="Leave head out.",
            )
            continue
        role = _generating_role(stage, "a model that plays", model)
        require(
            role.num_workers == 1,
            f"{stage}: num_workers of {model.name!r}",
            role.num_workers,
            rule="one engine of it runs besides each replica of the policy (rollout.num_replicas)",
            fix="Use 1.",
        )


def check_text_function(field: str, function: Any, takes: str) -> None:
    """Raise InvalidValue for anything but a plain function of one argument, `takes` in words."""
    require(
        callable(function) and not isinstance(function, type),
        field,
        function,
        rule="is not a function",
        fix=f"Give a function of {takes}.",
    )
    _check_not_deferred(field, function)
    _check_arguments(field, function, None, takes=f"{takes} only")


def check_train(
    model: Model,
    rollouts: Any,
    columns: Any,
    *,
    loss: Any,
    aggregation: Any,
    watch: Any,
    group_size: int,
) -> None:
    """Raise InvalidValue for arguments that flow.train cannot use."""
    check_rollouts("train", rollouts)
    check_columns("train", "columns", columns)
    check_columns("train", "watch", watch)
    _check_loss(loss, model.head)
    check_function("train", "aggregation", aggregation, "aggregation")
    takes = "(group_size, group_num_tokens, row_num_tokens) only"
    _check_arguments("flow.train: aggregation", aggregation, 1, 1, 1, takes=takes)
    _check_pairs(loss, aggregation, group_size)
    require(
        model.may_train,
        "flow.train: model",
        model.name,
        rule="has no trainer",
        fix="Give flow.model a TrainedRoleConfig.",
    )
    _check_columns_of_loss(model, rollouts, columns, loss)


def _check_loss(loss: Any, head: Head) -> None:
    kind, inputs = LOSSES[head]
    check_function("train", "loss", loss, kind)
    _check_arguments("flow.train: loss", loss, None, takes=f"{inputs} only")
    from rlsys.algorithms.loss_inputs import check_attributes

    check_attributes(loss)


def _check_pairs(loss: Callable[..., Any], aggregation: Callable[..., Any], size: int) -> None:
    """Raise InvalidValue for a loss of pairs without pairs, or without a mean over them.

    A user's aggregation may be any.
    """
    from rlsys.algorithms.aggregation import sequence_mean
    from rlsys.algorithms.loss_inputs import of_pairs
    from rlsys.algorithms.registry import comes_with_rlsys

    if not of_pairs(loss):
        return
    require(
        aggregation is sequence_mean or not comes_with_rlsys(aggregation),
        "flow.train: aggregation",
        name_of(aggregation),
        rule=f"{name_of(loss)} has the loss of a pair at each of its tokens, which this does not "
        "average over pairs",
        fix="Use aggregation=sequence_mean.",
    )
    require(
        size == 2,
        "flow.train: group_size",
        size,
        rule=f"{name_of(loss)} compares the two rows of a pair",
        fix="Use group_size=2.",
    )


def _check_columns_of_loss(
    model: Model, rollouts: Sequence[Column], columns: Sequence[Column], loss: Callable[..., Any]
) -> None:
    """Raise InvalidValue unless a loss gets the columns that it reads, and no others."""
    from rlsys.algorithms.loss_inputs import candidates_of, needs_of, required_columns

    field = f"flow.train({model.name!r}): columns"
    name = name_of(loss)
    required = required_columns(loss) if model.head == "logits" else needs_of(loss)
    require(
        SAMPLER_COLUMN not in required or SAMPLER_COLUMN in names_of(rollouts),
        "flow.train: loss",
        name,
        rule="compares the policy with the sampling policy, which a dataset does not have",
        fix="Use a loss without advantages, such as one of rlsys.algorithms.preferences.",
    )
    needs = [one for one in required if one != SAMPLER_COLUMN]
    of_candidates = candidates_of(loss)
    for column in columns:
        is_wide = column.width > 1
        takes = "the likeliest tokens" if column.name == of_candidates else "one value per token"
        require(
            is_wide == (column.name == of_candidates),
            field,
            column.name,
            rule=f"{name} takes {takes} of this column, which has {column.width} values per token",
            fix=f"{'Leave top_k out of' if is_wide else 'Set top_k=16 in'} flow.infer.",
        )
    given = names_of(columns)
    missing = [one for one in needs if one not in given]
    require(
        not missing,
        field,
        sorted(given),
        rule=f"{name} needs the columns {missing}",
        fix="Add the stages that write them, and give their columns.",
    )
    reads = {*needs, PROXIMAL_COLUMN} if model.head == "logits" else {*needs}
    unread = [one for one in given if one not in reads]
    require(
        not unread,
        field,
        unread,
        rule=f"{name} does not read these columns",
        fix="Leave them out, give them in watch=[...] for the metrics, or use a loss that reads "
        "them (your own needs an attribute `needs`).",
    )


def _generating_role(stage: str, what: str, model: Model) -> RoleConfig:
    """Return the configuration of a frozen model that generates text.

    Raises InvalidValue for any other model.
    """
    role = model.config
    if not isinstance(role, RoleConfig):
        raise InvalidValue(
            f"{stage}: model",
            model.name,
            rule=f"{what} is a frozen model of its own",
            fix="Give flow.model a RoleConfig; an empty path takes the initial weights of the "
            "policy.",
        )
    require(
        model.head == "logits",
        f"{stage}: head",
        model.head,
        rule=f"{what} writes text, which takes head 'logits'",
        fix="Leave head out, or run the model with flow.infer.",
    )
    require(
        role.num_gpus in (0, 1),
        f"{stage}: num_gpus",
        role.num_gpus,
        rule=f"{what} generates on one device and keeps its weights there",
        fix="Use 0 or 1.",
    )
    return role


def _check_not_deferred(field: str, function: Callable[..., Any]) -> None:
    require(
        not is_deferred(function),
        field,
        name_of(function),
        rule="is an async function or a generator, whose call computes nothing yet",
        fix="Give a plain function that returns its values.",
    )


def _check_arguments(
    field: str, function: Callable[..., Any], *arguments: object, takes: str
) -> None:
    error = misfit(function, *arguments)
    count = "one argument" if len(arguments) == 1 else f"{len(arguments)} arguments"
    require(
        error is None,
        field,
        name_of(function),
        rule=f"does not take {count} ({error})",
        fix=f"Let it take {takes}, and bind other arguments with functools.partial.",
    )
