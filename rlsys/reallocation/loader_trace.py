"""What a weight loader copies where, found out by running it over tensors that hold nothing.

    sources, targets: meta tensors ──► loader under a CopyRecorder ──► copies, boxes to boxes

A loader cuts, fuses, repeats and pads as it likes: a view of a meta tensor knows its storage,
offset and strides, so each copy tells by itself which part of which source goes to which part of
which target. Nothing is allocated, whatever the size of the model. What a loader computes, instead
of copying it, is refused by name.
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
# These give a new tensor with the numbers of their first argument.
CLONES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

MAX_PIECES = 4096  # of one copy


@dataclass(frozen=True, slots=True)
class Copy:
    """`target[target_box] = source[source_box].permute(order).reshape(target_box.shape)`"""

    source: str
    source_box: Box
    target: str
    target_box: Box
    order: tuple[int, ...]

    def arranged(self, part: torch.Tensor) -> torch.Tensor:
        """The part of the source that `source_box` says, as the target has it."""
        return part.permute(self.order).reshape(self.target_box.shape)


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same parts, those that continue one another in one copy: loaders copy the experts of a
    layer one by one, and gate and up apart. No two of `copies` have any part of a target in common.
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
    """What a loader takes of its sources, which have these shapes, as numbers of its targets'
    `dtypes`: for a plan, what is to get there.
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
    """What copies have in common that can continue one another along `dim` of the target."""
    has_dim = dim < len(one.target_box.bounds)
    if not has_dim or tuple(one.source_box.shape[d] for d in one.order) != one.target_box.shape:
        return object()  # nothing: dimensions of one element stand elsewhere
    source, target = list(one.source_box.bounds), list(one.target_box.bounds)
    del source[one.order[dim]], target[dim]
    return one.source, one.target, one.order, tuple(source), tuple(target)


def _continued(first: Copy, then: Copy, dim: int) -> Copy | None:
    """Both, of one row, as one copy; None where the second does not begin at the first one's end
    in both tensors.
    """
    source_dim = first.order[dim]
    source = _stretched(first.source_box, then.source_box, source_dim)
    target = _stretched(first.target_box, then.target_box, dim)
    if source is None or target is None:
        return None
    return replace(first, source_box=source, target_box=target)


def _stretched(box: Box, then: Box, dim: int) -> Box | None:
    (start, end), (begin, stop) = box.bounds[dim], then.bounds[dim]
    if end != begin:
        return None
    return Box((*box.bounds[:dim], (start, stop), *box.bounds[dim + 1 :]))


class CopyRecorder(TorchDispatchMode):
    """A context around the loader; `copies` and `fills` are complete afterwards.

    `sources` and `targets`: contiguous meta tensors by name, none a view of another. Raises
    ValueError, out of the loader, for a target that gets what is not a part of a source.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[tuple[str, Box]] = []
        """Parts of targets that get a constant: padding."""
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._targets = {_storage(tensor): (name, tensor) for name, tensor in targets.items()}
        self._clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the new one, and of what

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
                raise ValueError("weights are put together in a tensor of the loader's own")
            return
        name, whole = found
        if not self._is_known(source):
            raise ValueError(f"{name} is computed, not copied")
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
    """Through one or two tensors at once, element by element: sizes of the steps' loops, and for
    each tensor where it begins and how far each loop steps, in elements of its storage.
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
        """With loops cut in two until each stays within a dimension of `base`."""
        walk, loop = self, 0
        while loop < len(walk.sizes):
            dim, step = _dimension(walk.strides[side][loop], base)
            start = _digits(walk.offsets[side], base)[dim]
            if start + step * (walk.sizes[loop] - 1) < base.shape[dim]:
                loop += 1
                continue
            inner, rest = divmod(base.shape[dim], step)
            if start >= step or rest or walk.sizes[loop] % inner or inner == 1:
                raise ValueError("weights are reshaped across their dimensions")
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
        """Its last tensor, `made`, is a copy of the view `source`: walk through that instead."""
        walk = self.within(1, made)
        digits = _digits(walk.offsets[1], made)
        steps = [_dimension(stride, made) for stride in walk.strides[1]]
        leads = sum(n * own for n, own in zip(digits, source.stride(), strict=True))
        return replace(
            walk,
            offsets=(walk.offsets[0], int(source.storage_offset()) + leads),
            strides=(walk.strides[0], tuple(source.stride()[dim] * step for dim, step in steps)),
        )

    def at(self, loops: Sequence[int], numbers: Sequence[int]) -> _Walk:
        """With these loops at these numbers."""
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
    """A walk as boxes, one of each tensor, and in which order the last one's dimensions stand in
    the first one.
    """
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
        raise ValueError(f"weights are cut into {num_pieces} pieces, more than {MAX_PIECES}")
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
    """All dimensions, those of one element where they disturb least."""
    if list(walked) == sorted(walked):
        return tuple(range(base.dim()))
    return (*(d for d in range(base.dim()) if d not in walked), *walked)


def _dimension(stride: int, base: torch.Tensor) -> tuple[int, int]:
    """Along which dimension a stride leads, and how far."""
    fitting = [
        (own, d)
        for d, (size, own) in enumerate(zip(base.shape, base.stride(), strict=True))
        if size > 1 and 0 < own <= stride
    ]
    own, dim = max(fitting, default=(0, 0))
    if not own or stride % own:
        raise ValueError("weights are repeated, or read in a way that no boxes describe")
    return dim, stride // own


def _digits(offset: int, base: torch.Tensor) -> list[int]:
    """The indices of an element, by its place in the storage."""
    digits = [0] * base.dim()
    for own, d in sorted(((own, d) for d, own in enumerate(base.stride())), reverse=True):
        if base.shape[d] > 1:
            digits[d], offset = divmod(offset, own)
    return digits


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
