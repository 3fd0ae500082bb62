"""Measurement of collectives between two processes of this machine, as FSDP uses them on CPUs.

    measured_link ─► two processes that run this module ─► seconds of small and large collectives

A start of torch in both processes takes most of the time, some seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.planner.communication import LINK_EFFICIENCY

TIMEOUT_S: Final = 60.0
SMALL, LARGE = 1 << 10, 1 << 22  # values of the gathered float32 tensor
REPETITIONS: Final = {SMALL: 50, LARGE: 7}


def measured_link() -> tuple[float, float]:
    """Return the latency of a rank in seconds, and the rate between processes in GB/s.

    They are those of communication.gather_time, for two ranks.

    Raises:
        OSError: The processes could not be started.
        ValueError: They failed.
        subprocess.TimeoutExpired: They took longer than TIMEOUT_S.
    """
    small_s, large_s = _measured()
    rate = 4 * LARGE / 2 / max(large_s - small_s, 1e-9) / LINK_EFFICIENCY
    return small_s / 2, rate / 1e9


def _measured() -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", __name__, str(Path(directory) / "store")]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment)
            for rank in range(2)
        ]
        try:
            written, _ = ranks[0].communicate(timeout=TIMEOUT_S)
            ranks[1].communicate(timeout=TIMEOUT_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    small_s, large_s = parse_json(written.decode() or "null") or (0.0, 0.0)
    if not 0 < small_s < large_s:
        raise ValueError(f"collectives of {SMALL} and {LARGE} values took {small_s}, {large_s} s")
    return small_s, large_s


def _rank(store: str, rank: int) -> None:
    """Take part as one of two ranks. Rank 0 prints the seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    file = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    seconds = [_collective_s(torch, dist, size) for size in (SMALL, LARGE)]
    if rank == 0:
        print(dump_json(seconds))
    dist.destroy_process_group()


def _collective_s(torch: Any, dist: Any, size: int) -> float:
    """Return the mean seconds of an all-gather and a reduce-scatter of `size` values."""
    whole, part = torch.ones(size), torch.ones(size // 2)
    gather = _seconds(lambda: dist.all_gather_single(whole, part), REPETITIONS[size])
    scatter = _seconds(lambda: dist.reduce_scatter_single(part, whole), REPETITIONS[size])
    return (gather + scatter) / 2


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    work()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
