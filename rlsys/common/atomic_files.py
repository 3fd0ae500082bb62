"""Writing to a disk that may refuse: files that are there whole or not at all, and errors that say
what was to be written, why it was not, and what to do.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from rlsys.common.option_names import option


class DiskError(OSError):
    """Its message says it all; the number is there for programs."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing(path: Path, *, room: str = "") -> Iterator[None]:
    """A block that writes to `path`, or below it. Raises DiskError, with the cause and the fix,
    where the disk refuses; `room` is what to do where it is full, by default `free_space()`.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        if (advice := _advice(error, room or free_space())) is None:
            raise
        raise DiskError(error.errno, f"cannot write {path}: {advice}") from error


def free_space() -> str:
    return f"free some space, then continue the run with {option('resume', 'auto')}"


def write_all(file: FileIO, data: bytes) -> None:
    """To a file without a buffer, which may take a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_whole(path: Path, text: str) -> None:
    """The file appears, or replaces the one before, in one rename, when it is on disk."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb", buffering=0) as file:
            write_all(file, text.encode())
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def size_limit() -> str:
    """Why a file is too large, and what to do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "the file is too large for its file system; choose another (runs_dir)"
    return (
        f"a process may write files of {limit:,} bytes at most (ulimit -f); raise the limit first: "
        "ulimit -f unlimited"
    )


def _advice(error: OSError, room: str) -> str | None:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk is full; {room}"
        case errno.EFBIG:
            return size_limit()
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "permission denied; make the directory writable, or choose another (runs_dir)"
    return None
