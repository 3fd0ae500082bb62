"""Attention of 16-bit numbers on CPUs whose kernel for them is slow.

    query, key, value, 16-bit ──► float32 ──► attention ──► 16-bit

torch's attention on CPUs takes 16-bit numbers, and without AMX its gradient takes 1.2 to 3.4 times
as long as that of float32, most with short rows (on a Xeon with AVX-512 BF16 and FP16). What is
kept for the gradient stays 16-bit; sums of queries and keys become exact besides.

Shape legend: B rows, T tokens, H heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def in_float32(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """`attend` of tensors [B, H, T, D], through float32 where that is faster on this machine;
    differentiable."""
    dtype = query.dtype
    if dtype not in SIXTEEN_BIT or query.device.type != "cpu" or not _is_slow(dtype):
        return attend(query, key, value)

    def pack(kept: torch.Tensor) -> torch.Tensor:
        # Inputs and results [B, H, T, D]; logsumexp [B, H, T] would lose what weights go by.
        return kept.to(dtype) if kept.dtype is torch.float32 and kept.ndim == 4 else kept

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.float() if kept.dtype is dtype else kept

    with saved_tensors_hooks(pack, unpack):
        attended = attend(query.float(), key.float(), value.float())
    return attended.to(dtype)


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return not torch.cpu._is_amx_tile_supported()
    return not torch.cpu._is_amx_fp16_supported()
