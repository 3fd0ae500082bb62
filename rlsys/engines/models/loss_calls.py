"""Calls of losses and aggregations, which may be user functions, with checks of their results.

In: the function and its inputs. Out: losses [N] that carry a gradient, and metrics of known shapes;
two numbers of an aggregation; or an error that names the function.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlsys.algorithms.aggregation import Aggregation
from rlsys.algorithms.loss_inputs import MeanOver, TokenLoss
from rlsys.common.user_functions import called, name_of, printable
from rlsys.errors import InvalidValue, require
from rlsys.metrics import is_own


def call_loss(
    loss: Callable[[Any], TokenLoss], inputs: Any, *, count: int, unit: str, of: str
) -> TokenLoss:
    """Return the `count` values of a loss, one per `unit`, and its metrics.

    `of` is the field of the inputs that carries the gradient.

    Raises FunctionFailed if the loss raises, and InvalidValue unless it returns one value per unit:
    anything else would silently be summed and divided wrongly.
    """
    name = name_of(loss)
    returned: object = called(f"loss {name}", loss, inputs)
    match returned:
        case (torch.Tensor() as losses, Mapping() as metrics):
            pass
        case _:
            raise InvalidValue(
                f"loss {name}",
                rule=f"returned {_describe(returned)}",
                fix=f"Return a tensor with the loss of each {unit}, and a dictionary of metrics: "
                "`return losses, {}`.",
            )
    _check_shape(name, "loss", losses, count, unit)
    require(
        losses.requires_grad or not torch.is_grad_enabled(),
        f"loss {name}",
        rule="returned a loss without a gradient",
        fix=f"Compute it from inputs.{of}, without detach, item or torch.no_grad.",
    )
    for metric, values in metrics.items():
        _check_metric_name(name, metric)
        if isinstance(values, MeanOver):
            require(
                values.values.dim() == 1,
                f"loss {name}: metric",
                metric,
                rule=f"returned MeanOver of shape {tuple(values.values.shape)}",
                fix="Give it a tensor of values [K].",
            )
        else:
            _check_shape(name, metric, values, count, unit)
    return losses, dict(metrics)


def call_aggregation(
    aggregation: Aggregation, group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Return a token's weight and the rollout's part of the denominator, from a user's function.

    Raises FunctionFailed if the function raises, and InvalidValue unless it returns two numbers.
    """
    what = f"aggregation {name_of(aggregation)}"
    returned: Any = called(what, aggregation, group_size, group_num_tokens, row_num_tokens)
    try:
        weight, denominator = returned
        return float(weight), float(denominator)
    except (TypeError, ValueError):
        raise InvalidValue(
            what,
            rule=f"returned {_describe(returned)}",
            fix="Return two numbers: the weight of a token and the rollout's part of the "
            "denominator.",
        ) from None


def _check_metric_name(name: str, metric: object) -> None:
    require(
        isinstance(metric, str) and metric != "",
        f"loss {name}: metric",
        metric,
        rule="must be a name",
        fix="Use a string such as 'my/margin'.",
    )
    require(
        not is_own(str(metric)),
        f"loss {name}: metric",
        metric,
        rule="is the name of a metric of rlsys",
        fix=f"Use another name, such as 'my/{metric}'.",
    )


def _check_shape(name: str, what: str, values: object, count: int, unit: str) -> None:
    require(
        isinstance(values, torch.Tensor) and values.shape == (count,),
        f"loss {name}: {what}",
        rule=f"returned {_describe(values)} for {count} {unit}s",
        fix=f"Return one value per {unit}; the aggregation computes sums and means.",
    )


def _describe(returned: object) -> str:
    """Describe a returned value; tensors by their shapes."""
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_describe, returned))})"
    return printable(f"{reprlib.repr(returned)} ({type(returned).__name__})")
