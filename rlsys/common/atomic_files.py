"""Atomic writes of files, and errors of the disk with path, cause and fix."""

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
    """A failed write. The message has the path, the cause and the fix; `errno` is set too."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing(path: Path, *, room: str = "") -> Iterator[None]:
    """Raise DiskError for failures of the block, which writes to `path` or below it.

    `room` is the advice for a full disk, by default `free_space()`.
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
    """Return the advice for a full disk."""
    return f"free some space, then continue the run with {option('resume', 'auto')}"


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, whose `write` may write only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_atomically(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a file, or replace it, by renaming a temporary file.

    With `sync`, the temporary file is on disk before.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file, text.encode())
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Check that `write_atomically` can create its file. The file itself is not changed.

    Raises:
        OSError: It cannot.
    """
    temporary = _temporary(path)
    temporary.open("wb").close()
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def size_limit() -> str:
    """Return why a file is too large, and the advice."""
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
