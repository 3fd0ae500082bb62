"""Ring attention: tokens of a row are on several ranks; queries stay, keys and values are sent.

    turn 0   rank g: its queries see its own keys
    turn d   rank g: its queries see keys of rank g - d;  its keys go to rank g + d

Results per rank of keys are merged by their logsumexp (tree_attention.py), so that no rank has keys
of more than two ranks at a time, one of them in transit (Ring Attention, 2310.01889). A token sees
only earlier tokens of the packed row: nothing is sent to earlier ranks, and later ranks receive
only keys that one of their queries sees. So ranks exchange little if rows are short compared with
a rank's tokens, and rank g + d receives keys from rank g, not from its neighbour. In the backward
pass keys are sent once more, and their gradients back.

Shape legend: S tokens of each rank, H·G query heads, H key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rlsys.engines.models.prefix_tree import Block
from rlsys.engines.models.tree_attention import (
    OfResult,
    Places,
    Rectangle,
    TreeCalls,
    attend,
    join,
    places,
)
from rlsys.engines.training.parallel.collectives import Group


@dataclass(frozen=True)
class RingStep:
    """Messages between a rank and those at one `distance`."""

    target: int | None
    """Rank that receives own keys, if it sees any."""
    sent: Places
    source: int | None
    """Rank whose keys are received, if a query sees any."""
    num_received: int
    rectangles: Sequence[Rectangle]
    """Own queries and received keys that see each other."""


class RingCalls:
    """Computation and messages of rank `index` of `ranks` for the blocks of a tree.

    They are the same in every layer. Each rank has `size` consecutive tokens. `ranks` are numbers
    in `group`.
    """

    def __init__(
        self, blocks: Sequence[Block], size: int, group: Group, ranks: Sequence[int], index: int
    ) -> None:
        self._group = group
        spans = [range(number * size, (number + 1) * size) for number in range(len(ranks))]
        start = spans[index].start
        self.own = TreeCalls(list(_own(blocks, spans[index])))
        self.turns = []
        for distance in range(1, len(ranks)):
            behind, before = index + distance, index - distance
            sent = _rectangles(blocks, spans[behind], spans[index]) if behind < len(ranks) else []
            taken = _rectangles(blocks, spans[index], spans[before]) if before >= 0 else []
            sent_keys = _hull([keys for _, keys in sent]) or range(start, start)
            taken_keys = _hull([keys for _, keys in taken])
            turn = RingStep(
                target=ranks[behind] if sent else None,
                sent=_within(sent_keys, start),
                source=ranks[before] if taken else None,
                num_received=len(taken_keys),
                rectangles=[
                    (_within(queries, start), _within(keys, taken_keys.start))
                    for queries, keys in taken
                ],
            )
            self.turns.append(turn)

    def travel(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[RingStep, torch.Tensor]]:
        """Yield the keys and values received in each turn, [1, 2·H, n, D].

        The first transfer starts at once, each next one while the previous result is in use.
        """
        both = torch.cat((key, value), 1)
        return self._arriving(both, self._start(both, self.turns[0]))

    def _arriving(
        self, both: torch.Tensor, started: _Transfer
    ) -> Iterator[tuple[RingStep, torch.Tensor]]:
        for turn, following in zip(self.turns, (*self.turns[1:], None), strict=True):
            arrived = started.finished()
            if following is not None:
                started = self._start(both, following)
            yield turn, arrived

    def _start(self, both: torch.Tensor, turn: RingStep) -> _Transfer:
        buffer = both.new_empty(1, both.shape[1], turn.num_received, both.shape[3])
        return _Transfer(self._group, both[turn.sent], turn.target, buffer, turn.source)

    def send_back(self, turn: RingStep, of_taken: torch.Tensor, of_own: torch.Tensor) -> _Transfer:
        """Send the gradient of what a turn received, and receive that of what it sent."""
        buffer = torch.empty_like(of_own[turn.sent])
        return _Transfer(self._group, of_taken, turn.source, buffer, turn.target)


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: RingCalls, scaling: float
) -> torch.Tensor:
    """Return [1, S, H·G, D] for query [1, H·G, S, D], key and value [1, H, S, D]; differentiable.

    Tokens outside all blocks get zeros. A collective.
    """
    attended: torch.Tensor = _RingAttention.apply(query, key, value, calls, scaling)
    return attended.transpose(1, 2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        calls: RingCalls,
        scaling: float,
    ) -> torch.Tensor:
        travelling = calls.travel(key, value)
        joined, total = attend(query, key, value, calls.own, scaling)
        for turn, both in travelling:
            keys, values = both.chunk(2, 1)
            join(joined, total, query, keys, values, turn.rectangles, scaling)
        attended = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, total)
        ctx.calls, ctx.scaling = calls, scaling
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, total = ctx.saved_tensors
        calls: RingCalls = ctx.calls
        travelling = calls.travel(key, value)
        of_result = OfResult(query, attended, total, grad, ctx.scaling)
        of_query, *of_own = of_result.differentiate(key, value, calls.own)
        of_both = torch.cat(of_own, 1)
        returning: list[tuple[RingStep, _Transfer]] = []
        for turn, both in travelling:
            keys, values = both.chunk(2, 1)
            of_taken = torch.zeros_like(both)
            of_keys, of_values = of_taken.chunk(2, 1)
            of_result.differentiate_joined(keys, values, turn.rectangles, of_keys, of_values)
            returning.append((turn, calls.send_back(turn, of_taken, of_both)))
        for turn, transfer in returning:
            of_both[turn.sent] += transfer.finished()
        return of_query, *of_both.chunk(2, 1), None, None


class _Transfer:
    """A send to one rank of a group and a receive from another; either may be None."""

    def __init__(
        self,
        group: Group,
        sent: torch.Tensor,
        target: int | None,
        received: torch.Tensor,
        source: int | None,
    ) -> None:
        self._sent, self._received = sent.contiguous(), received
        operations = []
        if target is not None:
            operations.append(dist.P2POp(dist.isend, self._sent, group=group, group_peer=target))
        if source is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def finished(self) -> torch.Tensor:
        """Wait for the transfer and return the received tensor."""
        for work in self._works:
            work.wait()
        return self._received


def _own(blocks: Sequence[Block], span: range) -> Iterator[Block]:
    """Yield the parts of blocks with queries and keys in a span, counted from its start."""
    for block in blocks:
        queries = _common(range(block.query_start, block.query_end), span)
        keys = _common(range(block.key_start, block.key_end), span)
        if queries and keys:
            bounds = queries.start, queries.stop, keys.start, keys.stop
            yield Block(*(bound - span.start for bound in bounds))


def _rectangles(blocks: Sequence[Block], queries: range, keys: range) -> list[tuple[range, range]]:
    """Return the parts of blocks with queries in one span and keys in an earlier one.

    Every query there sees every key, also in causal blocks.
    """
    found = (
        (
            _common(range(block.query_start, block.query_end), queries),
            _common(range(block.key_start, block.key_end), keys),
        )
        for block in blocks
    )
    return [pair for pair in found if all(pair)]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _hull(ranges: Sequence[range]) -> range:
    """Return the range from the first to the last of them."""
    if not ranges:
        return range(0)
    return range(min(each.start for each in ranges), max(each.stop for each in ranges))


def _within(tokens: range, first: int) -> Places:
    return places(tokens.start - first, tokens.stop - first)
