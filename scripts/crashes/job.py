"""One run of the recipe, started again with the same command whenever it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlsys.runs.run_files import RunFiles
from scripts.crashes.processes import MARK

ROOT = Path(__file__).parents[2]
NAME = "run"
PROMPTS_PER_STEP, GROUP_SIZE = 8, 4

POLL_S = 0.1  # another process writes the files, without a notification


class Job:
    """A recipe's process and its later starts, with one log and `mark` in the environment."""

    def __init__(self, directory: Path, mark: str, arguments: Sequence[str]) -> None:
        self.files = RunFiles(directory / "runs" / NAME)
        self.log = directory / "log.txt"
        self._command = [
            sys.executable,
            str(ROOT / "scripts" / "crashes" / "recipe.py"),
            *("--name", NAME, "--runs-dir", str(directory / "runs"), "--resume", "auto"),
            *("--prompts-per-step", str(PROMPTS_PER_STEP), "--group-size", str(GROUP_SIZE)),
            *("--observe.record-groups", str(PROMPTS_PER_STEP), "--observe.print-samples", "0"),
            *("--sampling.max-tokens", "32", "--cluster.store-gib", "0.03125"),
            *("--trainer.layout", "dp2", "--rollout.num-replicas", "2"),
            *arguments,
        ]
        (directory / "tmp").mkdir(exist_ok=True)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(directory / "tmp"),
            MARK: mark,
        }
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        """Start the recipe."""
        self.num_starts += 1
        with self.log.open("ab") as log:
            log.write(f"--- start {self.num_starts}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the recipe's own process. Ray ends the processes that it started."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def step(self) -> int:
        """Return the last step that has metrics."""
        try:
            return self.files.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def reaches(self, step: int, deadline: float) -> bool:
        """Wait for a step; return False if the recipe ends or the deadline passes first."""
        while self.step < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def ends(self, deadline: float) -> bool:
        """Wait for exit code 0; return False for another code, or after the deadline."""
        try:
            return self.process.wait(max(0.1, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            return False
