"""Losses and aggregations are called, and what they return is checked: a recipe may bring its own.

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
from rlsys.metrics import is_own


def call_loss(
    loss: Callable[[Any], TokenLoss], inputs: Any, *, count: int, unit: str, of: str
) -> TokenLoss:
    """`count` values, one a `unit`; `of` is the field of the inputs that carries the gradient.

    Raises FunctionFailed where the loss raises, and ValueError unless everything is one value a
    unit: anything else would be summed and divided wrongly without a sign of it.
    """
    name = name_of(loss)
    returned: object = called(f"loss {name}", loss, inputs)
    match returned:
        case (torch.Tensor() as losses, Mapping() as metrics):
            pass
        case _:
            raise ValueError(
                f"loss {name} returned {_shown(returned)}; return a tensor with the loss of each "
                f"{unit}, and a dictionary of metrics: `return losses, {{}}`."
            )
    _check_shape(name, "its loss", losses, count, unit)
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise ValueError(
            f"loss {name} returned a loss without a gradient, of which nothing is learnt; compute "
            f"it from inputs.{of}, without detach, item or torch.no_grad on the way."
        )
    for metric, values in metrics.items():
        _check_metric_name(name, metric)
        if isinstance(values, MeanOver):
            if values.values.dim() != 1:
                raise ValueError(
                    f"loss {name} returned {metric} as MeanOver with shape "
                    f"{tuple(values.values.shape)}; give it a list of values, [K]."
                )
        else:
            _check_shape(name, metric, values, count, unit)
    return losses, dict(metrics)


def call_aggregation(
    aggregation: Aggregation, group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Raises FunctionFailed where it raises, ValueError for what are no two numbers."""
    what = f"aggregation {name_of(aggregation)}"
    returned: Any = called(what, aggregation, group_size, group_num_tokens, row_num_tokens)
    try:
        weight, denominator = returned
        return float(weight), float(denominator)
    except (TypeError, ValueError):
        raise ValueError(
            f"{what} returned {_shown(returned)}; return two numbers, the weight of a token and "
            "the rollout's part of the denominator."
        ) from None


def _check_metric_name(name: str, metric: object) -> None:
    if not isinstance(metric, str) or not metric:
        raise ValueError(
            f"loss {name} returned a metric called {metric!r}, which is no name; give it one, "
            "such as 'my/margin'."
        )
    if is_own(metric):
        raise ValueError(
            f"loss {name} returned a metric called {metric!r}, as one that rlsys tells itself, and "
            f"one of the two would be lost; give it another name, such as 'my/{metric}'."
        )


def _check_shape(name: str, what: str, values: object, count: int, unit: str) -> None:
    if isinstance(values, torch.Tensor) and values.shape == (count,):
        return
    found = f"with shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else ""
    raise ValueError(
        f"loss {name} returned {what} {found or _shown(values)} for {count} {unit}s; return one "
        f"value a {unit} and leave sums and means to the aggregation."
    )


def _shown(returned: object) -> str:
    """Tensors by their shapes."""
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)} alone"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_shown, returned))})".replace(" alone", "")
    return printable(f"{reprlib.repr(returned)} ({type(returned).__name__})")
