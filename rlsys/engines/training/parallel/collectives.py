"""Differentiable collectives within a forward pass.

Rule for gradients: if several ranks compute the same value, each rank has the part of the gradient
that flows through it, and the parts add up to the whole gradient.

Shape legend: n ranks of a group, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup
Exchange = Callable[[torch.Tensor], torch.Tensor]


def gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return all ranks' parts, concatenated along `dim`. Its gradient is summed over the ranks."""
    moved = x.movedim(dim, 0).contiguous()
    send, back = partial(_all_gather, group=group), partial(_reduce_scatter, group=group)
    gathered: torch.Tensor = _Exchanged.apply(moved, send, back)
    return gathered.movedim(0, dim)


def scatter_sum(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' x."""
    moved = x.movedim(dim, 0).contiguous()
    send, back = partial(_reduce_scatter, group=group), partial(_all_gather, group=group)
    scattered: torch.Tensor = _Exchanged.apply(moved, send, back)
    return scattered.movedim(0, dim)


def own_part(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of x, which is equal on all ranks."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def total(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' x, whose gradient is equal on all of them."""
    summed: torch.Tensor = _Exchanged.apply(x, partial(_all_reduce, group=group), _identity)
    return summed


def exchange(
    x: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send `sent[r]` consecutive rows of x to each rank r, and receive `received[r]` from it."""
    send = partial(_all_to_all, group=group, sent=list(sent), received=list(received))
    back = partial(_all_to_all, group=group, sent=list(received), received=list(sent))
    arrived: torch.Tensor = _Exchanged.apply(x.contiguous(), send, back)
    return arrived


class _Exchanged(torch.autograd.Function):
    """Apply `send` to a tensor and `back` to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return send(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad.contiguous()), None, None


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    gathered = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(gathered, x, group=group)
    return gathered


def _reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    scattered = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(scattered, x, group=group)
    return scattered


def _all_to_all(
    x: torch.Tensor, group: Group, sent: list[int], received: list[int]
) -> torch.Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x, received, sent, group=group)
    return arrived


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x
