"""Versions in the memory of a device: which buffer takes them, and who may read them until when."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.plan import Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.device_staging import DeviceShare, DeviceStage
from rlsys.reallocation.transport.shared_device import DeviceSharingError, digests
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError, Share
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import WeightManifest, WeightShare
from tests.reallocation.fake_device import FakeDevice
from tests.reallocation.test_staging import PIECES, TENSORS, laid_out

ROOT = Path(__file__).parents[2]
SMALL = laid_out(("w", Box(((0, 5),)), torch.bfloat16))


def write(stage: DeviceStage, version: int, segments: Sequence[Segment] = SMALL) -> WeightShare:
    """Write a version whose elements all equal its number."""
    return stage.write(segments, version, lambda one: torch.full(one.box.shape, float(version)))


def opened(share: WeightShare, device: FakeDevice) -> DeviceShare:
    found = DeviceShare(share)
    try:
        found.open_on(device)
    except BaseException:
        found.close()
        raise
    return found


def value_of(share: Share) -> float:
    ((_, part),) = share.parts()
    (value,) = part.unique().tolist()
    assert isinstance(value, float)
    return value


def reference_digest(words: Sequence[int]) -> int:
    """Compute a digest in Python's integers."""
    total = 0
    for place, word in enumerate(words, 1):
        factor = _signed(place * 0x9E3779B97F4A7C15)
        factor = _signed((factor ^ (factor >> 30)) * 0xBF58476D1CE4E5B9)
        total += word * ((factor ^ (factor >> 27)) | 1)
    return total % 2**64


def as_bytes(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32).view(torch.uint8)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


words = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


@given(words)
def test_a_digest_is_the_sum_of_weighted_words_modulo_2_to_the_64(numbers: list[int]) -> None:
    memory = as_bytes(numbers)
    assert digests(memory) == [reference_digest(numbers)]


@given(words, st.data())
def test_a_digest_finds_a_changed_byte_and_exchanged_words(
    numbers: list[int], data: st.DataObject
) -> None:
    memory = as_bytes(numbers)
    place = data.draw(st.integers(0, len(memory) - 1))
    changed = memory.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert digests(changed) != digests(memory)
    one, other = (data.draw(st.integers(0, len(numbers) - 1)) for _ in range(2))
    if numbers[one] != numbers[other]:
        numbers[one], numbers[other] = numbers[other], numbers[one]
        assert digests(as_bytes(numbers)) != digests(memory)


def test_large_memory_has_a_digest_per_bucket() -> None:
    memory = torch.zeros(2 * 16 * 2**20 + 64, dtype=torch.uint8)
    before = digests(memory)
    memory[16 * 2**20] = 1
    assert before == [0, 0, 0]
    assert [found == 0 for found in digests(memory)] == [True, False, True]


def test_readers_see_what_was_written_in_the_wanted_precision() -> None:
    device = FakeDevice()
    stage = DeviceStage(device, rank=3, node="n")
    staged = stage.write(PIECES, 7, lambda piece: TENSORS[piece.name])
    assert (staged.version, staged.rank, staged.node) == (7, 3, "n")
    with Weights(WeightManifest(version=7, shares=(staged,))) as weights:
        weights.check({p.name: TENSORS[p.name].to(p.dtype) for p in PIECES})
        weights.verify()  # needs no device
        weights.open_on(device)
        weights.require_owners()
        for piece in PIECES:
            expected = TENSORS[piece.name].to(piece.dtype)
            assert torch.equal(weights.read(piece.name, piece.box), expected), piece
    assert device.opened == {}
    stage.close()
    assert device.allocated == {}


def test_one_buffer_is_enough_if_readers_close_in_time() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    paths = set()
    for version in range(1, 5):
        staged = write(stage, version)
        paths.add(staged.path)
        share = opened(staged, device)
        assert value_of(share) == version
        share.close()
    assert len(paths) == len(device.allocated) == 1
    with pytest.raises(MemoryGone):
        DeviceShare(replace(staged, version=3))


def test_a_second_buffer_takes_a_version_while_the_other_one_is_read() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    first = opened(write(stage, 1), device)
    second = opened(write(stage, 2), device)
    assert (value_of(first), value_of(second)) == (1, 2)
    with pytest.raises(DeviceSharingError):  # both are being read
        write(stage, 3)
    first.close()
    third = write(stage, 4)
    assert third.path == first.share.path
    assert value_of(second) == 2
    second.close()
    assert len(device.allocated) == 2
    # The newest version can still be opened after the next one has been written elsewhere.
    write(stage, 5)
    late = opened(third, device)
    assert value_of(late) == 4
    late.close()


def test_a_device_without_room_for_a_second_buffer_is_asked_once() -> None:
    device = FakeDevice(room=1)
    stage = DeviceStage(device)
    share = opened(write(stage, 1), device)
    for version in (2, 3):
        with pytest.raises(DeviceSharingError):
            write(stage, version)
    assert device.num_refused == 1
    assert value_of(share) == 1
    share.close()
    share = opened(write(stage, 4), device)
    assert value_of(share) == 4
    share.close()


def test_a_device_without_room_is_asked_once() -> None:
    device = FakeDevice(room=0)
    stage = DeviceStage(device)
    for version in (1, 2):
        with pytest.raises(DeviceSharingError):
            write(stage, version)
    assert device.num_refused == 1


def test_a_header_that_cannot_be_allocated_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("no memory")

    def fails(*_: object) -> None:
        raise error

    device = FakeDevice()
    module = "rlsys.reallocation.transport.device_staging.LockedMemory"
    monkeypatch.setattr(module, fails)
    with pytest.raises(OSError) as found:  # noqa: PT011 - the same object
        write(DeviceStage(device), 1)
    assert found.value is error
    assert device.allocated == {}


def test_buffers_of_another_plan_are_freed_when_nobody_reads_them() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    share = opened(write(stage, 1), device)
    larger = laid_out(("w", Box(((0, 500),)), torch.float32))
    write(stage, 2, larger)
    assert len(device.allocated) == 2
    assert value_of(share) == 1
    share.close()
    write(stage, 3, larger)
    assert len(device.allocated) == 1


def test_a_device_is_asked_again_once_a_buffer_is_free() -> None:
    device = FakeDevice(room=1)
    stage = DeviceStage(device)
    share = opened(write(stage, 1), device)
    larger = laid_out(("w", Box(((0, 500),)), torch.float32))
    with pytest.raises(DeviceSharingError):
        write(stage, 2, larger)
    share.close()
    share = opened(write(stage, 3, larger), device)
    assert value_of(share) == 3
    share.close()


def test_closing_frees_all_but_what_is_read() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    share = opened(write(stage, 1), device)
    write(stage, 2)
    stage.close()
    assert len(device.allocated) == 1
    assert value_of(share) == 1
    share.close()
    stage.close()
    assert device.allocated == {}
    with pytest.raises(MemoryGone):
        DeviceShare(share.share)


def test_a_partly_written_version_cannot_be_opened() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    first = write(stage, 1)
    error = RuntimeError("the rank is gone")

    def fails(_: Segment) -> torch.Tensor:
        raise error

    with pytest.raises(RuntimeError) as found:
        stage.write(SMALL, 2, fails)
    assert found.value is error
    with pytest.raises(MemoryGone):
        DeviceShare(first)
    share = opened(write(stage, 3), device)
    assert value_of(share) == 3
    share.close()


@pytest.mark.parametrize("place", [0, 9, 63])
def test_damaged_memory_is_refused_and_released(place: int) -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    staged = write(stage, 4)
    (memory,) = device.allocated.values()
    memory.map()[place] ^= 1
    with pytest.raises(DamagedWeightsError) as found:
        opened(staged, device)
    assert "version 4 " in str(found.value)
    assert device.opened == {}
    assert write(stage, 5).path == staged.path


def test_a_reader_that_cannot_open_the_memory_keeps_nothing() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    staged = write(stage, 1)
    other = FakeDevice()
    other.refuses_to_open = True
    for reader in (other, None):
        share = DeviceShare(staged)
        with pytest.raises(DeviceSharingError):
            share.open_on(reader)
        share.close()
    assert write(stage, 2).path == staged.path


@given(st.lists(st.tuples(st.sampled_from(["write", "open", "close", "late"]), st.integers(0, 9))))
def test_readers_never_see_another_version_and_nothing_leaks(steps: list[tuple[str, int]]) -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    published: list[WeightShare] = []
    readers: list[DeviceShare] = []
    for version, (step, choice) in enumerate(steps, 1):
        if step == "write":
            try:
                published.append(write(stage, version))
            except DeviceSharingError:
                # Only if readers use both buffers.
                assert len({one.share.path for one in readers}) == 2
        elif step in ("open", "late") and published:
            share = published[-1 if step == "open" else choice % len(published)]
            try:
                readers.append(opened(share, device))
            except MemoryGone:
                assert share is not published[-1]
        elif step == "close" and readers:
            readers.pop(choice % len(readers)).close()
        assert [value_of(one) for one in readers] == [one.share.version for one in readers]
        assert len(device.allocated) <= 2
    for one in readers:
        one.close()
    stage.close()
    assert len(device.allocated) + len(device.opened) == 0


READER = """
import pickle, sys
from rlsys.reallocation.transport.device_staging import DeviceShare
from tests.reallocation.fake_device import FakeDevice
share = DeviceShare(pickle.load(sys.stdin.buffer))
share.open_on(FakeDevice())
print("opened", flush=True)
sys.stdin.buffer.read()
"""

WRITER = """
import pickle, sys
from rlsys.reallocation.transport.device_staging import DeviceStage
from tests.reallocation.fake_device import FakeDevice
from tests.reallocation.test_device_staging import write
stage = DeviceStage(FakeDevice())
pickle.dump(write(stage, 1), sys.stdout.buffer)
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


@contextmanager
def python(script: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, cwd=ROOT)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_dead_reader_holds_no_lock() -> None:
    device = FakeDevice()
    stage = DeviceStage(device)
    staged = write(stage, 1)
    with python(READER) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(pickle.dumps(staged))
        reader.stdin.flush()
        assert reader.stdout.readline() == b"opened\n"
        second = write(stage, 2)
        assert second.path != staged.path
        reader.kill()
        reader.wait()
    assert write(stage, 3).path == staged.path


def test_a_reader_notices_that_the_writer_died() -> None:
    with python(WRITER) as writer:
        assert writer.stdout is not None
        staged = pickle.load(writer.stdout)
        device = FakeDevice()
        share, unopened = opened(staged, device), DeviceShare(staged)
        assert value_of(share) == 1
        share.require_owner()
        writer.kill()
        writer.wait()
        with pytest.raises(MemoryGone):
            share.require_owner()
        with pytest.raises(MemoryGone):
            unopened.open_on(device)
        with pytest.raises(MemoryGone):
            DeviceShare(staged)
        share.close()
        unopened.close()
    assert device.opened == {}
