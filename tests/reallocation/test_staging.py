"""A rank's share of a version: written, opened, verified, and gone for late readers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.reallocation.plan import ALIGNMENT, Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport import share_layout
from rlsys.reallocation.transport.share_layout import ShareLayout
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError, Mappings, Share, StagingBuffer
from rlsys.reallocation.transport.version_memory import NAME
from rlsys.types import WeightShare

TENSORS = {
    "embedding": torch.arange(60, dtype=torch.float32).view(20, 3),
    "norm": torch.linspace(0, 1, 5, dtype=torch.float64),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "counts": torch.tensor([1, 2**40]),
}
DTYPES = {"norm": torch.bfloat16, "counts": torch.int64}


def laid_out(*wanted: tuple[str, Box, torch.dtype]) -> list[Segment]:
    segments, end = [], 0
    for name, box, dtype in wanted:
        segments.append(Segment(buffer="rank", offset=end, name=name, dtype=dtype, box=box))
        end += -(-segments[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return segments


PIECES = laid_out(
    *(
        (name, Box.whole(tensor.shape), DTYPES.get(name, torch.float32))
        for name, tensor in TENSORS.items()
    )
)


@pytest.fixture
def stage() -> Iterator[StagingBuffer]:
    stage = StagingBuffer(PIECES)
    yield stage
    stage.close()


def write(stage: StagingBuffer, version: int, scale: int = 1) -> WeightShare:
    return stage.write(version, lambda piece: TENSORS[piece.name] * scale)


def assert_holds(share: Share, scale: int = 1) -> None:
    found = list(share.parts())
    assert [replace(piece, buffer="rank") for piece, _ in found] == PIECES
    for piece, tensor in found:
        expected = (TENSORS[piece.name] * scale).to(piece.dtype)
        assert torch.equal(tensor, expected), piece


@pytest.mark.parametrize("bucket_bytes", [1, 24, 2**20])
def test_readers_see_what_was_written(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_layout, "BUCKET_BYTES", bucket_bytes)
    stage = StagingBuffer(PIECES)
    staged = write(stage, 7)
    share = Share(staged)
    share.verify()
    assert_holds(share)
    # 20 rows of 12 bytes, 5 numbers of 2, 3 rows of 8, a scalar of 4, 2 numbers of 8.
    num_buckets = {1: 20 + 5 + 3 + 1 + 2, 24: 14, 2**20: 1}[bucket_bytes]
    assert len(ShareLayout.of(share.segments).buckets) == num_buckets
    share.close()


def test_a_part_of_a_tensor_is_staged_in_the_wanted_precision() -> None:
    stage = StagingBuffer(laid_out(("w", Box(((1, 3), (0, 2))), torch.bfloat16)))
    whole = torch.tensor([[9.0, 9], [1, 1 / 3], [2, 3], [9, 9]])
    share = Share(stage.write(1, lambda piece: whole[piece.box.slices]))
    ((_, found),) = share.parts()
    assert torch.equal(found, torch.tensor([[1, 1 / 3], [2, 3]]).to(torch.bfloat16))
    share.close()
    stage.close()


def test_the_same_memory_takes_the_next_version_without_readers(stage: StagingBuffer) -> None:
    first = write(stage, 1)
    second = write(stage, 2, scale=3)
    assert second.path == first.path
    with pytest.raises(MemoryGone) as found:
        Share(first)
    assert "version 1" in str(found.value)
    share = Share(second)
    assert_holds(share, scale=3)
    share.close()


def test_a_reader_keeps_the_version_that_it_has_opened(stage: StagingBuffer) -> None:
    share = Share(write(stage, 1))
    memory = stage.memory.kept[0]
    second = write(stage, 2, scale=3)
    assert stage.memory.kept == [stage.memory.kept[0], memory]
    share.verify()
    assert_holds(share)
    share.close()
    other = Share(second)
    assert_holds(other, scale=3)
    other.close()


READER = """
import pickle, sys
from rlsys.reallocation.transport.staging import Share
share = Share(pickle.load(sys.stdin.buffer))
print("opened", flush=True)
sys.stdin.buffer.read()
"""


def test_a_dead_reader_holds_no_lock(stage: StagingBuffer) -> None:
    staged = write(stage, 1)
    memory = stage.memory.kept[0]
    with subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(pickle.dumps(staged))
        reader.stdin.flush()
        assert reader.stdout.readline() == b"opened\n"
        reader.kill()
    write(stage, 2)
    assert stage.memory.kept == [memory]


@pytest.mark.parametrize("place", range(-8, 0))
def test_damaged_numbers_are_refused(stage: StagingBuffer, place: int) -> None:
    staged = write(stage, 4)
    stage.memory.kept[0].content[place] ^= 1
    share = Share(staged)
    with pytest.raises(DamagedWeightsError) as found:
        share.verify()
    assert "version 4 " in str(found.value)
    assert "1 of its 1" in str(found.value)
    share.close()


@pytest.mark.parametrize("place", [9, 17, 30, 100])
def test_a_damaged_beginning_is_refused(stage: StagingBuffer, place: int) -> None:
    staged = write(stage, 4)
    stage.memory.kept[0].content[place] ^= 1
    with pytest.raises(DamagedWeightsError) as found:
        Share(staged)
    assert "version 4" in str(found.value)
    write(stage, 5)  # the memory is not locked


def test_truncated_memory_is_refused(stage: StagingBuffer, tmp_path: Path) -> None:
    staged = write(stage, 4)
    (tmp_path / "share").write_bytes(bytes(stage.memory.kept[0].content[: staged.num_bytes - 1]))
    with pytest.raises(DamagedWeightsError) as found:
        Share(replace(staged, path=str(tmp_path / "share")))
    assert f"{staged.num_bytes - 1} of {staged.num_bytes}" in str(found.value)


def test_mapped_memory_cannot_be_truncated(stage: StagingBuffer) -> None:
    staged = write(stage, 4)
    share = Share(staged)
    for size in (0, staged.num_bytes - 1, staged.num_bytes + 1):
        with pytest.raises(PermissionError), open(staged.path, "r+b") as memory:
            memory.truncate(size)
    share.verify()
    share.close()


def test_two_memories_serve_a_reader_that_keeps_each_version_until_the_next(
    stage: StagingBuffer,
) -> None:
    share = Share(write(stage, 1))
    paths = []
    for version in range(2, 8):
        staged = write(stage, version, scale=version)
        paths.append(staged.path)
        new = Share(staged)
        assert_holds(share, scale=version - 1 if version > 2 else 1)
        share.close()
        share = new
    assert paths[:2] * 2 == paths[2:]
    assert len(set(paths)) == 2
    share.close()
    write(stage, 8)
    assert len(stage.memory.kept) == 1  # one is enough without readers of the newest version


def test_a_reader_of_an_older_version_keeps_it(stage: StagingBuffer) -> None:
    shares = [Share(write(stage, version, scale=version)) for version in range(1, 5)]
    assert len(stage.memory.kept) == 2
    for version, share in enumerate(shares, 1):
        share.verify()
        assert_holds(share, scale=version)
        share.close()


def num_mapped() -> int:
    """Return the number of memories that readers of this process have mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/memfd:{NAME} " in line and line.split()[1].endswith("p") for line in lines)


def test_mappings_are_kept_of_memory_that_is_still_in_use(stage: StagingBuffer) -> None:
    mappings = Mappings()
    before = num_mapped()

    def opened(version: int) -> Share:
        share = Share(write(stage, version, scale=version), mappings)
        share.verify()
        assert_holds(share, scale=version)
        return share

    first = opened(1)
    second = opened(2)  # in other memory
    a, b = first.content.ctypes.data, second.content.ctypes.data
    first.close()
    third = opened(3)
    second.close()
    assert third.content.ctypes.data == a
    assert num_mapped() - before == 2
    third.close()
    fourth = opened(4)
    assert fourth.content.ctypes.data == a  # the writer has closed the other one
    assert num_mapped() - before == 1
    assert a != b
    fourth.close()
    mappings.keep([1])
    assert num_mapped() == before


def test_a_closed_version_cannot_be_opened(stage: StagingBuffer) -> None:
    staged = write(stage, 1)
    stage.close()
    with pytest.raises(MemoryGone):
        Share(staged)


def test_a_partly_written_version_cannot_be_opened(stage: StagingBuffer) -> None:
    first = write(stage, 1)

    error = RuntimeError("the rank is gone")

    def fails(piece: Segment) -> torch.Tensor:
        raise error

    with pytest.raises(RuntimeError) as found:
        stage.write(2, fails)
    assert found.value is error
    with pytest.raises(MemoryGone):
        Share(first)
    share = Share(write(stage, 3))
    share.verify()
    assert_holds(share)
    share.close()


def test_numbers_of_a_large_share_are_exact() -> None:
    numbers = torch.from_numpy(np.random.default_rng(0).integers(0, 2**31, 9_000_000, np.int32))
    wide = numbers[:8_999_000].view(1000, -1)
    tensors = {"flat": numbers, "wide": wide, "columns": wide[:, 3:4000]}
    pieces = laid_out(*((name, Box.whole(one.shape), torch.int32) for name, one in tensors.items()))
    stage = StagingBuffer(pieces)
    share = Share(stage.write(1, lambda piece: tensors[piece.name]))
    share.verify()
    for piece, tensor in share.parts():
        assert torch.equal(tensor, tensors[piece.name])
    share.close()
    stage.close()
