"""Calls of the CUDA driver for CUDA IPC, over a driver that allocates host memory.

tests/engines/test_cuda_ipc.py makes the same calls on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from rlsys.reallocation.transport import cuda_ipc
from rlsys.reallocation.transport.cuda_ipc import GRANULARITY, HANDLE_BYTES, CudaDevice
from rlsys.reallocation.transport.shared_device import DeviceSharingError
from rlsys.reallocation.transport.weight_views import Weights
from tests.reallocation.fake_device import stage_on

INVALID_VALUE = 1


def pointed(pointer: Any, kind: Any) -> Any:
    """Return the variable of this type that a pointer leads to."""
    return ctypes.cast(pointer, ctypes.POINTER(kind)).contents


class FakeDriver:
    """The part of libcuda.so that CUDA IPC uses; each handle contains the address."""

    def __init__(self) -> None:
        self.allocated: dict[int, Any] = {}
        self.num_open = 0
        self.fails: set[str] = set()

    def cuMemAlloc_v2(self, pointer: Any, size: ctypes.c_size_t) -> int:
        buffer = ctypes.create_string_buffer(b"x" * size.value, size.value)
        address = ctypes.addressof(buffer)
        pointed(pointer, ctypes.c_uint64).value = address
        self.allocated[address] = buffer
        return 0

    def cuMemFree_v2(self, pointer: ctypes.c_uint64) -> int:
        del self.allocated[pointer.value]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_uint64) -> int:
        if "cuIpcGetMemHandle" in self.fails:
            return INVALID_VALUE
        ctypes.memmove(handle, ctypes.byref(pointer), 8)
        return 0

    def cuIpcOpenMemHandle_v2(
        self, pointer: Any, handle: ctypes.Structure, flags: ctypes.c_uint
    ) -> int:
        address = int.from_bytes(bytes(handle)[:8], "little")
        if address not in self.allocated or flags.value != 1:
            return INVALID_VALUE
        pointed(pointer, ctypes.c_uint64).value = address
        self.num_open += 1
        return 0

    def cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> int:
        assert pointer.value in self.allocated
        self.num_open -= 1
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        pointed(text, ctypes.c_char_p).value = {INVALID_VALUE: b"invalid argument"}[status]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GRANULARITY, 20 * GRANULARITY))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return made


def device() -> CudaDevice:
    return CudaDevice(torch.device("cpu"))


def test_memory_is_zero_and_of_the_size_that_was_asked_for(driver: FakeDriver) -> None:
    one = device()
    memory = one.allocate(GRANULARITY + 64)
    assert memory.shape == (GRANULARITY + 64,)
    assert not memory.any()
    ((_, buffer),) = driver.allocated.items()
    assert len(buffer) == 2 * GRANULARITY  # nothing else shares its pages
    one.free(memory)
    assert driver.allocated == {}


def test_a_version_goes_through_handles(driver: FakeDriver) -> None:
    trainer, reader = device(), device()
    tensors = {"w": torch.arange(1000, dtype=torch.float32), "b": torch.tensor(3)}
    stage, manifest = stage_on(trainer, 1, tensors)
    for one, num_open in ((reader, 1), (trainer, 0)):  # a process cannot open its own memory
        with Weights(manifest) as weights:
            weights.open_on(one)
            assert driver.num_open == num_open
            for name, box, part in weights.parts():
                assert torch.equal(part, tensors[name][box.slices])
        assert driver.num_open == 0
    stage.close()
    assert driver.allocated == {}
    handle = manifest.shares[0].on_device
    assert handle is not None
    for one in (reader, trainer):
        with pytest.raises(DeviceSharingError):
            one.open(handle.handle, handle.num_bytes)


def test_memory_that_cannot_be_exported_is_freed(driver: FakeDriver) -> None:
    driver.fails = {"cuIpcGetMemHandle"}
    with pytest.raises(DeviceSharingError) as found:
        stage_on(device(), 1, {"w": torch.ones(3)})
    assert "cuIpcGetMemHandle: invalid argument" in str(found.value)
    assert driver.allocated == {}


@pytest.mark.parametrize(("num_pages", "fits"), [(9, True), (10, False)])
def test_a_part_of_the_memory_stays_free(driver: FakeDriver, num_pages: int, fits: bool) -> None:
    """10 of 20 pages are free, of which one must remain."""
    with contextlib.nullcontext() if fits else pytest.raises(DeviceSharingError):
        device().allocate(num_pages * GRANULARITY)
    assert len(driver.allocated) == fits


def test_handles_have_the_size_of_the_driver() -> None:
    assert ctypes.sizeof(cuda_ipc._Handle) == HANDLE_BYTES == 64


def test_only_gpus_are_shared() -> None:
    assert cuda_ipc.shared_device("cpu") is None
