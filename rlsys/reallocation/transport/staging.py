"""A rank's share of a version of the weights, in memory that the processes of its node share.

    StagingBuffer(segments) ── write(version, read) ──► WeightShare ──► Share ── verify() ──► parts

The memory contains its own table of segments (share_layout.py), so a WeightShare is small for any
number of tensors.
The same memory takes version after version (version_memory.py). So a version exists for readers
that open it before the next is written. Later readers may get MemoryGone and then take a newer
version.

Several threads copy buckets of bytes and compute their digests. Readers compute the digests again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from rlsys.reallocation.plan import ALIGNMENT, Segment
from rlsys.reallocation.transport.share_layout import (
    WORD,
    WRITING,
    Bucket,
    ShareLayout,
    parse_header,
    view,
    write_header,
)
from rlsys.reallocation.transport.shared_memory import (
    Bytes,
    MemoryGone,
    open_shared,
    path_of,
)
from rlsys.reallocation.transport.tensor_copies import NUM_THREADS, copy, rows_of
from rlsys.reallocation.transport.version_memory import NAME, VersionMemory
from rlsys.types import WeightShare

Read = Callable[[Segment], torch.Tensor]
"""Returns the values of a segment, on any device and in any precision; runs on several threads."""


class DamagedWeightsError(ValueError):
    """Bytes differ from those that were staged."""


class StagingBuffer:
    """Staging memory of one rank for `segments`, allocated at the first version.

    Raises OSError if there is too little memory.
    """

    def __init__(self, segments: Sequence[Segment], *, rank: int = 0, node: str = "") -> None:
        self.segments = tuple(segments)
        self._layout = ShareLayout.of(self.segments)
        self._rank = rank
        self._node = node
        self.memory = VersionMemory(self._layout.num_bytes)
        self._is_writing = False
        self._written: WeightShare | None = None  # the newest version, until the next begins

    def write(self, version: int, read: Read) -> WeightShare:
        """Write a version and return its share.

        Values that `read` returns in place (see `parts`) are not copied, only digested.
        """
        self.begin()
        memory = self.memory.newest
        checksum = _fill(self._layout, memory.content, version, read)
        self._is_writing = False
        memory.unlock()
        self._written = WeightShare(
            version=version,
            rank=self._rank,
            node=self._node,
            path=memory.shared.path,
            num_bytes=self._layout.num_bytes,
            checksum=checksum,
        )
        return self._written

    def verify(self) -> None:
        """Raise DamagedWeightsError unless the newest version is as it was written.

        It does nothing without a version, or after the next one has begun.
        """
        if self._written is not None:
            Content(self._written, self.memory.newest.content).verify()

    def begin(self) -> None:
        """Keep readers out of the memory for the next version until `write`.

        The version that it held is lost. If a reader uses it, other memory is taken.
        """
        if self._is_writing:
            return
        self.memory.begin().content[:WORD].view(np.int64)[0] = WRITING
        self._is_writing, self._written = True, None

    @property
    def parts(self) -> list[tuple[Segment, torch.Tensor]]:
        """Each segment and its tensor in the memory for the next version, after `begin`."""
        assert self._is_writing, "call begin first"
        flat = torch.from_numpy(self.memory.newest.content[self._layout.begin :])
        return [(segment, view(flat, segment)) for segment in self.segments]

    def close(self) -> None:
        """Close the memory; its version can no longer be opened."""
        self.memory.close()
        self._is_writing, self._written = False, None


def pack(segments: Sequence[Segment], share: WeightShare, read: Read) -> tuple[WeightShare, Bytes]:
    """Return segments of an open share as a smaller share of the same version, and its bytes.

    The share is to be sent to another node. The bytes are padded to a multiple of ALIGNMENT.
    """
    layout = ShareLayout.of(tuple(segments))
    content = np.zeros(-(-layout.num_bytes // ALIGNMENT) * ALIGNMENT, np.uint8)
    checksum = _fill(layout, content, share.version, read)
    sent = replace(share, path="", num_bytes=len(content), checksum=checksum, on_device=None)
    return sent, content


def _fill(layout: ShareLayout, memory: Bytes, version: int, read: Read) -> int:
    """Write a share and return its checksum."""
    memory[:WORD].view(np.int64)[0] = WRITING
    body = memory[layout.begin :]
    flat = torch.from_numpy(body)

    @torch.no_grad()
    def put(bucket: Bucket) -> int:
        for segment, rows in bucket.parts:
            copy(rows_of(view(flat, segment), rows), rows_of(read(segment), rows))
        return bucket.digest(body)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        digests = list(threads.map(put, layout.buckets))
    return write_header(memory, version, layout.table, digests)


class Content:
    """The bytes of a share, with their table of segments.

    Raises DamagedWeightsError if the table differs from what was written.
    """

    def __init__(self, share: WeightShare, content: Bytes) -> None:
        self.share = share
        self._bytes = content
        self._layout, self._digests = self._parse_header()

    def _parse_header(self) -> tuple[ShareLayout, list[int]]:
        found = parse_header(self._bytes, self.share.checksum)
        if found is None:
            raise self._damaged("is damaged in its header")
        segments, digests = found
        return ShareLayout.of(segments), digests

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the share."""
        return self._layout.segments

    @property
    def content(self) -> Bytes:
        """All bytes of the share, with its table, which must not be changed."""
        return self._bytes[: self.share.num_bytes]

    def verify(self) -> None:
        """Raise DamagedWeightsError unless the bytes are those that were staged."""
        body = self._body
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = threads.map(lambda bucket: bucket.digest(body), self._layout.buckets)
            pairs = enumerate(zip(found, self._digests, strict=True))
            damaged = [number for number, (found, staged) in pairs if found != staged]
        if damaged:
            raise self._damaged(
                f"is damaged in {len(damaged)} of its {len(self._digests)} buckets, {damaged[:4]}"
            )

    def parts(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield each segment and its values, which must not be changed."""
        for segment in self.segments:
            yield segment, self.view(segment)

    def view(self, segment: Segment) -> torch.Tensor:
        """Return the values of a segment, which must not be changed."""
        return view(self._flat, segment)

    @cached_property
    def _flat(self) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self._body)

    @property
    def _body(self) -> Bytes:
        return self._bytes[self._layout.begin :]

    def _damaged(self, why: str) -> DamagedWeightsError:
        return DamagedWeightsError(
            f"rank {self.share.rank}'s share of version {self.share.version} of the weights {why}; "
            "publish it again."
        )


class Mappings:
    """A reader's mappings of memories that it opens again and again.

    Their page tables are set up once, which takes half as long as computing the digests.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[tuple[int, int], Bytes]]] = {}  # by rank, newest last

    def keep(self, ranks: Collection[int]) -> None:
        """Drop the mappings of all other ranks."""
        for rank in self._kept.keys() - set(ranks):
            del self._kept[rank]

    def of(self, rank: int, descriptor: int) -> Bytes:
        """Return all bytes of a memory, which must not be changed."""
        status = os.fstat(descriptor)
        name = status.st_dev, status.st_ino  # unique while the memory is mapped
        before = self._kept.get(rank, [])
        content = dict(before).get(name)
        if content is None:
            content = _map_private(descriptor)
        # A writer that takes the same memory twice has closed the other one.
        others = [one for one in before[-1:] if one[0] != name]
        self._kept[rank] = [*others, (name, content)]
        return content

    def release(self) -> None:
        """Drop all mappings."""
        self._kept = {}


def _map_private(descriptor: int) -> Bytes:
    # Private mappings are writable, as torch requires even of tensors that are only read.
    mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapped, np.uint8)


class Share(Content):
    """A staged share, opened: its writer does not change it until `close`.

    Tensors of `parts` and `view` must not be used after `close`.

    Raises MemoryGone if another version has replaced it, or its writer has died, and
    DamagedWeightsError if its table differs from what was written.
    """

    def __init__(self, share: WeightShare, mappings: Mappings | None = None) -> None:
        self.share = share
        self._descriptor = open_shared(share.path, NAME, writable=False)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (size := os.fstat(self._descriptor).st_size) < share.host_bytes:
                raise self._damaged(f"is damaged: it has {size} of {share.host_bytes} bytes")
            if mappings is None:
                content = _map_private(self._descriptor)
            else:
                content = mappings.of(share.rank, self._descriptor)
            if int(content[:WORD].view(np.int64)[0]) != share.version:
                raise BlockingIOError
            super().__init__(share, content)
        except BlockingIOError:
            self.close()
            raise MemoryGone(f"version {share.version} of the weights is gone.") from None
        except BaseException:
            self.close()
            raise

    @property
    def local(self) -> WeightShare:
        """The share with a path that this process keeps open."""
        return replace(self.share, path=path_of(self._descriptor))

    def close(self) -> None:
        """Allow the writer to reuse the memory."""
        self._bytes = np.empty(0, np.uint8)
        self.__dict__.pop("_flat", None)
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # otherwise a mapping would keep the lock
            os.close(self._descriptor)
            self._descriptor = -1
