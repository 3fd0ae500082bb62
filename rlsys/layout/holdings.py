"""Who holds which part of a model: boxes of its tensors, by rank.

tensor "layers.0.q_proj.weight" [64, 32]      dp2tp2: rank 0 holds [0:16, 0:32]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank has of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box


def holdings(tensors: Mapping[str, torch.Tensor]) -> list[Holding]:
    """Of this rank. It has all of a tensor that is no DTensor; where a tensor has too few rows for
    all ranks, some have an empty box of it."""
    return [
        Holding(name=name, shape=tuple(tensor.shape), box=local_box(tensor))
        for name, tensor in tensors.items()
    ]


def local_box(tensor: torch.Tensor) -> Box:
    """The part of a tensor that lies on this rank. A tensor that is cut over data and over tensor
    ranks along the same dimension is cut over the tensor ranks first, so the part is one piece."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple((start, start + size) for start, size in zip(offset, shape, strict=True)))


def local_part(tensor: MaybeTensor) -> MaybeTensor:
    """This rank's part of a tensor, sharing its memory, differentiable; None stays None."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, gathered on every rank: a collective if it is cut."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
