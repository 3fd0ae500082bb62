"""Memory of tensors that somebody else may have for a while.

    released = ReleasedMemory(tensors)      tensors stay, with shapes and views; numbers are gone
    released.take_back()                    memory again, with any numbers

    offloaded = Offloaded(tensors, host)    the numbers are in host memory meanwhile
    offloaded.take_back()                   as if nothing had happened

What is let go is the storage below the tensors: whoever holds one of them, or a view, holds it
still. On a GPU a storage is emptied. On the CPU its pages go back to the system, which fills them
with zeros when they are used again: storages that numpy has seen cannot be emptied there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

HostMemory = dict[int, torch.Tensor]  # by the place of a storage among those of the tensors


class OffloadedMemory:
    """`tensors` that lose their numbers, with all that are views of the same memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        for storage in _storages(tensors):
            if storage.device.type == "cpu":
                _forget_pages(storage.data_ptr(), storage.nbytes())
            else:
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)
        return_freed_memory()

    def take_back(self) -> None:
        for storage, num_bytes in self._emptied:
            storage.resize_(num_bytes)
        self._emptied = []


class Offloaded:
    """`host` is where the numbers go: an empty dict the first time, kept by the caller for the next
    time with the same tensors (or more, behind these), since memory that a GPU copies to takes long
    to make.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], host: HostMemory) -> None:
        self._storages = _storages(tensors)
        self._host = host
        for place, storage in enumerate(self._storages):
            if place not in host or len(host[place]) != storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                host[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            host[place].copy_(_bytes_of(storage), non_blocking=True)
        _synchronize()
        self._released = OffloadedMemory(map(_bytes_of, self._storages))

    def take_back(self) -> None:
        self._released.take_back()
        for place, storage in enumerate(self._storages):
            _bytes_of(storage).copy_(self._host[place], non_blocking=True)
        _synchronize()


def return_freed_memory() -> None:
    """What allocators have kept of freed memory, to the GPU and to the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _forget_pages(address: int, num_bytes: int) -> None:
    """Those that lie within; nothing happens but on Linux."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform.startswith("linux") and end > begin:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
        )


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, in their order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[num_bytes], over the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
