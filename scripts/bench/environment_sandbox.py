"""Measure calls of a warm sandbox, and what many calls leave behind.

    python scripts/bench/environment_sandbox.py [--runs 10000] [--way namespaces]

Runs snippets and programs one after the other; each prints a number. Prints one line of JSON last:
the median milliseconds of a snippet (`sandbox_subset_ms`) and of a whole program in CPython
(`sandbox_cpython_ms`), the number of runs of each (`sandbox_runs`), and the processes and files
left at the end beyond those of the warm sandbox (`sandbox_left`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import fork_server_client as hosts
from rlsys.rewards.sandbox.fork_server_client import ForkServerClient
from rlsys.rewards.sandbox.isolation_levels import WAYS

NUM_RUNS = 10_000
# Equal counts in a row, a tenth of a second apart.
NUM_EQUAL = 10
SETTLE_TIMEOUT_S = 60.0


def run(num_runs: int = NUM_RUNS, way: str | None = None) -> dict[str, Any]:
    """Return the results."""
    if way is not None:
        hosts._of_this_process = ForkServerClient([one for one in WAYS if one == way])
    for i in range(20):
        snippet(i)
        program(i)
    before = settled()
    snippets_ms = median_ms(snippet, num_runs)
    programs_ms = median_ms(program, num_runs)
    return {
        "sandbox_subset_ms": round(snippets_ms, 3),
        "sandbox_cpython_ms": round(programs_ms, 3),
        "sandbox_runs": num_runs,
        "sandbox_left": max(0, settled() - before),
        "sandbox_way": sandbox.way(),
    }


def snippet(i: int) -> None:
    """Return a snippet that prints a number."""
    assert sandbox.python_sync(f"{i} + 1") == str(i + 1)


def program(i: int) -> None:
    """Return a program that prints a number."""
    assert sandbox.run_sync(f"print({i} + 1)").stdout == f"{i + 1}\n"


def median_ms(call: Callable[[int], None], num_runs: int) -> float:
    """Return the median milliseconds of a call."""
    times_s = []
    for i in range(num_runs):
        began_s = time.perf_counter()
        call(i)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) * 1e3


def settled() -> int:
    """Return the numbers of `left` after they have stopped changing.

    The sandbox replaces waiting processes after each program, and ended ones take a moment to
    vanish.
    """
    counts = [left()]
    end_s = time.monotonic() + SETTLE_TIMEOUT_S
    while counts[-NUM_EQUAL:] != counts[-1:] * NUM_EQUAL and time.monotonic() < end_s:
        time.sleep(0.1)
        counts.append(left())
    return counts[-1]


def left() -> int:
    """Return the numbers of child processes, descriptors and files of the sandbox."""
    processes = psutil.Process().children(recursive=True)
    files = [
        path for path in Path(tempfile.gettempdir()).glob("rlsys-sandbox-*/*") if path.exists()
    ]
    return len(processes) + len(os.listdir("/proc/self/fd")) + len(files)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Measure the sandbox.")
    parser.add_argument("--only", choices=["sandbox"], default="sandbox", help="the part to run")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="runs of each kind")
    parser.add_argument("--way", choices=WAYS, help="how programs are isolated")
    options = parser.parse_args()
    print(json.dumps(run(options.runs, options.way)))


if __name__ == "__main__":
    main()
