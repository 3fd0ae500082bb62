"""Checkpoints of a run: complete or absent, whatever kills the process.

    checkpoints/
        step_000010/            appears in one rename, when all below is on disk
            trainer/            model, optimizer, RNG: written by all ranks
            controller.json     data position, ledger, everything that is not a tensor
        .step_000020.partial    being written; a leftover of a killed save is removed by the next

In: a step and something that fills a directory. Out: that directory under its final name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlsys.file_modes import ordinary_modes

TRAINER_DIR = "trainer"
CONTROLLER_FILE = "controller.json"

STEP_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path

    @property
    def trainer_dir(self) -> Path:
        return self.path / TRAINER_DIR

    @property
    def controller_file(self) -> Path:
        return self.path / CONTROLLER_FILE


class Checkpoints:
    """The checkpoints below `directory`; the newest `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def all(self) -> list[Checkpoint]:
        """Complete ones, oldest first."""
        if not self._directory.is_dir():
            return []
        found = [
            Checkpoint(int(match[1]), path)
            for path in self._directory.iterdir()
            if (match := STEP_NAME.fullmatch(path.name))
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    @contextmanager
    def writing(self, step: int) -> Iterator[Checkpoint]:
        """A checkpoint to be filled; it is kept if the block ends, and removed if it raises.

            with checkpoints.writing(step) as checkpoint:
                learner.save(checkpoint.trainer_dir)
                checkpoint.controller_file.write_text(...)

        Raises OSError for an unwritable directory or a full disk; the older checkpoints stay.
        """
        with new_directory(self._directory / f"step_{step:06d}") as unfinished:
            yield Checkpoint(step, unfinished)
        for old in self.all()[: -self._keep]:
            # Renamed first, so that a kill in the middle of deleting leaves no half checkpoint.
            doomed = _partial_name(old.path)
            old.path.rename(doomed)
            shutil.rmtree(doomed)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """An empty directory that becomes `path`, replacing it, when the block ends; if the block
    raises, `path` stays what it was.

    Raises OSError with the cause and the fix for an unwritable directory or a full disk.
    """
    unfinished = _partial_name(path)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        ordinary_modes(unfinished)
        _sync_tree(unfinished)
        if path.exists():
            replaced = path.with_name(f".{path.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
            unfinished.rename(path)
            shutil.rmtree(replaced)
        else:
            unfinished.rename(path)
        _sync(path.parent)
    except OSError as error:
        if (advice := _advice(error)) is None:
            raise
        raise OSError(error.errno, f"cannot write {path}: {advice}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _advice(error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space, or keep fewer checkpoints (keep_checkpoints)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "permission denied; make the directory writable, or choose another (runs_dir)"
    return None


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
