"""Inputs of losses made by hand, and cut to pieces."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from rlsys.algorithms.inputs import LossInputs, MeanOver, ScoreInputs, ValueInputs

I = TypeVar("I", LossInputs, ValueInputs, ScoreInputs)  # noqa: E741

GRADIENT = {LossInputs: "trainer_logprobs", ValueInputs: "values", ScoreInputs: "scores"}


def chosen(inputs: I, index: torch.Tensor | slice) -> I:
    """The tokens (or rows) `index` of the inputs, with a gradient of their own."""
    return mapped(inputs, lambda values: values[index])


def mapped(inputs: I, change: Any) -> I:
    """Every tensor changed; the one that carries the gradient anew a leaf."""
    found: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if field.name == "columns":
            found["columns"] = {name: change(column) for name, column in value.items()}
        elif value is not None:
            found[field.name] = change(value.detach())
    name = GRADIENT[type(inputs)]
    found[name] = found[name].clone().requires_grad_()
    return replace(inputs, **found)


def in_float32(inputs: I) -> I:
    return mapped(inputs, lambda values: values.float() if values.is_floating_point() else values)


def metric_values(metric: Any) -> torch.Tensor:
    """Whatever it is a mean over."""
    found: torch.Tensor = metric.values if isinstance(metric, MeanOver) else metric
    return found


def leaf(inputs: LossInputs | ValueInputs | ScoreInputs) -> torch.Tensor:
    """The tensor that carries the gradient."""
    found: torch.Tensor = getattr(inputs, GRADIENT[type(inputs)])
    return found
