"""Release of the memory of tensors while another component needs it.

    released = OffloadedMemory(tensors)     tensors keep shapes and views; their values are lost
    released.take_back()                    memory is there again, with arbitrary values

    offloaded = Offloaded(tensors, host)    the values are in host memory meanwhile
    offloaded.take_back()                   the values are restored

The storage of the tensors is released, so references to them and to views of them stay valid. On a
GPU a storage is resized to zero. On the CPU its pages are returned to the system, which provides
zeros when they are used again: storages that numpy has seen cannot be resized.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

HostMemory = dict[int, torch.Tensor]  # by the index of a storage among those of the tensors


class OffloadedMemory:
    """Released memory of tensors, which lose their values, as do all views of the same memory."""

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
        """Allocate the memory again, with arbitrary values."""
        for storage, num_bytes in self._emptied:
            storage.resize_(num_bytes)
        self._emptied = []


class Offloaded:
    """Tensors whose values are in host memory.

    `host` receives the values. The caller passes an empty dict the first time and the same dict for
    the same tensors later, optionally with more tensors after them, because allocating memory that
    a GPU can copy to is slow.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], host: HostMemory) -> None:
        self._storages = _storages(tensors)
        self._host = host
        for index, storage in enumerate(self._storages):
            if index not in host or len(host[index]) != storage.nbytes():
                on_gpu = storage.device.type == "cuda"
                host[index] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            host[index].copy_(_bytes_of(storage), non_blocking=True)
        _synchronize()
        self._released = OffloadedMemory(map(_bytes_of, self._storages))

    def take_back(self) -> None:
        """Allocate the memory again and restore the values."""
        self._released.take_back()
        for index, storage in enumerate(self._storages):
            _bytes_of(storage).copy_(self._host[index], non_blocking=True)
        _synchronize()


def return_freed_memory() -> None:
    """Return memory that allocators keep after it was freed to the GPU and to the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _forget_pages(address: int, num_bytes: int) -> None:
    """Return the pages within a range to the system. It has no effect except on Linux."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform.startswith("linux") and end > begin:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
        )


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage once, in the order of the tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes [num_bytes] of a storage, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
