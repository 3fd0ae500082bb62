from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.runs.observe.step_log import StepLog, read_lines
from tests.errors import invalid

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(FINITE, max_size=20))
def test_numbers_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    log = StepLog(path)
    for step, value in enumerate(values, start=1):
        log.append({"step": step, "value": value})
    log.close()
    assert [line["value"].hex() for line in read_lines(path)] == [v.hex() for v in values]


@given(
    steps=st.lists(st.integers(1, 9), max_size=20).map(sorted),
    after_step=st.integers(0, 10),
    torn=st.booleans(),
)
def test_continuing_removes_later_steps_and_torn_lines(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], after_step: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    lines = [json.dumps({"step": step, "text": "new\nline"}) + "\n" for step in steps]
    path.write_text("".join(lines) + ('{"step": 1, "te' if torn else ""))
    log = StepLog(path, after_step=after_step)
    log.append({"step": after_step + 1})
    log.close()
    kept = [step for step in steps if step <= after_step]
    assert [line["step"] for line in read_lines(path)] == [*kept, after_step + 1]
    assert [entry.name for entry in path.parent.iterdir()] == ["log.jsonl"]


def test_readers_skip_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert list(read_lines(path)) == [{"step": 1}]


@pytest.mark.parametrize("damage", ["{}x", "[1]", '{"value": 1}', '{"step": "1"}'])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
    with invalid(f"{path}, line 2"):
        list(read_lines(path))


def test_every_line_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from rlsys.runs.observe.step_log import StepLog\n"
        "log = StepLog(Path(sys.argv[1]))\n"
        "for step in range(1, 101):\n"
        "    log.append({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_lines(path)] == list(range(1, 101))


@pytest.mark.parametrize("loss", ["deleted", "directory deleted", "moved", "replaced"])
def test_a_file_that_was_taken_away_is_an_error_not_silence(tmp_path: Path, loss: str) -> None:
    path = tmp_path / "run" / "log.jsonl"
    path.parent.mkdir()
    log = StepLog(path)
    log.append({"step": 1})
    if loss == "directory deleted":
        shutil.rmtree(path.parent)
    elif loss == "moved":
        path.parent.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
        if loss == "replaced":
            path.touch()
    with pytest.raises(FileNotFoundError):
        log.append({"step": 2})
    log.close()
