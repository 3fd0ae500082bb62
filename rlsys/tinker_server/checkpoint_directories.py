"""Directories of checkpoints: their names while they change, copying, and removal.

Large directories take seconds to remove, so a thread does it. The directory gets a name before that
nothing reads. The next server removes what is left if this one ends meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from rlsys.common.background_tasks import report, start_thread

# How long a request waits until files are removed, whose thread goes on afterwards.
REMOVAL_WAIT_S = 10.0


def partial_directory(place: Path) -> Path:
    """Return where a checkpoint is written before it is complete."""
    return place.with_name(f".{place.name}.partial")


def directory_before(place: Path) -> Path:
    """Return where a directory waits until another has replaced it."""
    return place.with_name(f".{place.name}.before")


async def remove_directories(*directories: Path) -> None:
    """Remove directories that may exist, and wait as `wait_for_removal` does."""
    await wait_for_removal(start_removal(*directories))


async def wait_for_removal(thread: Thread | None) -> None:
    """Wait until a thread of `start_removal` has ended, at most REMOVAL_WAIT_S."""
    if thread is not None:
        await asyncio.to_thread(thread.join, REMOVAL_WAIT_S)


def start_removal(*directories: Path) -> Thread | None:
    """Rename directories that may exist, and start a thread that removes them, if there are any."""
    found = []
    for directory in filter(Path.exists, directories):
        unread = partial_directory(directory.with_name(f"{directory.name}.{secrets.token_hex(4)}"))
        try:
            found.append(directory.rename(unread))
        except FileNotFoundError:  # another request has removed it
            continue
        except OSError:  # the thread reports why it cannot be removed either
            found.append(directory)
    if not found:
        return None
    return start_thread(_remove_all, found, name=f"remove {directories[0].name}", fail=report)


def remove_at_once(place: Path) -> None:
    """Remove a small file that may exist, or what is in its place."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _remove_all(directories: Sequence[Path]) -> None:
    for one in directories:
        try:
            shutil.rmtree(one)
        except OSError as error:
            report(error)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory. Raise the first OSError of its files, not a list of all."""
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        into.mkdir(parents=True, exist_ok=True)
        for name in names:
            _link_or_copy(Path(folder, name), into / name)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
