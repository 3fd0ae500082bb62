"""Layout of a share in memory: which bytes are which part of which tensor.

    version | length of the table | number of digests | table of segments | digests │ segments
    └───────────────── checksum in WeightShare.checksum ──────────────────────────┘

Segments follow the header, or are in the memory of a device (device_staging.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.reallocation.plan import ALIGNMENT, Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.shared_memory import Bytes
from rlsys.reallocation.transport.tensor_copies import BUCKET_BYTES, row_slices

WORD = 8  # bytes of a version, a length, a digest
WRITING = -1  # version number while a version is written


@dataclass(frozen=True)
class ShareLayout:
    """Layout of a share whose segments follow its header."""

    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    table: bytes
    begin: int  # offset of the segments

    @classmethod
    def of(cls, segments: tuple[Segment, ...]) -> ShareLayout:
        """Return the layout of these segments."""
        table = _table(segments)
        buckets = tuple(_buckets(segments))
        end = header_bytes(table, len(buckets))
        return cls(segments, buckets, table, begin=-(-end // ALIGNMENT) * ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Bytes of header and segments."""
        return self.begin + self.body_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the segments."""
        return max((one.offset + one.num_bytes for one in self.segments), default=0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of bytes of the body, and the rows of segments in it."""

    begin: int
    end: int
    parts: tuple[tuple[Segment, slice], ...]

    def digest(self, body: Bytes) -> int:
        """Return the digest of the bytes."""
        return int(xxhash.xxh3_64_intdigest(body[self.begin : self.end].data))


def header_bytes(table: bytes, num_digests: int) -> int:
    """Return the bytes of a header."""
    return 3 * WORD + len(table) + num_digests * WORD


def write_header(memory: Bytes, version: int, table: bytes, digests: Sequence[int]) -> int:
    """Write a header, its version last, and return its checksum."""
    head = b"".join(
        (
            np.array([version, len(table), len(digests)], np.int64).tobytes(),
            table,
            np.array(digests, np.uint64).tobytes(),
        )
    )
    memory[WORD : len(head)] = np.frombuffer(head, np.uint8)[WORD:]
    memory[:WORD].view(np.int64)[0] = version
    return int(xxhash.xxh3_64_intdigest(head))


def parse_header(memory: Bytes, checksum: int) -> tuple[tuple[Segment, ...], list[int]] | None:
    """Return the segments and digests of a header; None unless it has this checksum."""
    length = int(memory[WORD : 2 * WORD].view(np.int64)[0])
    num_digests = int(memory[2 * WORD : 3 * WORD].view(np.int64)[0])
    end = 3 * WORD + length + num_digests * WORD
    if xxhash.xxh3_64_intdigest(memory[: max(0, end)].data) != checksum:
        return None
    segments = _segments(bytes(memory[3 * WORD : 3 * WORD + length]))
    return segments, memory[3 * WORD + length : end].view(np.uint64).tolist()


def view(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return a segment of the bytes of all segments, in place."""
    part = flat[segment.offset : segment.offset + segment.num_bytes]
    return part.view(segment.dtype).view(segment.box.shape)


def _buckets(segments: Sequence[Segment]) -> Iterator[Bucket]:
    """Yield buckets of BUCKET_BYTES to twice as many; the last, or a larger row, may differ."""
    parts: list[tuple[Segment, slice]] = []
    begin = end = 0
    for segment in segments:
        row_bytes = segment.num_bytes // max(1, math.prod(segment.box.shape[:1]))
        for rows in row_slices(segment.box.shape, BUCKET_BYTES // max(1, row_bytes)):
            parts.append((segment, rows))
            end = segment.offset + rows.stop * row_bytes
            if end - begin >= BUCKET_BYTES:
                yield Bucket(begin, end, tuple(parts))
                parts, begin = [], end
    if parts:
        yield Bucket(begin, end, tuple(parts))


def _table(segments: Sequence[Segment]) -> bytes:
    """Return the table of segments, padded to whole words."""
    table = dump_json(
        [
            (one.name, str(one.dtype).removeprefix("torch."), one.offset, one.box.bounds)
            for one in segments
        ]
    ).encode()
    return table.ljust(-(-len(table) // WORD) * WORD)


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
