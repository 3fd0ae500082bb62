"""Memory of tensors that somebody else may have for a while.

    released = ReleasedMemory(tensors)      the tensors stay, with shapes and views; numbers are gone
    released.take_back()                    memory again, with any numbers

    offloaded = Offloaded(tensors, host)    the numbers are in host memory meanwhile
    offloaded.take_back()                   as if nothing had happened

What is let go is the storage below the tensors: whoever holds one of them, or a view, holds it
still.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch

HostMemory = dict[int, torch.Tensor]  # by the place of a storage among those of the tensors


class ReleasedMemory:
    """`tensors` with all views of theirs that are to be used again."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in _storages(tensors)]
        for storage, _ in self._storages:
            storage.resize_(0)
        return_freed_memory()

    def take_back(self) -> None:
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        self._storages = []


class Offloaded:
    """`host` is where the numbers go: an empty dict the first time, kept by the caller for the next
    time with the same tensors, since memory that a GPU copies to takes long to make."""

    def __init__(self, tensors: Iterable[torch.Tensor], host: HostMemory) -> None:
        self._bytes = [_bytes_of(storage) for storage in _storages(tensors)]
        self._host = host
        for place, numbers in enumerate(self._bytes):
            if place not in host:
                host[place] = torch.empty(
                    len(numbers), dtype=torch.uint8, pin_memory=numbers.is_cuda
                )
            host[place].copy_(numbers, non_blocking=True)
        _synchronize()
        self._released = ReleasedMemory(self._bytes)

    def take_back(self) -> None:
        self._released.take_back()
        for place, numbers in enumerate(self._bytes):
            numbers.copy_(self._host[place], non_blocking=True)
        _synchronize()


def return_freed_memory() -> None:
    """What allocators have kept of freed memory, to the GPU and to the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, in their order. Those of files mapped to memory, which cannot shrink, give way to
    others."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.detach().clone()
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[num_bytes], over the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
