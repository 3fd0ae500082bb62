"""Checkpoints of the server: their names, their directories and their expiry.

    tinker://MODEL/weights/NAME           state of a trainer: parameters and moments
    tinker://MODEL/sampler_weights/NAME   weights for a sampler: adapters, or a whole model
    tinker://MODEL/external_weights/NAME  files for a download: a PEFT adapter, or a whole model

A checkpoint is the directory DIRECTORY/MODEL/weights/NAME (and so on). It contains `saved.json`,
which describes the model, and manifest.json with the checksums of its files. A directory appears
atomically. NAME is the client's, or one with the number of optimizer steps; MODEL is the model's id
with "." instead of ":". The file `.NAME.expires` next to a directory contains the Unix time at
which the checkpoint is deleted. A checkpoint whose file is damaged is kept.

A server that is killed leaves directories `.NAME.partial` and `.NAME.before`, and temporary
checkpoints. The next server in the same directory removes them at its start (`recover`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Literal, get_args

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import writing
from rlsys.common.manifest import MANIFEST_FILE, check_entry, faults_of, write_manifest
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.checkpoint_directories import (
    copy_tree,
    directory_before,
    partial_directory,
    remove_at_once,
    remove_directories,
    start_removal,
    wait_for_removal,
)
from rlsys.tinker_server.checkpoint_lifetimes import Lifetimes, lifetime_files

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)

SCHEME = "tinker://"
SAVED = "saved.json"
ADAPTER_DIRECTORY = "adapter"  # in sampler weights, as PEFT saves them
LOCK = ".servers"  # each server of a directory holds a shared lock on this file

ROOM = (
    "delete checkpoints with all their copies, which share their files (tinker checkpoint delete), "
    "or free other space, and repeat the command"
)
# Copies of `copy_weights` share the damaged file.
RESTORE = "from a backup, as its copies on this server share its files"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:-]{0,199}")  # without ".", which replaces ":"


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """Description of a saved model.

    Attributes:
        base_model: Name of its base model.
        lora: The adapters as in model.lora; "" if all weights were trained.
        version: Number of optimizer steps.
        user_metadata: The client's own labels.
        is_temporary: Whether the checkpoint ends with its model: sampler weights without a name.
    """

    base_model: str
    lora: str
    version: int
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    is_temporary: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplerWeights:
    """Weights that a sampler can load.

    Attributes:
        base_model: Name of their base model.
        number: Version of the tokens that they sample, unique for all weights that this server has
            saved or read; 0 for those of base models.
        path: tinker://..., or "" for the base model.
        model: Id of the model that was trained.
        directory: Directory of the files.
        version: Number of optimizer steps.
        lora: The adapters as in model.lora; "" for the base model, or a whole model.
    """

    base_model: str
    number: int = 0
    path: str = ""
    model: str = ""
    directory: Path | None = None
    version: int = 0
    lora: str = ""

    @property
    def key(self) -> str:
        """Path, or the name of the base model."""
        return self.path or self.base_model

    @property
    def label(self) -> str:
        """Name of the weights in the ids of sampled sequences."""
        return self.path or "base"


@dataclass(frozen=True, kw_only=True)
class ServerCheckpoint:
    """A checkpoint on disk. Times are Unix times in seconds."""

    path: str
    model: str
    kind: CheckpointKind
    name: str
    directory: Path
    time: float
    expires_at: float | None

    @property
    def files(self) -> list[Path]:
        """Files of the model, without those that the server adds."""
        found = (one for one in sorted(self.directory.rglob("*")) if one.is_file())
        own = (self.directory / SAVED, self.directory / MANIFEST_FILE)
        return [one for one in found if one not in own]

    @property
    def num_bytes(self) -> int:
        """Size of the files, 0 if the checkpoint is deleted meanwhile."""
        try:
            return sum(one.stat().st_size for one in self.files)
        except FileNotFoundError:
            return 0


class ServerCheckpoints:
    """All checkpoints of one server in `directory`. `now` returns the Unix time in seconds.

    `recover` reads when the checkpoints that are there expire.
    """

    def __init__(self, directory: Path, now: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._lifetimes = Lifetimes(now)
        self._copying = asyncio.Lock()
        self._lock: int | None = None  # descriptor of the locked file

    def recover(self) -> None:
        """Remove what a killed server left, unless another server uses the directory.

        Incomplete checkpoints and temporary ones are removed. A checkpoint that was being
        overwritten is restored.

        Raises:
            OSError: The directory cannot be created or read.
        """
        with writing(self._directory, room=ROOM):
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._is_alone():
                _clean(self._directory)
            self._lifetimes.read(self._directory)

    def _is_alone(self) -> bool:
        """Return whether no other server uses the directory. This one keeps its lock."""
        if self._lock is None:
            self._lock = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another server, or a file system without locks
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def path(self, model: str, kind: CheckpointKind, name: str) -> str:
        """Return the path of a checkpoint.

        Raises:
            ApiError: The name is not valid.
        """
        if not _NAME.fullmatch(name):
            raise ApiError(
                "path",
                name,
                rule="is not a valid name of a checkpoint",
                fix="Use at most 200 letters, digits, '.', '_' and '-', and begin with a letter or "
                "digit.",
            )
        return f"{SCHEME}{model}/{kind}/{name}"

    def parse(self, path: str, kind: CheckpointKind) -> tuple[str, Path]:
        """Return the model and the directory of an existing checkpoint of this kind.

        Raises:
            ApiError: The path is not valid; 404, the checkpoint is missing or has expired.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
            raise ApiError(
                "path",
                path,
                rule=f"must name {kind}",
                fix="Give a path that this server has returned, such as "
                f"{SCHEME}MODEL/{kind}/NAME.",
            )
        model, _, name = parts
        if not _MODEL.fullmatch(model) or not _NAME.fullmatch(name):
            raise ApiError(
                "path",
                path,
                rule=f"{model!r} or {name!r} is not a valid name",
                fix="Give a path that this server has returned.",
            )
        directory = self._where(model, kind, name)
        if _saved_at(directory) is None or self._lifetimes.is_over(directory):
            raise _missing(path, "it was not saved, was deleted, or has expired")
        return model, directory

    def get(self, path: str) -> ServerCheckpoint:
        """Return the checkpoint of any kind at this path. Raise as `parse` does."""
        kind = kind_of_path(path)
        model, directory = self.parse(path, kind)
        saved_at = _saved_at(directory)
        if saved_at is None:
            raise _missing(path, "it was deleted meanwhile")
        return self._found(model, kind, directory, saved_at)

    def description(self, directory: Path) -> SavedModel:
        """Return the description of a checkpoint.

        Raises:
            ApiError: Its saved.json cannot be read, or differs from the manifest.
        """
        file = directory / SAVED
        try:
            check_entry(directory, SAVED)
            return SavedModel(**parse_json(file.read_text()))
        except (ValueError, TypeError, OSError) as error:
            raise ApiError(
                str(file),
                rule=f"it does not describe a checkpoint ({error}), so it was edited or damaged",
                fix=f"Restore it {RESTORE}, or load another checkpoint.",
            ) from error

    def exists(self, path: str, kind: CheckpointKind) -> bool:
        """Return whether the checkpoint exists."""
        try:
            self.parse(path, kind)
        except ApiError:
            return False
        return True

    @asynccontextmanager
    async def writing(
        self, path: str, description: SavedModel, *, overwrite: bool, ttl_s: float | None = None
    ) -> AsyncIterator[Path]:
        """Yield an empty directory, and make it the checkpoint at the end of the block.

        Raises:
            ApiError: 409, the name is taken.
            OSError: The disk refuses.
        """
        model, kind, name = path.removeprefix(SCHEME).split("/")
        assert kind in CHECKPOINT_KINDS
        place = self._where(model, kind, name)
        if place.exists() and not overwrite:
            raise ApiError(
                "path",
                path,
                rule="the checkpoint exists already",
                fix="Choose another name, or save with overwrite=True.",
                status=409,
            )
        aside = partial_directory(place)
        await remove_directories(aside)
        try:
            with writing(aside, room=ROOM):
                aside.mkdir(parents=True)
                yield aside
                (aside / SAVED).write_text(dump_json(asdict(description)))
                # The next server deletes temporary checkpoints, so they need not be on disk.
                sync = not description.is_temporary
                await asyncio.to_thread(write_manifest, aside, sync=sync)
                self._put(aside, place, ttl_s)
            await remove_directories(directory_before(place))
        finally:
            await remove_directories(aside)

    async def copy(self, path: str, model: str, ttl_s: float | None) -> str:
        """Copy a checkpoint to another model and return the new path.

        The files are hard links if the disk supports them, so a copy needs no space until the other
        one is deleted, and damage of a file damages both. An existing copy is kept. Copies run one
        after the other, because the client repeats a request whose answer is late.

        Raises:
            ApiError: As `parse`, or the checkpoint was deleted meanwhile.
            OSError: The disk refuses.
        """
        source = self.get(path)
        target = self.path(model, source.kind, source.name)
        place = self._where(model, source.kind, source.name)
        async with self._copying:
            if place.exists():
                return target
            aside = partial_directory(place)
            await remove_directories(aside)
            try:
                with writing(aside, room=ROOM):
                    await asyncio.to_thread(copy_tree, source.directory, aside)
                    self._put(aside, place, ttl_s)
            except FileNotFoundError:
                raise _missing(path, "it was deleted while it was copied") from None
            finally:
                await remove_directories(aside)
        return target

    def set_ttl(self, path: str, ttl_s: float | None) -> None:
        """Let a checkpoint expire after `ttl_s` seconds, or never.

        Raises:
            ApiError: As `parse`.
            OSError: The disk refuses.
        """
        directory = self.get(path).directory
        with writing(directory, room=ROOM):
            self._lifetimes.set(directory, ttl_s)

    def expire(self) -> None:
        """Delete the checkpoints whose time is over.

        Those that the disk does not let go are logged and tried again later.
        """
        for directory in self._lifetimes.due():
            try:
                self.start_removal(directory)
            except OSError as error:
                self._lifetimes.postpone(directory, error)

    async def remove(self, directory: Path) -> None:
        """Delete a checkpoint, and wait as `wait_for_removal` does until its files are removed."""
        await wait_for_removal(self.start_removal(directory))

    def start_removal(self, directory: Path) -> Thread | None:
        """Delete a checkpoint, and return the thread that removes its files.

        The next server removes the files if this one ends before.
        """
        thread = start_removal(directory_before(directory), directory)
        self._lifetimes.set(directory, None)
        return thread

    def all(self) -> list[ServerCheckpoint]:
        """Return the checkpoints of all models, oldest first."""
        models = (one.name.replace(".", ":") for one in self._directory.glob("*") if one.is_dir())
        found = [one for model in models for one in self._of_model(model)]
        return sorted(found, key=lambda one: one.time)

    def of_model(self, model: str) -> list[ServerCheckpoint]:
        """Return the checkpoints of one model, oldest first."""
        return sorted(self._of_model(model), key=lambda one: one.time)

    def _of_model(self, model: str) -> Iterator[ServerCheckpoint]:
        if not _MODEL.fullmatch(model):
            return
        for kind in CHECKPOINT_KINDS:
            for file in self._where(model, kind, "").glob(f"*/{SAVED}"):
                # Other names belong to directories that are being written or removed.
                if not _NAME.fullmatch(file.parent.name) or self._lifetimes.is_over(file.parent):
                    continue
                if (saved_at := _saved_at(file.parent)) is not None:
                    yield self._found(model, kind, file.parent, saved_at)

    def _found(
        self, model: str, kind: CheckpointKind, directory: Path, saved_at: float
    ) -> ServerCheckpoint:
        return ServerCheckpoint(
            path=f"{SCHEME}{model}/{kind}/{directory.name}",
            model=model,
            kind=kind,
            name=directory.name,
            directory=directory,
            time=saved_at,
            expires_at=self._lifetimes.end_of(directory),
        )

    def _put(self, aside: Path, place: Path, ttl_s: float | None) -> None:
        """Rename a complete directory to its place, and the former one to `directory_before`.

        The lifetime is written before, so that a server that is killed in between leaves no
        checkpoint with another one than requested.
        """
        self._lifetimes.set(place, ttl_s)
        if place.exists():
            start_removal(directory_before(place))
            place.rename(directory_before(place))
        aside.rename(place)

    def _where(self, model: str, kind: CheckpointKind, name: str) -> Path:
        place = self._directory / model.replace(":", ".") / kind / name
        if name and not place.exists() and directory_before(place).exists():
            # The process was killed between the two renames of _put.
            directory_before(place).rename(place)
        return place


def kind_of_path(path: str) -> CheckpointKind:
    """Return the kind that a path names.

    Raises:
        ApiError: It names none.
    """
    for kind in CHECKPOINT_KINDS:
        if path.startswith(SCHEME) and f"/{kind}/" in path:
            return kind
    raise ApiError(
        "path",
        path,
        rule="is not the path of a checkpoint",
        fix=f"Give one that this server has returned, such as {SCHEME}MODEL/weights/NAME.",
    )


def _saved_at(directory: Path) -> float | None:
    """Return the Unix time at which a checkpoint was saved, or None if there is none.

    A damaged saved.json counts, so that the checkpoint is listed and can be deleted.
    """
    try:
        return (directory / SAVED).lstat().st_mtime
    except OSError:
        return None


def _missing(path: str, why: str) -> ApiError:
    return ApiError(
        "path", path, rule=f"there is no such checkpoint: {why}", fix="Use another.", status=404
    )


async def check_undamaged(path: str, directory: Path) -> None:
    """Read all files of a checkpoint, in a thread.

    Raises:
        ApiError: A file is damaged; 404, the checkpoint was deleted since the request came.
    """
    faults = await asyncio.to_thread(faults_of, directory)
    if faults and not _has_files(directory):
        raise _missing(path, "it was deleted while the request waited")
    if faults:
        raise ApiError(
            "path",
            path,
            rule=f"the checkpoint is damaged: {'; '.join(faults)}",
            fix=f"Restore {directory} {RESTORE}, or use another checkpoint.",
        )


def _has_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _clean(directory: Path) -> None:
    """Remove incomplete and temporary checkpoints, and restore those that were overwritten."""
    for place in directory.glob("*/*/.*.partial"):
        shutil.rmtree(place, ignore_errors=True)
    for before in directory.glob("*/*/.*.before"):
        place = before.with_name(before.name.removeprefix(".").removesuffix(".before"))
        if place.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:  # the process was killed between the two renames of _put
            before.rename(place)
    for file in directory.glob(f"*/sampler_weights/*/{SAVED}"):
        with contextlib.suppress(ValueError, TypeError, OSError):
            if SavedModel(**parse_json(regular_file(file).read_text())).is_temporary:
                shutil.rmtree(file.parent, ignore_errors=True)
    for file, place in lifetime_files(directory):
        if not place.exists():
            remove_at_once(file)
