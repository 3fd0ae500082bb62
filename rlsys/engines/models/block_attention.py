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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.models.prefix_tree import IntArray, PrefixTree

BLOCK = 128  # the kernel's own choice
MIN_WIDTH = 16  # of a head, for the kernel

BoolArray = npt.NDArray[np.bool_]

# The tensors of torch's BlockMask: for blocks of queries those of keys that they see in part, and
# wholly; then the same for blocks of keys, which the gradient needs.
BLOCK_LISTS = tuple(
    f"{whole}{side}_{what}"
    for side in ("kv", "q")
    for whole in ("", "full_")
    for what in ("num_blocks", "indices")
)


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is a kernel for it."""
    return query.device.type == "cuda" and min(query.shape[-1], value.shape[-1]) >= MIN_WIDTH


@dataclass(frozen=True, eq=False)
class Sight:
    """Token q of a tree sees token k where k <= q < ends[k] and positions[k] >= firsts[q]; all
    [M].
    """

    ends: IntArray
    positions: IntArray
    firsts: IntArray

    @classmethod
    def of(cls, tree: PrefixTree, *, window: int | None = None, chunk: int | None = None) -> Sight:
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
        A block that is not filled never sees all.
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
        """Return what tokens see, as tensors on a device."""
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
    """A tree's mask for flex attention: tensors only, so that one compiled kernel serves passes of
    any length. Sizes of blocks stay constants of the kernel; torch refuses kernels in which they
    are inputs.
    """

    blocks: tuple[torch.Tensor, ...]  # by BLOCK_LISTS: counts [1, 1, N] and numbers [1, 1, N, N]
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
    """Attend along the tree: query [1, H·G, M, D], key and value [1, H, M, D] to [1, M, H·G, D].

    Differentiable. `softcap` and `sinks` as in attention.AttentionRule.
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
    """Attended values [1, H·G, M, D], with `with_logsumexp` also the logsumexp [1, H·G, M]."""
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
        # For passes of fewer tokens than a block torch would choose its kernel for decoding, which
        # has no block size for several query heads per key head.
        kernel_options={"BACKEND": "TRITON"},
    )
    if with_logsumexp:
        return attended[0], attended[1].lse
    return attended


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return `flex_along_tree`, on a GPU compiled for passes of any length. Off the GPU, where the
    tests are, torch computes it without a kernel.
    """
    if device != "cuda":
        return flex_along_tree
    import torch._dynamo

    # Precisions, head widths, windows and inference each take one. Past its limit torch would
    # compute all scores in memory, without a word.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_along_tree, dynamic=True, fullgraph=True)


@cache
def _capped(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    # As a number it would be one of the compiled kernel's inputs, which has no place for it.
    cap = torch.tensor(softcap, device=device)

    def score(score: torch.Tensor, *_place: Any) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    return score


def _listed(seen: BoolArray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of blocks [N, N]: for each one of queries how many it sees, and their numbers first among
    all, [1, 1, N] and [1, 1, N, N].
    """
    counts = seen.sum(1, dtype=np.int32)
    numbers = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    found = (torch.from_numpy(each).to(device) for each in (counts, numbers))
    counted, listed = (each[None, None] for each in found)
    return counted, listed
