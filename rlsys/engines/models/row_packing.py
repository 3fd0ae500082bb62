"""Rows of different lengths packed into one row without padding.

    rows [B] ──► PrefixTree: M tokens ──► norms, projections, MLP: M tokens, not B·L
                                   pad │ ▲ unpad
                                       ▼ │
                                attention: [O, ..., L, ...]

A shared prefix is stored once. Where a kernel can compute attention along the tree, it does
(tree_attention.py). Otherwise shared prefixes are copied into every row for attention only.

Shape legend: B rows, O rows with own tokens, L tokens of the longest, M tokens of the tree, H
heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from rlsys.engines.models.block_attention import Sight, TreeMask
from rlsys.engines.models.prefix_tree import IntArray, PrefixTree
from rlsys.engines.models.tree_attention import TreeCalls

# Rows of at most SHORT_ROW tokens are padded for attention, at almost no cost. For longer rows,
# every fork of the tree costs calls in every layer, so a shared prefix needs MIN_SHARED tokens.
SHORT_ROW, MIN_SHARED = 128, 16

# Prefixes are shared only if this saves MIN_SAVED of all tokens: attention along forks costs more.
MIN_SAVED = 0.05


def tree_of(rows: Sequence[npt.NDArray[np.integer]], *, shares: bool) -> PrefixTree:
    """Return the prefix tree of rows of token ids.

    With `shares`, prefixes are shared if that saves enough.
    """
    separate = PrefixTree(rows, min_shared=None)
    if not shares:
        return separate
    min_shared = 1 if max(map(len, rows)) <= SHORT_ROW else MIN_SHARED
    shared = PrefixTree(rows, min_shared=min_shared)
    return shared if shared.num_tokens <= (1 - MIN_SAVED) * separate.num_tokens else separate


class Packing:
    """Mapping between the tokens of a packed row and the padded rows."""

    def __init__(self, tree: PrefixTree, device: torch.device | str = "cpu") -> None:
        self.tree = tree
        self._device = device
        self._masks: dict[tuple[int | None, int | None], TreeMask] = {}
        self.longest = int(tree.lengths.max())
        owners = tree.owners  # [O]
        self._num_rows = len(owners)
        column = np.arange(self.longest)
        # Padding is never read; fill it with the row's last token.
        inside = np.minimum(column, tree.lengths[owners, None] - 1)  # [O, L]
        token = tree.places[tree.row_starts[owners, None] + inside]
        number = np.empty(len(tree.lengths), np.int64)
        number[owners] = np.arange(len(owners))
        place = number[tree.owner] * self.longest + tree.position_ids  # [M]
        self.position_ids = torch.from_numpy(tree.position_ids[None]).to(device)  # [1, M]
        self._is_full = len(place) == token.size
        self._places = torch.from_numpy(place).to(device)  # [M] into O·L
        self._tokens = torch.from_numpy(token.flatten()).to(device)  # [O·L] into M
        # Copies of shared tokens in rows other than their owner.
        copies = np.arange(len(owners))[:, None] * self.longest + column
        copies = copies[column < tree.shared[owners, None]]
        self._copies = torch.from_numpy(copies).to(device) if len(copies) else None

    @cached_property
    def calls(self) -> TreeCalls | None:
        """Kernel calls of attention along the tree; None for short rows."""
        return TreeCalls(self.tree.blocks) if self.longest > SHORT_ROW else None

    def mask(self, window: int | None, chunk: int | None) -> TreeMask:
        """Return the visibility rule for block_attention, computed once per window and chunk."""
        bounds = window, chunk
        if bounds not in self._masks:
            sight = Sight.of(self.tree, window=window, chunk=chunk)
            self._masks[bounds] = sight.mask(self._device)
        return self._masks[bounds]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Convert [1, H, M, D] to [O, H, L, D]; padding must not receive a gradient."""
        tokens: torch.Tensor = packed[0].transpose(0, 1)  # [M, H, D]
        if not self._is_full:
            tokens = _Pad.apply(tokens, self._tokens, self._places, self._copies)
        padded = tokens.reshape(self._num_rows, self.longest, *tokens.shape[1:])
        return padded.transpose(1, 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Convert [O, L, H, D] to [1, M, H, D]."""
        tokens = padded.flatten(0, 1)
        return (tokens if self._is_full else _Unpad.apply(tokens, self._places))[None]


class _Pad(torch.autograd.Function):
    """A gather whose gradient is a gather too, except for copies of shared tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        source: torch.Tensor,
        places: torch.Tensor,
        copies: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(source, places, copies)
        return tokens.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, places, copies = ctx.saved_tensors
        of_tokens = grad.index_select(0, places)
        if copies is not None:
            of_tokens.index_add_(0, source[copies], grad.index_select(0, copies))
        return of_tokens, None, None, None


class _Unpad(torch.autograd.Function):
    """A gather of distinct places, so that its gradient needs no sums."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = len(padded)
        return padded.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_places, *grad.shape[1:])
        return padded.index_copy_(0, places, grad.contiguous()), None


def ragged_places(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return row and column [Σ lengths] of each element of concatenated ragged rows."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]
