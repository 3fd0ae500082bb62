"""Copies between tensors on several threads, between host memory and devices too.

    copy_parts(pairs)               large tensors, in pieces of BUCKET_BYTES
    copy_all(targets, sources)      many tensors of any size

A device copies to and from pinned host memory only; the driver's own way through it is slow. Here
each thread takes a small pinned buffer, so that copies on the device's bus and in host memory
overlap, and conversions to another precision run on the device.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from rlsys.reallocation.transport.shared_memory import Bytes

BUCKET_BYTES = 16 * 2**20
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))

# Rows per copy into a transposed matrix: the written rows stay in the cache, which makes the copy
# six times as fast.
TRANSPOSED_ROWS = 32


def copy_parts(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, of the same shape, on several threads."""

    @torch.no_grad()
    def copy_pair(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        target, source = pair
        step = TRANSPOSED_ROWS if _is_transposed(target) and not target.is_cuda else None
        for rows in row_slices(source.shape, step):
            copy(rows_of(target, rows), rows_of(source, rows))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in threads.map(copy_pair, itertools.chain.from_iterable(map(_in_pieces, pairs))):
            pass


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target of the same place, which has the same shape."""
    if any(one.is_cuda for one in (*targets, *sources)):
        copy_parts(zip(targets, sources, strict=True))
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


def row_slices(shape: Sequence[int], step: int | None) -> Iterator[slice]:
    """Yield slices of `step` rows each, at least one; None means all rows."""
    num_rows = math.prod(shape[:1])
    step = max(1, num_rows if step is None else step)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _in_pieces(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split a pair of tensors into pieces of about BUCKET_BYTES."""
    target, source = pair
    row_bytes = source.nbytes // max(1, math.prod(source.shape[:1]))
    for rows in row_slices(source.shape, BUCKET_BYTES // max(1, row_bytes)):
        yield rows_of(target, rows), rows_of(source, rows)


def _is_transposed(tensor: torch.Tensor) -> bool:
    """Return whether a matrix is column-major."""
    return tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1)


def rows_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows of a tensor; a scalar has one."""
    return tensor[rows] if tensor.dim() else tensor


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of the same shape, on any device and in any precision.

    On devices, the copy follows all work of the calling thread's stream and is finished on return.
    """
    if source.is_cuda and not target.is_cuda:
        pinned = torch.empty(source.shape, dtype=target.dtype, pin_memory=True)
        pinned.copy_(source.to(target.dtype), non_blocking=True)
        _wait(source.device)
        copy(target, pinned)
    elif target.is_cuda and not source.is_cuda:
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy(pinned, source)
        target.copy_(pinned, non_blocking=True)
        _wait(target.device)
    elif target.is_cuda:
        target.copy_(source)
        _wait(target.device)
    elif not _is_raw(target, source):
        target.copy_(source)
    elif source.data_ptr() != target.data_ptr():
        # The C library's copy bypasses the cache, unlike torch's, and is twice as fast.
        np.copyto(_raw(target), _raw(source))
        torch.autograd.graph.increment_version(target)  # marks values derived from it as outdated


def _wait(device: torch.device) -> None:
    """Wait for the work that the calling thread has given to a device."""
    torch.cuda.current_stream(device).record_event().synchronize()


def _is_raw(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether the bytes in host memory can be copied as they are."""
    is_same = source.dtype == target.dtype and source.device.type == target.device.type == "cpu"
    return is_same and source.is_contiguous() and target.is_contiguous()


def _raw(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
