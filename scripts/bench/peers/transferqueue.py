"""Measure TransferQueue's SimpleStorage: the peer of scripts/bench/store.py.

    python scripts/bench/peers/transferqueue.py --venv DIR

Creates a virtual environment at DIR (kept for the next run), installs TransferQueue there, and
measures in it: rows of 4 fields of 1024 float32, in batches of 512 (MB/s), and as a stream of 64
groups of 8 rows, with a put and a get for each group (rows/s). Prints one line of JSON last:
medians of 5 runs after one for warm-up.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

# torch is installed first and pinned; an open range would take a build with the CUDA libraries.
REQUIREMENTS = ("torch==2.13.0", "TransferQueue==0.1.11")
INSTALL_TIMEOUT_S, MEASURE_TIMEOUT_S = 1200.0, 600.0

NUM_ROWS, WIDTH, NUM_FIELDS, GROUP, NUM_GROUPS, NUM_REPEATS = 512, 1024, 4, 8, 64, 5


def install(directory: Path) -> Path:
    """Return the Python of the environment, with the peer installed."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    for requirement in REQUIREMENTS:
        subprocess.run(
            [python, "-m", "pip", "install", "-q", requirement],
            check=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    return python


def measure() -> dict[str, float]:
    """Return the results."""
    import ray
    import torch
    import transfer_queue as tq  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]

    logging.disable(logging.INFO)
    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR")
    storage = {"total_storage_size": 100_000, "num_data_storage_units": 2}
    tq.init(
        OmegaConf.create(
            {
                "metrics": {"enabled": False},
                "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage},
            }
        )
    )
    fields = {f"f{i}": torch.randn(NUM_ROWS, WIDTH) for i in range(NUM_FIELDS)}
    rows = TensorDict(fields, batch_size=(NUM_ROWS,))

    def put(keys: list[str]) -> None:
        tq.kv_batch_put(keys=keys, partition_id="rows", fields=rows[: len(keys)])

    def get(keys: list[str]) -> None:
        tq.kv_batch_get(keys=keys, partition_id="rows")

    seconds: dict[str, list[float]] = {"batch_put": [], "batch_get": [], "put": [], "get": []}
    for repeat in range(NUM_REPEATS + 1):
        batch = [[f"{repeat}-{i}" for i in range(NUM_ROWS)]]
        groups = [[f"{repeat}-{g}-{i}" for i in range(GROUP)] for g in range(NUM_GROUPS)]
        for prefix, puts in (("batch_", batch), ("", groups)):
            seconds[f"{prefix}put"].append(_timed(put, puts))
            seconds[f"{prefix}get"].append(_timed(get, puts))
            tq.kv_clear(keys=[key for keys in puts for key in keys], partition_id="rows")
    tq.close()
    ray.shutdown()
    median = {name: statistics.median(runs[1:]) for name, runs in seconds.items()}
    megabytes = NUM_ROWS * WIDTH * NUM_FIELDS * 4 / 1e6
    return {
        "batch_put_mb_per_s": round(megabytes / median["batch_put"], 1),
        "batch_get_mb_per_s": round(megabytes / median["batch_get"], 1),
        "stream_put_rows_per_s": round(GROUP * NUM_GROUPS / median["put"], 1),
        "stream_get_rows_per_s": round(GROUP * NUM_GROUPS / median["get"], 1),
    }


def _timed(call: Callable[[list[str]], None], batches: list[list[str]]) -> float:
    start = time.perf_counter()
    for keys in batches:
        call(keys)
    return time.perf_counter() - start


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="rows/s and MB/s of TransferQueue")
    parser.add_argument("--venv", type=Path, help="directory of its environment")
    parser.add_argument("--measure", action="store_true", help="measure with this Python")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps({"peer": "TransferQueue", **measure()}))
    elif args.venv:
        command = [str(install(args.venv.absolute())), __file__, "--measure"]
        subprocess.run(command, check=True, timeout=MEASURE_TIMEOUT_S)
    else:
        parser.error("--venv: give the directory of the peer's environment")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
