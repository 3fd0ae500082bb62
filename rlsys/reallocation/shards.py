"""Who holds which part of a model: boxes of its tensors, by rank.

tensor "layers.0.q_proj.weight" [64, 32]      dp2tp2: rank 0 holds [0:16, 0:32]

Whoever plans with boxes needs no DTensor, whose import takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Indices [start, stop) along each dimension of a tensor; none at all for a scalar."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """With which the whole tensor is indexed."""
        return tuple(slice(start, stop) for start, stop in self.bounds)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """With which a tensor is indexed that is `outer` of the whole one."""
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)

    def overlap(self, other: Box) -> Box | None:
        """What both have of a tensor; None for nothing."""
        bounds = tuple(
            (max(start, first), min(stop, last))
            for (start, stop), (first, last) in zip(self.bounds, other.bounds, strict=True)
        )
        return Box(bounds) if all(start < stop for start, stop in bounds) else None

    def without(self, other: Box) -> list[Box]:
        """What is not in `other`, in boxes that do not overlap."""
        shared = self.overlap(other)
        if shared is None:
            return [self] if self.num_elements else []
        left, bounds = [], list(self.bounds)
        for dim, (start, stop) in enumerate(shared.bounds):
            for outside in ((bounds[dim][0], start), (stop, bounds[dim][1])):
                if outside[0] < outside[1]:
                    left.append(Box((*bounds[:dim], outside, *bounds[dim + 1 :])))
            bounds[dim] = start, stop
        return left

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What a rank has of one tensor, or is to have."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    box: Box

    def __str__(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {list(self.shape)} {precision} {self.box}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank and the node that it lies on, with what it has of a model, or is to have."""

    rank: str
    node: str
    holdings: tuple[TensorShard, ...]

    def __hash__(self) -> int:
        # Of a million boxes it would take seconds, and where layouts differ these mostly do.
        return hash((self.rank, self.node, len(self.holdings)))


def holdings(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Of this rank. It has all of a tensor that is no DTensor; where a tensor has too few rows for
    all ranks, some have an empty box of it.
    """
    return [
        TensorShard(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, box=local_box(tensor))
        for name, tensor in tensors.items()
    ]


def local_box(tensor: torch.Tensor) -> Box:
    """The part of a tensor that lies on this rank. A tensor that is cut over data and over tensor
    ranks along the same dimension is cut over the tensor ranks first, so the part is one piece.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple((start, start + size) for start, size in zip(offset, shape, strict=True)))


def local_part(tensor: MaybeTensor) -> MaybeTensor:
    """This rank's part of a tensor, sharing its memory, differentiable; None stays None."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, gathered on every rank: a collective if it is cut."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
