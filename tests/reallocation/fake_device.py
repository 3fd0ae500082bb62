"""A device whose memory is shared host memory, to test shared devices without a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from rlsys.reallocation.plan import Segment, plan
from rlsys.reallocation.shards import Holder, holdings
from rlsys.reallocation.transport.device_staging import DeviceStage
from rlsys.reallocation.transport.shared_device import DeviceSharingError, SharedDevice
from rlsys.reallocation.transport.shared_memory import (
    MemoryGone,
    SharedMemory,
    map_shared,
    open_shared,
)
from rlsys.types import WeightManifest

NAME = "rlsys-fake-device"


class FakeDevice:
    """A SharedDevice with memory for `room` allocations; every process may open its handles."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.num_refused = 0  # allocations
        self.refuses_to_open = False
        self.allocated: dict[int, SharedMemory] = {}  # by address
        self.opened: dict[int, str] = {}  # paths of open memory, by address

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if len(self.allocated) == self.room:
            self.num_refused += 1
            raise DeviceSharingError(f"all {self.room} places are taken")
        shared = SharedMemory(NAME, num_bytes, purpose="a test")
        memory = torch.from_numpy(shared.map())
        self.allocated[memory.data_ptr()] = shared
        return memory

    def free(self, memory: torch.Tensor) -> None:
        shared = self.allocated.pop(memory.data_ptr())
        assert shared.path not in self.opened.values(), "a reader has it open"
        shared.close()

    def export(self, memory: torch.Tensor) -> bytes:
        return self.allocated[memory.data_ptr()].path.encode()

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        if self.refuses_to_open:
            raise DeviceSharingError("no peer access")
        path = handle.decode()
        try:
            descriptor = open_shared(path, NAME, writable=True)
        except MemoryGone as gone:
            raise DeviceSharingError(str(gone)) from None
        memory = torch.from_numpy(map_shared(descriptor))
        os.close(descriptor)
        assert len(memory) == num_bytes
        self.opened[memory.data_ptr()] = path
        return memory

    def close(self, memory: torch.Tensor) -> None:
        del self.opened[memory.data_ptr()]


def segments_of(tensors: Mapping[str, torch.Tensor]) -> Sequence[Segment]:
    """Return the segments of weights that one process has whole."""
    held = tuple(holdings(tensors))
    planned = plan((Holder("rank", "", held),), (Holder("reader", "", held),))
    return planned.staged("rank")


def stage_on(
    device: SharedDevice, version: int, tensors: Mapping[str, torch.Tensor]
) -> tuple[DeviceStage, WeightManifest]:
    """Stage a version of weights that one process has whole on a device."""
    stage = DeviceStage(device)
    share = stage.write(
        segments_of(tensors), version, lambda one: tensors[one.name][one.box.slices]
    )
    return stage, WeightManifest(version=version, shares=(share,))
