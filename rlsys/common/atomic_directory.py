"""Directories that are complete or absent, even if the process that writes them is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from rlsys.common.atomic_files import writing
from rlsys.common.file_modes import apply_umask

_T = TypeVar("_T")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` when the block ends.

    If the block raises, `path` is unchanged.

    Raises:
        DiskError: The directory cannot be written.
    """
    with _advised(path):
        unfinished = _begin(path)
        try:
            yield unfinished
            _replace(unfinished, path)
        finally:
            _remove(unfinished)


def replace_directory(directory: Path, path: Path) -> None:
    """Rename `directory` to `path`, which it replaces.

    Raises:
        DiskError: The directory cannot be written.
    """
    with _advised(path):
        _replace(directory, path)


def _begin(final: Path) -> Path:
    """Create and return an empty directory next to `final`."""
    unfinished = partial_name(final)
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    return unfinished


def _replace(unfinished: Path, final: Path) -> None:
    """Rename `unfinished` to `final` once all its files are on disk."""
    apply_umask(unfinished)
    _sync_tree(unfinished)
    if final.exists():
        replaced = final.with_name(f".{final.name}.replaced")
        _remove(replaced)
        final.rename(replaced)
        unfinished.rename(final)
        _remove(replaced)
    else:
        unfinished.rename(final)
    _sync(final.parent)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


async def _finish_in_thread(function: Callable[..., _T], *args: object) -> _T:
    """Run a function in a thread and return its result.

    If the caller is cancelled, wait for the thread before raising, so that no thread still writes
    to a directory that the caller removes.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def partial_name(path: Path) -> Path:
    """Return the name of a directory while it is being written."""
    return path.with_name(f".{path.name}.partial")


def _advised(path: Path) -> AbstractContextManager[None]:
    return writing(path, room="free some space, or keep fewer checkpoints (keep_checkpoints)")


def _sync_tree(directory: Path) -> None:
    """Flush all files of the directory to disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
