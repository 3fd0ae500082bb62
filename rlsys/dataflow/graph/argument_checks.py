"""What a recipe gives to the graph's methods: refused, by name, where no stage could use it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlsys.common.user_functions import is_deferred, misfit, name_of
from rlsys.config import VLLM_TEMPERATURES, JudgeConfig, RoleConfig, require
from rlsys.config.fields import checked
from rlsys.dataflow.graph.stages import (
    IMPLICIT_COLUMNS,
    IS_GREEDY,
    PREFERENCE,
    ROW_COLUMNS,
    Column,
    DatasetStage,
    Episodes,
    GenerateStage,
    Head,
    Model,
    Stage,
    names_of,
)
from rlsys.environments.environment import Environment
from rlsys.rewards.reward import takes_rollout

if TYPE_CHECKING:  # a recipe's --help does without torch, whose import takes seconds
    from rlsys.algorithms.registry import Kind

# By what a model makes of a row, the kind of losses that train it, and what they are called with.
LOSSES: dict[Head, tuple[Kind, str]] = {
    "logits": ("loss", "LossInputs"),
    "value": ("value_loss", "ValueInputs"),
    "score": ("score_loss", "ScoreInputs"),
}


def check_is(stage: str, what: str, given: Any, kind: Any, fix: str) -> None:
    """`kind`: the class, or classes, of what a stage can use."""
    require(
        isinstance(given, kind) or not isinstance(given, Environment),
        f"flow.{stage} is given environment {getattr(given, 'name', '')!r} for its {what}; "
        "environments are played: flow.play(policy, environment, tasks, group_size=...).",
    )
    require(
        isinstance(given, kind),
        f"flow.{stage} is given {reprlib.repr(given)} for its {what}; give {fix}.",
    )


def check_columns(stage: str, *lists: Sequence[Any]) -> None:
    for columns in lists:
        require(
            isinstance(columns, list | tuple),
            f"flow.{stage} is given {columns!r} for a list of columns; give one, such as [reward].",
        )
        require(
            not any(isinstance(one, Episodes) for one in (columns, *columns)),
            f"flow.{stage} is given all that flow.play returns; give what it needs of that: "
            "episodes.rollouts, or a column such as episodes.reward.",
        )
        for column in columns:
            require(
                isinstance(column, Column),
                f"flow.{stage} is given {reprlib.repr(column)} for a column; give what another "
                "stage returns (flow.generate, flow.dataset and flow.per_batch return a tuple of "
                "columns).",
            )


def check_names(told: str, names: Any, *example: str) -> None:
    """`told`: what was called, up to where the names stand."""
    require(
        isinstance(names, list | tuple)
        and all(isinstance(name, str) and name for name in names)
        and len(set(names)) == len(names),
        f"flow.{told}{names!r}) is no list of different names; give one such as {[*example]}.",
    )


def check_rollouts(stage: str, rollouts: Sequence[Any]) -> None:
    check_columns(stage, rollouts)
    lacks = [name for name in ROW_COLUMNS if name not in {column.name for column in rollouts}]
    require(
        not lacks,
        f"flow.{stage} is given {[column.name for column in rollouts]} for rollouts, without "
        f"{lacks}; give all that flow.generate or flow.dataset returns.",
    )


def check_read(loss: Callable[..., Any], columns: Sequence[Column], reads: set[str]) -> None:
    """`reads`: what the loss says that it does."""
    unread = [column.name for column in columns if column.name not in reads]
    require(
        not unread,
        f"flow.train: {name_of(loss)} does not read the columns {unread}, so that they would "
        "change nothing; leave them out, name them in watch=[...] for the metrics alone, or give "
        "a loss that reads them (of your own, with an attribute `needs`).",
    )


def check_function(stage: str, what: str, given: Any, *kinds: Kind) -> None:
    """`kinds`: of those that come with rlsys; a function of the user's own may be any."""
    require(
        callable(given),
        f"flow.{stage} is given {given!r} for its {what}, which is no function; names of functions "
        "become functions with rlsys.algorithms.registry.parse.",
    )
    require(
        not isinstance(given, type),
        f"flow.{stage} is given the class {getattr(given, '__name__', given)} for its {what}; make "
        f"one of it: {getattr(given, '__name__', given)}(...).",
    )
    require(
        not is_deferred(given),
        f"flow.{stage} is given {name_of(given)} for its {what}, an async function or a generator, "
        "whose call computes nothing yet; give a plain function that returns its values.",
    )
    require(
        not takes_rollout(given),
        f"flow.{stage} is given {name_of(given)} for its {what}, a reward, which takes a rollout; "
        "give that to flow.score, and here a function of tensors.",
    )
    from rlsys.algorithms.registry import check_kind

    check_kind(f"flow.{stage}", given, what, kinds)


def check_judge(model: Model, *, max_tokens: int, temperature: float) -> None:
    """Raise ValueError for a model that is no judge, and for replies that it could not write."""
    told = f"flow.judge({model.name!r})"
    role = _writer(told, "a judge", model)
    checked(max_tokens, int, f"{told}: max_tokens")
    require(
        1 <= max_tokens < role.pass_tokens,
        f"{told}: max_tokens={max_tokens} lies outside 1 to {role.pass_tokens - 1}, what "
        "pass_tokens leaves for a reply beside its question; use one of these, or raise "
        "pass_tokens.",
    )
    checked(temperature, float, f"{told}: temperature")
    require(
        temperature >= 0,
        f"{told}: temperature={temperature} is negative; use 0 for the likeliest tokens.",
    )
    lowest, highest = VLLM_TEMPERATURES
    uses_vllm = isinstance(role, JudgeConfig) and role.engine == "vllm"
    require(
        not temperature or not uses_vllm or lowest <= temperature <= highest,
        f"{told}: temperature={temperature}, and vLLM samples from {lowest} to {highest}; use one "
        "of these, or 0.",
    )


def _writer(told: str, what: str, model: Model) -> RoleConfig:
    """The configuration of a frozen model that writes. Raises ValueError for one that does not."""
    role = model.config
    if not isinstance(role, RoleConfig):
        raise ValueError(
            f"{told}: {what} is a frozen model beside those that are trained; give flow.model a "
            "RoleConfig, whose empty path takes the policy's weights of the beginning."
        )
    require(
        model.head == "logits",
        f"{told}: {what} writes its reply, which takes head 'logits', and this model has "
        f"{model.head!r}; leave head out, or run it with flow.infer.",
    )
    require(
        role.num_gpus in (0, 1),
        f"{told}: num_gpus={role.num_gpus:g}; {what} keeps its weights on its device, and "
        "generates on one: use 0 or 1.",
    )
    return role


def check_seats(environment: Environment, seats: Any) -> None:
    """Raise ValueError for seats that the environment does not have, for models that cannot play
    one, and where none is left to the policy.
    """
    require(
        isinstance(seats, Mapping),
        f"flow.play(seats={reprlib.repr(seats)}) is no mapping; give the models by the names of "
        "their seats, such as seats={'second': opponent}.",
    )
    environment.check_seats("flow.play: seats", seats)
    for name, model in seats.items():
        told = f"flow.play(seats={{{name!r}: ...}})"
        check_is(told.removeprefix("flow."), "model", model, Model, "what flow.model returns")
        require(
            not model.is_main,
            f"{told}: {model.name!r} plays every seat that is not another model's; leave it out.",
        )
        if model.may_train:
            require(
                model.head == "logits",
                f"{told}: {model.name!r} has head {model.head!r}; who plays a seat writes, which "
                "takes head 'logits': leave head out.",
            )
            continue
        role = _writer(told, "who plays a seat beside the policy", model)
        require(
            role.num_workers == 1,
            f"{told}: num_workers={role.num_workers} of {model.name!r}; one engine of it stands "
            "beside each replica of the policy (rollout.num_replicas): use 1.",
        )


def check_text_function(told: str, function: Any, takes: str) -> None:
    """`told`: what it is given to; `takes`: its one argument, in words."""
    require(
        callable(function) and not isinstance(function, type),
        f"{told} is given {reprlib.repr(function)}; give a function of {takes}.",
    )
    require(
        not is_deferred(function),
        f"{told} is given {name_of(function)}, an async function or a generator, whose call "
        "computes nothing yet; give a plain function.",
    )
    error = misfit(function, None)
    require(
        error is None,
        f"{told}: {name_of(function)} does not take one argument ({error}); let it take {takes} "
        "alone, and give it other values with functools.partial.",
    )


def check_tokens(function: Callable[..., Any], columns: Sequence[Column]) -> None:
    """Of functions that come with rlsys."""
    from rlsys.algorithms.registry import needs_row_offsets

    require(
        not needs_row_offsets(function) or any(column.per == "token" for column in columns),
        f"flow.per_batch({name_of(function)}) goes from token to token, and the columns "
        f"{[column.name for column in columns]} have a value per row; give it those of tokens, "
        "such as the values that flow.infer writes.",
    )


def check_loss(loss: Callable[..., Any], head: Head) -> None:
    kind, inputs = LOSSES[head]
    check_function("train", "loss", loss, kind)
    error = misfit(loss, None)
    require(
        error is None,
        f"flow.train: loss {name_of(loss)} does not take one argument ({error}); let it take "
        f"{inputs} alone, and give it other values with functools.partial.",
    )
    from rlsys.algorithms.loss_inputs import check_attributes

    check_attributes(loss)


def check_aggregation(aggregation: Callable[..., Any]) -> None:
    check_function("train", "aggregation", aggregation, "aggregation")
    error = misfit(aggregation, 1, 1, 1)
    require(
        error is None,
        f"flow.train: aggregation {name_of(aggregation)} does not take three numbers ({error}); "
        "let it take (group_size, group_num_tokens, row_num_tokens) alone.",
    )


def check_pairs(loss: Callable[..., Any], aggregation: Callable[..., Any]) -> None:
    """An aggregation of the user's own may be any."""
    from rlsys.algorithms.aggregation import sequence_mean
    from rlsys.algorithms.loss_inputs import of_pairs
    from rlsys.algorithms.registry import comes_with_rlsys

    require(
        not of_pairs(loss) or aggregation is sequence_mean or not comes_with_rlsys(aggregation),
        f"flow.train: {name_of(loss)} has the loss of a pair at each of its tokens, of which "
        f"{name_of(aggregation)} makes no mean over pairs; use aggregation=sequence_mean.",
    )


def check_group_size(stage: str, group_size: int) -> None:
    checked(group_size, int, f"flow.{stage}: group_size")
    require(
        group_size >= 1,
        f"flow.{stage}: group_size={group_size} makes no rows; use at least 1.",
    )


def check_stage(stage: Stage, earlier: Sequence[Stage]) -> None:
    """Raise ValueError for a stage that stands in the graph already, reads what none of the earlier
    ones writes, or writes what is written.
    """
    writers = {column.name: one.name for one in earlier for column in one.writes}
    require(
        stage.name not in [one.name for one in earlier],
        f"stage {stage.name!r} stands twice in the dataflow; give the second another name.",
    )
    # The rows of its groups have an order that means something.
    has_pairs = any(isinstance(one, DatasetStage) for one in earlier)
    has_greedy = any(isinstance(one, GenerateStage) and one.greedy_baseline for one in earlier)
    for column in stage.reads:
        require(
            column.name in writers or column in IMPLICIT_COLUMNS,
            f"stage {stage.name!r} reads column {column.name!r}, which no earlier stage "
            f"writes (written so far: {sorted(writers)}); add the stage that writes it first.",
        )
        require(
            column != PREFERENCE or has_pairs,
            f"stage {stage.name!r} reads PREFERENCE, which says that the first row of a pair "
            "is the better one, as it is in a dataset; of completions that a model samples, "
            "let a stage say which is: flow.per_group(function, reward, name='preference').",
        )
        require(
            column != IS_GREEDY or has_greedy,
            f"stage {stage.name!r} reads IS_GREEDY, and no rollout of this graph is greedy; "
            "use flow.generate(..., greedy_baseline=True).",
        )
    written = names_of(stage.writes)
    for column in stage.writes:
        require(
            isinstance(column.name, str) and bool(column.name),
            f"stage {stage.name!r} writes a column called {column.name!r}, which is no name; "
            "give one, such as 'values'.",
        )
        require(
            column.name not in names_of(IMPLICIT_COLUMNS)
            or (column.name == PREFERENCE.name and not has_pairs),
            f"stage {stage.name!r} writes column {column.name!r}, which every row has without "
            "a stage; give its column another name.",
        )
        other = stage.name if written.count(column.name) > 1 else writers.get(column.name)
        require(
            other is None,
            f"stage {stage.name!r} writes column {column.name!r}, as stage "
            f"{other!r} does; a column has one writer: rename one, with "
            "writes= (of flow.per_group: name=).",
        )
