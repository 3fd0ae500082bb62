import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.checkpoint import Checkpoints, new_directory


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.writing(step) as checkpoint:
        checkpoint.trainer_dir.mkdir()
        (checkpoint.trainer_dir / "weights").write_text(f"weights of {step}")
        checkpoint.controller_file.write_text(str(step))


def test_what_was_written_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    save(checkpoints, 10)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 10
    assert newest.path == tmp_path / "checkpoints" / "step_000010"
    assert newest.controller_file.read_text() == "10"
    assert (newest.trainer_dir / "weights").read_text() == "weights of 10"


def test_the_newest_are_kept_by_number_and_not_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 999_999, 1_000_000):
        save(checkpoints, step)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [999_999, 1_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1000000", "step_999999"]


def test_a_failed_save_leaves_nothing_and_the_older_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fail() -> None:
        with checkpoints.writing(2) as checkpoint:
            checkpoint.controller_file.write_text("half")
            raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rlsys.checkpoint import Checkpoints
with Checkpoints(Path(sys.argv[1]), keep=2).writing(2) as checkpoint:
    checkpoint.controller_file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_save_is_never_the_newest_and_the_next_one_succeeds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert killed.returncode == -signal.SIGKILL
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    save(checkpoints, 2)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.controller_file.read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3)
    with checkpoints.writing(3) as checkpoint:
        checkpoint.controller_file.write_text("again")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.controller_file.read_text() == "again"
    assert not newest.trainer_dir.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EACCES, "permission denied; make"),
    ],
)
def test_errors_of_the_disk_name_the_place_and_the_fix(
    tmp_path: Path, code: int, advice: str
) -> None:
    target = tmp_path / "hf"
    with pytest.raises(OSError, match=advice) as raised, new_directory(target):
        raise OSError(code, os.strerror(code))
    assert raised.value.errno == code
    assert str(target) in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(OSError, match="checkpoints"):
        save(Checkpoints(tmp_path / "checkpoints", keep=1), 1)
