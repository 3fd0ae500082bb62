"""The command `rlsys` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RLSYS = (sys.executable, "-m", "rlsys")


def rlsys(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `rlsys ARGUMENTS` in a directory."""
    return subprocess.run(
        [*RLSYS, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
