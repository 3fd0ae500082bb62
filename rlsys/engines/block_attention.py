"""Attention of a packed row in one fused kernel, with no mask in memory: for GPUs.

    tree ──► for each token q: what it sees ──► for each 128 x 128 tokens: none, some or all seen
                  k ≤ q < end of k                                          │
                  position of k ≥ first of q (window, chunk)                ▼
                                       flex attention: skips none, asks token by token in some

Soft caps are part of the kernel. A sink takes weight and gives nothing, so it scales what the
kernel returns: by 1 / (1 + exp(sink − logsumexp)).

Shape legend: M tokens of the tree, N blocks of them, H·G query heads, H key/value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.token_tree import IntArray, TokenTree

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # the kernel's own choice
MIN_WIDTH = 16  # of a head, for the kernel

BoolArray = npt.NDArray[np.bool_]


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is a kernel for it."""
    return query.device.type == "cuda" and min(query.shape[-1], value.shape[-1]) >= MIN_WIDTH


@dataclass(frozen=True, eq=False)
class Sight:
    """Token q of a tree sees token k where k <= q < ends[k] and positions[k] >= firsts[q]; all
    [M]."""

    ends: IntArray
    positions: IntArray
    firsts: IntArray

    @classmethod
    def of(cls, tree: TokenTree, *, window: int | None = None, chunk: int | None = None) -> Sight:
        """A window and a chunk count positions, as in attention.Band."""
        positions = tree.position_ids
        firsts = np.zeros_like(positions)
        if window is not None:
            firsts = np.maximum(firsts, positions - window + 1)
        if chunk is not None:
            firsts = np.maximum(firsts, positions // chunk * chunk)
        return cls(tree.ends, positions, firsts)

    @property
    def blocks(self) -> tuple[BoolArray, BoolArray]:
        """[N, N] of queries and keys: which may see something, and which see all of each other.
        A block that is not filled never sees all."""
        num_tokens = len(self.ends)
        starts = np.arange(0, num_tokens, BLOCK)
        last = np.minimum(starts + BLOCK, num_tokens) - 1

        def lowest(values: IntArray) -> IntArray:
            return np.minimum.reduceat(values, starts)

        def highest(values: IntArray) -> IntArray:
            return np.maximum.reduceat(values, starts)

        query, key = (slice(None), None), (None, slice(None))
        some = (
            (starts[key] <= last[query])
            & (starts[query] < highest(self.ends)[key])
            & (highest(self.positions)[key] >= lowest(self.firsts)[query])
        )
        is_filled = last - starts == BLOCK - 1
        every = (
            (last[key] <= starts[query])
            & (last[query] < lowest(self.ends)[key])
            & (lowest(self.positions)[key] >= highest(self.firsts)[query])
            & is_filled[query]
            & is_filled[key]
        )
        return some & ~every, every

    def mask(self, device: torch.device | str) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        some, every = self.blocks
        ends, positions, firsts = (
            torch.from_numpy(each.astype(np.int32)).to(device)
            for each in (self.ends, self.positions, self.firsts)
        )

        def sees(_batch: Any, _head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < ends[k]) & (positions[k] >= firsts[q])

        num_tokens = len(self.ends)
        return BlockMask.from_kv_blocks(
            *_listed(some, device),
            *_listed(every, device),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(num_tokens, num_tokens),
        )


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [1, H·G, M, D], key and value [1, H, M, D] to [1, M, H·G, D]; differentiable. `softcap`
    and `sinks` as in attention.AttentionRule."""
    from torch.nn.attention.flex_attention import AuxRequest

    attended = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap, query.device),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        attended, of_all = attended
        share = torch.sigmoid(of_all.lse - sinks.float()[None, :, None])  # [1, H·G, M]
        attended = (attended * share[..., None]).to(query.dtype)
    rows: torch.Tensor = attended.transpose(1, 2)
    return rows


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled once for packed rows of any length. Off the GPU, where the tests are, as torch
    computes it without a kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention
    if device == "cuda":
        kernel = torch.compile(flex_attention, dynamic=True)
    return kernel


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    # As a number it would be one of the compiled kernel's inputs, which has no place for it.
    cap = torch.tensor(softcap, device=device)

    def score(score: torch.Tensor, *_place: Any) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    return score


def _listed(seen: BoolArray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of blocks [N, N]: for each one of queries how many it sees, and their numbers first among
    all, [1, 1, N] and [1, 1, N, N]."""
    counts = seen.sum(1, dtype=np.int32)
    numbers = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    found = (torch.from_numpy(each).to(device) for each in (counts, numbers))
    counted, listed = (each[None, None] for each in found)
    return counted, listed
