"""Linear layers through oneDNN where that is faster: about twice as fast on AMD's CPUs.

torch multiplies float32 matrices on x86 with MKL, which uses the whole vector width of Intel's CPUs
only, and is the faster one there; oneDNN, which torch carries too, generates code for the CPU at
hand. Either way the results for a row do not depend on the other rows of the batch (from a few rows
on), which is what makes a sampled completion independent of what else is being sampled.

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

# Of so many numbers a weight does not stay in a core's cache, and the call itself costs nothing
# beside its product.
LARGE = 2**20

LinearFunction = Callable[[torch.Tensor], torch.Tensor]


def use_onednn(model: nn.Module) -> None:
    """Switch every nn.Linear of a model to oneDNN, in place; names and weights stay.

    Does nothing where torch has no oneDNN. Layers go on using torch's own product for anything but
    plain float32 tensors on the CPU that hold something.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


@functools.cache
def is_faster() -> bool:
    """Than torch's own product, on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    cpu = Path("/proc/cpuinfo")
    is_intel = cpu.exists() and "GenuineIntel" in cpu.read_text()
    return not (is_intel and torch.backends.mkl.is_available())


class OneDNNLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X · weightᵀ + bias, [..., O], by oneDNN where it can; differentiable."""
    if not (_is_plain_float32(x) and _is_plain_float32(weight) and x.numel()):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _linear(x, weight, bias)
    # With rows of one axis: the product of more is a view of that, and what a custom function
    # returns as a view may not be changed in place, as some models do.
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    output: torch.Tensor = _Linear.apply(rows, weight, bias)
    return output if x.ndim == 2 else output.view(*x.shape[:-1], -1)


def is_best_turned(weight: torch.Tensor) -> bool:
    """Whether products of few rows are best with a weight [O, I] that lies column by column: MKL
    reads along the output, and is up to twice as fast for it. Of large weights oneDNN is as fast,
    as they are.
    """
    return not is_faster() and not _is_large(weight)


def _is_large(weight: torch.Tensor) -> bool:
    is_possible = torch.backends.mkldnn.is_available() and _is_plain_float32(weight)
    return is_possible and weight.numel() >= LARGE


def linear_function(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction:
    """X ↦ linear(x, weight, bias) for plain x [N, I], N > 0, without gradient; looks at the weight
    once, not in every call.
    """
    if (is_faster() and _is_plain_float32(weight)) or _is_large(weight):
        return lambda x: _linear(x, weight, bias)
    transposed = weight.t()  # [I, O]
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def _is_plain_float32(tensor: torch.Tensor) -> bool:
    # A DTensor (tensor parallelism) splits the product over ranks; oneDNN would see one shard.
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, nn.Parameter)
    )


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    """Of rows x [N, I]."""

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
        # oneDNN would copy both to turn them round.
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
