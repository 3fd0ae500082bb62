"""Rotary embeddings and gated activations as one GPU kernel per direction.

    rotary       x [B, H, T, W], cos and sin [B, T, W]   x · cos + rotate_half(x) · sin
    gated SiLU   gate and up [..., M]                    silu(gate) · up

transformers computes each in several memory-bound kernels. Here torch.compile makes one kernel for
each direction, which computes in float32 and rounds once. The backward pass keeps cos and sin, or
gate and up. On the CPU the same formulas run without the compiler, for tests and for estimates of a
GPU's memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ROTARY = "apply_rotary_pos_emb"
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
TOLERANCE = 1e-4


def use_fused_elementwise(model: Any) -> None:
    """Replace the rotary embedding and the gated MLPs of a model, in place.

    Only functions and modules that compute the formulas above are replaced. Names and weights stay.

    The rotary embedding is a function of the model's Python module, so every model of that module
    in this process changes, but only on GPUs.
    """
    module = sys.modules[type(model).__module__]
    original = getattr(module, ROTARY, None)
    if original is not None and not hasattr(original, "is_fused") and _is_rotary(original):
        setattr(module, ROTARY, _fused(original))
    for part in model.modules():
        if _is_gated_mlp(part):
            kind = type(part)
            part.__class__ = type(f"Fused{kind.__name__}", (_FusedMLP, kind), {})


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, H, T, W] rotated by the angles of cos and sin [B, T, W]; differentiable in x."""
    rotated: torch.Tensor = _Rotary.apply(x, cos, sin)
    return rotated


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up [..., M]; differentiable once."""
    gated: torch.Tensor = _GatedSiLU.apply(gate, up)
    return gated


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        rotated: torch.Tensor = _run(_rotated, x, cos, sin)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _run(_rotated_back, grad, *ctx.saved_tensors), None, None


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        gated: torch.Tensor = _run(_gated, gate, up)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grads: tuple[torch.Tensor, torch.Tensor] = _run(_gated_grads, *ctx.saved_tensors, grad)
        return grads


def _run(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return (_compiled(function) if tensors[0].is_cuda else function)(*tensors)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    half = torch.cat((-second, first), -1)
    return (x.float() * cos[:, None].float() + half * sin[:, None].float()).to(x.dtype)


def _rotated_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = (grad.float() * sin[:, None].float()).chunk(2, -1)
    half = torch.cat((second, -first), -1)
    return (grad.float() * cos[:, None].float() + half).to(grad.dtype)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _gated_grads(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, over = gate.float(), grad.float()
    share = torch.sigmoid(wide)
    slope = share * (1 + wide * (1 - share))
    return (over * up.float() * slope).to(gate.dtype), (over * wide * share).to(up.dtype)


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.is_cuda and not options and cos.shape[-1] == q.shape[-1]:
            return rotate(q, cos, sin), rotate(k, cos, sin)
        both: tuple[torch.Tensor, torch.Tensor] = original(q, k, cos, sin, **options)
        return both

    apply_rotary.is_fused = True  # type: ignore[attr-defined]
    return apply_rotary


class _FusedMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.get_submodule("gate_proj")(x), self.get_submodule("up_proj")(x)
        down: torch.Tensor = self.get_submodule("down_proj")(gated_silu(gate, up))
        return down


def _is_rotary(function: Callable[..., Any]) -> bool:
    """Return whether a function rotates q, k [B, H, T, W] by cos, sin [B, T, W] like `rotate`."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 3, 8, generator=generator)
    try:
        found = function(q, k, cos, sin)
        expected = rotate(q, cos, sin), rotate(k, cos, sin)
        return all(
            torch.allclose(one, other, atol=TOLERANCE)
            for one, other in zip(found, expected, strict=True)
        )
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False  # other arguments


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module computes down(silu(gate(x)) · up(x))."""
    if {name for name, _ in module.named_children()} != MLP_PARTS:
        return False
    if isinstance(module, _FusedMLP):
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    weights = {}
    for name, _ in module.named_parameters():
        part, _, kind = name.partition(".")
        if part not in sizes or kind not in ("weight", "bias"):
            return False
        shape = sizes[part] if kind == "weight" else sizes[part][:1]
        weights[name] = torch.randn(shape, generator=generator)
    x = torch.randn(3, 4, generator=generator)

    def linear(part: str, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, weights[f"{part}.weight"], weights.get(f"{part}.bias"))

    try:
        with torch.no_grad():
            found = torch.func.functional_call(module, weights, (x,))
    except (TypeError, ValueError, RuntimeError):
        return False
    expected = linear("down_proj", F.silu(linear("gate_proj", x)) * linear("up_proj", x))
    return torch.allclose(found, expected, atol=TOLERANCE)
