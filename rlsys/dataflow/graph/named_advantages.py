"""Advantage functions that a configuration names, as stages of a graph.

    "opo_advantage" ──► parse ──► function ──► columns_of: reward, num_tokens ──► add_advantage

The names of the function's arguments are the columns that it reads: `rewards`, num_tokens,
truncated and is_greedy. A function that reads others, such as a critic's values, needs a recipe
with stages that write them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlsys.algorithms.batch_functions import GROUP_INDEX, TOKEN_FACTS
from rlsys.algorithms.group_functions import dynamic_sampling
from rlsys.algorithms.registry import Kind, kind_of
from rlsys.common.user_functions import name_of
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import IS_GREEDY, NUM_TOKENS, TRUNCATED, Column
from rlsys.errors import InvalidValue, require

ADVANTAGES: tuple[Kind, ...] = ("group_advantage", "batch_advantage", "token_advantage")


@contextmanager
def naming_option(option: str) -> Iterator[None]:
    """Put the name of an option in front of the mistakes that its block raises."""
    try:
        yield
    except InvalidValue as error:
        raise error.within(f"{option}: ") from None
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def needs_greedy(advantage: Callable[..., Any]) -> bool:
    """Return whether an advantage needs flow.generate(greedy_baseline=True)."""
    if isinstance(advantage, dynamic_sampling):
        return needs_greedy(advantage.advantage)
    return IS_GREEDY.name in inspect.signature(advantage).parameters


def add_advantage(flow: Dataflow, advantage: Callable[..., Any], reward: Column) -> Column:
    """Add the stage that computes an advantage, over each group or over the batch.

    `advantage` is a result of rlsys.algorithms.registry.parse for ADVANTAGES.

    Raises:
        InvalidValue: It reads other columns than the reward and the implicit ones.
    """
    columns = columns_of(advantage, reward)
    if kind_of(advantage) == "group_advantage":
        return flow.per_group(advantage, *columns)
    return flow.per_batch(advantage, *columns)[0]


def columns_of(advantage: Callable[..., Any], reward: Column) -> list[Column]:
    """Return the columns that an advantage reads, in the order of its arguments."""
    if isinstance(advantage, dynamic_sampling):
        columns = columns_of(advantage.advantage, reward)
        return [*columns, reward] if advantage.by_last_column else columns
    implicit = {column.name: column for column in (NUM_TOKENS, TRUNCATED, IS_GREEDY)}
    known = {"rewards": reward, **implicit}
    reads = [
        parameter.name
        for parameter in inspect.signature(advantage).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.name not in (GROUP_INDEX, *TOKEN_FACTS)
    ]
    unknown = [name for name in reads if name not in known]
    require(
        not unknown,
        f"arguments of {name_of(advantage)}",
        unknown,
        rule=f"a named advantage can read only {[*known]}",
        fix="Write a recipe with stages that write such columns (docs/algorithms.md).",
    )
    return [known[name] for name in reads]
