"""Attention of a packed row in one fused GPU kernel, without a mask in memory.

    tree ──► for each token q: its visible keys ──► for each 128 x 128 tokens: none, some or all
                  k ≤ q < end of k                                          │
                  position of k ≥ first of q (window, chunk)                ▼
                                  flex attention: skips "none", tests each token pair in "some"

Soft caps are part of the kernel. A sink takes part of the softmax weight and contributes no value,
so it scales the kernel's result by 1 / (1 + exp(sink − logsumexp)).

Shape legend: M tokens of the tree, N blocks of them, H·G query heads, H key/value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.models.prefix_tree import IntArray, PrefixTree

BLOCK = 128  # the kernel's default
MIN_WIDTH = 16  # smallest head width that the kernel supports

BoolArray = npt.NDArray[np.bool_]

# The tensors of torch's BlockMask: for each block of queries the key blocks that it sees partly,
# then those that it sees fully; then the same for blocks of keys, which the gradient needs.
BLOCK_LISTS = tuple(
    f"{whole}{side}_{what}"
    for side in ("kv", "q")
    for whole in ("", "full_")
    for what in ("num_blocks", "indices")
)


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    return query.device.type == "cuda" and min(query.shape[-1], value.shape[-1]) >= MIN_WIDTH


@dataclass(frozen=True, eq=False)
class Sight:
    """The visibility rule of a tree's tokens; all arrays are [M].

    Token q sees token k where k <= q < ends[k] and positions[k] >= firsts[q].
    """

    ends: IntArray
    positions: IntArray
    firsts: IntArray

    @classmethod
    def of(cls, tree: PrefixTree, *, window: int | None = None, chunk: int | None = None) -> Sight:
        """Return the visibility rule of a tree. Window and chunk count positions, as in Band."""
        positions = tree.position_ids
        firsts = np.zeros_like(positions)
        if window is not None:
            firsts = np.maximum(firsts, positions - window + 1)
        if chunk is not None:
            firsts = np.maximum(firsts, positions // chunk * chunk)
        return cls(tree.ends, positions, firsts)

    @property
    def blocks(self) -> tuple[BoolArray, BoolArray]:
        """Return two masks [N, N] of query and key blocks: partly visible, and fully visible.

        A block that is not full of tokens is never fully visible.
        """
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

    def mask(self, device: torch.device | str) -> TreeMask:
        """Return the visibility rule as tensors on a device."""
        from torch.nn.attention.flex_attention import BlockMask

        some, every = self.blocks
        of_queries = BlockMask.from_kv_blocks(
            *_listed(some, device), *_listed(every, device), BLOCK_SIZE=BLOCK
        )
        limits = (
            torch.from_numpy(each.astype(np.int32)).to(device)
            for each in (self.ends, self.positions, self.firsts)
        )
        return TreeMask(tuple(getattr(of_queries, name) for name in BLOCK_LISTS), tuple(limits))


class TreeMask(NamedTuple):
    """A tree's mask for flex attention.

    It holds tensors only, so that one compiled kernel serves micro-batches of any length. Block
    sizes are constants of the kernel, because torch rejects kernels in which they are inputs.
    """

    blocks: tuple[torch.Tensor, ...]  # as BLOCK_LISTS: counts [1, 1, N] and indices [1, 1, N, N]
    limits: tuple[torch.Tensor, ...]  # ends, positions, firsts of Sight, [M] each


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention along the tree; differentiable.

    query [1, H·G, M, D], key and value [1, H, M, D]; returns [1, M, H·G, D]. `softcap` and `sinks`
    are those of attention.AttentionRule.
    """
    attended = _kernel(query.device.type)(
        query,
        key,
        value,
        mask.blocks,
        mask.limits,
        scaling,
        None if softcap is None else _capped(softcap, query.device),
        sinks is not None,
    )
    if sinks is not None:
        attended, logsumexp = attended
        share = torch.sigmoid(logsumexp - sinks.float()[None, :, None])  # [1, H·G, M]
        attended = (attended * share[..., None]).to(query.dtype)
    rows: torch.Tensor = attended.transpose(1, 2)
    return rows


def flex_along_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: tuple[torch.Tensor, ...],
    limits: tuple[torch.Tensor, ...],
    scaling: float,
    score: Callable[..., torch.Tensor] | None,
    with_logsumexp: bool,
) -> Any:
    """Return attended values [1, H·G, M, D], and the logsumexp [1, H·G, M] if asked for."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    ends, positions, firsts = limits

    def sees(_batch: Any, _head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < ends[k]) & (positions[k] >= firsts[q])

    attend: Any = flex_attention
    make_mask: Any = BlockMask
    attended: Any = attend(
        query,
        key,
        value,
        score_mod=score,
        block_mask=make_mask(
            (query.shape[2], key.shape[2]), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees
        ),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True) if with_logsumexp else None,
        # With fewer tokens than a block, torch would choose its decoding kernel, which has no block
        # size for several query heads per key head.
        kernel_options={"BACKEND": "TRITON"},
    )
    if with_logsumexp:
        return attended[0], attended[1].lse
    return attended


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return `flex_along_tree`, compiled for any number of tokens if the device is a GPU.

    Tests on the CPU run torch's unfused implementation.
    """
    if device != "cuda":
        return flex_along_tree
    import torch._dynamo

    # Each precision, head width, window and grad mode is compiled separately. Past the limit, torch
    # would silently compute all scores in memory.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_along_tree, dynamic=True, fullgraph=True)


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    # The compiled kernel accepts no number as an input, only a tensor.
    cap = torch.tensor(softcap, device=device)

    def score(score: torch.Tensor, *_place: Any) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    return score


def _listed(seen: BoolArray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of visible key blocks per query block, and all indices, visible first.

    `seen` is [N, N]; the results are [1, 1, N] and [1, 1, N, N].
    """
    counts = seen.sum(1, dtype=np.int32)
    numbers = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    found = (torch.from_numpy(each).to(device) for each in (counts, numbers))
    counted, listed = (each[None, None] for each in found)
    return counted, listed
