"""Bytes that a reallocation moves over each link, and the minimum that any plan moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.reallocation.shards import Box, Holder
from rlsys.reallocation.tensor_groups import RankSet, TensorGroup, grouped

MAX_LINES = 12  # per part of a table


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes per link, without alignment. Links without bytes are left out."""

    staged: Mapping[str, int]
    """By node: bytes that its ranks stage for its own targets."""
    imported: Mapping[str, int]
    """By node: bytes from other nodes."""
    read: Mapping[str, int]
    """By target: bytes that it reads from its node's memory."""

    @property
    def total(self) -> int:
        """Bytes of all links."""
        return sum(sum(link.values()) for link in (self.staged, self.imported, self.read))


def minimal_bytes(sources: Sequence[Holder], targets: Sequence[Holder]) -> Traffic:
    """Return the bytes that any plan has to move if the ranks of a node share memory.

    A target has to read each element that it wants and does not hold. An element that targets of a
    node read must get into its memory: from one of its own ranks if one holds it, else from another
    node. Raises InvalidValue as `plan` does for sides that belong to different models.
    """
    ranks = RankSet.of(sources, targets)
    staged: dict[str, int] = defaultdict(int)
    imported: dict[str, int] = defaultdict(int)
    read: dict[str, int] = defaultdict(int)
    for group in grouped(sources, targets, ranks):
        for rank, num_elements in _read(group).items():
            read[ranks.names[rank]] += num_elements * _bytes_each(group)
        here: dict[int, list[Box]] = defaultdict(list)
        for box, holders in group.held.items():
            for node in ranks.nodes_of(holders):
                here[node].append(box)
        for node, lacking in _lacking(group, ranks).items():
            name = ranks.node_names[node]
            foreign = volume(without(lacking, here[node]))
            staged[name] += (volume(lacking) - foreign) * _bytes_each(group)
            imported[name] += foreign * _bytes_each(group)
    return Traffic(staged=_some(staged), imported=_some(imported), read=_some(read))


def _read(group: TensorGroup) -> dict[int, int]:
    """Return the elements of one tensor that each target reads."""
    found: dict[int, int] = {}
    for box, wanting in group.wanted.items():
        for rank in wanting:
            found[rank] = found.get(rank, 0) + volume(without([box], group.held_by(rank)))
    return found


def _lacking(group: TensorGroup, ranks: RankSet) -> dict[int, list[Box]]:
    """Return, by node, all elements that some target there has to read, in disjoint boxes."""
    found: dict[int, list[Box]] = {}
    for box, wanting in group.wanted.items():
        for rank in dict.fromkeys(wanting):
            union = found.setdefault(ranks.nodes[rank], [])
            for piece in without([box], group.held_by(rank)):
                union += without([piece], union)
    return found


def without(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """Return the rest of disjoint boxes outside `others`, in disjoint boxes."""
    left = list(boxes)
    for other in others:
        left = [piece for box in left for piece in box.without(other)]
    return left


def volume(boxes: Iterable[Box]) -> int:
    """Return the number of elements of disjoint boxes."""
    return sum(box.num_elements for box in boxes)


def _bytes_each(group: TensorGroup) -> int:
    """Return the bytes of one element over all tensors of a group."""
    return len(group.names) * group.dtype.itemsize


def _some(link: Mapping[str, int]) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in link.items() if num_bytes}


def table(
    put: Mapping[tuple[str, str], int], read: Mapping[str, int], nodes: Mapping[str, str]
) -> str:
    """Return a table of the links between and within nodes, sorted by bytes.

    `put` has bytes by rank and the node that it writes to, `read` bytes by target, and `nodes` the
    node of each rank.
    """
    by_link: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (rank, node), num_bytes in put.items():
        by_link[nodes[rank], node].append(num_bytes)
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank, num_bytes in read.items():
        by_node[nodes[rank]].append(num_bytes)
    links = [
        (one, "staged by", "rank", of)
        if one == other
        else (f"{one} -> {other}", "sent by", "rank", of)
        for (one, other), of in by_link.items()
    ]
    reads = [(node, "read by", "target", of) for node, of in by_node.items()]
    if not links:
        return "nothing to move: every target holds its tensors"
    width = max(len(title) for title, *_ in (*links, *reads))
    return "\n".join([*_lines(links, width), *_lines(reads, width)])


def _lines(links: Sequence[tuple[str, str, str, Sequence[int]]], width: int) -> list[str]:
    by_bytes = sorted(links, key=lambda link: (-sum(link[-1]), link[0]))
    lines = [
        f"{title:{width}} {size_text(sum(of))}  {verb} {len(of)} {who}{'s' * (len(of) > 1)}"
        + (f", at most {size_text(max(of)).strip()} each" if len(of) > 1 else "")
        for title, verb, who, of in by_bytes[:MAX_LINES]
    ]
    if others := by_bytes[MAX_LINES:]:
        left = sum(sum(of) for *_, of in others)
        lines.append(f"{f'and {len(others)} more':{width}} {size_text(left)}")
    return lines


def size_text(num_bytes: int) -> str:
    """Return a size with its unit, in a fixed width."""
    for power, unit in enumerate(("KiB", "MiB"), start=1):
        if num_bytes < 1024 ** (power + 1):
            return f"{num_bytes / 1024**power:9.1f} {unit}"
    return f"{num_bytes / 2**30:9.1f} GiB"
