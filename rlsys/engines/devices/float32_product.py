"""Products of 16-bit matrices whose results stay float32.

    x [N, I], weight [O, I], both 16-bit ──► x · weightᵀ [N, O] float32

The products of 16-bit numbers and their sums are formed in float32 anyway; a 16-bit result would
round them once more. For a head that is a lot: bfloat16 keeps eight bits, so a logit of 21 is off
by up to 0.06, which the log-probability then is too.

CUDA writes float32 results by itself. Elsewhere both matrices become float32 first.

Shape legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlsys.engines.devices import onednn_linear


def float32_product(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """X · weightᵀ [N, O] float32; differentiable in x, and in weight through `total`, which is
    `gradient_sum(weight)`.
    """
    product: torch.Tensor = _Product.apply(x, weight.detach(), total)
    return product


def gradient_sum(weight: torch.Tensor) -> torch.Tensor:
    """Stands for `weight` in several products, and sums their gradients in float32; only the sum is
    rounded to the precision of `weight`. Takes no memory of its own.
    """
    total: torch.Tensor = _GradientSum.apply(weight)
    return total


class Float32Copy:
    """The float32 copy of a 16-bit matrix that is multiplied often, made anew after each change; on
    CUDA, where `mm` needs none, the matrix itself.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._version: int | None = None
        self._copy = matrix

    def get(self) -> torch.Tensor:
        if self._version != self._matrix._version and not self._matrix.is_cuda:
            self._copy = self._matrix.detach().float()
            self._version = self._matrix._version
        return self._copy


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [N, K] · b [K, M] in float32. On CUDA, where `b` is 16-bit, `a` is rounded to that too."""
    if b.is_cuda and b.dtype is not torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    if onednn_linear.is_faster():
        return onednn_linear.linear(a.float(), b.float().t(), None)
    return a.float() @ b.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return mm(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = mm(grad, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = mm(grad.t(), x) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight


class _GradientSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), device=weight.device).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)
