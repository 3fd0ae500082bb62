"""Tensors that lie alike, so that what is planned for one of them is planned for all.

    by rank: what it has, and what it is to have ──► by tensor: which ranks, which boxes ──► groups

The layers of a model repeat, so a thousand tensors make some ten groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlsys.reallocation.shards import Box, Holder

NUM_NAMED = 4  # of what is wrong, in a message

_Bounds = tuple[tuple[int, int], ...]
_Boxes = list[tuple[int, _Bounds]]  # the number of a rank, and a box that lies there
_Key = tuple[tuple[int, ...], torch.dtype, tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class RankSet:
    """Names of ranks and of nodes, by their numbers."""

    names: tuple[str, ...]
    node_names: tuple[str, ...]
    nodes: tuple[int, ...]  # by rank

    @classmethod
    def of(cls, sources: Iterable[Holder], targets: Iterable[Holder]) -> RankSet:
        """Raises ValueError for a rank that stands twice on a side, or on two nodes."""
        node_of: dict[str, str] = {}
        for side in (sources, targets):
            seen = set()
            for holder in side:
                if holder.rank in seen:
                    raise ValueError(
                        f"rank {holder.rank} stands twice on one side; give all that it holds as "
                        "one Holder."
                    )
                seen.add(holder.rank)
                if (node := node_of.setdefault(holder.rank, holder.node)) != holder.node:
                    raise ValueError(
                        f"rank {holder.rank} lies on {node} as a source and on {holder.node} as a "
                        "target; a rank has one node, other processes have other names."
                    )
        node_names = tuple(dict.fromkeys(node_of.values()))
        if both := sorted({*node_of} & {*node_names}):
            raise ValueError(
                f"{both[0]} is the name of a rank and of a node; buffers are told apart by these "
                "names, so give them different ones."
            )
        numbers = {name: number for number, name in enumerate(node_names)}
        return cls(tuple(node_of), node_names, tuple(numbers[node] for node in node_of.values()))

    def nodes_of(self, ranks: Iterable[int]) -> frozenset[int]:
        return frozenset(self.nodes[rank] for rank in ranks)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and precision whose boxes lie on the same ranks."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which they are wanted
    held: Mapping[Box, tuple[int, ...]]  # by which ranks; no empty boxes
    wanted: Mapping[Box, tuple[int, ...]]  # a rank stands as often as it wants the box

    def held_by(self, rank: int) -> Sequence[Box]:
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
    """All tensors, each once for every precision that it is wanted in, in the sources' order.

    Raises ValueError where the sides do not belong to the same model: a tensor that one of them
    lacks, other shapes, precisions that are no rounding of each other.
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
            if one.dtype != dtype:
                raise ValueError(
                    f"tensor {one.name} is {_short(dtype)} on {first} and {_short(one.dtype)} on "
                    f"{holder.rank}, so what arrives would depend on who sends it; all sources "
                    "hold a tensor in one precision."
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
            if one.dtype != dtype and not (one.dtype.is_floating_point and dtype.is_floating_point):
                raise ValueError(
                    f"tensor {one.name} is {_short(dtype)} on {first}, but {holder.rank} is to "
                    f"have it as {_short(one.dtype)}; only floating-point numbers are rounded on "
                    "the way, others keep their type."
                )
            wanted[one.name, one.dtype].append((number, one.box.bounds))
    _check_names(missing, held.keys() - {name for name, _ in wanted}, facts)
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
            names=tuple(alike),
            shape=facts[alike[0]][0],
            dtype=dtype,
            held=_by_box(held[alike[0]], facts[alike[0]][0]),
            wanted=_by_box(wanted[alike[0], dtype], facts[alike[0]][0]),
        )
        for (_, dtype, *_), alike in names.items()
    ]


def _by_box(boxes: _Boxes, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
    ranks: dict[_Bounds, list[int]] = defaultdict(list)
    for rank, bounds in boxes:
        if all(start < stop for start, stop in bounds):
            ranks[bounds].append(rank)
    for bounds in ranks:
        sizes = zip(bounds, shape, strict=True)
        inside = all(start >= 0 and stop <= size for (start, stop), size in sizes)
        assert inside, f"{bounds} is no box of {shape}"
    return {Box(bounds): tuple(found) for bounds, found in ranks.items()}


def _check_names(
    missing: Mapping[str, str], left: Iterable[str], facts: Mapping[str, tuple[object, ...]]
) -> None:
    if missing:
        raise ValueError(
            f"no source holds {_some(missing)}, which {next(iter(missing.values()))} is to have; "
            "both sides must be of the same model, and all ranks of the sources must be given."
        )
    if unwanted := sorted(left):
        raise ValueError(
            f"no target is to have {_some(unwanted)}, which {facts[unwanted[0]][2]} holds: weights "
            "would get lost on the way; both sides must be of the same model. Leave out of the "
            "sources what is not to travel."
        )


def _some(names: Iterable[str]) -> str:
    first, *others = names
    told = ", ".join([first, *others[: NUM_NAMED - 1]])
    return told + (f" and {len(others) + 1 - NUM_NAMED} more" if len(others) >= NUM_NAMED else "")


def _other_shapes(
    name: str, shape: Sequence[int], rank: str, other: Sequence[int], other_rank: str
) -> ValueError:
    return ValueError(
        f"tensor {name} has the shape {tuple(shape)} on {rank} and {tuple(other)} on {other_rank}; "
        "both sides must be of the same model (is a vocabulary padded, or a tensor fused, on one "
        "side only?)."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
