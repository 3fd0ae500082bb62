"""Memory of a device that processes of one node share, as trainer and readers use it.

    trainer    allocate ─► write ─► export ──► handle ──► open ─► read ─► close    reader
               free, after all readers have closed

A digest of such memory is computed on the device: XXH3 would need the bytes in host memory. It is
the sum of all 32-bit words, each times an odd 64-bit number that depends on its place, modulo 2^64
(multilinear hashing). A change of one word always changes the sum, since odd numbers have inverses.
Other changes keep it with a probability of at most about 2^-32. The order of the additions has no
effect, so it is the same on all devices.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from rlsys.reallocation.transport.tensor_copies import BUCKET_BYTES

WORD = 4  # bytes
_MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # of splitmix64, as signed numbers


class DeviceSharingError(OSError):
    """Memory of a device that cannot be allocated, exported or opened.

    The version of the weights takes the way through host memory instead.
    """


class SharedDevice(Protocol):
    """A device as one process sees it. Every method raises DeviceSharingError if it fails."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros [num_bytes] of uint8, if the device has memory to spare."""

    def free(self, memory: torch.Tensor) -> None:
        """Free what `allocate` returned."""

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle for other processes."""

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """Return the memory of a handle, as uint8 [num_bytes] of this device."""

    def close(self, memory: torch.Tensor) -> None:
        """Close what `open` returned."""


def digests(memory: torch.Tensor) -> list[int]:
    """Return a digest of each BUCKET_BYTES of complete memory, whose size is a multiple of WORD."""
    words = memory.view(torch.int32)
    size = BUCKET_BYTES // WORD
    # Generation goes on meanwhile on the default stream.
    with torch.cuda.stream(_stream(memory.device)):
        factors = _factors(min(size, len(words)), memory.device)
        sums = [(part * factors[: len(part)]).sum() for part in words.split(size)]
        found: list[int] = torch.stack(sums).tolist() if sums else []
    return [one % 2**64 for one in found]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    factors = torch.arange(1, count + 1, device=device) * _MIX[0]
    factors = (factors ^ (factors >> 30)) * _MIX[1]
    return (factors ^ (factors >> 27)) | 1


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def finish(device: torch.device) -> None:
    """Wait for the work that the calling thread has given to a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
