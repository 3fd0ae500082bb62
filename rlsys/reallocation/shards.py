"""Shards of a model: the boxes of its tensors that each rank holds.

    tensor "layers.0.q_proj.weight" [64, 32]      dp2tp2: rank 0 holds [0:16, 0:32]

Code that plans with boxes does not import DTensor, which takes a second.
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
    """Index ranges [start, stop) of each dimension of a tensor; empty for a scalar."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index into the whole tensor."""
        return tuple(slice(start, stop) for start, stop in self.bounds)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the index into a tensor that is the part `outer` of the whole one."""
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None."""
        bounds = tuple(
            (max(start, first), min(stop, last))
            for (start, stop), (first, last) in zip(self.bounds, other.bounds, strict=True)
        )
        return Box(bounds) if all(start < stop for start, stop in bounds) else None

    def without(self, other: Box) -> list[Box]:
        """Return the rest of the box outside `other`, in boxes that do not overlap."""
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
    """The part of one tensor that a rank holds or wants."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    box: Box

    def __str__(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {list(self.shape)} {precision} {self.box}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank and its node, with the shards that it holds or wants."""

    rank: str
    node: str
    holdings: tuple[TensorShard, ...]

    def __hash__(self) -> int:
        # Hashing a million boxes would take seconds, and other layouts mostly differ in these.
        return hash((self.rank, self.node, len(self.holdings)))


def holdings(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Return the shards of this rank.

    A tensor that is no DTensor is held whole. If a tensor has fewer rows than ranks, some ranks
    have an empty box.
    """
    return [
        TensorShard(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, box=local_box(tensor))
        for name, tensor in tensors.items()
    ]


def local_box(tensor: torch.Tensor) -> Box:
    """Return the part of a tensor that this rank holds.

    A tensor that data and tensor parallelism cut along the same dimension is cut by tensor ranks
    first, so the part is contiguous.
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
    """Return this rank's part of a tensor, sharing its memory, differentiable. None stays None."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole parameter on every rank. A collective if it is sharded."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
