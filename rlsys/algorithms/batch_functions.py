"""Functions over all rollouts of a step, as `Dataflow.per_batch` runs them.

    function(*columns) -> one tensor, or a tuple of as many as the stage writes

A column with a value per rollout is [B]. A column with a value per token is [N] and holds all
rollouts one after another. Both are float32. Parameters with these names are passed by name:

    group_index   [B] int64: numbers of the rollouts' groups, from 0

and, if a column that the function reads or writes has a value per token:

    row_offsets   [B + 1] int64: rollout i has the tokens row_offsets[i] to row_offsets[i + 1] - 1
    loss_mask     [N] bool: False for tokens that the policy did not sample, whose sampler
                  log-probabilities are meaningless

Shape legend: B rollouts of a step, N completion tokens of all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlsys.algorithms.group_functions import as_values, check_arguments, shortened
from rlsys.common.user_functions import FunctionFailed, called, name_of
from rlsys.errors import require

GROUP_INDEX = "group_index"
TOKEN_FACTS = ("row_offsets", "loss_mask")


def check_batch_function(
    function: Callable[..., Any], num_columns: int, *, has_tokens: bool
) -> None:
    """Raise InvalidValue for a function that does not take `num_columns` columns.

    `has_tokens` is true if a column that it reads or writes has a value per token.
    """
    facts = (GROUP_INDEX, *(TOKEN_FACTS if has_tokens else ()))
    by_name = _parameters_among(function, dict.fromkeys(facts))
    hint = f" Parameters named {', '.join(facts)} are passed by name."
    if not has_tokens:
        hint += f" With columns of tokens, {' and '.join(TOKEN_FACTS)} are too."
    check_arguments("per_batch", function, num_columns, by_name=by_name, hint=hint)


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
    """Return what a stage's function computes from a step, by column.

    `loss_masks` has the tokens of each rollout that the policy sampled, if any column has a value
    per token. The results are [N] if `per_token`, else [B].

    Raises:
        InvalidValue: The results do not have one value per token or rollout.
        FunctionFailed: The function raised, or a value is NaN or infinite. A value per token may be
            -inf.
    """
    numbers: dict[int, int] = {}
    index = torch.tensor([numbers.setdefault(group_id, len(numbers)) for group_id in group_ids])
    facts, num_tokens = {GROUP_INDEX: index}, 0
    if loss_masks is not None:
        offsets = torch.tensor([0, *map(len, loss_masks)]).cumsum(0)
        loss_mask = torch.cat([torch.ones(0, dtype=torch.bool), *loss_masks])
        facts |= zip(TOKEN_FACTS, (offsets, loss_mask), strict=True)
        num_tokens = len(loss_mask)
    caller = f"stage {stage!r}: {name_of(function)}"
    result = called(caller, function, *columns, **_parameters_among(function, facts))
    results = [as_values(caller, x) for x in (result if isinstance(result, tuple) else (result,))]
    count = num_tokens if per_token else len(group_ids)
    unit = "tokens" if per_token else "rollouts"
    shapes = [tuple(x.shape) for x in results]
    require(
        shapes == [(count,)] * len(writes),
        caller,
        rule=f"returned shapes {shapes} for the columns {list(writes)} of {count} {unit}",
        fix=f"Return one tensor [{count}] for each.",
    )
    for name, values in zip(writes, results, strict=True):
        # A token's log-probability may be -inf.
        fine = values < torch.inf if per_token else values.isfinite()
        if not fine.all():
            raise FunctionFailed(
                f"{caller} returned {shortened(values[~fine])} in column {name!r}, for "
                f"{int((~fine).sum())} of {count} {unit}. Return finite numbers."
            )
    return dict(zip(writes, results, strict=True))


def _parameters_among(function: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return those facts that the function has a free parameter for."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function in C without a signature
        return {}
    return {name: x for name, x in facts.items() if name in parameters and name not in bound}
