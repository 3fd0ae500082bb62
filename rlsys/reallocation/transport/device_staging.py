"""A rank's share of a version in the memory of its device, for the readers of its node.

    DeviceStage.write(segments, version, read) ──► WeightShare ──► DeviceShare ── open_on(device)

    host memory:    header (share_layout.py), with the lock          WeightShare.path
    device memory:  segments                                         WeightShare.on_device

The header is in the same kind of memory as a share in host memory, and its lock protects both
(version_memory.py). A reader locks the header, opens the device's memory, reads it, closes it, and
only then releases the lock. The kernel releases the lock of a reader that dies. So the writer never
overwrites or frees memory that a reader has open, and never waits for a reader:

    buffer    free ── begin ──► being written ── unlock ──► readable ◄──► read (locked by readers)
                ▲                                              │
                └──────────────────── begin ───────────────────┘

If the newest version is being read, the next one is written to a second buffer, if the device has
memory to spare. Otherwise `write` raises DeviceSharingError, and the caller uses host memory.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

import numpy as np
import torch

from rlsys.reallocation.plan import ALIGNMENT, Segment
from rlsys.reallocation.transport.share_layout import (
    WORD,
    WRITING,
    ShareLayout,
    header_bytes,
    view,
    write_header,
)
from rlsys.reallocation.transport.shared_device import (
    DeviceSharingError,
    SharedDevice,
    digests,
    finish,
)
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import Read, Share
from rlsys.reallocation.transport.tensor_copies import BUCKET_BYTES
from rlsys.reallocation.transport.version_memory import LockedMemory
from rlsys.types import DeviceHandle, WeightShare

NUM_BUFFERS = 2


class DeviceStage:
    """Staging memory of one rank on its device, allocated when versions need it."""

    def __init__(self, device: SharedDevice, *, rank: int = 0, node: str = "") -> None:
        self._device = device
        self._rank = rank
        self._node = node
        self._layout = ShareLayout.of(())
        self._buffers: list[_Buffer] = []  # newest version first
        self._shortage = ""  # reason why the device has no memory for another buffer

    def write(self, segments: Sequence[Segment], version: int, read: Read) -> WeightShare:
        """Write a version and return its share, after all copies have finished.

        Raises DeviceSharingError if readers use all buffers that the device has memory for.
        """
        if tuple(segments) != self._layout.segments:
            self._layout = ShareLayout.of(tuple(segments))
        layout = self._layout
        buffer = self._begin(_sizes(layout))
        with torch.no_grad():
            for segment in layout.segments:
                view(buffer.body, segment).copy_(read(segment))
        finish(buffer.body.device)
        header = buffer.header
        checksum = write_header(header.content, version, layout.table, digests(buffer.body))
        header.unlock()
        return WeightShare(
            version=version,
            rank=self._rank,
            node=self._node,
            path=header.shared.path,
            num_bytes=sum(buffer.sizes),
            checksum=checksum,
            on_device=buffer.handle,
        )

    def close(self) -> None:
        """Free the memory, except for what a reader has open: call it again later.

        What is never freed ends with this process.
        """
        for one in [*self._buffers]:
            if one.header.lock():
                self._free(one)

    def _begin(self, sizes: tuple[int, int]) -> _Buffer:
        """Return a locked buffer for the next version; the version that it held is lost."""
        for one in [*self._buffers]:
            if one.sizes != sizes and one.header.lock():  # the plan has changed
                self._free(one)
        # The older one first: a late reader may still open the newest version.
        fitting = (one for one in reversed(self._buffers) if one.sizes == sizes)
        buffer = next((one for one in fitting if one.header.lock()), None)
        if buffer is None:
            buffer = self._allocate(sizes)
        buffer.header.content[:WORD].view(np.int64)[0] = WRITING
        self._buffers = [buffer, *(one for one in self._buffers if one is not buffer)]
        return buffer

    def _free(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        buffer.header.shared.close()
        self._device.free(buffer.body)
        self._shortage = ""

    def _allocate(self, sizes: tuple[int, int]) -> _Buffer:
        if len(self._buffers) == NUM_BUFFERS:
            raise DeviceSharingError(f"replicas still read the last {NUM_BUFFERS} versions")
        if self._shortage:
            raise DeviceSharingError(self._shortage)
        try:
            return _Buffer(sizes, self._device)
        except DeviceSharingError as error:
            self._shortage = str(error)
            raise


class _Buffer:
    """Memory of one version. Its header is locked initially."""

    def __init__(self, sizes: tuple[int, int], device: SharedDevice) -> None:
        self.sizes = sizes  # bytes of the header and of the segments
        num_header_bytes, num_bytes = sizes
        self.body = device.allocate(num_bytes)
        try:
            exported = device.export(self.body)
            self.header = LockedMemory(num_header_bytes, "the table of a version of the weights")
        except BaseException:
            device.free(self.body)
            raise
        self.handle = DeviceHandle(handle=exported, num_bytes=num_bytes, owner=os.getpid())


def _sizes(layout: ShareLayout) -> tuple[int, int]:
    """Return the bytes of the header and of the segments."""
    num_bytes = max(1, -(-layout.body_bytes // ALIGNMENT)) * ALIGNMENT
    return header_bytes(layout.table, -(-num_bytes // BUCKET_BYTES)), num_bytes


class DeviceShare(Share):
    """A share on a device, of which `Share` opens the header and `open_on` the rest.

    Any process can open the header, without a context of the device.
    """

    def __init__(self, share: WeightShare) -> None:
        self._device: SharedDevice | None = None
        self._memory: torch.Tensor | None = None
        self._owner = -1
        super().__init__(share)

    def open_on(self, device: SharedDevice | None) -> None:
        """Open and verify the device's memory; see `Weights.open_on`."""
        handle = self.share.on_device
        assert handle is not None
        if self._memory is not None:
            return
        if device is None:
            raise DeviceSharingError("this process computes on the CPU")
        try:
            self._owner = os.pidfd_open(handle.owner)
        except ProcessLookupError:
            raise self._gone() from None
        self._device = device
        try:
            self._memory = device.open(handle.handle, handle.num_bytes)
        except DeviceSharingError:
            self.require_owner()
            raise
        found = zip(digests(self._memory), self._digests, strict=True)
        damaged = [number for number, (read, staged) in enumerate(found) if read != staged]
        if damaged:
            self.require_owner()
            raise self._damaged(
                f"is damaged in {len(damaged)} of its {len(self._digests)} buckets, {damaged[:4]}"
            )

    def require_owner(self) -> None:
        """Raise MemoryGone if the owner of the opened memory has died.

        Its memory is undefined from then on, also in this process.
        """
        if self._owner >= 0:
            poll = select.poll()
            poll.register(self._owner, select.POLLIN)
            if poll.poll(0):
                raise self._gone()

    def verify(self) -> None:
        """Do nothing, since `open_on` verifies."""

    def close(self) -> None:
        """Close the device's memory, then allow the writer to reuse it."""
        memory, self._memory = self._memory, None
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
        try:
            if memory is not None and self._device is not None:
                self._device.close(memory)
        finally:
            super().close()

    def view(self, segment: Segment) -> torch.Tensor:
        """Return the values of a segment, after `open_on`."""
        assert self._memory is not None, "call open_on first"
        return view(self._memory, segment)

    def _gone(self) -> MemoryGone:
        return MemoryGone(f"version {self.share.version} of the weights is gone.")
