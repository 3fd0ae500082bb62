"""Causal attention along a tree of tokens, which computes each pair of tokens once.

    for each block of the tree:  query, key, value ──► attended values, logsumexp ─┐
                                                                                  ├─► joined
    softmax over all blocks = Σ block · exp(logsumexp of the block − of all) ──────┘

A token's weights over its whole past follow from those within each block and the blocks' sums. The
gradient needs no more: given the logsumexp over all blocks, the backward kernel of one block
computes the weights that its tokens have among all.

Shape legend: M tokens of the tree, H·G query heads, H key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlsys.engines.models.prefix_tree import Block

# Causal blocks are batched and padded to the longest, if at least this share is not padding,
MIN_FILLED = 0.75
# and if the heads of so many tokens fit into a core's cache.
BATCH_TOKENS = 1024

Places = tuple[slice, slice, slice]  # index into [1, H, M, ...]
Rectangle = tuple[Places, Places]  # queries, and the keys that all of them see

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def places(start: int, end: int) -> Places:
    """Return the index of tokens [start, end)."""
    return slice(None), slice(None), slice(start, end)


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


class TreeCalls:
    """Kernel calls for the blocks of a tree, the same in every layer."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        batches = _batch_by_length([block for block in blocks if block.is_causal])
        self.causal = [_Batch(blocks) for blocks in batches]
        self.whole = [_rectangle(block) for block in blocks if not block.is_causal]


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: TreeCalls, scaling: float
) -> torch.Tensor:
    """Return attention along the tree; differentiable.

    query [1, H·G, M, D], key and value [1, H, M, D]; returns [1, M, H·G, D].
    """
    attended: torch.Tensor = _TreeAttention.apply(query, key, value, calls, scaling)
    return attended.transpose(1, 2)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        calls: TreeCalls,
        scaling: float,
    ) -> torch.Tensor:
        joined, total = attend(query, key, value, calls, scaling)
        attended = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, total)
        ctx.calls, ctx.scaling = calls, scaling
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, total = ctx.saved_tensors
        of_result = OfResult(query, attended, total, grad, ctx.scaling)
        return *of_result.differentiate(key, value, ctx.calls), None, None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: TreeCalls, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attended values [1, H·G, M, D] and logsumexp [1, H·G, M], in float32 or wider.

    Queries that are in no block get zeros.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    joined = torch.zeros_like(query, dtype=dtype)
    total = torch.zeros(query.shape[:3], dtype=dtype)
    for batch in calls.causal:
        of_batch = (batch.take(tensor) for tensor in (query, key, value))
        attended, sums = _forward(*of_batch, is_causal=True, scale=scaling)
        batch.put(joined, attended)
        batch.put(total, sums)
    join(joined, total, query, key, value, calls.whole, scaling)
    return joined, total


def join(
    joined: torch.Tensor,
    total: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rectangles: Sequence[Rectangle],
    scaling: float,
) -> None:
    """Add rectangles to the results of `attend`, in place. The keys may belong to another rank."""
    for queries, keys in rectangles:
        attended, sums = _forward(query[queries], key[keys], value[keys], scale=scaling)
        before = total[queries].clone()
        torch.logaddexp(before, sums, out=total[queries])
        joined[queries].mul_((before - total[queries]).exp_()[..., None])
        joined[queries].addcmul_(attended, (sums - total[queries]).exp_()[..., None])


class OfResult:
    """Results of `attend` and `join`, and their gradient.

    All tensors are [1, H·G, M, D], `total` without D.
    """

    def __init__(
        self,
        query: torch.Tensor,
        attended: torch.Tensor,
        total: torch.Tensor,
        grad: torch.Tensor,
        scaling: float,
    ) -> None:
        self._query, self._attended, self._total = query, attended, total
        self._grad, self._scaling = grad, scaling
        self.of_query = torch.zeros_like(query)
        """Gradient of the queries so far."""

    def differentiate(
        self, key: torch.Tensor, value: torch.Tensor, calls: TreeCalls
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gradients of query, key and value."""
        of = self.of_query, torch.zeros_like(key), torch.zeros_like(value)
        for batch in calls.causal:
            inputs = (self._query, key, value, self._attended, self._total)
            own = [batch.take(tensor) for tensor in inputs]
            # Padding copies real tokens, which must not receive its gradient.
            found = _backward(batch.take_real(self._grad), *own, 0.0, True, scale=self._scaling)
            for gradient, part in zip(of, found, strict=True):
                batch.put(gradient, part)
        self.differentiate_joined(key, value, calls.whole, of[1], of[2])
        return of

    def differentiate_joined(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rectangles: Sequence[Rectangle],
        of_key: torch.Tensor,
        of_value: torch.Tensor,
    ) -> None:
        """Add the gradients of rectangles."""
        for queries, keys in rectangles:
            inputs = (self._query[queries], key[keys], value[keys])
            result = (self._attended[queries], self._total[queries])
            found = _backward(
                *(self._grad[queries], *inputs, *result, 0.0, False), scale=self._scaling
            )
            of = (self.of_query, queries), (of_key, keys), (of_value, keys)
            for (gradient, where), part in zip(of, found, strict=True):
                gradient[where] += part


class _Batch:
    """Blocks [n] of at most L tokens each."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._num = len(blocks)
        lengths = torch.tensor([len(block) for block in blocks])
        starts = torch.tensor([block.query_start for block in blocks])
        column = torch.arange(int(lengths.max()))
        self._real = (column < lengths[:, None]).flatten()  # [n·L]
        # Contiguous blocks of equal length need no gather.
        contiguous = starts[0] + lengths[0] * torch.arange(self._num)
        is_span = bool((lengths == lengths[0]).all() and (starts == contiguous).all())
        self._span = slice(int(starts[0]), int(starts[0]) + len(self._real)) if is_span else None
        places = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
        self._places = places.flatten()  # [n·L] into M
        self._places_of_real = self._places[self._real]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather [1, H, M, ...] into [n, H, L, ...]; padding repeats a block's last token."""
        if self._span is not None:
            return self._blocks(tensor[0][:, self._span])
        return self._blocks(tensor[0].index_select(1, self._places))

    def take_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather like `take`, with zeros at padding."""
        if self._span is not None:
            return self.take(tensor)
        taken = tensor[0].index_select(1, self._places)
        taken *= self._real.view(-1, *[1] * (taken.dim() - 2))
        return self._blocks(taken)

    def _blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Convert [H, n·L, ...] to [n, H, L, ...]."""
        blocks: torch.Tensor = tokens.unflatten(1, (self._num, -1))
        return blocks.transpose(0, 1)

    def put(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Scatter [n, H, L, ...] into [1, H, M, ...]."""
        if self._span is not None:
            self._blocks(into[0][:, self._span]).copy_(tensor)
            return
        tokens = tensor.transpose(0, 1).flatten(1, 2)[:, self._real]
        into[0].index_copy_(1, self._places_of_real, tokens.to(into.dtype))


def _rectangle(block: Block) -> Rectangle:
    queries, keys = (block.query_start, block.query_end), (block.key_start, block.key_end)
    return places(*queries), places(*keys)


def _batch_by_length(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group causal blocks of similar length, longest first."""
    batches: list[list[Block]] = []
    filled = 0
    for block in sorted(blocks, key=len, reverse=True):
        if batches:
            padded = len(batches[-1][0]) * (len(batches[-1]) + 1)
        if not batches or padded > BATCH_TOKENS or filled + len(block) < MIN_FILLED * padded:
            batches.append([])
            filled = 0
        batches[-1].append(block)
        filled += len(block)
    return batches
