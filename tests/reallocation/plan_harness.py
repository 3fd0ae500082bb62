"""Execution of a plan by plain copies, and its expected results by sets of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from rlsys.reallocation.plan import Import, Read, ReallocationPlan, Segment
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.traffic import Traffic

Elements = npt.NDArray[np.bool_]  # mask over a whole tensor

# A tensor, or a part of one, and the box of that part.
Local = tuple[torch.Tensor, Box]


def box(*bounds: tuple[int, int]) -> Box:
    return Box(bounds)


def holding(
    name: str, shape: Sequence[int], part: Box | None = None, dtype: torch.dtype = torch.float32
) -> TensorShard:
    whole = Box.whole(shape)
    return TensorShard(
        name=name, shape=tuple(shape), dtype=dtype, box=whole if part is None else part
    )


def holder(rank: str, node: str, *holdings: TensorShard) -> Holder:
    return Holder(rank, node, holdings)


def size_of(segments: Iterable[Segment]) -> int:
    return max((one.offset + one.num_bytes for one in segments), default=0)


def staged(segments: Sequence[Segment], local: Callable[[Segment], Local]) -> torch.Tensor:
    """Return a rank's buffer, uint8, filled from its tensors."""
    buffer = torch.zeros(size_of(segments), dtype=torch.uint8)
    for one in segments:
        tensor, where = local(one)
        view(buffer, one).copy_(tensor[one.box.slices_in(where)])
    return buffer


def imported(imports: Sequence[Import], buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a node's buffer, filled from those of other nodes' ranks."""
    buffer = torch.zeros(size_of(one.here for one in imports), dtype=torch.uint8)
    for one in imports:
        view(buffer, one.here).copy_(view(buffers[one.there.buffer], one.there))
    return buffer


def copy(
    read: Read,
    into: Local,
    buffers: Mapping[str, torch.Tensor],
    own: Callable[[TensorShard], torch.Tensor],
) -> None:
    """Copy one read into a target; `own` returns tensors that the target holds."""
    origin, (tensor, where) = read.origin, into
    found = own(origin) if isinstance(origin, TensorShard) else view(buffers[origin.buffer], origin)
    tensor[read.box.slices_in(where)].copy_(found[read.box.slices_in(origin.box)])


def view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    piece = buffer[segment.offset : segment.offset + segment.num_bytes]
    return piece.view(segment.dtype).view(segment.box.shape)


def check(plan: ReallocationPlan, sources: Sequence[Holder], targets: Sequence[Holder]) -> None:
    """Check all properties of a plan except balance, element by element, and execute it."""
    tensors = {one.name: one for each in (*sources, *targets) for one in each.holdings}
    numbers = {
        name: torch.arange(prod(one.shape), dtype=torch.float32).view(one.shape) + 0.3
        for name, one in tensors.items()
    }
    nodes = {each.rank: each.node for each in (*sources, *targets)}
    held = {each.rank: _elements(each.holdings) for each in sources}

    buffers = {}
    ranks = [each.rank for each in sources]
    for each in sources:
        segments = plan.staged(each.rank)
        _check_offsets(segments)
        for one in segments:
            assert one.buffer == each.rank
            assert held[each.rank][one.name][one.box.slices].all(), "staged but not held"
        buffers[each.rank] = staged(segments, lambda s: (numbers[s.name], _whole(numbers[s.name])))
    for node in dict.fromkeys(nodes.values()):
        imports = plan.imports(node)
        _check_offsets([one.here for one in imports])
        for arrival in imports:
            assert (arrival.here.buffer, arrival.there.box) == (node, arrival.here.box)
            assert node in arrival.there.nodes
            assert nodes[arrival.there.buffer] != node
        places = [(ranks.index(one.there.buffer), one.there.offset) for one in imports]
        assert places == sorted(places), "neighbours of the sender are neighbours of the node"
        buffers[node] = imported(imports, buffers)

    for each in targets:
        received = [torch.full(one.box.shape, -1.0, dtype=one.dtype) for one in each.holdings]
        times = [np.zeros(one.box.shape, np.int64) for one in each.holdings]
        for read in plan.reads(each.rank):
            want = each.holdings[read.want]
            _check_read(read, each, held.get(each.rank, {}), nodes)
            into = (received[read.want], want.box)
            copy(read, into, buffers, lambda own: numbers[own.name][own.box.slices])
            times[read.want][read.box.slices_in(want.box)] += 1
        for want, got, count in zip(each.holdings, received, times, strict=True):
            assert (count == 1).all(), "each element is written exactly once"
            assert torch.equal(got, numbers[want.name][want.box.slices].to(want.dtype))

    lacked = _lacked(sources, targets)
    _check_borders(plan, sources, nodes, lacked)
    assert plan.bytes_per_link == _least(sources, targets, nodes, lacked)


def _check_offsets(segments: Sequence[Segment]) -> None:
    end = 0
    for one in segments:
        assert one.offset % 64 == 0
        assert one.offset >= end, "segments overlap"
        assert one.num_bytes > 0
        end = one.offset + one.num_bytes


def _check_read(
    read: Read, target: Holder, own: Mapping[str, Elements], nodes: Mapping[str, str]
) -> None:
    want = target.holdings[read.want]
    assert read.origin.name == want.name
    has = own.get(want.name, np.zeros(want.shape, np.bool_))[read.box.slices]
    if isinstance(read.origin, TensorShard):
        assert has.all()
    else:
        assert not has.any(), "reads what it holds"
        assert read.origin.dtype == want.dtype
        assert nodes.get(read.origin.buffer, read.origin.buffer) == target.node


_Lacked = dict[tuple[str, str, torch.dtype], Elements]  # by node, name and precision


def _lacked(sources: Sequence[Holder], targets: Sequence[Holder]) -> _Lacked:
    held = {each.rank: _elements(each.holdings) for each in sources}
    found: _Lacked = {}
    for each in targets:
        for one in each.holdings:
            wanted = _elements([one])[one.name]
            wanted &= ~held.get(each.rank, {}).get(one.name, np.zeros(one.shape, np.bool_))
            key = (each.node, one.name, one.dtype)
            found[key] = found.get(key, np.zeros(one.shape, np.bool_)) | wanted
    return found


def _check_borders(
    plan: ReallocationPlan, sources: Sequence[Holder], nodes: Mapping[str, str], lacked: _Lacked
) -> None:
    """Check what is staged on a node, and what it imports, element by element."""
    for node in dict.fromkeys(nodes.values()):
        here = [each for each in sources if each.node == node]
        segments = [one for each in here for one in plan.staged(each.rank)]
        imports = [one.here for one in plan.imports(node)]
        for name, dtype in {(name, dtype) for _, name, dtype in lacked}:
            shape = next(iter(v.shape for k, v in lacked.items() if k[1] == name))
            nothing = np.zeros(shape, np.bool_)
            own = lacked.get((node, name, dtype), nothing)
            held = np.logical_or.reduce(
                [nothing, *(_elements(each.holdings).get(name, nothing) for each in here)]
            )
            of_rank, sent, came = (np.zeros(shape, np.int64) for _ in range(3))
            for one in segments:
                if (one.name, one.dtype) == (name, dtype):
                    of_rank[one.box.slices] += 1
                    sent[one.box.slices] += len(one.nodes)
            for one in imports:
                if (one.name, one.dtype) == (name, dtype):
                    came[one.box.slices] += 1
            assert (of_rank <= 1).all(), "two ranks of a node stage the same"
            assert np.array_equal(of_rank == 1, (own & held) | (sent > 0)), "staged but not read"
            assert np.array_equal(came, (own & ~held).astype(np.int64)), "imported once if lacking"


def _least(
    sources: Sequence[Holder],
    targets: Sequence[Holder],
    nodes: Mapping[str, str],
    lacked: _Lacked,
) -> Traffic:
    by_node = {node: _elements(_of_node(sources, node)) for node in set(nodes.values())}
    near: dict[str, int] = {}
    far: dict[str, int] = {}
    for (node, name, dtype), elements in lacked.items():
        held = by_node[node].get(name, np.zeros(elements.shape, np.bool_))
        for link, some in ((near, elements & held), (far, elements & ~held)):
            if some.any():
                link[node] = link.get(node, 0) + int(some.sum()) * dtype.itemsize
    read: dict[str, int] = {}
    held_by = {each.rank: _elements(each.holdings) for each in sources}
    for each in targets:
        for one in each.holdings:
            has = held_by.get(each.rank, {}).get(one.name, np.zeros(one.shape, np.bool_))
            lacking = int((_elements([one])[one.name] & ~has).sum())
            if lacking:
                read[each.rank] = read.get(each.rank, 0) + lacking * one.dtype.itemsize
    return Traffic(staged=near, imported=far, read=read)


def _of_node(sources: Sequence[Holder], node: str) -> list[TensorShard]:
    return [one for each in sources if each.node == node for one in each.holdings]


def _elements(holdings: Iterable[TensorShard]) -> dict[str, Elements]:
    found: dict[str, Elements] = {}
    for one in holdings:
        found.setdefault(one.name, np.zeros(one.shape, np.bool_))[one.box.slices] = True
    return found


def _whole(tensor: torch.Tensor) -> Box:
    return Box.whole(tensor.shape)
