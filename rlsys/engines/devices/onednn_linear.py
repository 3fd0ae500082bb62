"""Linear layers through oneDNN on CPUs where that is faster: about twice as fast on AMD's.

torch multiplies float32 matrices on x86 with MKL, which uses the full vector width only on Intel's
CPUs, and is faster there. oneDNN, which torch includes too, generates code for the actual CPU. With
either library the result of a row does not depend on the other rows of the batch (from a few rows
on), so a sampled completion does not depend on what else is being sampled.

Shape legend: x [..., I] input, weight [O, I], bias [O].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# A weight of so many numbers exceeds a core's cache, and makes the overhead of a call negligible.
LARGE = 2**20

LinearFunction = Callable[[torch.Tensor], torch.Tensor]


def use_onednn(model: nn.Module) -> None:
    """Switch every nn.Linear of a model to oneDNN, in place; names and weights stay.

    It does nothing if torch has no oneDNN. For anything but non-empty, plain float32 tensors on the
    CPU, layers still use torch's own product.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN is faster than torch's own product on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    cpu = Path("/proc/cpuinfo")
    is_intel = cpu.exists() and "GenuineIntel" in cpu.read_text()
    return not (is_intel and torch.backends.mkl.is_available())


class OneDNNLinear(nn.Linear):
    """A linear layer through oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input · weightᵀ + bias."""
        return linear(input, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x · weightᵀ + bias, [..., O], through oneDNN if possible; differentiable."""
    if not (_is_plain_float32(x) and _is_plain_float32(weight) and x.numel()):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _linear(x, weight, bias)
    # Flatten to [N, I]: with more axes oneDNN returns a view, and torch forbids in-place changes,
    # as some models make them, to a view that a custom function returns.
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    output: torch.Tensor = _Linear.apply(rows, weight, bias)
    return output if x.ndim == 2 else output.view(*x.shape[:-1], -1)


def is_best_turned(weight: torch.Tensor) -> bool:
    """Return whether products of few rows are fastest with a column-major weight [O, I].

    MKL reads along the output, and is up to twice as fast for such weights. oneDNN is equally fast
    for large weights in the usual order.
    """
    return not is_faster() and not _is_large(weight)


def _is_large(weight: torch.Tensor) -> bool:
    is_possible = torch.backends.mkldnn.is_available() and _is_plain_float32(weight)
    return is_possible and weight.numel() >= LARGE


def linear_function(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction:
    """Return x ↦ linear(x, weight, bias) for plain x [N, I], N > 0, without gradient.

    It inspects the weight once, not in every call.
    """
    if (is_faster() and _is_plain_float32(weight)) or _is_large(weight):
        return lambda x: _linear(x, weight, bias)
    transposed = weight.t()  # [I, O]
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def _is_plain_float32(tensor: torch.Tensor) -> bool:
    # A DTensor (tensor parallelism) splits the product over ranks; oneDNN would use one shard only.
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, nn.Parameter)
    )


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    """The product for rows x [N, I], with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = _linear(grad, weight.t(), None) if ctx.needs_input_grad[0] else None
        # oneDNN would copy both to transpose them.
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
