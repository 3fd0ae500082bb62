"""Freed memory that a process keeps, as its own allocator reports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlsys.engines.devices import malloc_tuning
from rlsys.engines.devices.malloc_tuning import (
    APART,
    LARGEST_MMAP_THRESHOLD,
    M_MMAP_THRESHOLD,
    Pieces,
    keep_freed_memory,
)
from rlsys.types import MicroBatch
from tests.engines.torch_engine_harness import build_model
from tests.engines.training_harness import make_engine, make_rows

MIB = 1 << 20

# Layers whose weights come and go between activations that stay: the next activation uses part of
# the hole, and the rest fits nothing.
LAYERS = """
import contextlib, os, sys, torch
from scripts.bench.loading import anonymous_bytes
from rlsys.engines.devices.malloc_tuning import Pieces, apart, heap_sizes, keep_freed_memory

keep_freed_memory()
between = apart if sys.argv[1] == "apart" else contextlib.nullcontext
kept = []
for _ in range(40):
    with between():
        weights = torch.ones(8 << 18)  # 8 MiB
    kept.append(torch.ones(6 << 18))
    del weights
    kept.append(torch.ones(5 << 18))
free = heap_sizes().free
before = anonymous_bytes(os.getpid())
Pieces().release()
print(free >> 20, before - anonymous_bytes(os.getpid()) >> 20)
"""


def run_layers(how: str) -> tuple[int, int]:
    """Return the MiB that are free between blocks, and the MiB that `release` returned."""
    done = subprocess.run(
        [sys.executable, "-c", LAYERS, how],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert not done.returncode, done.stderr
    free, given_back = map(int, done.stdout.split())
    return free, given_back


@pytest.fixture(autouse=True)
def _needs_glibc() -> None:
    if malloc_tuning.heap_sizes() is None:
        pytest.skip("no glibc that reports its heap")


@pytest.mark.slow
def test_short_lived_blocks_leave_no_holes_between_others() -> None:
    free, given_back = run_layers("among them")
    assert free > 64, "if glibc reuses the holes, `apart` has no purpose"
    assert given_back > free // 2
    free, given_back = run_layers("apart")
    assert free < 8
    assert given_back < 8


def test_fragments_are_returned_only_if_large_in_a_large_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[None] = []
    monkeypatch.setattr(malloc_tuning, "return_freed_memory", lambda: returned.append(None))
    keep_freed_memory()

    def are_returned(pieces: Pieces, used: int, free: int) -> bool:
        sizes = SimpleNamespace(used=used * MIB, free=free * MIB)
        monkeypatch.setattr(malloc_tuning, "heap_sizes", lambda: sizes)
        before = len(returned)
        pieces.release()
        return len(returned) > before

    pieces = Pieces()
    assert not are_returned(pieces, 1000, 150), "a seventh"
    assert are_returned(pieces, 1000, 250)
    assert not are_returned(pieces, 100, 1150), "a small micro-batch"
    assert are_returned(pieces, 960, 250)
    assert not are_returned(Pieces(), 10, 50), "little"


def test_ranks_gather_and_reduce_in_separate_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    # bfloat16 on one rank: FSDP2 gathers its layers, too.
    engine = make_engine(build_model(tmp_path, "llama"), dtype="bfloat16")
    thresholds: list[int] = []
    known = malloc_tuning.glibc_function

    def glibc(function: str) -> object:
        if function != "mallopt":
            return known(function)
        return lambda option, value: thresholds.append(value) if option == M_MMAP_THRESHOLD else 0

    monkeypatch.setattr(malloc_tuning, "glibc_function", glibc)
    engine.accumulate(MicroBatch(rows=make_rows(2)))
    engine.close()
    num_times, rest = divmod(len(thresholds), 2)
    assert rest == 0
    assert thresholds == [APART, LARGEST_MMAP_THRESHOLD] * num_times
    assert num_times >= 3 * 2, "two layers, forward and backward"
