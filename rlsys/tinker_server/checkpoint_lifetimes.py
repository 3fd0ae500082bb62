"""Lifetimes of the checkpoints of a server.

    set() ──► due() once the time is over ──► removed: set(None), or postpone() if the disk refuses

The file `.NAME.expires` next to a directory contains the Unix time at which it expires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_atomically
from rlsys.tinker_server.checkpoint_directories import remove_at_once

logger = logging.getLogger(__name__)

# The last second of the year 9999, after which there are no dates.
MAX_TIME = 253_402_300_799

# A disk that refuses a removal, such as one that became read-only, rarely recovers within minutes.
RETRY_S = 3600.0


class Lifetimes:
    """Times at which checkpoints expire. `now` returns the Unix time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ends: dict[Path, float] = {}
        self._retries: dict[Path, float] = {}

    def read(self, directory: Path) -> None:
        """Read the lifetimes of all checkpoints below a directory. A damaged file never ends."""
        for file, place in lifetime_files(directory):
            if (end := _read(file)) is not None:
                self._ends[place] = end

    def end_of(self, directory: Path) -> float | None:
        """Return the Unix time at which a checkpoint expires, or None if it never does."""
        return self._ends.get(directory)

    def is_over(self, directory: Path) -> bool:
        """Return whether a checkpoint has expired."""
        end = self.end_of(directory)
        return end is not None and end <= self._now()

    def set(self, directory: Path, ttl_s: float | None) -> None:
        """Let a checkpoint expire after `ttl_s` seconds, or never.

        Raises:
            OSError: The disk refuses.
        """
        file = directory.with_name(f".{directory.name}.expires")
        if ttl_s is None or file.is_dir():
            remove_at_once(file)
        self._retries.pop(directory, None)
        if ttl_s is None:
            self._ends.pop(directory, None)
            return
        end = self._now() + ttl_s
        write_atomically(file, f"{end}\n")
        self._ends[directory] = end

    def due(self) -> list[Path]:
        """Return the checkpoints to remove now."""
        now = self._now()
        return [
            one for one in self._ends if self.is_over(one) and self._retries.get(one, now) <= now
        ]

    def postpone(self, directory: Path, error: OSError) -> None:
        """Log why an expired checkpoint cannot be removed, and return it again in RETRY_S."""
        self._retries[directory] = self._now() + RETRY_S
        logger.warning(
            "the expired checkpoint %s cannot be removed (%s). Nobody can load it. The server "
            "tries again in %g minutes. Make its disk writable.",
            directory,
            error,
            RETRY_S / 60,
        )


def lifetime_files(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of lifetimes, each with the place of its checkpoint."""
    for file in list(directory.glob("*/*/.*.expires")):
        yield file, file.with_name(file.name.removeprefix(".").removesuffix(".expires"))


def _read(file: Path) -> float | None:
    """Return the Unix time in a file. If it is damaged, log a warning and return None."""
    try:
        text = regular_file(file).read_text()
        if 0 <= (found := float(text)) <= MAX_TIME:  # false for nan
            return found
        why = f"{found} is not a Unix time before the year 10000"
    except (ValueError, OSError) as error:
        why = str(error)
    logger.warning(
        "%s is damaged (%s), so its checkpoint is kept and does not expire. Set its ttl again.",
        file,
        why,
    )
    return None
