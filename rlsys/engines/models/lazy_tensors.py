"""Lazy tensors, whose values are read from files only when they are needed.

    file: 128 experts' matrices ─stack─► gate ┐
    file: 128 experts' matrices ─stack─► up   ┴─cat─► gate_up [128, 2I, D]: a lazy tensor
                                                        └─ read rows 0..31: 32 experts' files

A lazy tensor has shape and dtype like any tensor, and records the operations applied to it. So
transformers can rename, merge, check and tie the weights of a checkpoint before they are in memory.
`read` then computes a part of the result from the parts of the files that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

Index = tuple[slice, ...]  # start and stop of each dimension, without steps

PIECE_BYTES = 1 << 26  # size of a piece that is read at once


class LazyTensor(torch.Tensor):
    """A tensor on the CPU whose values are read on demand.

    `read` returns a part of the values; `inputs` are the lazy tensors that it is computed from. An
    operation in place raises NotImplementedError.
    """

    _read: Callable[[Index], torch.Tensor]
    inputs: Sequence[LazyTensor]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: Callable[[Index], torch.Tensor],
        inputs: Sequence[LazyTensor] = (),
    ) -> LazyTensor:
        """Make a tensor of this shape and dtype."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made._read, made.inputs = read, inputs
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> LazyTensor:
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"

    def read(self, index: Index | None = None) -> torch.Tensor:
        """Return the values of a part, or all. The result may be a view."""
        found = self._read(whole_index(self.shape) if index is None else index)
        assert found.dtype is self.dtype
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default:
            return _equal(*args)
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} changes weights that are not read yet.")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inputs: list[LazyTensor] = []
        tree_map_only(LazyTensor, inputs.append, (args, kwargs))
        shapes = func(
            *tree_map_only(torch.Tensor, _on_meta, args),
            **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs),
        )

        def lazy(shape: torch.Tensor, number: int | None) -> LazyTensor:
            def read(index: Index) -> torch.Tensor:
                if (rule := _RULES.get(func)) is not None:
                    return rule(index, number, func, *args, **kwargs)
                made = func(*tree_map_only(LazyTensor, _read_whole, args), **kwargs)
                part: torch.Tensor = (made if number is None else made[number])[index]
                return part

            return LazyTensor(shape.shape, shape.dtype, read, inputs)

        if isinstance(shapes, torch.Tensor):
            return lazy(shapes, None)
        return [lazy(shape, number) for number, shape in enumerate(shapes)]


def whole_index(shape: Sequence[int]) -> Index:
    """Return the index of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def pieces(index: Index, item_bytes: int) -> Iterator[Index]:
    """Yield parts of a part, in order along its first dimension, of about PIECE_BYTES each."""
    if not index:
        yield index
        return
    rows, *others = index
    row_bytes = item_bytes
    for each in others:
        row_bytes *= each.stop - each.start
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        yield (slice(start, min(start + step, rows.stop)), *others)


def sources(tensor: LazyTensor) -> list[LazyTensor]:
    """Return the tensors of files that a lazy tensor is computed from."""
    found: dict[int, LazyTensor] = {}
    open_ = [tensor]
    while open_:
        one = open_.pop()
        if not one.inputs:
            found.setdefault(id(one), one)
        open_ += one.inputs
    return list(found.values())


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _read_whole(tensor: LazyTensor) -> torch.Tensor:
    return tensor.read().contiguous()


def _part(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    return tensor.read(index) if isinstance(tensor, LazyTensor) else tensor[index]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(
        torch.equal(_part(one, piece), _part(other, piece))
        for piece in pieces(whole_index(one.shape), one.itemsize)
    )


# Rules that compute a part of a result from parts of its inputs: (part, index among several
# results, operation, arguments of the operation) -> values.


def _of_elementwise(
    index: Index, _: int | None, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    made: torch.Tensor = func(_part(x, index), *args, **kwargs)
    return made


def _of_stack(
    index: Index, _: int | None, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> torch.Tensor:
    dim %= len(index)
    inner = (*index[:dim], *index[dim + 1 :])
    return torch.stack([_part(one, inner) for one in tensors[index[dim]]], dim)


def _of_cat(
    index: Index, _: int | None, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> torch.Tensor:
    dim %= len(index)
    start, stop, parts, begin = index[dim].start, index[dim].stop, [], 0
    for one in tensors:
        end = begin + one.shape[dim]
        overlap = slice(max(start, begin) - begin, min(stop, end) - begin)
        if overlap.start < overlap.stop:
            parts.append(_part(one, (*index[:dim], overlap, *index[dim + 1 :])))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _of_split(
    index: Index, number: int | None, func: Any, x: torch.Tensor, size: int, dim: int = 0
) -> torch.Tensor:
    dim %= len(index)
    first = size * (number or 0)
    shifted = slice(index[dim].start + first, index[dim].stop + first)
    return _part(x, (*index[:dim], shifted, *index[dim + 1 :]))


def _of_transpose(
    index: Index, _: int | None, func: Any, x: torch.Tensor, dim0: int, dim1: int
) -> torch.Tensor:
    swapped = list(index)
    swapped[dim0], swapped[dim1] = index[dim1], index[dim0]
    return _part(x, tuple(swapped)).transpose(dim0, dim1)


_RULES: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(
        (aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default),
        _of_elementwise,
    ),
    aten.stack.default: _of_stack,
    aten.cat.default: _of_cat,
    aten.split.Tensor: _of_split,
    aten.transpose.int: _of_transpose,
}
