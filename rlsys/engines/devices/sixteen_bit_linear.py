"""16-bit linear layers on CPUs without 16-bit instructions.

    x [..., I], weight [O, I], both 16-bit ──► float32 ──► x · weightᵀ + bias ──► 16-bit [..., O]

With instructions for a precision, torch multiplies at the speed of float32 or faster. Without them
it is fifty times slower than float32. In that case the numbers are converted to float32 for the
product, which is as exact: 16-bit products are summed in float32 and rounded once in either case.

Shape legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rlsys.engines.devices.float32_product import mm

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def use_float32_products(model: nn.Module) -> None:
    """Switch every linear layer of a model, in place, if this CPU lacks a precision.

    Names and weights stay. Only plain 16-bit tensors on the CPU are multiplied differently.
    """
    if all(map(_multiplies, SIXTEEN_BIT)):
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, _Float32Products):
            kind = type(module)
            module.__class__ = type(f"Rounding{kind.__name__}", (_Float32Products, kind), {})


def wants_float32(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether these tensors should be multiplied by `rounded_linear`."""
    return (
        weight.device.type == "cpu"
        and x.dtype is weight.dtype
        and weight.dtype in SIXTEEN_BIT
        and type(weight) in (torch.Tensor, nn.Parameter)
        and not _multiplies(weight.dtype)
    )


def rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x · weightᵀ + bias [..., O], rounded to the precision of x; differentiable."""
    rows = x.reshape(-1, x.shape[-1])
    product: torch.Tensor = _Rounded.apply(rows, weight, bias)
    return product.view(*x.shape[:-1], len(weight))


class _Float32Products(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if wants_float32(input, self.weight):
            return rounded_linear(input, self.weight, self.bias)
        return super().forward(input)


class _Rounded(torch.autograd.Function):
    """The product for rows x [N, I], with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        product = mm(x, weight.t())
        return (product if bias is None else product.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = mm(grad, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = mm(grad.t(), x).to(x.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.float().sum(0).to(x.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for a precision."""
    if not torch.backends.mkldnn.is_available():
        return False
    mkldnn = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    return bool(mkldnn._is_mkldnn_fp16_supported())
