"""Products of 16-bit matrices with float32 results.

    x [N, I], weight [O, I], both 16-bit ──► x · weightᵀ [N, O] float32

Hardware forms the products of 16-bit numbers and their sums in float32; a 16-bit result would round
them once more. For a head this matters: bfloat16 has eight significant bits, so a logit of 21, and
its log-probability, would be off by up to 0.06.

CUDA returns float32 results natively. On other devices both matrices are converted to float32.

Shape legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlsys.engines.devices import onednn_linear


def float32_product(x: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return x · weightᵀ [N, O] float32; differentiable.

    The gradient of `weight` flows through `total`, which is `gradient_sum(weight)`.
    """
    product: torch.Tensor = _Product.apply(x, weight.detach(), total)
    return product


def gradient_sum(weight: torch.Tensor) -> torch.Tensor:
    """Return a placeholder of `weight` that sums gradients of several products in float32.

    Only the sum is rounded to the precision of `weight`. The placeholder takes no memory.
    """
    total: torch.Tensor = _GradientSum.apply(weight)
    return total


class Float32Copy:
    """Float32 copy of a 16-bit matrix that is multiplied often, renewed after each change.

    On CUDA, where `mm` needs no copy, it is the matrix itself.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._version: int | None = None
        self._copy = matrix

    def get(self) -> torch.Tensor:
        """Return the copy, up to date."""
        if self._version != self._matrix._version and not self._matrix.is_cuda:
            self._copy = self._matrix.detach().float()
            self._version = self._matrix._version
        return self._copy


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [N, K] · b [K, M] in float32. On CUDA, a 16-bit `b` rounds `a` to its precision."""
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
