"""Checkpoints of a run: complete or absent, whatever kills the process; and checked before use.

    checkpoints/
        step_000010/            appears in one rename, when all below is on disk
            trainer/            model, optimizer, RNG: written by all ranks
            controller.json     data position, everything else that is not a tensor
            rollouts.npz        what had been sampled and not trained, where anything is sampled
            manifest.json       written last: size and checksum of every file beside it
        .step_000020.partial    being written; what a killed save leaves, the next one removes

In: a step and something that fills a directory. Out: that directory under its final name.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.atomic_directory import (
    _advised,
    _begin,
    _finish_in_thread,
    _partial_name,
    _remove,
    _replace,
    _sync,
)
from rlsys.common.atomic_files import write_atomically
from rlsys.common.manifest import faults_of, write_manifest

TRAINER_DIR = "trainer"
BEGINNING_DIR = ".beginning"
CONTROLLER_FILE = "controller.json"
ROLLOUTS_FILE = "rollouts.npz"


STEP_NAME = re.compile(r"step_(\d{6,})")
LEFTOVER_NAME = re.compile(r"\.step_\d+\.(partial|replaced)")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path

    @property
    def trainer_dir(self) -> Path:
        """The policy's."""
        return self.path / TRAINER_DIR

    def role_dir(self, model: str) -> Path:
        """Of a trained model, by its name."""
        return self.trainer_dir if model == "policy" else self.path / f"{TRAINER_DIR}-{model}"

    @property
    def controller_file(self) -> Path:
        return self.path / CONTROLLER_FILE

    def faults(self) -> list[str]:
        """What is wrong with its files, by name; none if it is as it was written. Reads it all."""
        return faults_of(self.path)


class Checkpoints:
    """The checkpoints below `directory`; the newest `keep` stay.

    `records` are files that a checkpoint builds on (the ledger, the metrics): what they hold when
    a checkpoint is finished is on disk before it counts. `finished`: a file that says, once one
    is, which step's was last, so that it is missed when it is gone.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        records: Sequence[Path] = (),
        finished: Path | None = None,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._records = records
        self._finished = finished

    @property
    def warm_start(self) -> Path:
        """Where the trainer keeps, while the run goes on, what its warm start had taught."""
        return self._directory / ".warm_start"

    def beginning(self, model_path: str) -> str | Path:
        """The weights that the run begins with: model.path, or what a warm start made of it, where
        other models begin with them too.
        """
        return self.taught if self.taught.is_dir() else model_path

    @property
    def taught(self) -> Path:
        """Where the weights are kept that a warm start has taught, for other models."""
        return self._directory / BEGINNING_DIR

    def seal_taught(self) -> str:
        """Say that they are there, whole. Returns what `beginning_fault` knows them by. Raises
        OSError with the cause and the fix.
        """
        with _advised(self.taught):
            return write_manifest(self.taught)

    def all(self) -> list[Checkpoint]:
        """Complete ones, oldest first."""
        return find_checkpoints(self._directory)

    def newest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    @asynccontextmanager
    async def writing(self, step: int) -> AsyncIterator[Checkpoint]:
        """A checkpoint to be filled; it is kept if the block ends, and removed if it raises.

            async with checkpoints.writing(step) as checkpoint:
                await learner.save(checkpoint.trainer_dir)
                checkpoint.controller_file.write_text(...)

        What waits for the disk runs in a thread, beside the event loop. Raises OSError for an
        unwritable directory or a full disk; the older checkpoints stay.
        """
        final = self._directory / f"step_{step:06d}"
        with _advised(final):
            await _finish_in_thread(self._sweep)
            unfinished = await _finish_in_thread(_begin, final)
            try:
                yield Checkpoint(step, unfinished)
                await _finish_in_thread(self._finish, unfinished, final)
            finally:
                await _finish_in_thread(_remove, unfinished)

    def _sweep(self) -> None:
        """Remove what processes left behind that were killed while they wrote or deleted."""
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if LEFTOVER_NAME.fullmatch(path.name):
                    _remove(path)

    def _finish(self, unfinished: Path, final: Path) -> None:
        for record in self._records:
            if record.exists():
                _sync(record)
        write_manifest(unfinished)
        _replace(unfinished, final)
        if self._finished is not None:
            write_atomically(self._finished, f"{final.name}\n")
        for old in self.all()[: -self._keep]:
            # Renamed first, so that a kill in the middle of deleting leaves no half checkpoint.
            doomed = _partial_name(old.path)
            _remove(doomed)
            old.path.rename(doomed)
            _remove(doomed)


def beginning_fault(directory: Path, seal: str | None) -> str | None:
    """What is wrong with the weights, kept among the checkpoints, that other models of the run
    began with (`Checkpoints.seal_taught`); None for `seal`: they began with none.
    """
    taught = directory / BEGINNING_DIR
    if seal is None:
        return f"{taught} is none of this run's" if taught.exists() else None
    if not taught.is_dir():
        return f"{taught} is missing"
    faults = faults_of(taught, crc32=seal)
    return f"{taught} is damaged: {'; '.join(faults)}" if faults else None


def find_checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoints below a directory that were finished, oldest first; whether they are whole
    is told by `Checkpoint.faults`.
    """
    found = [Checkpoint(int(match[1]), path) for path, match in _entries(directory) if match]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find_strays(directory: Path) -> list[Path]:
    """What lies among the checkpoints and is none, nor one that is being written."""
    return [
        path for path, match in _entries(directory) if not match and not path.name.startswith(".")
    ]


def _entries(directory: Path) -> list[tuple[Path, re.Match[str] | None]]:
    """What lies in the directory, by name; with a match where it is a checkpoint."""
    if not directory.is_dir():
        return []
    return [
        (path, STEP_NAME.fullmatch(path.name) if path.is_dir() else None)
        for path in sorted(directory.iterdir())
    ]
