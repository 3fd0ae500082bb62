"""RMSNorm with fewer memory accesses than autograd needs for its definition.

    y = x̂ · (w + offset)        x̂ = x · s        s = (mean(x²) + ε)^(−1/2)
    ∂x = s · (g·w − x̂ · mean(g · w · x̂))        ∂w = Σ g · x̂        (Zhang, Sennrich 1910.07467)

On the CPU the backward pass is written out, in float32. On GPUs torch has one kernel for each
direction and any precision. It computes in float32 and rounds once, as the sampler's decode step
does, and keeps only the input and s for the gradient.

Shape legend: x, g [..., D], weight [D], s [..., 1].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def use_fast_norms(model: nn.Module, *, fused: bool = False) -> None:
    """Replace every RMSNorm of a model that computes the formula above, in place.

    The class of the module does not matter. Names and weights stay. With `fused`, use torch's GPU
    kernels, in every precision, with and without a gradient. Otherwise only float32 modules that
    need a gradient change.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and (offset := _offset(module)) is not None:
            kind = type(module)
            attributes = {"offset": offset, "fused": fused}
            module.__class__ = type(f"Fast{kind.__name__}", (_FastNorm, kind), attributes)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm [..., D] of x; differentiable once."""
    normed: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm [..., D] of x, rounded once to its precision; differentiable once."""
    normed: torch.Tensor = _FusedRMSNorm.apply(x, weight, eps)
    return normed


class _FastNorm(nn.Module):
    offset: float
    fused: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter("weight")
        if self.fused and x.dtype is weight.dtype:
            return fused_rms_norm(x, weight + self.offset if self.offset else weight, _eps(self))
        if not (torch.is_grad_enabled() and x.dtype is weight.dtype is torch.float32):
            slow: torch.Tensor = super().forward(x)
            return slow
        return rms_norm(x, weight + self.offset if self.offset else weight, _eps(self))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1]).add_(eps).rsqrt_()
        normed: torch.Tensor = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        both = (grad * normed).flatten(0, -2)
        mean = (both @ weight).view_as(scale) / len(weight)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, both.sum(0), None


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor
        normed, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        if x.is_cuda:
            grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
                grad.contiguous(), x, [x.shape[-1]], scale, weight, [True, True]
            )
            return grad_x, grad_weight, None
        # Without the kernel: for tests, and to estimate the memory of a GPU on another machine.
        normed = x.float() * scale
        both = (grad.float() * normed).flatten(0, -2)
        mean = (both @ weight.float()).view_as(scale) / len(weight)
        grad_x = (grad.float() * weight.float()).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), both.sum(0).to(weight.dtype), None


def _eps(module: nn.Module) -> float:
    eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return float(eps or 0.0)


def _offset(module: nn.Module) -> float | None:
    """Return the constant added to the weight: 0, or Gemma's 1; None for other formulas."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    # The module's own weight may be on the meta device, without values.
    weight = torch.linspace(0.5, 1.5, len(weight))
    x = torch.linspace(-1, 2, 3 * len(weight)).view(3, -1)
    with torch.no_grad():
        expected = torch.func.functional_call(module, {"weight": weight}, (x,))
        for offset in (0.0, 1.0):
            if torch.allclose(rms_norm(x, weight + offset, _eps(module)), expected, rtol=1e-4):
                return offset
    return None
