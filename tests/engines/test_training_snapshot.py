"""A rank's state in shared memory, from which another rank continues exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.engines.devices.offload import HostMemory, Offloaded
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.reallocation.shards import local_part
from rlsys.reallocation.transport.shared_memory import MemoryGone, SharedMemory
from rlsys.types import MicroBatch, StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    Weights,
    accumulate,
    assert_same,
    make_engine,
    make_rows,
    memory,
    tiny_model,
    train_step,
    weights,
)
from tests.errors import invalid
from tests.tiers import rest_slow


def state(number: float) -> dict[str, torch.Tensor]:
    return {
        "weights": torch.full((3, 5), number),
        "none": torch.empty(0, 4),
        "counter": torch.tensor(number),
        "bytes": torch.arange(7, dtype=torch.uint8) + int(number),
    }


def open_file(path: Path, num_slots: int = 2) -> SnapshotFile:
    if not path.exists():
        memory(path, snapshot_bytes(state(0), num_slots))
    return SnapshotFile(str(path), path.name, state(0))


def read(file: SnapshotFile, step: int) -> float:
    """Return the number of the state after this step, if the snapshot has one state only."""
    found = state(-1)
    file.read(step, found)
    number = float(found["counter"])
    assert all(torch.equal(found[name], tensor) for name, tensor in state(number).items())
    return number


def test_the_newest_two_snapshots_stay(tmp_path: Path) -> None:
    file = open_file(tmp_path / "file")
    assert file.steps == set()
    for step in (0, 1, 4):
        file.write(step, state(step + 10))
    successor = open_file(tmp_path / "file")
    assert successor.steps == {1, 4}
    assert read(successor, 4) == 14
    assert read(successor, 1) == 11


def test_a_killed_writer_leaves_the_older_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(tmp_path / "file")
    for step in (1, 2):
        file.write(step, state(step))

    def killed(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        copies[0].copy_(tensors[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", killed)
        with pytest.raises(KeyboardInterrupt):
            file.write(3, state(3))
    successor = open_file(tmp_path / "file")
    assert successor.steps == {2}
    assert read(successor, 2) == 2


def test_restoring_discards_newer_snapshots(tmp_path: Path) -> None:
    """Check that the repeated step is stored again."""
    file = open_file(tmp_path / "file")
    file.write(5, state(5))
    file.write(6, state(6))
    assert read(file, 5) == 5
    assert file.steps == {5}
    file.write(6, state(60))
    assert read(file, 6) == 60
    file.clear()
    assert file.steps == set()


def test_a_held_snapshot_stays_while_newer_ones_are_written(tmp_path: Path) -> None:
    file = open_file(tmp_path / "file", num_slots=3)
    file.write(1, state(1))
    held = file.hold(1)
    for step in (2, 3, 4, 5):
        file.write(step, state(step))
    assert file.steps == {1, 4, 5}
    assert all(torch.equal(held[name], tensor) for name, tensor in state(1).items())
    with pytest.raises(AssertionError):
        file.hold(5)
    file.release()
    file.write(6, state(6))
    assert file.steps == {4, 5, 6}


def test_a_held_snapshot_is_saved_without_a_copy(tmp_path: Path) -> None:
    """Check the storage size, because torch.save writes a tensor's whole storage."""
    file = open_file(tmp_path / "file")
    file.write(1, state(1))
    for tensor in file.hold(1).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_file_of_another_layout_is_rejected(tmp_path: Path) -> None:
    file = open_file(tmp_path / "file")
    file.write(1, state(1))
    other = state(0) | {"weights": torch.zeros(5, 3)}  # the same number of bytes
    with invalid("file"):
        SnapshotFile(str(tmp_path / "file"), "file", other)


def test_snapshots_of_a_dead_owner_are_gone() -> None:
    """Reuse the numbers of the dead owner's process and descriptor, too."""
    owner = SharedMemory("rlsys-snapshots-a", snapshot_bytes(state(0), 2), purpose="a test")
    file = SnapshotFile(owner.path, owner.name, state(0))
    file.write(1, state(1))
    with pytest.raises(MemoryGone):
        SnapshotFile(owner.path, "rlsys-snapshots-b", state(0))
    owner.close()
    with pytest.raises(MemoryGone):
        SnapshotFile(owner.path, owner.name, state(0))
    file.write(2, state(2))  # existing mappings continue to work
    assert file.steps == {1, 2}


def train_on(engine: FSDPEngine, rows: list[TrainRow]) -> tuple[StepResult, Weights]:
    engine.accumulate(MicroBatch(rows=rows))
    result = engine.optimizer_step()
    return result, weights(engine)


def interrupted(rank: int, world_size: int, directory: Path, **options: Any) -> list[Any]:
    """Return third steps of an undisturbed engine, and of one that replaced it after the second."""
    options = {"rank": rank, "world_size": world_size, "warmup_steps": 4} | options
    first = make_engine(directory / "model", **options)
    path = memory(directory / f"rank-{rank}", first.snapshot_bytes(2))
    file = first.open_snapshots(path, "snapshots")
    batches = [make_rows(8, seed=seed)[rank::world_size] for seed in range(3)]
    for rows in batches[:2]:
        train_on(first, rows)
        first.snapshot(file)
        torch.rand(3)  # the state includes the RNG
    random = torch.get_rng_state()
    undisturbed = train_on(first, batches[2])

    second = make_engine(directory / "model", **options)
    accumulate(second, [batches[0]])  # is discarded
    again = second.open_snapshots(path, "snapshots")
    assert again.steps == {1, 2}
    second.restore(again, 2)
    assert second.policy_version == 2
    drawn = torch.rand(3), torch.get_rng_state()
    assert torch.equal(drawn[1], random)
    recovered = train_on(second, batches[2])
    first.close()
    second.close()
    return [undisturbed, recovered]


def assert_bitwise_equal(found: list[Any]) -> None:
    (result, expected), (other, same) = found
    assert result == other
    assert expected.keys() == same.keys()
    assert all(torch.equal(tensor, same[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("dtype", "moments"),
    rest_slow(
        [
            *(("float32", "float32"), ("float32", "bfloat16")),
            *(("bfloat16", "bfloat16"), ("float16", "float32")),
        ],
        only=[("bfloat16", "bfloat16")],
    ),
)
def test_the_next_step_is_the_same_to_the_last_bit(
    tmp_path: Path, dtype: str, moments: str
) -> None:
    torch.set_num_threads(1)
    tiny_model(tmp_path / "model")
    found = interrupted(0, 1, tmp_path, dtype=dtype, optimizer_state=moments)
    assert found[0][1]
    assert_bitwise_equal(found)


@pytest.mark.slow
def test_two_ranks_continue_exactly(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    of_16_bit_moments = partial(interrupted, optimizer_state="cpu_bfloat16")
    for found in on_ranks(2, of_16_bit_moments, tmp_path):
        assert_bitwise_equal(found)


def test_a_fresh_optimizer_is_restored_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    engine = make_engine(tiny_model(tmp_path / "model"))
    path = memory(tmp_path / "file", engine.snapshot_bytes(2))
    rows = make_rows(4)
    engine.snapshot(engine.open_snapshots(path, "snapshots"))
    undisturbed = train_on(engine, rows)

    other = make_engine(tmp_path / "model", seed=1)
    train_on(other, make_rows(4, seed=1))
    other.restore(other.open_snapshots(path, "snapshots"), 0)
    assert_bitwise_equal([undisturbed, train_on(other, rows)])
    for each in (engine, other):
        each.close()


@pytest.mark.parametrize(
    "dtype", rest_slow(["float32", "bfloat16"], only=["bfloat16"])
)  # plain tensors, and those of FSDP2
def test_training_continues_after_offloading(dtype: str, tmp_path: Path) -> None:
    """Offload on the CPU, too, and overwrite the released memory."""
    path = tiny_model(tmp_path / "model")
    engine, expected = (make_engine(path, dtype=dtype) for _ in range(2))
    host: HostMemory = {}
    for step in range(3):
        results = []
        for one in (engine, expected):
            results.append(train_step(one, make_rows(6, seed=step)))
        assert results[0] == results[1]
        engine.release()
        state = [tensor for name, tensor in engine.local_state().items() if name != "rng"]
        held = [*map(local_part, state), *engine.model.buffers()]
        offloaded = Offloaded(held, host)
        for tensor in held:
            tensor.fill_(float("nan"))
        offloaded.take_back()
        engine.take_back()
    assert_same(weights(engine), weights(expected), rtol=0, atol=0)
