"""CUDA IPC: memory of a GPU that processes of one node share.

The memory comes from the driver, not from torch's allocator. So a handle stays valid from version
to version, `expandable_segments` has no effect on it, and nothing but the memory itself is shared:
torch's own way (torch.multiprocessing) exports a whole segment of its allocator, cannot export an
expandable one on older kernels, and keeps memory whose reader died until it has counted the
reader's release.

A GPU may be open in the reader under another number than in the trainer, or not be visible there.
The driver maps its memory for the reader's current GPU, over NVLink or PCIe, and fails if these
GPUs have no access to each other.

Not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from rlsys.reallocation.transport.shared_device import DeviceSharingError, SharedDevice, finish

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1

# The driver places smaller allocations together, and would share all of them.
GRANULARITY = 2 * 2**20

# Part of the device that stays free: the trainer's batches differ in size.
SPARE_FRAC = 0.05


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def shared_device(device: str | torch.device) -> SharedDevice | None:
    """Return a GPU as a SharedDevice, None for another device."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(torch.device("cuda", index))


class CudaDevice:
    """A SharedDevice; there is one per process and GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[bytes, torch.Tensor] = {}  # exported by this process, which cannot open it

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `SharedDevice.allocate`."""
        size = -(-num_bytes // GRANULARITY) * GRANULARITY
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if free - size < SPARE_FRAC * total:
            raise DeviceSharingError(
                f"a version needs {size / 2**30:.2f} GiB of the GPU's memory, of which "
                f"{free / 2**30:.2f} GiB are free, and {SPARE_FRAC:.0%} must remain"
            )
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        memory = self._tensor(pointer.value, num_bytes).zero_()
        finish(self._device)
        return memory

    def free(self, memory: torch.Tensor) -> None:
        """See `SharedDevice.free`."""
        self._own = {handle: one for handle, one in self._own.items() if one is not memory}
        self._call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))

    def export(self, memory: torch.Tensor) -> bytes:
        """See `SharedDevice.export`."""
        handle = _Handle()
        pointer = ctypes.c_uint64(memory.data_ptr())
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        self._own[bytes(handle)] = memory
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """See `SharedDevice.open`."""
        if handle in self._own:
            return self._own[handle]
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS),
        )
        return self._tensor(pointer.value, num_bytes)

    def close(self, memory: torch.Tensor) -> None:
        """See `SharedDevice.close`."""
        if not any(one is memory for one in self._own.values()):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(memory.data_ptr()))

    def _tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        storage: Any = torch._C._construct_storage_from_data_pointer(
            pointer, self._device, num_bytes
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info(self._device)  # makes the context current on this thread
            status = getattr(_driver(), name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            _driver().cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DeviceSharingError(f"{name}: {reason} (CUDA error {status})")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceSharingError(f"the CUDA driver cannot be loaded: {error}") from None
