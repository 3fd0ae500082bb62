"""Trace of a weight loader: the copies that it makes, recorded by running it over meta tensors.

    sources, targets: meta tensors ──► loader under a CopyRecorder ──► copies, boxes to boxes

A loader may cut, fuse, repeat and pad. A view of a meta tensor has a storage, offset and strides,
so each copy shows its part of a source and its part of a target. Nothing is allocated. Values that
a loader computes instead of copying raise an error.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.reallocation.shards import Box, TensorShard

COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
# Operations that return a new tensor with the values of their first argument.
CLONES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

MAX_PIECES = 4096  # boxes of one copy


class NotCopied(ValueError):
    """An operation of a loader that is not a copy of boxes."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`target[target_box] = source[source_box].permute(order).reshape(target_box.shape)`."""

    source: str
    source_box: Box
    target: str
    target_box: Box
    order: tuple[int, ...]

    def arranged(self, part: torch.Tensor) -> torch.Tensor:
        """Return the source's part in the target's shape and order."""
        return part.permute(self.order).reshape(self.target_box.shape)


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Merge copies that continue each other.

    Loaders copy the experts of a layer one by one, and gate and up separately. No two of `copies`
    may overlap in a target.
    """
    found = list(copies)
    for dim in reversed(range(max((len(one.order) for one in found), default=0))):
        rows: dict[object, list[Copy]] = defaultdict(list)
        for one in found:
            row = rows[_row(one, dim)]
            if row and (both := _continued(row[-1], one, dim)) is not None:
                row[-1] = both
            else:
                row.append(one)
        found = [one for row in rows.values() for one in row]
    return found


def wanted(
    copies: Iterable[Copy],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> list[TensorShard]:
    """Return the parts of the sources that a loader copies, for a plan.

    `shapes` are those of the sources, `dtypes` those of the targets, in which the parts are wanted.
    """
    found = (
        TensorShard(
            name=one.source,
            shape=shapes[one.source],
            dtype=dtypes[one.target],
            box=one.source_box,
        )
        for one in copies
    )
    return list(dict.fromkeys(found))


def _row(one: Copy, dim: int) -> object:
    """Return a key of copies that may continue each other along `dim` of the target."""
    has_dim = dim < len(one.target_box.bounds)
    if not has_dim or tuple(one.source_box.shape[d] for d in one.order) != one.target_box.shape:
        return object()  # a unique key: dimensions of one element have moved
    source, target = list(one.source_box.bounds), list(one.target_box.bounds)
    del source[one.order[dim]], target[dim]
    return one.source, one.target, one.order, tuple(source), tuple(target)


def _continued(first: Copy, then: Copy, dim: int) -> Copy | None:
    """Merge two copies of one row; None if the second does not continue the first."""
    source_dim = first.order[dim]
    source = _extended(first.source_box, then.source_box, source_dim)
    target = _extended(first.target_box, then.target_box, dim)
    if source is None or target is None:
        return None
    return replace(first, source_box=source, target_box=target)


def _extended(box: Box, then: Box, dim: int) -> Box | None:
    (start, end), (begin, stop) = box.bounds[dim], then.bounds[dim]
    if end != begin:
        return None
    return Box((*box.bounds[:dim], (start, stop), *box.bounds[dim + 1 :]))


class CopyRecorder(TorchDispatchMode):
    """A context in which a loader runs; `copies` and `fills` are complete afterwards.

    `sources` and `targets` are contiguous meta tensors by name, none a view of another. A target
    that gets something else than a part of a source raises NotCopied, inside the loader.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[tuple[str, Box]] = []
        """Parts of targets that are filled with a constant, such as padding."""
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._targets = {_storage(tensor): (name, tensor) for name, tensor in targets.items()}
        self._clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (clone, original)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is COPY:
            self._copy(args[0], args[1])
        elif func in FILLS:
            self._fill(args[0])
        result = func(*args, **(kwargs or {}))
        if func in CLONES and self._is_known(args[0]) and _storage(result) != _storage(args[0]):
            self._clones[_storage(result)] = (result, args[0])
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._sources or _storage(tensor) in self._clones

    def _fill(self, part: torch.Tensor) -> None:
        if (found := self._targets.get(_storage(part))) is not None:
            name, whole = found
            self.fills += [(name, boxes[0]) for boxes, _ in _pieces(_Walk.over(part), [whole])]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if (found := self._targets.get(_storage(target))) is None:
            if self._is_known(source):
                raise NotCopied("the loader assembles weights in its own tensor")
            return
        name, whole = found
        if not self._is_known(source):
            raise NotCopied(f"{name} is computed, not copied")
        walk = _Walk.over(target, source.expand_as(target))
        while (clone := self._clones.get(_storage(source))) is not None:
            made, source = clone
            walk = walk.through(made, source)
        origin, base = self._sources[_storage(source)]
        self.copies += [
            Copy(origin, source_box, name, target_box, order)
            for (target_box, source_box), order in _pieces(walk, [whole, base])
        ]


@dataclass(frozen=True)
class _Walk:
    """Iteration over one or two tensors, element by element.

    It has the sizes of nested loops, and for each tensor the offset of the first element and the
    stride of each loop, in elements of its storage.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, *views: torch.Tensor) -> _Walk:
        loops = [d for d, size in enumerate(views[0].shape) if size != 1]
        return cls(
            sizes=tuple(views[0].shape[d] for d in loops),
            offsets=tuple(int(view.storage_offset()) for view in views),
            strides=tuple(tuple(view.stride()[d] for d in loops) for view in views),
        )

    def within(self, side: int, base: torch.Tensor) -> _Walk:
        """Split loops until each stays within a dimension of `base`."""
        walk, loop = self, 0
        while loop < len(walk.sizes):
            dim, step = _dimension(walk.strides[side][loop], base)
            start = _digits(walk.offsets[side], base)[dim]
            if start + step * (walk.sizes[loop] - 1) < base.shape[dim]:
                loop += 1
                continue
            inner, rest = divmod(base.shape[dim], step)
            if start >= step or rest or walk.sizes[loop] % inner or inner == 1:
                raise NotCopied("weights are reshaped across their dimensions")
            walk = walk._cut(loop, inner)
        return walk

    def _cut(self, loop: int, inner: int) -> _Walk:
        def replaced(values: tuple[int, ...], *new: int) -> tuple[int, ...]:
            return (*values[:loop], *new, *values[loop + 1 :])

        return replace(
            self,
            sizes=replaced(self.sizes, self.sizes[loop] // inner, inner),
            strides=tuple(replaced(s, s[loop] * inner, s[loop]) for s in self.strides),
        )

    def through(self, made: torch.Tensor, source: torch.Tensor) -> _Walk:
        """Replace the last tensor, `made`, by the view `source` that it is a copy of."""
        walk = self.within(1, made)
        digits = _digits(walk.offsets[1], made)
        steps = [_dimension(stride, made) for stride in walk.strides[1]]
        offset = sum(n * own for n, own in zip(digits, source.stride(), strict=True))
        return replace(
            walk,
            offsets=(walk.offsets[0], int(source.storage_offset()) + offset),
            strides=(walk.strides[0], tuple(source.stride()[dim] * step for dim, step in steps)),
        )

    def at(self, loops: Sequence[int], numbers: Sequence[int]) -> _Walk:
        """Return the walk with these loops fixed at these indices."""
        kept = [loop for loop in range(len(self.sizes)) if loop not in loops]
        return _Walk(
            sizes=tuple(self.sizes[loop] for loop in kept),
            offsets=tuple(
                offset + sum(n * strides[loop] for loop, n in zip(loops, numbers, strict=True))
                for offset, strides in zip(self.offsets, self.strides, strict=True)
            ),
            strides=tuple(tuple(strides[loop] for loop in kept) for strides in self.strides),
        )


def _pieces(
    walk: _Walk, bases: Sequence[torch.Tensor]
) -> Iterator[tuple[list[Box], tuple[int, ...]]]:
    """Yield a walk as boxes, one per tensor, and the order of the last tensor's dimensions."""
    for side, base in enumerate(bases):
        walk = walk.within(side, base)
    if 0 in walk.sizes:
        return
    jumping = [
        loop
        for loop in range(len(walk.sizes))
        if any(
            _dimension(walk.strides[side][loop], base)[1] != 1 for side, base in enumerate(bases)
        )
    ]
    num_pieces = math.prod(walk.sizes[loop] for loop in jumping)
    if num_pieces > MAX_PIECES:
        raise NotCopied(f"weights are cut into {num_pieces} pieces, more than {MAX_PIECES}")
    for numbers in itertools.product(*(range(walk.sizes[loop]) for loop in jumping)):
        piece = walk.at(jumping, numbers)
        dims = [
            [_dimension(stride, base)[0] for stride in piece.strides[side]]
            for side, base in enumerate(bases)
        ]
        boxes = []
        for side, base in enumerate(bases):
            sizes = dict(zip(dims[side], piece.sizes, strict=True))
            starts = _digits(piece.offsets[side], base)
            boxes.append(Box(tuple((at, at + sizes.get(d, 1)) for d, at in enumerate(starts))))
        yield boxes, _order([d for _, d in sorted(zip(dims[0], dims[-1], strict=True))], bases[-1])


def _order(walked: Sequence[int], base: torch.Tensor) -> tuple[int, ...]:
    """Return all dimensions in the walked order, with those of one element in place if possible."""
    if list(walked) == sorted(walked):
        return tuple(range(base.dim()))
    return (*(d for d in range(base.dim()) if d not in walked), *walked)


def _dimension(stride: int, base: torch.Tensor) -> tuple[int, int]:
    """Return the dimension that a stride follows, and the step along it."""
    fitting = [
        (own, d)
        for d, (size, own) in enumerate(zip(base.shape, base.stride(), strict=True))
        if size > 1 and 0 < own <= stride
    ]
    own, dim = max(fitting, default=(0, 0))
    if not own or stride % own:
        raise NotCopied("weights are repeated, or read in a way that no boxes describe")
    return dim, stride // own


def _digits(offset: int, base: torch.Tensor) -> list[int]:
    """Return the indices of an element from its offset in the storage."""
    digits = [0] * base.dim()
    for own, d in sorted(((own, d) for d, own in enumerate(base.stride())), reverse=True):
        if base.shape[d] > 1:
            digits[d], offset = divmod(offset, own)
    return digits


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
