"""Each script of scripts/bench starts, as a reader would start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "scripts" / "bench").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)
PATIENCE_S = 300.0

# Runs all scripts in one process, which imports their packages once, and prints what they print.
ALL = """
import contextlib, io, json, runpy, sys, traceback
folder, *names = sys.argv[1:]
path, found = list(sys.path), {}
for name in names:
    sys.argv, sys.path[:] = [name, "--help"], [folder, *path]
    output, code = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(f"{folder}/{name}", run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
    found[name] = code, output.getvalue()
print(json.dumps(found))
"""


def python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=PATIENCE_S,
    )


def test_all_scripts_print_their_help(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", ALL, str(ROOT / "scripts" / "bench"), *SCRIPTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [*found] == SCRIPTS
    for name, (code, output) in found.items():
        assert (code, output[:7]) == (0, "usage: "), (name, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_help(name: str, tmp_path: Path) -> None:
    done = python(tmp_path, str(ROOT / "scripts" / "bench" / name), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
