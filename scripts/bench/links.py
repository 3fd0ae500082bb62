"""Compare the transfer of weights to another node: an object of Ray's store, or gloo.

    python scripts/bench/links.py [--model-mb 500] [--repeats 5]

Two nodes of one Ray cluster run on this machine, each with its own object store and an actor. The
same bytes go from one actor to the other, in turn:

ray     as rollout actors fetch parcels: one object over Ray's connections, until the receiver has
        copied it into its own memory
gloo    a process group of the two, in buckets of 256 MiB; one is sent while the previous one is
        copied

Prints one line of JSON last: GB/s of both (medians), and the ratio of Ray's to gloo's (`ratio`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scripts.crashes.nodes import two_nodes

BUCKET_BYTES = 256 * 2**20
PATIENCE_S = 120.0


class End:
    """One end of the link, rank 0 or 1."""

    def __init__(self, rank: int, store: str, num_bytes: int) -> None:
        torch.set_num_threads(1)
        limit = timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
        )
        self._rank = rank
        self._bytes = np.full(num_bytes, rank, np.uint8)
        self._buckets = [
            torch.from_numpy(self._bytes[begin : begin + BUCKET_BYTES])
            for begin in range(0, num_bytes, BUCKET_BYTES)
        ]
        largest = min(num_bytes, BUCKET_BYTES)
        self._rooms = [torch.zeros(largest, dtype=torch.uint8) for _ in range(2)]

    def weight_delta(self) -> Any:
        """Return the bytes."""
        return self._bytes

    def take(self, weight_delta: Any) -> None:
        """Copy the bytes."""
        self._bytes[:] = weight_delta

    def gloo(self) -> None:
        """Send or receive the bytes over gloo."""
        if self._rank == 0:
            for bucket in self._buckets:
                dist.send(bucket, 1)
            return
        rooms = [
            self._rooms[number % 2][: len(bucket)] for number, bucket in enumerate(self._buckets)
        ]
        coming = _coming(rooms[0])
        for (room, bucket), (ahead, _) in pairwise(zip(rooms, self._buckets, strict=True)):
            coming.wait()
            coming = _coming(ahead)
            bucket.copy_(room)
        coming.wait()
        self._buckets[-1].copy_(rooms[-1])

    def holds(self) -> int | None:
        """Return the value of all bytes, or None if they differ."""
        first = int(self._bytes[0])
        return first if (self._bytes == first).all() else None

    def forget(self) -> None:
        """Clear the memory."""
        self._bytes[:] = self._rank


def _coming(room: torch.Tensor) -> dist.Work:
    coming = dist.irecv(room, 0)
    assert coming is not None, "this process is of the group"
    return coming


def measure(num_bytes: int, repeats: int) -> dict[str, float]:
    """Return the results."""
    seconds: dict[str, list[float]] = {"ray": [], "gloo": []}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory,
        two_nodes("links", Path(directory), store_bytes=num_bytes + 2**28) as nodes,
    ):
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        try:
            sender, receiver = _ends(os.path.join(directory, "gloo"), num_bytes)
            for _ in range(repeats):
                for name, times in seconds.items():
                    _done(receiver.forget.remote())
                    began = time.perf_counter()
                    if name == "ray":
                        _done(receiver.take.remote(sender.weight_delta.remote()))
                    else:
                        _done([sender.gloo.remote(), receiver.gloo.remote()])
                    times.append(time.perf_counter() - began)
                    if (held := _done(receiver.holds.remote())) != 0:
                        raise AssertionError(f"{name} delivered {held} instead of 0")
        finally:
            ray.shutdown()
    # The first transfer of each also connects.
    speeds = {name: num_bytes / median(times[1:]) / 1e9 for name, times in seconds.items()}
    return {
        "ray_gb_per_s": round(speeds["ray"], 2),
        "gloo_gb_per_s": round(speeds["gloo"], 2),
        "ratio": round(speeds["ray"] / speeds["gloo"], 2),
    }


def _ends(store: str, num_bytes: int) -> list[Any]:
    """Return sender and receiver, each on its own node."""
    actor = ray.remote(num_cpus=1)(End)
    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return [
        actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        ).remote(rank, store, num_bytes)
        for rank, node in enumerate(ids)
    ]


def _done(references: Any) -> Any:
    return ray.get(references, timeout=PATIENCE_S)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-mb", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps(measure(given.model_mb * 10**6, 1 + given.repeats)))


if __name__ == "__main__":
    main()
