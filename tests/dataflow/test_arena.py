"""Shared memory without Ray: blocks, leases, and real processes that write and read."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rlsys.dataflow.store.arena import PAGE_BYTES, Arena, BlockWriter, Lease, map_arena, read_only
from rlsys.dataflow.store.blocks import (
    Array,
    BlockRef,
    layout_of,
    pack_cells,
    read_column,
    unpack_cells,
    write_block,
)
from rlsys.reallocation.transport.shared_memory import MemoryGone
from tests.errors import error_about, invalid

TIMEOUT_S = 300.0


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena("shard", 8 * PAGE_BYTES)
    yield arena
    arena.close()


# Blocks


@st.composite
def batches(draw: st.DrawFn) -> dict[str, list[Array]]:
    num_rows = draw(st.integers(1, 6))
    return {
        name: [draw(npst.arrays(dtype, st.integers(0, 9))) for _ in range(num_rows)]
        for name, dtype in {"ids": np.int32, "flags": np.bool_, "values": np.float64}.items()
    }


@settings(deadline=None)
@given(batches(), batches(), st.data())
def test_what_was_written_is_read_whole_or_in_parts(
    first: dict[str, list[Array]], second: dict[str, list[Array]], data: st.DataObject
) -> None:
    """In the same process and after a transfer, for any choice and order of rows."""
    memory = np.zeros(4096, np.uint8)
    blocks = []
    offset = 0
    for columns in (first, second):
        layout = layout_of(columns)
        write_block(memory, offset, layout, columns)
        blocks.append(BlockRef("shard", 1, offset, layout))
        offset += layout.num_bytes
    everything = [
        (block, columns, place)
        for block, columns in zip(blocks, (first, second), strict=True)
        for place in range(block.layout.num_rows)
    ]
    chosen = data.draw(st.lists(st.sampled_from(range(len(everything))), min_size=1))
    cells = {name: [(everything[i][0], everything[i][2]) for i in chosen] for name in first}
    unpacked = unpack_cells(pack_cells(memory, cells), cells)
    for name in first:
        views = read_column(read_only(memory), cells[name], name)
        for i, view, travelled in zip(chosen, views, unpacked[name], strict=True):
            _, columns, place = everything[i]
            for found in (view, travelled):
                assert found.dtype == columns[name][place].dtype
                assert found.flags.aligned
                np.testing.assert_array_equal(found, columns[name][place])
            assert not view.flags.writeable
            assert view.size == 0 or np.shares_memory(view, memory)


def test_a_layout_by_hand() -> None:
    layout = layout_of(
        {
            "ids": [np.array([1, 2, 3], np.int32), np.array([], np.int32)],
            "values": [np.array([0.5]), np.array([1.5])],
        }
    )
    assert layout.starts() == [0, 16, 32]  # 12 bytes of ids, up to the next multiple of 8
    assert layout.row_bytes() == [20, 8]
    assert layout.num_rows == 2


@pytest.mark.parametrize(
    ("columns", "field", "value"),
    [
        ({}, "columns", []),
        ({"a": []}, "rows by column", {"a": 0}),
        ({"a": [np.zeros(1)], "b": [np.zeros(1)] * 2}, "rows by column", {"a": 1, "b": 2}),
        ({"a": [np.zeros((2, 2))]}, "column 'a', row 0", "float64 (2, 2)"),
        ({"a": [np.zeros(1), np.zeros(1, np.int8)]}, "column 'a', row 1", "int8 (1,)"),
        ({"a": [np.array(["text"])]}, "dtype of column 'a'", "<U4"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    columns: dict[str, Sequence[Array]], field: str, value: object
) -> None:
    with invalid(field, value):
        layout_of(columns)


def test_a_column_of_another_block_is_refused() -> None:
    layout = layout_of({"a": [np.zeros(1)]})
    with invalid("column", "b"):
        read_column(np.zeros(8, np.uint8), [(BlockRef("shard", 1, 0, layout), 0)], "b")


# Leases


def test_a_lease_returns_when_it_is_sealed_and_all_its_rows_are_freed(arena: Arena) -> None:
    lease = arena.lease("writer", 7 * PAGE_BYTES)
    assert lease is not None
    arena.free({lease.lease: 2})  # two rows are gone before the writer is done
    assert arena.lease("writer", 2 * PAGE_BYTES) is None
    arena.seal(lease.lease, 3)
    assert arena.holds(lease.lease)
    arena.free({lease.lease: 1})
    assert not arena.holds(lease.lease)
    again = arena.lease("writer", 8 * PAGE_BYTES)
    assert again is not None
    assert (again.offset, again.num_bytes) == (0, 8 * PAGE_BYTES)
    assert again.lease != lease.lease


def test_a_dead_writers_rows_stay_while_they_are_needed(arena: Arena) -> None:
    held = [arena.lease("dead", PAGE_BYTES) for _ in range(3)]
    other = arena.lease("alive", PAGE_BYTES)
    assert other is not None
    first, second, third = (lease.lease for lease in held if lease is not None)
    arena.seal(first, 9)
    arena.free({first: 2, second: 4})
    # Of the first lease 9 - 2 rows were never announced or are needed: two of them are needed.
    arena.reclaim("dead", {first: 2, second: 1})
    assert [arena.holds(lease) for lease in (first, second, third)] == [True, True, False]
    arena.free({first: 2, second: 1})
    assert not arena.holds(first)
    assert not arena.holds(second)
    assert arena.holds(other.lease)


def test_the_arena_says_what_fills_it(arena: Arena) -> None:
    with invalid("bytes of a block", 40_000):
        arena.lease("writer", 40_000)
    sealed = arena.lease("a", 3 * PAGE_BYTES)
    assert sealed is not None
    arena.seal(sealed.lease, 5)
    arena.free({sealed.lease: 1})
    arena.lease("b", PAGE_BYTES)
    leased, capacity, largest_gap = 4 * PAGE_BYTES, 8 * PAGE_BYTES, 4 * PAGE_BYTES
    numbers = [int(number) for number in re.findall(r"\d+", arena.describe())]
    assert numbers == [leased, capacity, 2, 1, 4, 1, 1, largest_gap]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PAGE_BYTES)), max_size=40))
def test_leases_never_overlap_and_all_space_comes_back(events: list[tuple[bool, int]]) -> None:
    arena = Arena("shard", 16 * PAGE_BYTES)
    try:
        live: list[Lease] = []
        for give_back, num_bytes in events:
            if give_back and live:
                lease = live.pop(num_bytes % len(live))
                arena.seal(lease.lease, 0)
            elif (new := arena.lease("writer", num_bytes)) is not None:
                assert new.num_bytes >= num_bytes
                live.append(new)
            spans = sorted((lease.offset, lease.offset + lease.num_bytes) for lease in live)
            ends = [0, *(end for _, end in spans)]
            assert all(end <= start for end, (start, _) in zip(ends, spans, strict=False))
            assert ends[-1] <= arena.capacity_bytes
            assert arena.bytes_leased == sum(lease.num_bytes for lease in live)
        for lease in live:
            arena.seal(lease.lease, 0)
        assert arena.lease("writer", arena.capacity_bytes) is not None
    finally:
        arena.close()


def test_a_writer_moves_on_when_its_lease_is_full(arena: Arena) -> None:
    writer = BlockWriter(map_arena(arena.path, "shard"))
    columns = {"ids": [np.arange(300)]}  # 2400 bytes: one block fits into a page
    layout = layout_of(columns)
    assert writer.write(layout, columns) is None
    first, second = arena.lease("writer", PAGE_BYTES), arena.lease("writer", PAGE_BYTES)
    assert first is not None
    assert second is not None
    writer.start(first)
    assert writer.write(layout, columns) is not None
    assert writer.write(layout, columns) is None
    writer.start(second)
    block = writer.write(layout, columns)
    assert block is not None
    assert (block.lease, block.offset) == (second.lease, PAGE_BYTES)
    assert writer.take_seals() == [(first.lease, 1)]
    writer.seal()
    assert writer.take_seals() == [(second.lease, 1)]


# Processes


def write_in_process(path: str, leases: list[Lease], pipe: Connection) -> None:
    """Fill leases with rows that identify their writer; then wait to be killed."""
    writer = BlockWriter(map_arena(path, "shard"))
    for lease in leases:
        writer.start(lease)
        columns = {"ids": [np.full(n, lease.lease, np.int32) for n in (1, 200, 0, 31)]}
        pipe.send(writer.write(layout_of(columns), columns))
    pipe.recv()


def test_writers_in_other_processes_are_read_here_and_may_be_killed() -> None:
    arena = Arena("shard", 64 * PAGE_BYTES)
    context = multiprocessing.get_context("spawn")
    processes = []
    blocks: list[BlockRef] = []
    try:
        for name in ("first", "second"):
            leases = [arena.lease(name, PAGE_BYTES) for _ in range(3)]
            here, there = context.Pipe()
            process = context.Process(target=write_in_process, args=(arena.path, leases, there))
            process.start()
            processes.append((process, here))
        for _, pipe in processes:
            for _ in range(3):
                assert pipe.poll(TIMEOUT_S), "the writer has not written"
                blocks.append(pipe.recv())
        for process, _ in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(TIMEOUT_S)
            assert process.exitcode == -signal.SIGKILL
        cells = [(block, place) for block in blocks for place in range(4)]
        views = read_column(read_only(arena.buffer), cells, "ids")
        for (block, place), view in zip(cells, views, strict=True):
            assert view.tolist() == [block.lease] * (1, 200, 0, 31)[place]
        # Somebody needs one row of the first writer still; all the rest comes back.
        arena.reclaim("second", {})
        arena.reclaim("first", {blocks[1].lease: 1})
        assert [arena.holds(block.lease) for block in blocks] == [False, True, *[False] * 4]
    finally:
        for process, _ in processes:
            process.kill()
            process.join(TIMEOUT_S)
        arena.close()


def own_in_process(pipe: Connection) -> None:
    arena = Arena("shard", PAGE_BYTES)
    arena.buffer[:] = 7
    pipe.send(arena.path)
    pipe.recv()


def test_a_killed_owners_memory_stays_with_those_who_mapped_it_and_with_nobody_else() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=own_in_process, args=(there,))
    process.start()
    try:
        assert here.poll(TIMEOUT_S), "the owner has not started"
        path: str = here.recv()
        mapped = map_arena(path, "shard")
        with error_about(MemoryGone, "rlsys-other"):
            map_arena(path, "other")
        process.kill()
        process.join(TIMEOUT_S)
        assert mapped.tolist() == [7] * PAGE_BYTES
        with error_about(MemoryGone, "rlsys-shard"):
            map_arena(path, "shard")
    finally:
        process.kill()
        process.join(TIMEOUT_S)


def test_memory_that_is_not_there_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with error_about(OSError, "cluster.store_gib", "1048576.00 GiB"):
        Arena("shard", 2**50)

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with error_about(OSError) as raised:
        Arena("shard", PAGE_BYTES)
    assert raised.value.errno == errno.ENOSPC
