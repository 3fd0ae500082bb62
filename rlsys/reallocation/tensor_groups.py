"""Groups of tensors with the same shape, dtype and sharding; the planner plans each group once.

    by rank: boxes that it holds and wants ──► by tensor: ranks and boxes ──► groups

The layers of a model repeat, so a thousand tensors form some ten groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlsys.errors import InvalidValue, require
from rlsys.reallocation.shards import Box, Holder

_Bounds = tuple[tuple[int, int], ...]
_Boxes = list[tuple[int, _Bounds]]  # index of a rank, and one of its boxes
_Key = tuple[tuple[int, ...], torch.dtype, tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class RankSet:
    """Names of ranks and nodes, by their indices."""

    names: tuple[str, ...]
    node_names: tuple[str, ...]
    nodes: tuple[int, ...]  # by rank

    @classmethod
    def of(cls, sources: Iterable[Holder], targets: Iterable[Holder]) -> RankSet:
        """Return the ranks of both sides.

        Raises InvalidValue for a rank that occurs twice on a side, or on two nodes.
        """
        node_of: dict[str, str] = {}
        for side in (sources, targets):
            seen = set()
            for holder in side:
                require(
                    holder.rank not in seen,
                    "rank",
                    holder.rank,
                    rule="occurs twice on one side",
                    fix="Give all shards of a rank in one Holder.",
                )
                seen.add(holder.rank)
                node = node_of.setdefault(holder.rank, holder.node)
                require(
                    node == holder.node,
                    f"node of rank {holder.rank}",
                    holder.node,
                    rule=f"differs between the target and the source, which is on {node}",
                    fix="Give a rank one node, and other processes other names.",
                )
        node_names = tuple(dict.fromkeys(node_of.values()))
        both = sorted({*node_of} & {*node_names})
        require(
            not both,
            "names",
            both,
            rule="name both a rank and a node, but buffers are identified by these names",
            fix="Give ranks and nodes different names.",
        )
        numbers = {name: number for number, name in enumerate(node_names)}
        return cls(tuple(node_of), node_names, tuple(numbers[node] for node in node_of.values()))

    def nodes_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """Return the nodes of some ranks."""
        return frozenset(self.nodes[rank] for rank in ranks)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and precision that are sharded in the same way."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype  # wanted precision
    held: Mapping[Box, tuple[int, ...]]  # ranks that hold each box; no empty boxes
    wanted: Mapping[Box, tuple[int, ...]]  # ranks that want each box, once for each time

    def held_by(self, rank: int) -> Sequence[Box]:
        """Return the boxes that a rank holds."""
        return self._held_by.get(rank, ())

    @cached_property
    def _held_by(self) -> Mapping[int, Sequence[Box]]:
        found: dict[int, list[Box]] = defaultdict(list)
        for box, ranks in self.held.items():
            for rank in ranks:
                found[rank].append(box)
        return found


def grouped(
    sources: Sequence[Holder], targets: Sequence[Holder], ranks: RankSet
) -> list[TensorGroup]:
    """Return all tensors in groups, each once for every wanted precision, in the sources' order.

    Raises InvalidValue if the sides do not belong to the same model: a missing tensor, other
    shapes, precisions that are not a rounding of each other.
    """
    numbers = {name: number for number, name in enumerate(ranks.names)}
    facts: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {}
    held: dict[str, _Boxes] = defaultdict(list)
    for holder in sources:
        number = numbers[holder.rank]
        for one in holder.holdings:
            shape, dtype, first = facts.setdefault(one.name, (one.shape, one.dtype, holder.rank))
            if one.shape != shape:
                raise _other_shapes(one.name, shape, first, one.shape, holder.rank)
            require(
                one.dtype == dtype,
                f"precision of tensor {one.name}",
                _short(one.dtype),
                rule=f"differs between the sources: {_short(dtype)} on {first}, "
                f"{_short(one.dtype)} on {holder.rank}",
                fix="Hold a tensor in one precision on all sources.",
            )
            held[one.name].append((number, one.box.bounds))
    wanted: dict[tuple[str, torch.dtype], _Boxes] = defaultdict(list)
    missing: dict[str, str] = {}
    for holder in targets:
        number = numbers[holder.rank]
        for one in holder.holdings:
            if one.name not in facts:
                missing.setdefault(one.name, holder.rank)
                continue
            shape, dtype, first = facts[one.name]
            if one.shape != shape:
                raise _other_shapes(one.name, shape, first, one.shape, holder.rank)
            require(
                one.dtype == dtype or (one.dtype.is_floating_point and dtype.is_floating_point),
                f"precision of tensor {one.name}",
                _short(one.dtype),
                rule=f"{holder.rank} wants a tensor that is {_short(dtype)} on {first}, but only "
                "floating-point numbers are converted",
                fix=f"Use {_short(dtype)}.",
            )
            wanted[one.name, one.dtype].append((number, one.box.bounds))
    _check_names(missing, held.keys() - {name for name, _ in wanted})
    return _groups(facts, held, wanted)


def _groups(
    facts: Mapping[str, tuple[tuple[int, ...], torch.dtype, str]],
    held: Mapping[str, _Boxes],
    wanted: Mapping[tuple[str, torch.dtype], _Boxes],
) -> list[TensorGroup]:
    place = {name: number for number, name in enumerate(facts)}
    names: dict[_Key, list[str]] = defaultdict(list)
    for name, dtype in sorted(wanted, key=lambda one: (place[one[0]], str(one[1]))):
        key = (facts[name][0], dtype, tuple(held[name]), tuple(wanted[name, dtype]))
        names[key].append(name)
    return [
        TensorGroup(
            names=tuple(members),
            shape=facts[members[0]][0],
            dtype=dtype,
            held=_by_box(held[members[0]], facts[members[0]][0]),
            wanted=_by_box(wanted[members[0], dtype], facts[members[0]][0]),
        )
        for (_, dtype, *_), members in names.items()
    ]


def _by_box(boxes: _Boxes, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
    ranks: dict[_Bounds, list[int]] = defaultdict(list)
    for rank, bounds in boxes:
        if all(start < stop for start, stop in bounds):
            ranks[bounds].append(rank)
    for bounds in ranks:
        sizes = zip(bounds, shape, strict=True)
        inside = all(start >= 0 and stop <= size for (start, stop), size in sizes)
        assert inside, f"{bounds} is outside of {shape}"
    return {Box(bounds): tuple(found) for bounds, found in ranks.items()}


def _check_names(missing: Mapping[str, str], left: Iterable[str]) -> None:
    require(
        not missing,
        "tensors of the targets",
        list(missing),
        rule=f"no source holds them, but {next(iter(missing.values()), '')} wants them",
        fix="Give both sides of the same model, and all ranks of the sources.",
    )
    unwanted = sorted(left)
    require(
        not unwanted,
        "tensors of the sources",
        unwanted,
        rule="no target wants them, so these weights would be lost",
        fix="Give both sides of the same model, or leave these tensors out of the sources.",
    )


def _other_shapes(
    name: str, shape: Sequence[int], rank: str, other: Sequence[int], other_rank: str
) -> InvalidValue:
    return InvalidValue(
        f"shape of tensor {name}",
        tuple(other),
        rule=f"differs: {tuple(shape)} on {rank}, {tuple(other)} on {other_rank}",
        fix="Give both sides of the same model. Maybe a vocabulary is padded, or a tensor fused, "
        "on one side only.",
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
