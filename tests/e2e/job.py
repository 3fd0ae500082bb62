"""Recipes in processes of their own, as a user starts them, and what they leave behind."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "RLSYS_TEST_MARK"  # in the environment of every process that a job starts

# Limit of any event on a busy machine.
PATIENCE_S = 600.0

# Limit for the operating system to remove ended processes.
REAP_S = 60.0


def copied(names: Sequence[str], target: Path) -> Path:
    """Return a new directory with files and directories of the checkout."""
    target.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@dataclass(kw_only=True)
class Job:
    """A running recipe. Its standard output and error go to one log."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str
    returncode: int | None = field(default=None)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            self.returncode = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None
        return self.returncode

    def wait_for_output(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the log contains `text`; fail if the job ends first or takes too long."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.1)  # another process writes the file without notice

    def wait_for_step(self, directory: Path, step: int, timeout_s: float = PATIENCE_S) -> int:
        """Wait for so many optimizer steps in the run's metrics; return how many there are."""
        deadline = time.monotonic() + timeout_s
        metrics = directory / "metrics.jsonl"
        while not metrics.exists() or (done := metrics.read_bytes().count(b"\n")) < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output}"
            assert time.monotonic() < deadline, f"no step {step} in {timeout_s} s:\n{self.output}"
            time.sleep(0.1)  # another process writes the file without notice
        return done

    def wait_for_checkpoint(self, directory: Path, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the run has a finished checkpoint.

        A run writes checkpoints while it trains, so a later step may be recorded before one exists.
        """
        deadline = time.monotonic() + timeout_s
        while not (directory / ".checkpointed").exists():
            assert self.process.poll() is None, f"ended without a checkpoint:\n{self.output}"
            assert time.monotonic() < deadline, f"no checkpoint in {timeout_s} s:\n{self.output}"
            time.sleep(0.1)  # another process writes the file without notice

    def processes(self) -> dict[int, str]:
        """Return the processes of this job and their descendants: {pid: command line}."""
        return marked_processes(self.mark)

    def left_behind(self) -> dict[int, str]:
        """Return the processes that still exist some time after the job has ended."""
        deadline = time.monotonic() + REAP_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def end(self) -> None:
        """Kill all processes, so that a failed test does not disturb the next one."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(REAP_S)


def marked_processes(mark: str) -> dict[int, str]:
    """Return the processes that inherited this MARK: {pid: command line}."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"{MARK}={mark}".encode() in environment and command:
            found[int(entry.name)] = command.strip()
    return found


def start(script: str, arguments: Sequence[str], directory: Path, **environment: str) -> Job:
    """Start `python script arguments` with its log in `directory`."""
    return start_command([sys.executable, script, *arguments], directory, **environment)


def start_command(
    command: Sequence[str], log_directory: Path, directory: Path = ROOT, /, **environment: str
) -> Job:
    """Start `command` in `directory`, with its log in `log_directory`."""
    mark = uuid.uuid4().hex
    log = log_directory / f"{mark}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark, **environment},
        )
    return Job(process=process, log=log, mark=mark)


def run(
    script: str, arguments: Sequence[str], directory: Path, *, timeout_s: float = PATIENCE_S
) -> Job:
    """Run a script to the end; assert that no process is left behind."""
    job = start(script, arguments, directory)
    try:
        job.wait(timeout_s)
        assert job.left_behind() == {}, job.output
    finally:
        job.end()
    return job


SMALL_QUICKSTART = shlex.split(
    "--warm-start-steps 2 --warm-start-batch 8 --prompts-per-step 4 --group-size 2 --num-steps 3"
)


def quickstart(directory: Path, *arguments: str, timeout_s: float = PATIENCE_S) -> Job:
    """Run a small quickstart in `directory`/runs; `arguments` override its sizes."""
    where = ["--runs-dir", str(directory / "runs")]
    return run(
        "recipes/quickstart.py",
        [*SMALL_QUICKSTART, *where, *arguments],
        directory,
        timeout_s=timeout_s,
    )
