"""Checkpoints of a run. A checkpoint is complete or absent, even if the process is killed.

    checkpoints/
        step_000010/            appears by one rename, when all of the following is on disk
            trainer/            model, optimizer, RNG: written by all ranks
            controller.json     data position and everything else that is not a tensor
            rollouts.npz        sampled rollouts that are not trained yet, if the run samples
            manifest.json       written last: size and checksum of every other file
        .step_000020.partial    being written; the next save removes what a killed one left

Input: a step, and a function that fills a directory. Output: that directory under its final name.
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
    _remove,
    _replace,
    _sync,
    partial_name,
)
from rlsys.common.atomic_files import write_atomically
from rlsys.common.manifest import OnBytes, faults_of, ignore_bytes, write_manifest
from rlsys.common.option_names import option
from rlsys.errors import InvalidValue

TRAINER_DIR = "trainer"
BEGINNING_DIR = ".beginning"
CONTROLLER_FILE = "controller.json"
ROLLOUTS_FILE = "rollouts.npz"


STEP_NAME = re.compile(r"step_(\d{6,})")
LEFTOVER_NAME = re.compile(r"\.step_\d+\.(partial|replaced)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory of a run."""

    step: int
    path: Path

    @property
    def trainer_dir(self) -> Path:
        """The policy's directory."""
        return self.path / TRAINER_DIR

    def role_dir(self, model: str) -> Path:
        """Return the directory of a trained model, by its name."""
        return self.trainer_dir if model == "policy" else self.path / f"{TRAINER_DIR}-{model}"

    @property
    def controller_file(self) -> Path:
        """File of the data position and of all state that is not a tensor."""
        return self.path / CONTROLLER_FILE

    def faults(self, on_bytes: OnBytes = ignore_bytes) -> list[str]:
        """Return what is wrong with its files, by name. All of them are read."""
        return faults_of(self.path, on_bytes=on_bytes)


class Checkpoints:
    """The checkpoints in `directory`, of which the newest `keep` are kept, and every K-th step.

    Args:
        directory: The run's checkpoint directory.
        keep: How many checkpoints to keep.
        records: Files that a checkpoint refers to (the ledger, the metrics). They are synced to
            disk before a checkpoint counts as finished.
        keep_every: K. Checkpoints of multiples of this number of steps are never removed. 0: none.
        finished: File that gets the name of each finished checkpoint, so that a lost one is
            noticed.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        records: Sequence[Path] = (),
        finished: Path | None = None,
        *,
        keep_every: int = 0,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._records = records
        self._finished = finished

    @property
    def warm_start(self) -> Path:
        """Directory in which the trainer keeps the result of its warm start during the run."""
        return self._directory / ".warm_start"

    def initial_model(self, model_path: str) -> str | Path:
        """Return the path of the weights that the run begins with.

        That is model.path, or the result of a warm start if other models begin with it too.
        """
        return self.initial_weights if self.initial_weights.is_dir() else model_path

    @property
    def initial_weights(self) -> Path:
        """Directory of the weights after a warm start, with which other models begin."""
        return self._directory / BEGINNING_DIR

    def seal_initial_weights(self) -> str:
        """Write the manifest of the initial weights and return its checksum.

        Raises:
            OSError: The disk refuses. The message has the cause and the fix.
        """
        with _advised(self.initial_weights):
            return write_manifest(self.initial_weights)

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self._directory / f"step_{step:06d}"

    def all(self) -> list[Checkpoint]:
        """Return the finished checkpoints, oldest first."""
        return find_checkpoints(self._directory)

    def newest(self) -> Checkpoint | None:
        """Return the finished checkpoint of the latest step."""
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    @asynccontextmanager
    async def writing(self, step: int) -> AsyncIterator[Checkpoint]:
        """Yield a checkpoint to fill. Keep it if the block ends, remove it if the block raises.

            async with checkpoints.writing(step) as checkpoint:
                await learner.save(checkpoint.trainer_dir)
                checkpoint.controller_file.write_text(...)

        Disk operations run in a thread, so that the event loop goes on.

        Raises:
            OSError: The directory cannot be written, or the disk is full. Older checkpoints stay.
        """
        final = self.path(step)
        with _advised(final):
            await _finish_in_thread(self._sweep)
            unfinished = await _finish_in_thread(_begin, final)
            try:
                yield Checkpoint(step, unfinished)
                await _finish_in_thread(self._finish, unfinished, final)
            finally:
                await _finish_in_thread(_remove, unfinished)

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they wrote or deleted."""
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
        for old in superseded(self.all(), keep=self._keep, keep_every=self._keep_every):
            # Renamed first: a process killed while deleting leaves no partial checkpoint.
            doomed = partial_name(old.path)
            _remove(doomed)
            old.path.rename(doomed)
            _remove(doomed)


def superseded(
    checkpoints: Sequence[Checkpoint], *, keep: int, keep_every: int
) -> list[Checkpoint]:
    """Return the checkpoints to remove, of a list from the oldest to the newest.

    The newest `keep` >= 1 stay, of which a resume needs one, and those of multiples of `keep_every`
    steps.
    """
    return [one for one in checkpoints[:-keep] if keep_every == 0 or one.step % keep_every != 0]


def first_few(faults: Sequence[str]) -> str:
    """Return the first three of a list for a message, and how many more there are."""
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return ", ".join(faults[:3]) + more


def initial_weights_fault(directory: Path, checksum: str | None) -> InvalidValue | None:
    """Return an error unless the initial weights are those that the run began with.

    Args:
        directory: The run's checkpoint directory.
        checksum: The value that `Checkpoints.seal_initial_weights` returned, or None if the run
            began without initial weights.
    """
    weights = directory / BEGINNING_DIR
    if checksum is None:
        if not weights.exists():
            return None
        return InvalidValue(
            str(weights), rule="it does not belong to this run", fix="Move it away."
        )
    if not weights.is_dir():
        fault = "it is missing"
    elif faults := faults_of(weights, crc32=checksum):
        fault = f"it is damaged: {'; '.join(faults)}"
    else:
        return None
    return InvalidValue(
        str(weights),
        rule=f"{fault}. A reference or a critic begins with these weights of the warm start",
        fix=f"Restore them from a copy, or start again under another {option('name')}.",
    )


def find_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the finished checkpoints in a directory, oldest first.

    Use `Checkpoint.faults` to find damaged ones.
    """
    found = [Checkpoint(int(match[1]), path) for path, match in _entries(directory) if match]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find_strays(directory: Path) -> list[Path]:
    """Return entries that are neither checkpoints nor being written."""
    return [
        path for path, match in _entries(directory) if not match and not path.name.startswith(".")
    ]


def _entries(directory: Path) -> list[tuple[Path, re.Match[str] | None]]:
    """Return the directory's entries in order, with a match for each checkpoint."""
    if not directory.is_dir():
        return []
    return [
        (path, STEP_NAME.fullmatch(path.name) if path.is_dir() else None)
        for path in sorted(directory.iterdir())
    ]
