"""Each script of scripts/bench starts, as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import rest_slow

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "scripts" / "bench").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)
PATIENCE_S = 300.0


# mypy checks the imports of the others.
@pytest.mark.parametrize("name", rest_slow(SCRIPTS, only=["store.py"]))
def test_a_script_prints_its_help(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench" / name, "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
