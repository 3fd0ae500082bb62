"""Inputs of losses made by hand, and cut to pieces."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from rlsys.algorithms.loss_inputs import LossInputs, MeanOver, ScoreInputs, ValueInputs

I = TypeVar("I", LossInputs, ValueInputs, ScoreInputs)  # noqa: E741

GRADIENT = {LossInputs: "trainer_logprobs", ValueInputs: "values", ScoreInputs: "scores"}


def policy_inputs(
    *,
    trainer: torch.Tensor,
    proximal: torch.Tensor,
    sampler: torch.Tensor,
    advantages: torch.Tensor,
    rows: list[int],
    **others: Any,
) -> LossInputs:
    """Tokens of three policies, by their log-probabilities; `others`: further fields."""
    num_tokens = len(rows)
    fields_of: dict[str, Any] = {
        "entropy": torch.ones(num_tokens),
        "staleness": torch.zeros(num_tokens, dtype=torch.int64),
    }
    return LossInputs(
        trainer_logprobs=trainer.detach().clone().requires_grad_(),
        proximal_logprobs=proximal,
        sampler_logprobs=sampler,
        advantages=advantages,
        row_index=torch.tensor(rows, dtype=torch.int64),
        **fields_of | others,
    )


MU = 0.1  # what the sampler gave each token of `three_policies`


def three_policies(w: list[float], rho: list[float], rows: list[int], **others: Any) -> LossInputs:
    """Tokens with π_prox = w · μ and π_θ = ρ · μ, so that a ratio of the wrong two of them shows;
    advantages −1 unless `others` has them."""
    sampler = torch.full((len(rows),), MU)
    return policy_inputs(
        trainer=(sampler * torch.tensor(rho)).log(),
        proximal=(sampler * torch.tensor(w)).log(),
        sampler=sampler.log(),
        rows=rows,
        **{"advantages": -torch.ones(len(rows))} | others,
    )


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
