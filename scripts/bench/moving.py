"""Measure the move of a trainer's state to another layout: in memory, and by a checkpoint.

scripts/bench/weights.py calls it and documents the numbers.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.state_resharding import Kept, find_move, packed
from rlsys.engines.training.trainer_state import finish_state
from rlsys.reallocation.shards import Holder, local_part
from rlsys.reallocation.transport.shared_memory import SharedMemory
from scripts.bench import updates
from scripts.ranks import on_ranks, staying_ranks

BEFORE, AFTER = "dp2", "tp2"
REPEATS = 3


def measure(num_bytes: int) -> dict[str, Any]:
    """Return the shortest times in seconds, and the bytes of the state."""
    with tempfile.TemporaryDirectory() as directory:
        path = updates.build_model(Path(directory, "model"), num_bytes)
        checkpoint = Path(directory, "checkpoint")
        with staying_ranks(2, _left_behind, path, checkpoint) as left:
            files = [file for file, _ in left]
            found: dict[str, Any] = on_ranks(2, _arrived, path, checkpoint, files)[0]
    held = (one for file in files for one in file.holder.holdings)
    state_mb = sum(one.box.num_elements * one.dtype.itemsize for one in held) / 1e6
    found |= {"move_state_mb": round(state_mb), "save_s": left[0][1]}
    found["move_ratio"] = round((found["save_s"] + found["load_s"]) / found["move_s"], 1)
    return found


@contextlib.contextmanager
def _left_behind(
    rank: int, world_size: int, path: Path, checkpoint: Path
) -> Iterator[tuple[Kept, float]]:
    """Return this rank's file, which stays, and the seconds of a checkpoint."""
    engine = updates.training_engine(path, BEFORE, rank)
    for tensor in engine.local_state().values():
        if tensor.is_floating_point():
            local_part(tensor).normal_()
    memory = SharedMemory(f"rank-{rank}", engine.snapshot_bytes(1), purpose="a snapshot")
    held = engine.hold(engine.open_snapshots(memory.path, memory.name))

    def save() -> None:
        parts = engine.ranks.all(held.write(checkpoint))
        if rank == 0:
            finish_state(checkpoint, parts)

    seconds = _seconds(engine, save)
    holder = Holder(memory.name, "node", engine.state_holdings)
    yield Kept(path=memory.path, name=memory.name, holder=holder), seconds
    memory.close()


def _arrived(
    rank: int, world_size: int, path: Path, checkpoint: Path, files: Sequence[Kept]
) -> dict[str, float]:
    engine = updates.training_engine(path, AFTER, rank)

    def move(nodes: str) -> None:
        """Return the bytes of the former ranks, then of these."""
        own = [
            replace(file, holder=replace(file.holder, node=node))
            for file, node in zip(files, nodes[:2], strict=True)
        ]
        name, node = f"rank {rank}", nodes[2 + rank]
        targets = engine.ranks.all(Holder(name, node, engine.state_holdings))
        found = find_move([(file, {0}) for file in own], targets, at_most=0)
        assert found is not None
        weight_deltas = [packed(found, sender, node) for sender in found.senders.get(node, ())]
        engine.take(found, name, weight_deltas)

    times = {
        "move_s": lambda: move("AAAA"),
        "move_between_s": lambda: move("ABBA"),
        "load_s": lambda: engine.load(checkpoint),
    }
    return {name: _seconds(engine, work) for name, work in times.items()}


def _seconds(engine: FSDPEngine, work: Callable[[], None]) -> float:
    """Return the shortest time of the slowest rank."""
    found = []
    for _ in range(REPEATS):
        engine.ranks.max(0)  # all ranks begin together
        start = time.perf_counter()
        work()
        spent = torch.tensor([time.perf_counter() - start])
        found.append(float(engine.ranks.gather(spent).max()))
    return round(min(found), 2)
