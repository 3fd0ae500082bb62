"""A rank's share of a version of the weights, in memory that the processes of its node share.

    Stage(segments) ── write(version, read) ──► Staged ──► Share(staged) ── verify() ──► parts

What a plan has a rank stage lies where the plan says, behind a header that tells the version. The
same memory takes version after version: a reader keeps the writer from it by a lock on the file,
which ends with the reader if nothing else ends it. A writer that finds its memory locked takes
other memory, and leaves the old to its readers. So a version is there for those that open it before
the next is written; a later one gets MemoryGone, and takes a newer version.

Buckets of bytes are copied and summed on several threads; whoever reads them sums them again.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import xxhash

from rlsys.layout.plan import ALIGNMENT, Segment
from rlsys.layout.transport.shared_memory import (
    Bytes,
    MemoryGone,
    SharedMemory,
    open_shared,
    path_of,
)

HEADER_BYTES = ALIGNMENT  # the version, as int64; -1 while it is written
BUCKET_BYTES = 16 * 2**20
NUM_THREADS = min(4, len(os.sched_getaffinity(0)))
NAME = "rlsys-weights"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What a rank has staged of a version, for the processes of its node and user."""

    version: int
    path: str
    segments: tuple[Segment, ...] = field(repr=False)
    digests: tuple[int, ...]
    """XXH3 of each bucket."""

    @property
    def num_bytes(self) -> int:
        """With the header."""
        return _room(self.segments)


class Stage:
    """Of one rank: room for `segments`, taken at the first version. Raises OSError where memory is
    short."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        self._memory: SharedMemory | None = None
        self._bytes = np.empty(0, np.uint8)

    def write(self, version: int, read: Callable[[Segment], torch.Tensor]) -> Staged:
        """A version, of which `read` gives each segment, on any device and in any precision; called
        on several threads. The version before is gone then, but for those that have opened it."""
        memory = self._taken()
        header = self._bytes[:8].view(np.int64)
        header[0] = -1
        body = self._bytes[HEADER_BYTES:]
        flat = torch.from_numpy(body)

        def put(bucket: _Bucket) -> int:
            for segment, rows in bucket.parts:
                _copy(_rows(_view(flat, segment), rows), _rows(read(segment).detach(), rows))
            return bucket.digest(body)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            digests = tuple(threads.map(put, _buckets(self._segments)))
        header[0] = version
        fcntl.flock(memory.descriptor, fcntl.LOCK_UN)
        return Staged(version=version, path=memory.path, segments=self._segments, digests=digests)

    def close(self) -> None:
        """Nobody can open its version any more."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _taken(self) -> SharedMemory:
        """Memory that nobody reads, locked."""
        if self._memory is not None:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._memory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._memory
            self.close()
        self._memory = SharedMemory(NAME, _room(self._segments), purpose="a version of the weights")
        self._bytes = self._memory.map()
        fcntl.flock(self._memory.descriptor, fcntl.LOCK_EX)
        return self._memory


class Share:
    """A staged version, opened: its writer leaves it alone until `close`.

    Raises MemoryGone if another has taken its place, or its writer is dead.
    """

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._descriptor = open_shared(staged.path, NAME, writable=False)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (size := os.fstat(self._descriptor).st_size) < staged.num_bytes:
                raise ValueError(
                    f"{staged.path} has {size} bytes, version {staged.version} needs "
                    f"{staged.num_bytes}: it was cut off; publish the version again."
                )
            mapped = mmap.mmap(
                self._descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
            self._bytes: Bytes = np.frombuffer(mapped, np.uint8)
            found = int(self._bytes[:8].view(np.int64)[0])
            if found != staged.version:
                raise BlockingIOError
        except BlockingIOError:
            self.close()
            raise MemoryGone(f"version {staged.version} of the weights is gone.") from None
        except BaseException:
            self.close()
            raise

    @property
    def local(self) -> Staged:
        """By a path that this process keeps open."""
        return replace(self._staged, path=path_of(self._descriptor))

    def verify(self) -> None:
        """Raise ValueError unless the bytes are those that were staged."""
        body = self._bytes[HEADER_BYTES:]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = threads.map(lambda bucket: bucket.digest(body), _buckets(self._staged.segments))
            pairs = enumerate(zip(found, self._staged.digests, strict=True))
            damaged = [number for number, (found, staged) in pairs if found != staged]
        if damaged:
            raise ValueError(
                f"version {self._staged.version} of the weights is damaged: of its "
                f"{len(self._staged.digests)} buckets {damaged[:4]} are not as they were staged; "
                "publish it again."
            )

    def parts(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Each segment and its numbers, which must not be used after `close`."""
        flat = torch.from_numpy(self._bytes[HEADER_BYTES:])
        for segment in self._staged.segments:
            yield segment, _view(flat, segment)

    def close(self) -> None:
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a mapping would keep it
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Some bytes behind the header, and the rows of segments that lie there."""

    begin: int
    end: int
    parts: tuple[tuple[Segment, slice], ...]

    def digest(self, body: Bytes) -> int:
        found: int = xxhash.xxh3_64_intdigest(body[self.begin : self.end].data)
        return found


def _buckets(segments: Sequence[Segment]) -> Iterator[_Bucket]:
    """Of BUCKET_BYTES to twice as many, but for the last, or a row that has more."""
    parts: list[tuple[Segment, slice]] = []
    begin = end = 0
    for segment in segments:
        num_rows = math.prod(segment.box.shape[:1])
        row_bytes = segment.num_bytes // max(1, num_rows)
        step = max(1, BUCKET_BYTES // max(1, row_bytes))
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            parts.append((segment, rows))
            end = segment.offset + rows.stop * row_bytes
            if end - begin >= BUCKET_BYTES:
                yield _Bucket(begin, end, tuple(parts))
                parts, begin = [], end
    if parts:
        yield _Bucket(begin, end, tuple(parts))


def _room(segments: Sequence[Segment]) -> int:
    return HEADER_BYTES + max((one.offset + one.num_bytes for one in segments), default=0)


def _view(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    part = flat[segment.offset : segment.offset + segment.num_bytes]
    return part.view(segment.dtype).view(segment.box.shape)


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == "cpu" and source.dtype == target.dtype and source.is_contiguous():
        # The C library's copy passes the cache by, torch's does not: twice as fast.
        np.copyto(_raw(target), _raw(source))
    else:
        target.copy_(source)


def _raw(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
