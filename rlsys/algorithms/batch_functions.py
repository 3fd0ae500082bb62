"""Functions over all rollouts of a step, as `Dataflow.per_batch` runs them.

    function(*columns) -> one tensor, or a tuple of as many as the stage writes

A column with a value per rollout is [B], one with a value per token [N], all rollouts one after
another, in float32. A function with parameters of these very names is given besides, by name:

    group_index   [B] int64: numbers of the rollouts' groups, from 0

and, where a column that it reads or writes has a value per token:

    row_offsets   [B + 1] int64: tokens of rollout i are row_offsets[i] up to row_offsets[i + 1]
    loss_mask     [N] bool: False for tokens that the policy did not sample, of which the sampler's
                  log-probabilities and the like say nothing
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlsys.algorithms.group_functions import as_values, check_arguments, shown
from rlsys.common.user_functions import FunctionFailed, called, name_of

GROUP_INDEX = "group_index"
TOKEN_FACTS = ("row_offsets", "loss_mask")


def check_batch_function(
    function: Callable[..., Any], num_columns: int, *, has_tokens: bool
) -> None:
    """Raise ValueError for one that does not take so many columns. `has_tokens`: one of what it
    reads and writes has a value per token.
    """
    facts = (GROUP_INDEX, *(TOKEN_FACTS if has_tokens else ()))
    given = _asked_for(function, dict.fromkeys(facts))
    hint = (
        f" Parameters called {', '.join((GROUP_INDEX, *TOKEN_FACTS))} are passed in addition."
        if has_tokens
        else f" A parameter called {GROUP_INDEX} is passed in addition; "
        f"{' and '.join(TOKEN_FACTS)} need columns of tokens."
    )
    check_arguments("per_batch", function, num_columns, given=given, hint=hint)


def run_batch_function(
    function: Callable[..., Any],
    columns: Sequence[torch.Tensor],
    *,
    stage: str,
    group_ids: Sequence[int],
    loss_masks: Sequence[torch.Tensor] | None,
    writes: Sequence[str],
    per_token: bool,
) -> dict[str, torch.Tensor]:
    """What the function of a stage makes of them, by column. Raises ValueError for anything but one
    value per rollout [B], or per token [N]; FunctionFailed where it raises, or where one is no
    number. `loss_masks`: which tokens of each rollout the policy sampled, where a column has any
    tokens.
    """
    numbers: dict[int, int] = {}
    index = torch.tensor([numbers.setdefault(group_id, len(numbers)) for group_id in group_ids])
    facts, num_tokens = {GROUP_INDEX: index}, 0
    if loss_masks is not None:
        offsets = torch.tensor([0, *map(len, loss_masks)]).cumsum(0)
        loss_mask = torch.cat([torch.ones(0, dtype=torch.bool), *loss_masks])
        facts |= zip(TOKEN_FACTS, (offsets, loss_mask), strict=True)
        num_tokens = len(loss_mask)
    given = _asked_for(function, facts)
    what = f"stage {stage!r}: {name_of(function)}"
    made = called(what, function, *columns, **given)
    results = [as_values(what, x) for x in (made if isinstance(made, tuple) else (made,))]
    count = num_tokens if per_token else len(group_ids)
    unit = "tokens" if per_token else "rollouts"
    if len(results) != len(writes) or any(tuple(x.shape) != (count,) for x in results):
        raise ValueError(
            f"{what} returned shapes {[tuple(x.shape) for x in results]} for the columns "
            f"{list(writes)} of {count} {unit}; return one tensor [{count}] for each."
        )
    for name, values in zip(writes, results, strict=True):
        # A token's log-probability may be -inf.
        fine = values < torch.inf if per_token else values.isfinite()
        if not fine.all():
            raise FunctionFailed(
                f"{what} returned {shown(values[~fine])} in column {name!r}, for "
                f"{int((~fine).sum())} of {count} {unit}; return finite numbers."
            )
    return dict(zip(writes, results, strict=True))


def _asked_for(function: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    bound = function.keywords if isinstance(function, functools.partial) else {}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a function in C, which does not tell
        return {}
    return {name: x for name, x in facts.items() if name in parameters and name not in bound}
