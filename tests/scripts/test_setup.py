"""The function `step` of scripts/setup.sh, with commands that need no network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = f"source {ROOT}/scripts/setup.sh\n"


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script; its standard output goes to a file that it may read."""
    out = directory / "out"
    with out.open("w") as file:
        done = subprocess.run(
            ["bash", "-c", SETUP + script],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            env={**os.environ, "SIGN_EVERY_S": "1", "OUT": str(out)},
        )
    return subprocess.CompletedProcess(done.args, done.returncode, out.read_text(), done.stderr)


def test_a_long_step_prints_its_progress(tmp_path: Path) -> None:
    waits = "work() { echo Downloading; until grep -q 'so far' $OUT; do sleep 0.1; done; }\n"
    done = run(waits + "step torch work; step rest true", tmp_path)
    assert done.returncode == 0
    first, sign, *signs, end, second, second_end = done.stdout.splitlines()
    assert first == "torch ..."
    assert re.fullmatch(r"torch: \d+ s so far: Downloading", sign)
    assert all("so far" in line for line in signs)
    assert re.fullmatch(r"torch: \d+ s", end)
    assert (second, second_end) == ("rest ...", "rest: 0 s")


def test_a_step_that_fails_ends_the_set_up_with_its_output(tmp_path: Path) -> None:
    done = run("work() { echo 'no such package'; return 3; }\nstep torch work; echo on", tmp_path)
    assert done.returncode == 3
    assert "no such package" in done.stderr
    assert "on" not in done.stdout.splitlines()


def test_an_interrupt_ends_the_command_of_the_step(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["bash", "-c", SETUP + f"work() {{ sleep 600 & echo $! >{pid_file}; wait; }}\n"]
    command[-1] += "step torch work"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        slept = int(pid_file.read_text())
        while Path(f"/proc/{slept}").exists():
            if "Z" in Path(f"/proc/{slept}/stat").read_text().rpartition(")")[2].split()[0]:
                break
            assert time.monotonic() < deadline, "the command outlives the set-up"
            time.sleep(0.05)
    finally:
        process.kill()
