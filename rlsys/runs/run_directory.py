"""The directory of a run, which one process at a time may use.

    RunDirectory.open(...) ──► create: new or emptied ──┐
                        └────► resume: to be continued ─┴─► RunDirectory, locked until `close`

A configuration is a plain mapping. rlsys/runs/run_files.py lists the files of the directory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import size_limit, write_all, write_atomically, writing
from rlsys.common.installed_versions import versions
from rlsys.common.option_names import option
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import NOT_GIVEN, ErrorCollector, InvalidValue, require
from rlsys.runs.config_changes import differences, leaves_of, may_change
from rlsys.runs.export_seal import export_faults, exported_step
from rlsys.runs.run_files import (
    FORMER_CONFIG,
    LOCK_FILE,
    RunFiles,
    num_steps_in,
    read_config,
)

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 * 2**20  # metrics, rollouts and a trace of an average run
PROBE_BYTES = 2**20

# What a start that ended before its first optimizer step may leave behind.
START_FILES = re.compile(
    r"\.lock|config(-\d+)?\.json|(metrics|rollouts|ledger|evaluations|external)\.jsonl"
    r"|trace\.json|plan\.(json|toml)|report\.html|outcome\.json|profile|trackers|wandb|best"
    r"|\.evaluating|[\w.-]+\.tmp"
    r"|\.[\w.-]+\.(partial|replaced)"
    r"|\.warm_start|\.beginning|\.evaluated|\.checkpoint-request"
)


class RunDirectory(RunFiles):
    """The directory of one run, locked for this process until `close` or its death.

    Use `open`, `create` or `resume` to get one, and the directory as a context manager.
    """

    def __init__(self, path: Path) -> None:
        """Lock an existing directory.

        Raises:
            InvalidValue: Another process holds the lock.
        """
        super().__init__(path)
        self._lock = _lock(path)

    @classmethod
    def open(
        cls,
        runs_dir: str | Path,
        name: str,
        config: Mapping[str, Any],
        *,
        resume: bool | Literal["auto"],
        defaults: Mapping[str, Any] | None = None,
        required_bytes: int = MIN_FREE_BYTES,
    ) -> RunDirectory:
        """Return the directory from `resume` or from `create`.

        `resume="auto"` resumes if there is a checkpoint or an exported model. Otherwise it creates
        the directory, and discards what an earlier attempt without a checkpoint has recorded.
        """
        if _continues(RunFiles(Path(runs_dir) / name), resume):
            return cls.resume(
                runs_dir, name, config, defaults=defaults, required_bytes=required_bytes
            )
        return cls.create(
            runs_dir,
            name,
            config,
            required_bytes=required_bytes,
            may_discard_steps=resume == "auto",
        )

    @classmethod
    def create(
        cls,
        runs_dir: str | Path,
        name: str,
        config: Mapping[str, Any],
        *,
        required_bytes: int = MIN_FREE_BYTES,
        may_discard_steps: bool = False,
    ) -> RunDirectory:
        """Return a new directory, or the emptied one of a run that ended before its first step.

        Args:
            runs_dir: Parent directory of all runs.
            name: Name of the run.
            config: Resolved configuration.
            required_bytes: What the run will write, checkpoints included.
            may_discard_steps: Empty the directory of a run without a checkpoint, too, even if it
                has recorded steps.

        Raises:
            InvalidValue: The directory holds anything else, is in use or cannot be written, or the
                disk has too little room. A directory that is not used is left as it was.
        """
        parent = Path(runs_dir)
        path = parent / name
        check_room(parent, required_bytes)
        try:
            path.mkdir()
            is_new = True
        except FileExistsError:
            is_new = False
            _check_is_directory(path)
        run = cls(path)
        try:
            if not is_new:
                run._empty(may_discard_steps)
            run.checkpoints.mkdir()
            run.write_config(config)
        except BaseException:
            run.close()
            if is_new:
                shutil.rmtree(path)
            raise
        return run

    @classmethod
    def resume(
        cls,
        runs_dir: str | Path,
        name: str,
        config: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        required_bytes: int = MIN_FREE_BYTES,
    ) -> RunDirectory:
        """Return the directory of a run that continues from its newest checkpoint.

        Nothing in it is changed, so that the caller can check its history first
        (rlsys.runs.run_history). `write_config` then records the new configuration.

        Args:
            runs_dir: Parent directory of all runs.
            name: Name of the run.
            config: Resolved configuration.
            defaults: Values by dotted name of fields that the run's config.json may lack, because
                they were added later.
            required_bytes: What the run will write, checkpoints included.

        Raises:
            InvalidValue: The run does not exist, is not finished and has no checkpoint, or is in
                use by another process; or the configuration differs in a field that a resume may
                not change.
        """
        path = Path(runs_dir) / name
        _check_exists(path)
        run = cls(path)
        try:
            _check_resumable(run, config, defaults or {})
            # New checkpoints replace those that exist.
            check_room(path, max(0, required_bytes - _bytes_below(run.checkpoints)))
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _empty(self, may_discard_steps: bool) -> None:
        """Remove what a start has left.

        Raises:
            InvalidValue: The directory holds more than that.
        """
        _check_left_by_a_start(self, may_discard_steps)
        if num_steps := num_steps_in(self.metrics):
            logger.warning(
                "%s: no checkpoint holds the %d recorded steps. The run starts again, and its "
                "records are removed",
                self.path,
                num_steps,
            )
        for entry in self.path.iterdir():
            if entry.name == LOCK_FILE:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json atomically, when the run starts or resumes.

        The former one is kept next to it under a number. The outcome of the earlier process is
        removed.
        """
        run_id = self.run_id if self.config.exists() else secrets.token_hex(8)
        if self.config.exists():
            former = [FORMER_CONFIG.fullmatch(path.name) for path in self.path.iterdir()]
            number = 1 + max((int(match[1]) for match in former if match), default=0)
            shutil.copyfile(self.config, self.path / f"config-{number}.json")
        resolved = {
            "config": config,
            "run_id": run_id,
            "versions": versions(),
            "git_revision": git_revision(),
        }
        with writing(self.config):
            write_atomically(self.config, dump_json(resolved, indent=2) + "\n")
        self.outcome.unlink(missing_ok=True)


def check_open(
    runs_dir: str | Path,
    name: str,
    config: Mapping[str, Any],
    *,
    resume: bool | Literal["auto"],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Check what `RunDirectory.open` checks, except free space and the lock. Write nothing.

    Raises:
        InvalidValue: `RunDirectory.open` would refuse the directory.
    """
    files = RunFiles(Path(runs_dir) / name)
    if _continues(files, resume):
        _check_exists(files.path)
        _check_resumable(files, config, defaults or {})
    elif files.path.exists():
        _check_is_directory(files.path)
        _check_left_by_a_start(files, may_discard_steps=resume == "auto")


def _continues(files: RunFiles, resume: bool | Literal["auto"]) -> bool:
    if resume == "auto":
        return files.has_checkpoint or exported_step(files.hf) is not None
    return resume


def _check_is_directory(path: Path) -> None:
    if not path.is_dir():
        raise InvalidValue(
            "name",
            path.name,
            rule=f"{path} is a file",
            fix=f"Choose another {option('name')}, or delete the file.",
        )


def _check_exists(path: Path) -> None:
    if not path.is_dir():
        raise InvalidValue(
            "name",
            path.name,
            rule=f"{path} does not exist, so there is nothing to resume",
            fix=f"Start it without {option('resume')}, or check name and runs_dir.",
        )


def _check_left_by_a_start(files: RunFiles, may_discard_steps: bool) -> None:
    """Raise InvalidValue for a directory that holds more than an early end of a start leaves."""
    path, name = files.path, files.path.name
    if files.has_checkpoint or (files.has_steps and not may_discard_steps):
        raise _existing_run(path, name)
    if lost := lost_checkpoints(files):
        raise lost
    found = [*path.iterdir()]
    if files.checkpoints.is_dir():
        found += files.checkpoints.iterdir()
    for entry in found:
        if not (START_FILES.fullmatch(entry.name) or entry == files.checkpoints):
            raise InvalidValue(
                "name",
                name,
                rule=f"{path} holds {entry.relative_to(path)}, which no start of a run writes",
                fix=f"Choose another {option('name')}, or move that file away.",
            )


def _check_resumable(
    files: RunFiles, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Check that a run can be resumed with this configuration.

    Raises:
        InvalidValue: The run has neither a checkpoint nor a finished model, is another experiment,
            or its config.json has another run_id than its rollouts.
    """
    if fault := checkpointed_fault(files):
        raise fault
    ends_at = config["num_steps"], config.get("stop_when", ())
    if not files.has_checkpoint and not files.has_finished(*ends_at):
        raise nothing_to_resume(files)
    if fault := foreign_rollouts(files, _first_run_id(files.rollouts)):
        raise fault
    before = {**defaults, **leaves_of(read_config(files.config))}
    now = leaves_of(config)
    errors = ErrorCollector()
    for field, (old, _) in differences(before, config).items():
        with errors.collect():
            require(
                may_change(field),
                field,
                now.get(field, NOT_GIVEN),
                rule=f"a resumed run must be the same experiment, and this one began with {old}",
                fix=f"Set it back, or start a new run under another {option('name')}.",
            )
    errors.raise_found()


def check_room(directory: Path, required_bytes: int) -> None:
    """Create the directory, check its free space and write a probe to it.

    Raises:
        InvalidValue: The directory cannot be written, or the disk has too little room.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < required_bytes:
            raise InvalidValue(
                "runs_dir",
                str(directory),
                rule=f"it has {free_bytes:,} bytes free, and the run needs {required_bytes:,}",
                fix="Free some space, or choose another runs_dir.",
            )
        # Quotas, read-only mounts and failing disks only show when bytes reach the disk.
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            write_all(probe, bytes(PROBE_BYTES))
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InvalidValue(
                "runs_dir", str(directory), rule="it cannot be written", fix=f"{size_limit()}."
            ) from error
        raise InvalidValue(
            "runs_dir",
            str(directory),
            rule=f"it cannot be written ({error}), and needs {required_bytes:,} free bytes",
            fix="Free some space, set its permissions, or choose another runs_dir.",
        ) from error


def git_revision() -> str | None:
    """Return the commit of the checkout that this code runs from.

    It ends with "-dirty" if files were edited. Without a checkout, it is None.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git here, or not our repository to read
        return None
    return found.stdout.strip()


def _bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def foreign_rollouts(files: RunFiles, run_ids: Iterable[object]) -> InvalidValue | None:
    """Return an error unless all these ids of rollouts.jsonl are that of config.json.

    Raises:
        InvalidValue: As `RunFiles.run_id`.
    """
    own = files.run_id
    for other in run_ids:
        if other != own:
            return InvalidValue(
                f"{files.config}: run_id",
                own,
                rule=f"{files.rollouts} has lines of run_id={dump_json(other)}, so one of the two "
                "files was edited or belongs to another run",
                fix="Set run_id back, or restore one of the two files from a copy.",
            )
    return None


def _first_run_id(rollouts: Path) -> list[object]:
    """Return the run_id of the first line, if that can be read.

    Checkpoints have a checksum of the lines that follow.
    """
    try:
        with regular_file(rollouts).open("rb") as file:
            first = file.readline()
        return [parse_json(first).get("run_id")] if first else []
    except (OSError, ValueError, AttributeError):  # the checks of the records report it
        return []


def checkpointed_fault(files: RunFiles) -> InvalidValue | None:
    """Return an error if .checkpointed cannot be replaced."""
    try:
        regular_file(files.checkpointed)
    except ValueError as error:
        return InvalidValue(
            str(files.checkpointed),
            rule=f"the next checkpoint must be able to replace it ({error})",
            fix="Move it away.",
        )
    return None


def lost_checkpoints(files: RunFiles) -> InvalidValue | None:
    """Return an error if a run that has no checkpoint had one before."""
    if not files.checkpointed.is_file():
        return None
    finished = files.checkpointed.read_bytes().decode(errors="replace").strip()
    return InvalidValue(
        "name",
        files.path.name,
        rule=f"{files.path} holds no checkpoint, although {finished or 'one'} was finished",
        fix=f"Restore {files.checkpoints}. Without it, choose another {option('name')}, or delete "
        "the directory to start again.",
    )


def nothing_to_resume(files: RunFiles) -> InvalidValue:
    """Return the error for resuming a run that has no checkpoint."""
    path, name = files.path, files.path.name
    step = exported_step(files.hf)
    if step is None:
        return lost_checkpoints(files) or InvalidValue(
            "name",
            name,
            rule=f"{path} holds no checkpoint to resume from",
            fix=f"Delete it and start again without {option('resume')} (checkpoint_every sets how "
            "often a checkpoint is written).",
        )
    if faults := export_faults(files.hf, run_id=files.run_id):
        return InvalidValue(
            "name",
            name,
            rule=f"{path} has ended at step {step}, but its model is damaged ({faults[0]}) and no "
            "checkpoint is left to export it from",
            fix=f"Restore {files.hf} or {files.checkpoints} from a copy. Without one, delete "
            f"{path} and start again.",
        )
    return InvalidValue(
        "name",
        name,
        rule=f"{path} has ended at step {step} and has no checkpoint to continue from",
        fix=f"Restore {files.checkpoints} from a copy. Without one, train its model further under "
        f"another {option('name')} with {option('model.path', str(files.hf))}.",
    )


def _existing_run(path: Path, name: str) -> InvalidValue:
    fix = "delete the directory"
    if RunFiles(path).has_checkpoint:
        fix = f"continue it with {option('resume', True)}"
    return InvalidValue(
        "name",
        name,
        rule=f"{path} holds the steps of another run, and two runs never share a directory",
        fix=f"Choose another {option('name')}, or {fix}.",
    )


class _Lock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(directory: Path) -> _Lock:
    """Return the lock of a directory. The kernel releases it when the process dies.

    Raises:
        InvalidValue: The lock file cannot be opened, or another process holds the lock.
    """
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(regular_file(path), os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, ValueError) as error:
        raise InvalidValue(
            str(path),
            rule=f"it must be a file that this user may write, to lock the run ({error})",
            fix="Move it away, or set its permissions.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InvalidValue(
            "name",
            directory.name,
            rule=f"{directory} is in use by {path.read_text().strip() or 'another process'}",
            fix=f"Wait for it, end it, or choose another {option('name')}.",
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return _Lock(descriptor)
