"""Resharding of a trainer's state in memory: random boxes in one process, and real ranks.

Engines of real ranks then equal, bit for bit, those that load a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.training import state_resharding
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.engines.training.state_resharding import Kept, Move, fill, find_move, packed
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.traffic import minimal_bytes
from rlsys.reallocation.transport.changed_bytes import Changes
from rlsys.reallocation.transport.shared_memory import MemoryGone, SharedMemory
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from scripts.bench.weights import Weight, trainer
from scripts.check_reallocation import TRAINERS, CellResult, check_trainers
from tests.tiers import examples

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((6, 5), torch.float32),
    "moments": ((6, 5), torch.bfloat16),
    "short": ((1, 3), torch.float32),  # too few rows for all ranks
    "step": ((), torch.float32),
    "scale": ((3,), torch.float64),
    "rng": ((7,), torch.uint8),
}
STEP = 4


def numbers(name: str, step: int) -> torch.Tensor:
    """Return a whole tensor after this step."""
    shape, dtype = SHAPES[name]
    count = Box.whole(shape).num_elements
    return (torch.arange(count) + 10 * step).reshape(shape).to(dtype)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], count: int) -> list[Box]:
    """Draw a box for each rank: split along a dimension, or whole; some are empty."""
    whole = Box.whole(shape)
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
        return [whole] * count
    inner = draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1))
    edges = [0, *sorted(inner), shape[dim]]
    return [
        Box((*whole.bounds[:dim], (start, stop), *whole.bounds[dim + 1 :]))
        for start, stop in pairwise(edges)
    ]


@st.composite
def sides(draw: st.DrawFn, prefix: str) -> list[Holder]:
    """Draw one to four ranks on one to three nodes, which together have the whole state."""
    count = draw(st.integers(1, 4))
    boxes = {name: draw(cuts(shape, count)) for name, (shape, _) in SHAPES.items()}
    # A rank of a pipeline has some tensors only, and no other rank has them.
    owner = {name: draw(st.sampled_from([None, *range(count)])) for name in SHAPES}
    boxes["rng"], owner["rng"] = [Box.whole(SHAPES["rng"][0])] * count, None  # the same on all
    holders = []
    for rank in range(count):
        held = tuple(
            TensorShard(
                name=name,
                shape=shape,
                dtype=dtype,
                box=boxes[name][rank] if owner[name] is None else Box.whole(shape),
            )
            for name, (shape, dtype) in SHAPES.items()
            if owner[name] in (None, rank)
        )
        holders.append(Holder(f"{prefix} {rank}", draw(st.sampled_from("ABC")), held))
    return holders


def tensors(held: Sequence[TensorShard], step: int | None) -> dict[str, torch.Tensor]:
    """Return a rank's tensors of a step, or empty ones."""
    return {
        one.name: torch.full(one.box.shape, 99, dtype=one.dtype)
        if step is None
        else numbers(one.name, step)[one.box.slices].contiguous()
        for one in held
    }


@contextlib.contextmanager
def kept(holders: Sequence[Holder], steps: Mapping[str, Sequence[int]]) -> Iterator[list[Kept]]:
    """Create files of these ranks, with snapshots of these steps."""
    with ExitStack() as opened:
        files = []
        for one in holders:
            state = tensors(one.holdings, None)
            memory = SharedMemory(one.rank, snapshot_bytes(state, 3), purpose="a test")
            opened.callback(memory.close)
            file = SnapshotFile(memory.path, memory.name, state)
            for step in steps[one.rank]:
                file.write(step, tensors(one.holdings, step))
            files.append(Kept(path=memory.path, name=memory.name, holder=one))
        yield files


def carry_out(move: Move) -> dict[str, dict[str, torch.Tensor]]:
    """Return each rank's tensors after the move."""
    sent: dict[str, list[WeightDelta]] = {}
    for node, senders in move.senders.items():
        sent[node] = [packed(move, sender, node) for sender in senders]
    found = {}
    for target in move.targets:
        state = tensors(target.holdings, None)
        fill(move, target.rank, state, sent.get(target.node, ()))
        found[target.rank] = state
    return found


@settings(max_examples=examples(60))
@given(sides("was"), sides("is"))
def test_every_element_is_written_once_and_correctly(was: list[Holder], to: list[Holder]) -> None:
    steps = {one.rank: (STEP - 1, STEP) for one in was}
    written: Counter[int] = Counter()

    def copy_parts(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for into, source in pairs:
            assert into.shape == source.shape
            written.update([into.untyped_storage().data_ptr()] * into.numel())
            into.copy_(source)

    with kept(was, steps) as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_resharding, "copy_parts", copy_parts)
        move = find_move([(file, {STEP - 1, STEP}) for file in files], to, STEP)
        assert move is not None
        assert move.step == STEP
        found = carry_out(move)
        for target in to:
            for name, tensor in found[target.rank].items():
                (box,) = (one.box for one in target.holdings if one.name == name)
                assert torch.equal(tensor, numbers(name, STEP)[box.slices])
                assert written[tensor.untyped_storage().data_ptr()] == tensor.numel()
        # Nothing crosses a border that is there already, and nothing twice.
        least = minimal_bytes(was, to)
        assert move.bytes_sent == sum(least.imported.values())


def of_layout(layout: str, prefix: str, nodes: str) -> list[Holder]:
    """Return ranks of a small model, in turn on these nodes."""
    model = [
        Weight(name="embed", shape=(8, 4), cut=0),
        Weight(name="layers.0.q", shape=(8, 4), cut=0, layer=0),
        Weight(name="layers.1.o", shape=(4, 8), cut=1, layer=1),
        Weight(name="norm", shape=(4,), is_last=True),
    ]
    ranks = trainer(ParallelLayout.parse(layout), model, name=prefix)
    return [replace(one, node=nodes[number]) for number, one in enumerate(ranks)]


@pytest.mark.parametrize(
    ("before", "after", "bytes_sent"),
    [
        (("dp2x1", "AB"), ("dp1", "A"), 0),  # a copy is there
        (("dp1", "A"), ("dp2x1", "AB"), 400),  # B lacks all of 8x4 + 8x4 + 4x8 + 4 numbers
        (("dp2", "AB"), ("dp1", "A"), 200),  # half
        (("dp2", "AB"), ("dp2", "BA"), 400),  # each lacks what the other has
        (("tp2", "AA"), ("dp2", "AA"), 0),
        (("pp2", "AB"), ("dp1", "B"), 256),  # the embedding and a layer, 8x4 each
    ],
)
def test_bytes_sent_between_nodes_by_hand(
    before: tuple[str, str], after: tuple[str, str], bytes_sent: int
) -> None:
    was, to = of_layout(before[0], "was", before[1]), of_layout(after[0], "is", after[1])
    files = [Kept(path="", name=one.rank, holder=one) for one in was]
    move = find_move([(file, {STEP}) for file in files], to, STEP)
    assert move is not None
    assert move.bytes_sent == bytes_sent


def test_the_newest_complete_step_is_restored() -> None:
    was, to = of_layout("dp2", "was", "AB"), of_layout("dp1", "is", "A")
    first, second = (Kept(path="", name=one.rank, holder=one) for one in was)

    def found(steps: set[int], others: set[int], at_most: int) -> int | None:
        move = find_move([(first, steps), (second, others)], to, at_most)
        return None if move is None else move.step

    assert found({3, 4}, {3, 4}, 9) == 4
    assert found({4, 5}, {3, 4}, 9) == 4  # one rank died before it had written step 5
    assert found({3, 4}, {3, 4}, 3) == 3  # a critic has no more
    assert found({4}, {3}, 9) is None
    assert found({4}, set(), 9) is None  # its node is gone
    assert find_move([], to, 9) is None


def test_a_copy_of_an_older_step_is_ignored() -> None:
    was, to = of_layout("dp2x1", "was", "AB"), of_layout("dp1", "is", "B")
    first, second = (Kept(path="", name=one.rank, holder=one) for one in was)
    move = find_move([(first, {4, 5}), (second, {3, 4})], to, 9)
    assert move is not None
    assert (move.step, move.files, move.bytes_sent) == (5, (first,), 400)


def moved_between(nodes: str) -> tuple[list[Holder], list[Holder]]:
    held = tuple(
        TensorShard(name=name, shape=shape, dtype=dtype, box=Box.whole(shape))
        for name, (shape, dtype) in SHAPES.items()
    )
    return [Holder("was 0", nodes[0], held)], [Holder("is 0", nodes[1], held)]


def test_damage_in_transit_is_detected() -> None:
    was, to = moved_between("AB")
    with kept(was, {"was 0": [STEP]}) as files:
        move = Move(step=STEP, files=tuple(files), targets=tuple(to))
        weight_delta = packed(move, "A", "B")
        assert not isinstance(weight_delta.content, Changes)
        content = weight_delta.content.copy()
        content[-60] ^= 1  # in the last tensor, which is followed by at most a line
        damaged = replace(weight_delta, content=content)
        state = tensors(to[0].holdings, None)
        with pytest.raises(DamagedWeightsError):
            fill(move, "is 0", state, [damaged])
        content.flags.writeable = False  # like arrays from Ray
        weight_delta.content.flags.writeable = False
        fill(move, "is 0", state, [weight_delta])
        assert torch.equal(state["matrix"], numbers("matrix", STEP))


def test_a_file_that_was_overwritten_is_not_read() -> None:
    was, to = moved_between("AA")
    with kept(was, {"was 0": [STEP]}) as files:
        move = Move(step=STEP + 1, files=tuple(files), targets=tuple(to))
        with pytest.raises(MemoryGone):
            fill(move, "is 0", tensors(to[0].holdings, None), [])
        gone = replace(files[0], path=f"{files[0].path}0")
        with pytest.raises(MemoryGone):
            fill(Move(step=STEP, files=(gone,), targets=tuple(to)), "is 0", {}, [])


def assert_all_equal(cells: Sequence[CellResult]) -> None:
    assert cells
    assert [str(cell) for cell in cells if cell.result not in ("equal", "refused")] == []


@pytest.mark.slow
def test_real_ranks_restore_what_a_checkpoint_gives(tmp_path: Path) -> None:
    cells = check_trainers(tmp_path, families=["qwen3"], pairs=[("dp2", "tp2"), ("tp2", "dp1")])
    assert [cell.result for cell in cells] == ["equal", "equal"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_layout_restores_the_state_of_every_other(tmp_path: Path, family: str) -> None:
    pairs = [(one, other) for one in TRAINERS for other in TRAINERS if one != other]
    cells = check_trainers(tmp_path, families=[family], pairs=pairs)
    assert_all_equal(cells)
    refused = {(cell.layout, cell.to) for cell in cells if cell.result == "refused"}
    assert refused == {pair for pair in pairs if "ep2" in pair and family == "qwen3"}
