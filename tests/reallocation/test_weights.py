"""Shares of several ranks as one model: read, checked, and refused if they do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.plan import plan
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError, StagingBuffer
from rlsys.reallocation.transport.weight_views import Weights, open_verified, stage_whole
from rlsys.types import WeightManifest
from tests.errors import invalid

MATRIX = torch.arange(48, dtype=torch.float32).view(8, 6)
NORM = torch.linspace(0, 1, 6)
TENSORS = {"matrix": MATRIX, "norm": NORM, "scalar": torch.tensor(3), "nothing": torch.ones(0, 2)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def holding(name: str, box: Box) -> TensorShard:
    return TensorShard(name=name, shape=SHAPES[name], dtype=TENSORS[name].dtype, box=box)


def in_rows_and_columns(rows: Sequence[int], columns: Sequence[int]) -> Iterator[Holder]:
    """Yield ranks that each hold a part of the matrix, cut as given, and the other tensors."""
    for row in range(len(rows) - 1):
        for column in range(len(columns) - 1):
            box = Box(((rows[row], rows[row + 1]), (columns[column], columns[column + 1])))
            others = [
                holding(name, Box.whole(shape))
                for name, shape in SHAPES.items()
                if name != "matrix"
            ]
            name = f"{row}.{column}"
            yield Holder(name, "node", (holding("matrix", box), *others))


def staged(
    holders: Sequence[Holder], version: int = 1, *, of_each: int | None = None
) -> tuple[ExitStack, list[StagingBuffer], WeightManifest]:
    """Stage the segments of all ranks, or the first `of_each` segments of each."""
    target = Holder("t", "node", tuple(holding(n, Box.whole(shape)) for n, shape in SHAPES.items()))
    planned = plan(tuple(holders), (target,), finest_bytes=16)
    stages = [
        StagingBuffer(planned.staged(holder.rank)[:of_each], rank=rank, node="node")
        for rank, holder in enumerate(holders)
    ]
    shares = tuple(
        stage.write(version, lambda one: TENSORS[one.name][one.box.slices]) for stage in stages
    )
    opened = ExitStack()
    for stage in stages:
        opened.callback(stage.close)
    return opened, stages, WeightManifest(version=version, shares=shares)


cuts = st.sets(st.integers(1, 5), max_size=3).map(sorted)


@given(cuts, cuts, st.tuples(st.integers(0, 7), st.integers(1, 8)), st.integers(0, 5))
def test_a_box_is_read_from_any_ranks(
    rows: list[int], columns: list[int], of_rows: tuple[int, int], column: int
) -> None:
    opened, _, manifest = staged(list(in_rows_and_columns([0, *rows, 8], [0, *columns, 6])))
    start, stop = min(of_rows), max(*of_rows, min(of_rows) + 1)
    with opened, open_verified(manifest, TENSORS) as weights:
        assert weights.version == 1
        box = Box(((start, stop), (column, 6)))
        assert torch.equal(weights.read("matrix", box), MATRIX[box.slices])
        assert torch.equal(weights.read("norm", Box(((2, 6),))), NORM[2:])
        assert weights.read("scalar", Box(())).item() == 3
        whole = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        for name, box, part in weights.parts():
            whole[name][box.slices] += part
    for name, tensor in TENSORS.items():
        assert torch.equal(whole[name], tensor), name


def test_a_box_of_one_rank_is_read_without_a_copy() -> None:
    stage, manifest = stage_whole(3, TENSORS)
    with open_verified(manifest, TENSORS) as weights:
        part = weights.read("matrix", Box(((2, 4), (1, 3))))
        (whole,) = (part for name, _, part in weights.parts() if name == "matrix")
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    stage.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head": torch.ones(3, 4)}, "head is missing"),
        ({"norm": torch.ones(7)}, "norm has shape (6,) instead of (7,)"),
        ({"matrix": torch.ones(48)}, "matrix has shape (8, 6) instead of (48,)"),
        ({"scalar": None}, "scalar is not in the model"),
        ({"scalar": torch.tensor(3.0)}, "scalar has dtype torch.int64 instead of torch.float32"),
        ({"norm": NORM.int()}, "norm has dtype torch.float32 instead of torch.int32"),
    ],
)
def test_weights_of_another_model_are_refused(
    changes: dict[str, torch.Tensor | None], problem: str
) -> None:
    changed = {name: one for name, one in (TENSORS | changes).items() if one is not None}
    opened, _, manifest = staged(list(in_rows_and_columns([0, 3, 8], [0, 6])))
    with opened, invalid("weights of version", 1) as refused:
        open_verified(manifest, changed)
    assert refused.value.rule.endswith(f"1 tensors: {problem}")


def test_a_missing_share_is_refused() -> None:
    opened, _, manifest = staged(list(in_rows_and_columns([0, 3, 8], [0, 6])), of_each=1)
    first = WeightManifest(version=1, shares=manifest.shares[1:])
    only_matrix = {"matrix": MATRIX}
    with opened, invalid("weights of version", 1) as refused:
        open_verified(first, only_matrix)
    assert "30 elements" in refused.value.rule


def test_a_share_that_occurs_twice_is_refused() -> None:
    opened, _, manifest = staged(list(in_rows_and_columns([0, 3, 8], [0, 6])), of_each=1)
    twice = WeightManifest(version=1, shares=(*manifest.shares, manifest.shares[0]))
    with opened, invalid("weights of version", 1) as refused:
        open_verified(twice, {"matrix": MATRIX})
    assert "66 elements" in refused.value.rule


def test_damage_in_one_share_is_found_and_nothing_stays_open() -> None:
    opened, stages, manifest = staged(list(in_rows_and_columns([0, 3, 8], [0, 6])))
    with opened:
        memory = stages[0].memory.kept[0]
        stages[1].memory.kept[0].content[-1] ^= 1
        with pytest.raises(DamagedWeightsError) as found:
            open_verified(manifest, TENSORS)
        assert "rank 1's share of version 1" in str(found.value)
        stages[0].write(2, lambda one: TENSORS[one.name][one.box.slices])
        assert stages[0].memory.kept == [memory]  # no reader holds a lock
        with pytest.raises(MemoryGone):
            Weights(manifest)
