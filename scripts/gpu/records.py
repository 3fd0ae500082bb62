"""Result lines of a part of the GPU check.

A part prints one JSON object per line to standard output, as soon as it has measured something.
`scripts/gpu/check.py` collects these lines; everything else that a part prints is its log.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MARK = "@result "


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Device of a part and the size of its work."""

    device: str
    small: bool
    cases: tuple[str, ...] = ()
    """Shapes or runs to measure; empty: all of the part."""

    @property
    def on_gpu(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device.startswith("cuda")


def parse_settings(description: str | None, argv: list[str] | None = None) -> Settings:
    """Read --device and --small from the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--cases", nargs="+", default=[], help="shapes or runs; default: all")
    args = parser.parse_args(argv)
    return Settings(device=args.device, small=args.small, cases=tuple(args.cases))


def emit(**values: Any) -> None:
    """Print a result line: names and JSON values."""
    print(MARK + json.dumps(values), flush=True)


def read_line(line: str) -> dict[str, Any] | None:
    """Return the values of a result line, None for a line of the log."""
    if not line.startswith(MARK):
        return None
    values: dict[str, Any] = json.loads(line[len(MARK) :])
    return values


@contextmanager
def measured(**names: Any) -> Iterator[dict[str, Any]]:
    """Emit what the block writes into the yielded dictionary, or the error that ended it.

    A failed measurement must not stop the measurements after it, so the error is emitted and
    printed, not raised.
    """
    values: dict[str, Any] = dict(names)
    try:
        yield values
    except torch.OutOfMemoryError as error:
        values["error"] = f"out of memory: {str(error).splitlines()[0][:160]}"
    except Exception as error:  # noqa: BLE001 - the line below states it, and the log shows it
        import traceback

        traceback.print_exc(file=sys.stdout)
        values["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    emit(**values)
    free_memory()


def free_memory() -> None:
    """Return unused device memory, so that the next measurement starts from an empty cache."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], *, repeats: int = 3, warm_up: int = 1) -> float:
    """Return the median wall time of a call in seconds, device work included."""
    import statistics
    import time

    times = []
    for number in range(warm_up + repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def gib(num_bytes: float) -> float:
    """Return bytes in GiB, rounded."""
    return round(num_bytes / 2**30, 2)


def peak_bytes(settings: Settings) -> int:
    """Return the most device memory allocated since `free_memory`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if settings.on_gpu else 0
