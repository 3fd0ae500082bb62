"""Passes of several policies over one base model, each with its own low-rank adapter.

    x [N, I] ─┬─► W, frozen ────────────────────────────────────────────► + ─► y [N, O]
              └─► segments x_k [N_k, I] ─► A_k ─► B_k ─► · scaling_k ─────┘

The inputs of a policy are one segment of the flattened input. The base model computes all segments
at once, and each segment passes through its own factors only. So ranks and adapted layers may
differ, and the gradient of a factor is a product over the rows of its own segment, as in a pass of
that policy alone.

Shape legend: N inputs of a pass, N_k of segment k, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rlsys.config import ModelConfig
from rlsys.engines.models.model_roles import Policy, load_role
from rlsys.engines.training.adapters import FrozenWeights, LowRankProduct, adaptable_layers
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.sharding import allocate


class MixedSegments(RuntimeError):
    """A layer gets other inputs than the model, such as an expert that gets chosen tokens only."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Inputs of one policy in a pass: `size` consecutive ones, and its adapted layers by name."""

    size: int
    products: Mapping[str, LowRankProduct]


class AdapterSegments:
    """Hooks in the linear layers of a base model that add the products of the current segments."""

    def __init__(self, model: nn.Module) -> None:
        self._segments: Sequence[Segment] = ()
        for name, layer in adaptable_layers(model).items():
            layer.register_forward_hook(partial(self._add, name))

    @contextmanager
    def of(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Use these segments within the block, which includes the backward pass.

        Layers that recompute their activations call the hooks in the backward pass too.
        """
        self._segments = segments
        try:
            yield
        finally:
            self._segments = ()

    def _add(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        segments = self._segments
        if not any(name in one.products for one in segments):
            return None
        x = args[0].reshape(-1, args[0].shape[-1])  # [N, I]
        sizes = [one.size for one in segments] if len(segments) > 1 else [len(x)]
        if sum(sizes) != len(x):
            raise MixedSegments(f"{name} gets {len(x)} inputs, and the model {sum(sizes)}")
        ends = list(accumulate(sizes))
        adapted = [
            (_Range(end - size, end, product.scaling), product)
            for size, end, one in zip(sizes, ends, segments, strict=True)
            if (product := one.products.get(name)) is not None
        ]
        factors = [weight for _, one in adapted for weight in (one.a.weight, one.b.weight)]
        flat = output.reshape(-1, output.shape[-1])  # [N, O]
        total: torch.Tensor = _Products.apply(flat, x, [one for one, _ in adapted], *factors)
        return total.view(output.shape)


@dataclass(frozen=True)
class _Range:
    """Rows [start, end) of a segment, and the scaling of its product."""

    start: int
    end: int
    scaling: float


class _Products(torch.autograd.Function):
    """y + B_k A_k x · scaling_k for the rows of each segment k. The products are in float32.

    Other rows are those of y. With t = g B · scaling, for the gradient g of a segment's result:

        ∂A = tᵀ x        ∂B = gᵀ (x Aᵀ) · scaling        ∂x = t A
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        ranges: Sequence[_Range],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        total = y.float() if y.dtype is not torch.float32 else y.clone()  # [N, O]
        inner = []
        for one, (a, b) in zip(ranges, _pairs(factors), strict=True):
            inner.append(x[one.start : one.end].float() @ a.t())  # [N_k, R_k]
            total[one.start : one.end].addmm_(inner[-1], b.t(), alpha=one.scaling)
        ctx.ranges = ranges
        ctx.save_for_backward(x, *factors, *inner)
        return total.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        num_factors = 2 * len(ctx.ranges)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = torch.zeros(x.shape, device=x.device)
        of_factors: list[torch.Tensor] = []
        pairs = zip(ctx.ranges, _pairs(rest[:num_factors]), rest[num_factors:], strict=True)
        for one, (a, b), inner in pairs:
            own = grad[one.start : one.end].float()  # [N_k, O]
            of_inner = (own @ b).mul_(one.scaling)  # [N_k, R_k]
            of_factors.append(of_inner.t() @ x[one.start : one.end].float())
            of_factors.append((own.t() @ inner).mul_(one.scaling))
            if grad_x is not None:
                torch.mm(of_inner, a, out=grad_x[one.start : one.end])
        return grad, None if grad_x is None else grad_x.to(x.dtype), None, *of_factors


def _pairs(factors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield A and B of each segment."""
    yield from zip(factors[::2], factors[1::2], strict=True)


def load_base(
    path: str | Path, model: ModelConfig, frozen: FrozenWeights, device: torch.device
) -> Policy:
    """Return the base model as a policy that shares the frozen weights of engines."""
    role = load_role(
        path, head="logits", dtype=model.dtype, trained=True, temperature=1.0, device=device
    )
    assert isinstance(role, Policy)
    role.hidden_dtype = getattr(torch, model.dtype)
    frozen.put_into(role.network.model)
    role.unread = {}
    role.network.requires_grad_(False)
    checkpoint_layers(role.network, model.checkpointing(on_gpu=device.type != "cpu"))
    allocate(role.network, device.type)
    role.network.to(device)
    return role
