"""Balance of the bytes that ranks stage, where several ranks hold the same boxes.

    lines: pieces of tensors, and the ranks that could stage each of them
      ── distribute each line onto its least loaded ranks ──► bytes for each rank of a line
      ── cut each line accordingly, between tensors or along their rows ──► runs for each rank

Shape legend: R ranks, K ranks that share a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.shards import Box

FloatArray = npt.NDArray[np.float64]

# The iteration ends when no rank's share changes by more than this part of the largest load.
TOLERANCE = 1e-3
MAX_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """A box of consecutive tensors of one group."""

    group: int  # index of the group
    first: int  # first tensor of the group
    stop: int  # index after the last tensor
    box: Box
    itemsize: int

    @property
    def bytes_each(self) -> int:
        """Bytes of the box of one tensor."""
        return self.box.num_elements * self.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes of all tensors."""
        return (self.stop - self.first) * self.bytes_each

    def split(self, num_bytes: float, finest_bytes: int) -> tuple[list[Run], list[Run]]:
        """Split the run in two, of which the first has about `num_bytes`.

        A tensor is cut along its first dimension longer than one, into parts of at least
        `finest_bytes`.
        """
        whole = min(int(num_bytes // self.bytes_each), self.stop - self.first - 1)
        at, rest = self.first + whole, num_bytes / self.bytes_each - whole
        sizes = self.box.shape
        dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
        size = 1 if dim is None else sizes[dim]
        num_parts = max(1, min(size, self.bytes_each // finest_bytes))
        part = round(rest * num_parts)
        if part in (0, num_parts):
            at += part == num_parts
            return self._tensors(self.first, at), self._tensors(at, self.stop)
        assert dim is not None
        start, stop = self.box.bounds[dim]
        row = start + size * part // num_parts
        return (
            [*self._tensors(self.first, at), self._rows(at, dim, start, row)],
            [self._rows(at, dim, row, stop), *self._tensors(at + 1, self.stop)],
        )

    def _tensors(self, first: int, stop: int) -> list[Run]:
        return [replace(self, first=first, stop=stop)] if first < stop else []

    def _rows(self, at: int, dim: int, start: int, stop: int) -> Run:
        bounds = self.box.bounds
        box = Box((*bounds[:dim], (start, stop), *bounds[dim + 1 :]))
        return replace(self, first=at, stop=at + 1, box=box)


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that could be staged by any of the same ranks."""

    ranks: tuple[int, ...]
    runs: Sequence[Run]
    times: int = 1
    """Weight of each byte: the number of nodes that it is sent to."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs, each counted once."""
        return sum(run.num_bytes for run in self.runs)


def spread(
    lines: Sequence[Line], loads: FloatArray, *, finest_bytes: int
) -> list[list[tuple[int, Run]]]:
    """Return the runs that each rank stages, for each line.

    `loads` [R] are the bytes that ranks stage otherwise; the assigned bytes are added in place.
    """
    shares = _balanced_shares(lines, loads)
    owed = np.zeros_like(loads)  # bytes that ranks got less than their shares of earlier lines
    found = []
    for line, share in zip(lines, shares, strict=True):
        ranks = list(line.ranks)
        wanted = np.maximum(share + owed[ranks], 0.0)
        if not wanted.any():
            wanted = share
        by_rank = _cut(line.runs, wanted * (line.num_bytes / wanted.sum()), finest_bytes)
        got = np.array([sum(run.num_bytes for run in runs) for runs in by_rank]) * line.times
        owed[ranks] += share - got
        loads[ranks] += got
        pairs = zip(ranks, by_rank, strict=True)
        found.append([(rank, run) for rank, runs in pairs for run in runs])
    return found


def _balanced_shares(lines: Sequence[Line], loads: FloatArray) -> list[FloatArray]:
    """Return shares [K] of each line that minimize the largest load.

    The minimum is where the sum of the loads' squares is least (Fujishige 1980). It is found line
    by line: a line's shares are removed and distributed again onto the then least loaded ranks.
    """
    levels = loads.copy()
    shares = [np.zeros(len(line.ranks)) for line in lines]
    order = sorted(range(len(lines)), key=lambda number: len(lines[number].ranks))
    for round_ in range(MAX_ROUNDS):
        most_moved = 0.0
        for number in order:
            line, before = lines[number], shares[number]
            if round_ and len(line.ranks) == 1:
                continue
            ranks = list(line.ranks)
            rest = levels[ranks] - before
            share = _fill_lowest(rest, line.num_bytes * line.times)
            levels[ranks] = rest + share
            shares[number] = share
            most_moved = max(most_moved, float(np.abs(share - before).max()))
        if most_moved <= TOLERANCE * levels.max(initial=0.0):
            break
    return shares


def _fill_lowest(levels: FloatArray, amount: float) -> FloatArray:
    """Return the parts [K] of an amount that raise the lowest levels to one height."""
    rising = np.sort(levels)
    heights = (np.cumsum(rising) + amount) / np.arange(1, len(levels) + 1)  # with the k lowest
    reached = np.append(rising[1:], np.inf) >= heights
    parts: FloatArray = np.maximum(heights[int(np.argmax(reached))] - levels, 0.0)
    return parts


def _cut(runs: Sequence[Run], amounts: FloatArray, finest_bytes: int) -> list[list[Run]]:
    """Cut consecutive runs into parts of about `amounts` bytes."""
    parts: list[list[Run]] = [[] for _ in amounts]
    takers = np.flatnonzero(amounts > 0).tolist()
    rest = list(reversed(runs))
    due, assigned = 0.0, 0
    for taker in takers[:-1]:
        due += float(amounts[taker])
        while rest and assigned < due:
            run = rest.pop()
            head, tail = [run], list[Run]()
            if assigned + run.num_bytes > due:
                head, tail = run.split(due - assigned, finest_bytes)
            parts[taker] += head
            assigned += sum(one.num_bytes for one in head)
            rest += reversed(tail)
            if tail:
                break
    parts[takers[-1]] += reversed(rest)
    return parts
