"""A rank's share of a version of the weights, in memory that the processes of its node share.

    Stage(segments) ── write(version, read) ──► WeightShare ──► Share ── verify() ──► parts

    memory:  version | table of segments | digests of buckets │ segments, where the plan says
             └────────────── sums up to WeightShare.checksum ─┘

A share explains itself, so what tells of it is small however many tensors it has. The same memory
takes version after version: a reader keeps the writer from it by a lock on the file, which ends
with the reader if nothing else ends it. A writer that finds its memory locked takes other memory,
and comes back to the old when its readers have left: it keeps two at most, one where readers leave
in time. So a version is there for those that open it before the next is written; a later one may
get MemoryGone, and takes a newer version.

Buckets of bytes are copied and summed on several threads; whoever reads them sums them again.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.reallocation.plan import ALIGNMENT, Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.shared_memory import (
    Bytes,
    MemoryGone,
    SharedMemory,
    open_shared,
    path_of,
)
from rlsys.types import WeightShare

BUCKET_BYTES = 16 * 2**20
NUM_THREADS = min(4, len(os.sched_getaffinity(0)))
NAME = "rlsys-weights"

# Into a matrix that lies across its source, this many rows are copied at a time: what is written
# to them stays in the cache, and all goes six times as fast.
TURNED_ROWS = 32

WORD = 8  # bytes of a version, a length, a digest
WRITING = -1  # the version while it is written

Read = Callable[[Segment], torch.Tensor]
"""The numbers of a segment, on any device and in any precision; called on several threads."""


class DamagedWeightsError(ValueError):
    """Bytes are not those that were staged."""


class StagingBuffer:
    """Of one rank: room for `segments`, taken at the first version. Raises OSError where memory is
    short.
    """

    def __init__(self, segments: Sequence[Segment], *, rank: int = 0, node: str = "") -> None:
        self.segments = tuple(segments)
        self._room = _Room.of(self.segments)
        self._rank = rank
        self._node = node
        self._kept: list[_Memory] = []  # the newest version first
        self._is_begun = False
        self._written: WeightShare | None = None  # the newest, until the next begins

    def write(self, version: int, read: Read) -> WeightShare:
        """Numbers that `read` finds where they are to be stay there, and are only summed."""
        self.begin()
        memory = self._kept[0]
        checksum = self._room.fill(memory.content, version, read)
        self._is_begun = False
        memory.unlock()
        self._written = WeightShare(
            version=version,
            rank=self._rank,
            node=self._node,
            path=memory.shared.path,
            num_bytes=self._room.num_bytes,
            checksum=checksum,
        )
        return self._written

    def verify(self) -> None:
        """Raise DamagedWeightsError unless the newest version, where there is one and the next is
        not begun, is as it was written.
        """
        if self._written is not None:
            Content(self._written, self._kept[0].content).verify()

    def begin(self) -> None:
        """Keep readers out of the memory for the next version until `write`: what it held is gone
        then, but other memory is taken where somebody reads that.
        """
        if self._is_begun:
            return
        before = self._kept
        memory = next((one for one in before if one.lock()), None)
        if memory is None:
            memory = _Memory(self._room.num_bytes)
        # Where nobody reads the newest version, one memory is enough.
        keep_newest = before and memory is not before[0]
        self._kept = [memory, *before[:1]] if keep_newest else [memory]
        for one in before:
            if one not in self._kept:
                one.shared.close()
        memory.content[:WORD].view(np.int64)[0] = WRITING
        self._is_begun, self._written = True, None

    @property
    def parts(self) -> list[tuple[Segment, torch.Tensor]]:
        """Each segment and its place in the memory for the next version, after `begin`."""
        assert self._is_begun, "begin comes first"
        flat = torch.from_numpy(self._kept[0].content[self._room.begin :])
        return [(segment, _view(flat, segment)) for segment in self.segments]

    def close(self) -> None:
        """Nobody can open its version any more."""
        for one in self._kept:
            one.shared.close()
        self._kept = []
        self._is_begun, self._written = False, None


class _Memory:
    """Locked at first."""

    def __init__(self, num_bytes: int) -> None:
        self.shared = SharedMemory(NAME, num_bytes, purpose="a version of the weights")
        self.content = self.shared.map()
        self.lock()

    def lock(self) -> bool:
        """False where somebody reads it."""
        try:
            fcntl.flock(self.shared.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.shared.descriptor, fcntl.LOCK_UN)


def pack(segments: Sequence[Segment], share: WeightShare, read: Read) -> tuple[WeightShare, Bytes]:
    """Segments of an open share as a smaller share of the same version, to be sent to another node;
    as many bytes as make whole lines of ALIGNMENT.
    """
    room = _Room.of(tuple(segments))
    content = np.zeros(-(-room.num_bytes // ALIGNMENT) * ALIGNMENT, np.uint8)
    checksum = room.fill(content, share.version, read)
    return replace(share, path="", num_bytes=len(content), checksum=checksum), content


class Content:
    """The bytes of a share, which say what they are. Raises DamagedWeightsError if what they say is
    not what was written.
    """

    def __init__(self, share: WeightShare, content: Bytes) -> None:
        self.share = share
        self._bytes = content
        self._room, self._digests = self._told()

    def _told(self) -> tuple[_Room, list[int]]:
        length = int(self._bytes[WORD : 2 * WORD].view(np.int64)[0])
        num_buckets = int(self._bytes[2 * WORD : 3 * WORD].view(np.int64)[0])
        end = 3 * WORD + length + num_buckets * WORD
        if xxhash.xxh3_64_intdigest(self._bytes[: max(0, end)].data) != self.share.checksum:
            raise self._damaged("does not begin as it was written")
        room = _Room.of(_segments(bytes(self._bytes[3 * WORD : 3 * WORD + length])))
        return room, self._bytes[3 * WORD + length : end].view(np.uint64).tolist()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._room.segments

    def verify(self) -> None:
        """Raise DamagedWeightsError unless the bytes are those that were staged."""
        body = self._body
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = threads.map(lambda bucket: bucket.digest(body), self._room.buckets)
            pairs = enumerate(zip(found, self._digests, strict=True))
            damaged = [number for number, (found, staged) in pairs if found != staged]
        if damaged:
            raise self._damaged(
                f"is damaged in {len(damaged)} of its {len(self._digests)} buckets, {damaged[:4]}"
            )

    def parts(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Each segment and its numbers, which are not to be written to."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            flat = torch.from_numpy(self._body)
        for segment in self.segments:
            yield segment, _view(flat, segment)

    @property
    def _body(self) -> Bytes:
        return self._bytes[self._room.begin :]

    def _damaged(self, why: str) -> DamagedWeightsError:
        return DamagedWeightsError(
            f"rank {self.share.rank}'s share of version {self.share.version} of the weights {why}; "
            "publish it again."
        )


class Mappings:
    """What a reader has mapped of the memories that it opens again and again: their pages are
    looked up once, which takes half as long as to sum them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[tuple[int, int], Bytes]]] = {}  # by rank, newest last

    def keep(self, ranks: Collection[int]) -> None:
        """There are no others any more."""
        for rank in self._kept.keys() - set(ranks):
            del self._kept[rank]

    def of(self, rank: int, descriptor: int) -> Bytes:
        """All bytes of a memory, not to be written to."""
        status = os.fstat(descriptor)
        name = status.st_dev, status.st_ino  # no other has the number of one that is mapped
        before = self._kept.get(rank, [])
        content = dict(before).get(name)
        if content is None:
            content = _mapped(descriptor)
        # A writer that takes the same memory twice has given up the other one.
        others = [one for one in before[-1:] if one[0] != name]
        self._kept[rank] = [*others, (name, content)]
        return content

    def let_go(self) -> None:
        self._kept = {}


def _mapped(descriptor: int) -> Bytes:
    # Private, and so writable, which torch wants of what it does not write to.
    mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapped, np.uint8)


class Share(Content):
    """A staged share, opened: its writer leaves it alone until `close`, which `parts` must not be
    used after.

    Raises MemoryGone if another version has taken its place, or its writer is dead;
    DamagedWeightsError if what it says of itself is not what was written.
    """

    def __init__(self, share: WeightShare, mappings: Mappings | None = None) -> None:
        self.share = share
        self._descriptor = open_shared(share.path, NAME, writable=False)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (size := os.fstat(self._descriptor).st_size) < share.num_bytes:
                raise self._damaged(f"has {size} bytes of {share.num_bytes}: it was cut off")
            if mappings is None:
                content = _mapped(self._descriptor)
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
        """By a path that this process keeps open."""
        return replace(self.share, path=path_of(self._descriptor))

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a mapping would keep it
            os.close(self._descriptor)
            self._descriptor = -1


def copy_parts(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, of the same shape, on several threads."""

    @torch.no_grad()
    def copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        target, source = pair
        for rows in _row_slices(source.shape, TURNED_ROWS if _is_turned(target) else None):
            _copy(_rows(target, rows), _rows(source, rows))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in threads.map(copy, itertools.chain.from_iterable(map(_in_pieces, pairs))):
            pass


@dataclass(frozen=True)
class _Room:
    """How a share lies in memory."""

    segments: tuple[Segment, ...]
    buckets: tuple[_Bucket, ...]
    table: bytes
    begin: int
    """Of the segments."""

    @classmethod
    def of(cls, segments: tuple[Segment, ...]) -> _Room:
        table = _table(segments)
        buckets = tuple(_buckets(segments))
        end = 3 * WORD + len(table) + len(buckets) * WORD
        return cls(segments, buckets, table, begin=-(-end // ALIGNMENT) * ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        return self.begin + max((one.offset + one.num_bytes for one in self.segments), default=0)

    def fill(self, memory: Bytes, version: int, read: Read) -> int:
        """Write a share; returns its checksum."""
        memory[:WORD].view(np.int64)[0] = WRITING
        body = memory[self.begin :]
        flat = torch.from_numpy(body)

        @torch.no_grad()
        def put(bucket: _Bucket) -> int:
            for segment, rows in bucket.parts:
                _copy(_rows(_view(flat, segment), rows), _rows(read(segment), rows))
            return bucket.digest(body)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            digests = list(threads.map(put, self.buckets))
        head = b"".join(
            (
                np.array([version, len(self.table), len(digests)], np.int64).tobytes(),
                self.table,
                np.array(digests, np.uint64).tobytes(),
            )
        )
        memory[WORD : len(head)] = np.frombuffer(head, np.uint8)[WORD:]
        memory[:WORD].view(np.int64)[0] = version
        return int(xxhash.xxh3_64_intdigest(head))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Some bytes of the body, and the rows of segments that lie there."""

    begin: int
    end: int
    parts: tuple[tuple[Segment, slice], ...]

    def digest(self, body: Bytes) -> int:
        return int(xxhash.xxh3_64_intdigest(body[self.begin : self.end].data))


def _buckets(segments: Sequence[Segment]) -> Iterator[_Bucket]:
    """Of BUCKET_BYTES to twice as many, but for the last, or a row that has more."""
    parts: list[tuple[Segment, slice]] = []
    begin = end = 0
    for segment in segments:
        row_bytes = segment.num_bytes // max(1, math.prod(segment.box.shape[:1]))
        for rows in _row_slices(segment.box.shape, BUCKET_BYTES // max(1, row_bytes)):
            parts.append((segment, rows))
            end = segment.offset + rows.stop * row_bytes
            if end - begin >= BUCKET_BYTES:
                yield _Bucket(begin, end, tuple(parts))
                parts, begin = [], end
    if parts:
        yield _Bucket(begin, end, tuple(parts))


def _row_slices(shape: Sequence[int], step: int | None) -> Iterator[slice]:
    """Of so many rows each, at least one; None: all of them."""
    num_rows = math.prod(shape[:1])
    step = max(1, num_rows if step is None else step)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _in_pieces(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of about BUCKET_BYTES."""
    target, source = pair
    row_bytes = source.nbytes // max(1, math.prod(source.shape[:1]))
    for rows in _row_slices(source.shape, BUCKET_BYTES // max(1, row_bytes)):
        yield _rows(target, rows), _rows(source, rows)


def _is_turned(tensor: torch.Tensor) -> bool:
    """Whether its rows lie across its memory, as columns do."""
    return tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1)


def _table(segments: Sequence[Segment]) -> bytes:
    """As many bytes as make whole words."""
    told = dump_json(
        [
            (one.name, str(one.dtype).removeprefix("torch."), one.offset, one.box.bounds)
            for one in segments
        ]
    ).encode()
    return told.ljust(-(-len(told) // WORD) * WORD)


def _segments(table: bytes) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            buffer="",
            offset=offset,
            name=name,
            dtype=getattr(torch, dtype),
            box=Box(tuple((start, stop) for start, stop in bounds)),
        )
        for name, dtype, offset, bounds in parse_json(table)
    )


def _view(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    part = flat[segment.offset : segment.offset + segment.num_bytes]
    return part.view(segment.dtype).view(segment.box.shape)


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    is_alike = source.dtype == target.dtype and source.device.type == target.device.type == "cpu"
    if is_alike and source.is_contiguous() and target.is_contiguous():
        if source.data_ptr() == target.data_ptr():
            return
        # The C library's copy passes the cache by, torch's does not: twice as fast.
        np.copyto(_raw(target), _raw(source))
        torch.autograd.graph.increment_version(target)  # whoever has made something of it looks
    else:
        target.copy_(source)


def _raw(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
