"""Progress of a directory that another process writes, by the bytes on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from rlsys.common.atomic_directory import partial_name
from rlsys.common.background_tasks import report, start_task
from rlsys.runs.observe.phases import Phase

POLL_S = 1.0


@contextlib.asynccontextmanager
async def showing_bytes(phase: Phase, directory: Path, total: int) -> AsyncIterator[None]:
    """Show how much of a directory has been written, until the block ends.

    Args:
        phase: Where to show it.
        directory: The final name of the directory.
        total: Expected bytes.
    """

    async def show() -> None:
        while True:
            await asyncio.sleep(POLL_S)  # another process writes without notice
            phase.update_bytes(bytes_in(partial_name(directory)), total)

    showing = start_task(show(), name="disk progress", fail=report)
    try:
        yield
    finally:
        showing.cancel()


def bytes_in(directory: Path) -> int:
    """Return the bytes of the files of a directory, without those that disappear meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total
