"""An advantage that a configuration names, as a stage of a graph.

    "opo_advantage" ──► parse ──► function ──► columns_of: reward, num_tokens ──► add_advantage

What such a function reads is told by the names of its arguments: `rewards`, and facts of a rollout
(num_tokens, truncated, is_greedy). One that reads more, such as a critic's values, needs a recipe
with stages that write it.
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
from rlsys.config import require
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import IS_GREEDY, NUM_TOKENS, TRUNCATED, Column

ADVANTAGES: tuple[Kind, ...] = ("group_advantage", "batch_advantage", "token_advantage")


@contextmanager
def naming_option(option: str) -> Iterator[None]:
    """A mistake in what names something is told with the option that it stands in."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def needs_greedy(advantage: Callable[..., Any]) -> bool:
    """Whether it compares with a greedy rollout, for flow.generate(greedy_baseline=...)."""
    if isinstance(advantage, dynamic_sampling):
        return needs_greedy(advantage.advantage)
    return IS_GREEDY.name in inspect.signature(advantage).parameters


def add_advantage(flow: Dataflow, advantage: Callable[..., Any], reward: Column) -> Column:
    """The stage that computes it: over each group as soon as that is complete, or over the batch.

    `advantage` is what rlsys.algorithms.registry.parse returns for ADVANTAGES. Raises ValueError
    for one that reads what neither the reward nor a fact is, and what flow raises.
    """
    columns = columns_of(advantage, reward)
    if kind_of(advantage) == "group_advantage":
        return flow.per_group(advantage, *columns)
    return flow.per_batch(advantage, *columns)[0]


def columns_of(advantage: Callable[..., Any], reward: Column) -> list[Column]:
    """In the order of its arguments."""
    if isinstance(advantage, dynamic_sampling):
        columns = columns_of(advantage.advantage, reward)
        return [*columns, reward] if advantage.by_last_column else columns
    facts = {fact.name: fact for fact in (NUM_TOKENS, TRUNCATED, IS_GREEDY)}
    known = {"rewards": reward, **facts}
    reads = [
        parameter.name
        for parameter in inspect.signature(advantage).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.name not in (GROUP_INDEX, *TOKEN_FACTS)
    ]
    lacks = [name for name in reads if name not in known]
    require(
        not lacks,
        f"advantage {name_of(advantage)} reads {lacks}, and by name it can have {[*known]} alone; "
        "write a recipe with stages that write such columns (docs/algorithms.md).",
    )
    return [known[name] for name in reads]
