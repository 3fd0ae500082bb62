import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.atomic_directory import new_directory
from rlsys.common.atomic_files import DiskError
from rlsys.runs.checkpoint import (
    Checkpoint,
    Checkpoints,
    find_checkpoints,
    find_strays,
    initial_weights_fault,
    superseded,
)


def save(checkpoints: Checkpoints, step: int, *, state: str = "") -> None:
    async def write() -> None:
        async with checkpoints.writing(step) as checkpoint:
            checkpoint.trainer_dir.mkdir()
            (checkpoint.trainer_dir / "weights").write_text(f"weights of {step}")
            checkpoint.controller_file.write_text(state or str(step))

    asyncio.run(write())


def test_saved_files_are_found(tmp_path: Path) -> None:
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


def test_checkpoints_of_every_kth_step_are_kept_for_good(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=10)
    for step in (5, 10, 15, 20, 25, 30, 35):
        save(checkpoints, step)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [10, 20, 30, 35]


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 5), st.integers(0, 7))
def test_the_newest_checkpoints_are_never_removed(
    steps: list[int], keep: int, keep_every: int
) -> None:
    found = [Checkpoint(step, Path(f"step_{step}")) for step in sorted(steps)]
    removed = superseded(found, keep=keep, keep_every=keep_every)
    assert not {one.step for one in removed} & {one.step for one in found[-keep:]}
    assert all(not keep_every or one.step % keep_every for one in removed)


def test_a_failed_save_leaves_nothing_and_the_older_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    async def fail() -> None:
        async with checkpoints.writing(2) as checkpoint:
            checkpoint.controller_file.write_text("half")
            raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError):
        asyncio.run(fail())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from rlsys.runs.checkpoint import Checkpoints

async def write():
    async with Checkpoints(Path(sys.argv[1]), keep=2).writing(2) as checkpoint:
        checkpoint.controller_file.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(write())
"""


def test_a_killed_save_is_never_the_newest_and_the_next_one_succeeds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert killed.returncode == -signal.SIGKILL
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1]
    save(checkpoints, 2)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.controller_file.read_text() == "2"
    assert newest.faults() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3)
    (tmp_path / "step_000003" / "more").touch()
    save(checkpoints, 3, state="again")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.controller_file.read_text() == "again"
    assert newest.faults() == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "keep_checkpoints"),
        (errno.EFBIG, "runs_dir"),
        (errno.EACCES, "writable"),
    ],
)
def test_errors_of_the_disk_name_the_place_and_the_fix(
    tmp_path: Path, code: int, advice: str
) -> None:
    target = tmp_path / "hf"
    with pytest.raises(DiskError) as raised, new_directory(target):
        raise OSError(code, os.strerror(code))
    assert raised.value.errno == code
    assert str(target) in str(raised.value)
    assert advice in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(NotADirectoryError) as found:
        save(Checkpoints(tmp_path / "checkpoints", keep=1), 1)
    assert Path(found.value.filename).parent == tmp_path / "checkpoints"


def test_remains_of_killed_processes_are_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".step_000001.partial", ".step_000007.replaced", ".cache"):
        (tmp_path / name).mkdir()
    save(Checkpoints(tmp_path, keep=1), 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "step_000009"]


def test_other_directories_are_not_checkpoints(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=1), 3)
    (tmp_path / "step_000009").touch()
    (tmp_path / "step_000010_copy").mkdir()
    (tmp_path / "notes").mkdir()
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [3]
    strays = [path.name for path in find_strays(tmp_path)]
    assert strays == ["notes", "step_000009", "step_000010_copy"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(checkpoint: Path, kind: str) -> None:
    weights = checkpoint / "trainer" / "weights"
    match kind:
        case "flipped":
            flip_a_bit(weights)
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "lost":
            weights.unlink()
        case "no manifest":
            (checkpoint / "manifest.json").unlink()
        case "torn manifest":
            (checkpoint / "manifest.json").write_text("{")
        case "other manifest":
            (checkpoint / "manifest.json").write_text('{"files": {"trainer/weights": 3}}')
        case "shorter manifest":
            weights.unlink()
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            del manifest["files"]["trainer/weights"]
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        case "manifest without a seal":
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            (checkpoint / "manifest.json").write_text(json.dumps({"files": manifest["files"]}))
        case "infinite size":
            manifest = (checkpoint / "manifest.json").read_text()
            infinite = manifest.replace('"bytes": 12', '"bytes": 1e999')
            (checkpoint / "manifest.json").write_text(infinite)
        case "name of half a character":
            manifest = (checkpoint / "manifest.json").read_text()
            other = manifest.replace('"trainer/weights"', '"\\ud800"')
            (checkpoint / "manifest.json").write_text(other)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flipped", "trainer/weights has another checksum"),
        ("cut", "trainer/weights has 11 bytes instead of 12"),
        ("lost", "trainer/weights is missing"),
        ("no manifest", "manifest.json is missing"),
        ("torn manifest", "manifest.json is damaged"),
        ("other manifest", "manifest.json is damaged"),
        ("shorter manifest", "manifest.json was edited: it has another checksum than it says"),
        ("manifest without a seal", "manifest.json is damaged, or of another version of rlsys"),
        ("infinite size", "manifest.json is damaged, or of another version of rlsys (TypeError"),
        ("name of half a character", "manifest.json is damaged, or of another version of rlsys"),
    ],
)
def test_damage_is_found_by_name(tmp_path: Path, kind: str, words: str) -> None:
    save(Checkpoints(tmp_path, keep=1), 1)
    (checkpoint,) = find_checkpoints(tmp_path)
    assert checkpoint.faults() == []
    damage(checkpoint.path, kind)
    (fault,) = checkpoint.faults()
    assert fault.startswith(words)


def test_additional_files_do_no_harm(tmp_path: Path) -> None:
    """A file manager's, say."""
    save(Checkpoints(tmp_path, keep=1), 1)
    (checkpoint,) = find_checkpoints(tmp_path)
    (checkpoint.path / ".DS_Store").touch()
    (checkpoint.trainer_dir / "notes.txt").touch()
    assert checkpoint.faults() == []


def test_the_manifest_covers_all_files(tmp_path: Path) -> None:
    async def write() -> None:
        async with Checkpoints(tmp_path, keep=1).writing(1) as checkpoint:
            (checkpoint.path / "rollouts" / "deep").mkdir(parents=True)
            (checkpoint.path / "rollouts" / "deep" / "0").write_bytes(b"abc")
            checkpoint.controller_file.touch()

    asyncio.run(write())
    (checkpoint,) = find_checkpoints(tmp_path)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    assert manifest["files"] == {
        "controller.json": {"bytes": 0, "crc32": "00000000"},
        "rollouts/deep/0": {"bytes": 3, "crc32": "352441c2"},
    }


def test_the_event_loop_runs_during_disk_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers only when the loop has done something else meanwhile."""
    answered = threading.Event()

    def slow(descriptor: int) -> None:
        assert answered.wait(300)

    async def run() -> None:
        monkeypatch.setattr(os, "fsync", slow)
        asyncio.get_running_loop().call_later(0.1, answered.set)
        async with Checkpoints(tmp_path, keep=1).writing(1) as checkpoint:
            checkpoint.controller_file.touch()

    asyncio.run(run())
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1]


def test_a_cancelled_save_leaves_no_thread_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        assert go_on.wait(300)

    async def write() -> None:
        async with Checkpoints(tmp_path, keep=1).writing(1) as checkpoint:
            checkpoint.controller_file.touch()

    async def run() -> None:
        monkeypatch.setattr(os, "fsync", slow)
        task = asyncio.create_task(write())
        await asyncio.to_thread(syncing.wait, 60)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert all(checkpoint.faults() == [] for checkpoint in find_checkpoints(tmp_path))


def test_changes_of_the_initial_weights_are_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.initial_model("model") == "model"
    assert initial_weights_fault(tmp_path, None) is None
    weights = checkpoints.initial_weights
    weights.mkdir()
    (weights / "weights").write_text("as taught")
    seal = checkpoints.seal_initial_weights()
    assert checkpoints.initial_model("model") == weights

    def fault(checksum: str | None) -> str:
        error = initial_weights_fault(tmp_path, checksum)
        assert error is not None
        assert error.field == str(weights)
        return error.rule

    assert initial_weights_fault(tmp_path, seal) is None
    assert fault(None)
    (weights / "weights").write_text("as tau9ht")
    assert "weights has another checksum" in fault(seal)
    assert checkpoints.seal_initial_weights() != seal
    assert "manifest.json" in fault(seal)
    shutil.rmtree(weights)
    assert "is missing" in fault(seal)
