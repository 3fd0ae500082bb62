"""Who of several holders stages what, so that all of them have about equally many bytes to stage.

    lines: pieces of tensors, and the ranks of which each could stage them
      ── poured, line by line, onto the ranks that have least ──► bytes for each rank of a line
      ── each line cut there, between tensors or along their rows ──► runs for each rank

Shape legend: R ranks, K ranks that share a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.shards import Box

FloatArray = npt.NDArray[np.float64]

# Pouring ends when no rank's share changes by more than this part of the largest load.
TOLERANCE = 1e-3
MAX_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """A box of each of some tensors that lie alike."""

    group: int  # of tensors that lie alike
    first: int  # of these tensors, up to `stop`
    stop: int
    box: Box
    itemsize: int

    @property
    def bytes_each(self) -> int:
        return self.box.num_elements * self.itemsize

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.bytes_each

    def split(self, num_bytes: float, finest_bytes: int) -> tuple[list[Run], list[Run]]:
        """In two, of which the first has about so many bytes. A tensor is cut along its first
        dimension that is longer than one, into parts of at least `finest_bytes`.
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
    """Runs that each of the same ranks could stage."""

    ranks: tuple[int, ...]
    runs: Sequence[Run]
    times: int = 1
    """That each byte counts: it is sent to so many nodes."""

    @property
    def num_bytes(self) -> int:
        return sum(run.num_bytes for run in self.runs)


def spread(
    lines: Sequence[Line], loads: FloatArray, *, finest_bytes: int
) -> list[list[tuple[int, Run]]]:
    """Of each line, who stages what. `loads` [R] is what ranks have to do besides; what they are
    given is added to it.
    """
    shares = _poured_out(lines, loads)
    owed = np.zeros_like(loads)  # to ranks that got less than their shares of the lines before
    found = []
    for line, share in zip(lines, shares, strict=True):
        ranks = list(line.ranks)
        wanted = np.maximum(share + owed[ranks], 0.0)
        if not wanted.any():
            wanted = share
        dealt = _dealt(line.runs, wanted * (line.num_bytes / wanted.sum()), finest_bytes)
        got = np.array([sum(run.num_bytes for run in runs) for runs in dealt]) * line.times
        owed[ranks] += share - got
        loads[ranks] += got
        found.append([(rank, run) for rank, runs in zip(ranks, dealt, strict=True) for run in runs])
    return found


def _poured_out(lines: Sequence[Line], loads: FloatArray) -> list[FloatArray]:
    """Shares [K] of each line, such that the largest loads are as small as can be.

    That is where the sum of the loads' squares is least (Fujishige 1980), which is found line by
    line: what a line gave is taken back and poured onto the ranks that then have least.
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
            share = _poured(rest, line.num_bytes * line.times)
            levels[ranks] = rest + share
            shares[number] = share
            most_moved = max(most_moved, float(np.abs(share - before).max()))
        if most_moved <= TOLERANCE * levels.max(initial=0.0):
            break
    return shares


def _poured(levels: FloatArray, amount: float) -> FloatArray:
    """What each vessel [K] takes of an amount that fills the lowest ones up to one height."""
    rising = np.sort(levels)
    heights = (np.cumsum(rising) + amount) / np.arange(1, len(levels) + 1)  # with the k lowest
    reached = np.append(rising[1:], np.inf) >= heights
    taken: FloatArray = np.maximum(heights[int(np.argmax(reached))] - levels, 0.0)
    return taken


def _dealt(runs: Sequence[Run], amounts: FloatArray, finest_bytes: int) -> list[list[Run]]:
    """Runs one after another: to the first taker about amounts[0] bytes, and so on."""
    dealt: list[list[Run]] = [[] for _ in amounts]
    takers = np.flatnonzero(amounts > 0).tolist()
    rest = list(reversed(runs))
    due, given = 0.0, 0
    for taker in takers[:-1]:
        due += float(amounts[taker])
        while rest and given < due:
            run = rest.pop()
            head, tail = [run], list[Run]()
            if given + run.num_bytes > due:
                head, tail = run.split(due - given, finest_bytes)
            dealt[taker] += head
            given += sum(one.num_bytes for one in head)
            rest += reversed(tail)
            if tail:
                break
    dealt[takers[-1]] += reversed(rest)
    return dealt
