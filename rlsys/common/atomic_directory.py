"""Directories that are complete or absent, whatever kills the process that writes them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from rlsys.common.atomic_files import writing
from rlsys.common.file_modes import ordinary_modes

_T = TypeVar("_T")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """An empty directory that becomes `path`, replacing it, when the block ends; if the block
    raises, `path` stays what it was.

    Raises OSError with the cause and the fix for an unwritable directory or a full disk.
    """
    with _advised(path):
        unfinished = _begin(path)
        try:
            yield unfinished
            _replace(unfinished, path)
        finally:
            _remove(unfinished)


def swapped_in(directory: Path, path: Path) -> None:
    """`directory` becomes `path`, replacing it. Raises OSError with the cause and the fix."""
    with _advised(path):
        _replace(directory, path)


def _begin(final: Path) -> Path:
    """An empty directory beside `final`."""
    unfinished = _partial_name(final)
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    return unfinished


def _replace(unfinished: Path, final: Path) -> None:
    """Everything below is on disk when the final name appears."""
    ordinary_modes(unfinished)
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


async def _to_the_end(function: Callable[..., _T], *args: object) -> _T:
    """Run in a thread. If the caller is cancelled meanwhile, it goes on when the thread is done:
    no thread is at work on a directory that its owner has given up.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _advised(path: Path) -> AbstractContextManager[None]:
    return writing(path, room="free some space, or keep fewer checkpoints (keep_checkpoints)")


def _sync_tree(directory: Path) -> None:
    """Everything below is on disk, not only in the kernel's memory."""
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
