"""Checkpoints appear atomically, and paths reach nothing else."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.atomic_files import DiskError
from rlsys.common.manifest import faults_of, write_manifest
from rlsys.tinker_server import checkpoint_directories
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.checkpoint_lifetimes import RETRY_S
from rlsys.tinker_server.server_checkpoints import SavedModel, ServerCheckpoints, check_undamaged
from tests.tinker_server.clocks import Clock
from tests.tinker_server.refusals import refused

LIMIT_S = 60.0
SAVED = SavedModel(base_model="tiny", lora="r8a32", version=3)


def save(
    checkpoints: ServerCheckpoints,
    path: str,
    text: str,
    *,
    overwrite: bool = False,
    ttl_s: float | None = None,
) -> None:
    async def write() -> None:
        async with checkpoints.writing(path, SAVED, overwrite=overwrite, ttl_s=ttl_s) as place:
            (place / "state").write_text(text)
            assert checkpoints.exists(path, "weights") == overwrite

    asyncio.run(write())


def test_a_checkpoint_is_found_by_its_path(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("session-1:train:0", "weights", "first")
    assert path == "tinker://session-1:train:0/weights/first"
    save(checkpoints, path, "1")
    model, directory = checkpoints.parse(path, "weights")
    assert (model, (directory / "state").read_text()) == ("session-1:train:0", "1")
    assert checkpoints.description(directory) == SAVED
    assert [one.path for one in checkpoints.of_model(model)] == [path]


def test_a_name_is_taken_once_unless_it_is_overwritten(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")
    save(checkpoints, path, "2", overwrite=True)
    with refused("path", path, status=409):
        save(checkpoints, path, "3")
    assert (checkpoints.parse(path, "weights")[1] / "state").read_text() == "2"


def test_an_incomplete_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")

    async def write() -> None:
        async with checkpoints.writing(path, SAVED, overwrite=False) as place:
            (place / "state").write_text("1")
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(write())
    assert not list(tmp_path.rglob("state"))


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", ".hidden", "a" * 201])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with refused("path", name):
        ServerCheckpoints(tmp_path).path("m", "weights", name)


@pytest.mark.parametrize(
    "path",
    [
        "tinker://m/sampler_weights/a",
        "tinker://../weights/a",
        "tinker://m/weights/..",
        "tinker://m/weights/a/b",
        "/etc/passwd",
        "tinker://m/weights/missing",
    ],
)
def test_a_path_only_reaches_checkpoints(tmp_path: Path, path: str) -> None:
    with pytest.raises(ApiError):
        ServerCheckpoints(tmp_path).parse(path, "weights")


@pytest.mark.parametrize("text", ['{"a": ', '{"base_model": "m"}', "[]"])
def test_a_damaged_saved_json_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "saved.json").write_text(text)
    write_manifest(tmp_path)
    with refused(str(tmp_path / "saved.json")):
        ServerCheckpoints(tmp_path).description(tmp_path)


def test_a_saved_json_that_was_edited_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1234")
    _, directory = checkpoints.parse(path, "weights")
    file = directory / "saved.json"
    file.write_text(file.read_text().replace("r8a32", "r9a32"))
    with refused(str(file)):
        checkpoints.description(directory)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1234")
    _, directory = checkpoints.parse(path, "weights")
    asyncio.run(check_undamaged(path, directory))
    (directory / "state").write_text("1235")
    with refused("path", path) as error:
        asyncio.run(check_undamaged(path, directory))
    assert "state has another" in error.value.rule
    asyncio.run(checkpoints.remove(directory))
    with refused("path", path, status=404):
        asyncio.run(check_undamaged(path, directory))


def test_a_kill_between_two_renames_leaves_the_state_before(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")
    _, directory = checkpoints.parse(path, "weights")
    directory.rename(directory.with_name(".a.before"))
    assert (checkpoints.parse(path, "weights")[1] / "state").read_text() == "1"
    save(checkpoints, path, "2", overwrite=True)
    assert (checkpoints.parse(path, "weights")[1] / "state").read_text() == "2"
    assert [one.name for one in directory.parent.iterdir()] == ["a"]


def test_a_kill_before_the_state_before_is_removed_leaves_the_new_one(tmp_path: Path) -> None:
    """It can be overwritten, and what is removed does not come back."""
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "2")
    _, directory = checkpoints.parse(path, "weights")
    before = directory.with_name(".a.before")
    shutil.copytree(directory, before)
    save(checkpoints, path, "3", overwrite=True)
    assert (checkpoints.parse(path, "weights")[1] / "state").read_text() == "3"
    shutil.copytree(directory, before)
    asyncio.run(checkpoints.remove(directory))
    assert not checkpoints.exists(path, "weights")


def killed_in_mid_save(checkpoints: ServerCheckpoints, path: str) -> None:
    """Leave what a server leaves that is killed while a trainer writes."""

    async def write() -> None:
        async with checkpoints.writing(path, SAVED, overwrite=True, ttl_s=50) as place:
            (place / "state").write_text("half")
            shutil.copytree(place, place.with_name("copy"))

    asyncio.run(write())
    _, directory = checkpoints.parse(path, "weights")
    directory.with_name("copy").rename(directory.with_name(f".{directory.name}.partial"))


def test_the_next_server_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed = ServerCheckpoints(tmp_path)
    path = killed.path("m", "weights", "a")
    killed_in_mid_save(killed, path)
    other = killed.path("m", "weights", "b")
    save(killed, other, "old")
    directory = killed.get(other).directory
    directory.rename(directory.with_name(".b.before"))
    (directory.with_name(".gone.expires")).write_text("1")
    named = killed.path("m", "sampler_weights", "named")

    save_for_sampler(killed, "step-000001-1", is_temporary=True)
    save_for_sampler(killed, "named", is_temporary=False)
    next_one = ServerCheckpoints(tmp_path)
    next_one.recover()
    assert {one.path for one in next_one.all()} == {path, other, named}
    files = sorted(one.name for one in (tmp_path / "m" / "weights").iterdir())
    assert files == [".a.expires", "a", "b"]
    assert (next_one.get(other).directory / "state").read_text() == "old"


def save_for_sampler(checkpoints: ServerCheckpoints, name: str, *, is_temporary: bool) -> Path:
    path = checkpoints.path("m", "sampler_weights", name)

    async def write() -> None:
        description = replace(SAVED, is_temporary=is_temporary)
        async with checkpoints.writing(path, description, overwrite=False) as place:
            (place / "adapter").mkdir()
            (place / "adapter" / "weights").write_text("1")

    asyncio.run(write())
    return checkpoints.parse(path, "sampler_weights")[1]


def test_only_named_checkpoints_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    checkpoints = ServerCheckpoints(tmp_path)
    temporary = save_for_sampler(checkpoints, "step-000001-1", is_temporary=True)
    assert not synced
    save_for_sampler(checkpoints, "named", is_temporary=False)
    assert synced
    assert not faults_of(temporary)


def test_a_temporary_checkpoint_is_gone_before_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server is killed before its thread has removed them."""
    checkpoints = ServerCheckpoints(tmp_path / "server")
    directory = save_for_sampler(checkpoints, "step-000001-1", is_temporary=True)
    threads: list[Callable[[], object]] = []
    monkeypatch.setattr(
        checkpoint_directories,
        "start_thread",
        lambda run, *args, **_: threads.append(lambda: run(*args)),
    )
    checkpoints.start_removal(directory)
    assert not directory.exists()
    assert not checkpoints.of_model("m")
    assert len(list((tmp_path / "server").rglob("weights"))) == 1
    killed = shutil.copytree(tmp_path / "server", tmp_path / "killed")
    ServerCheckpoints(killed).recover()
    assert not list(killed.rglob("weights"))
    threads[0]()
    assert not list((tmp_path / "server").rglob("weights"))
    checkpoints.start_removal(directory)  # it has expired
    assert len(threads) == 1


def test_other_requests_run_while_the_files_of_a_checkpoint_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")
    begins, goes_on, remove_tree = threading.Event(), threading.Event(), shutil.rmtree

    def slowly(directory: Path, **options: Any) -> None:
        begins.set()
        assert goes_on.wait(LIMIT_S)
        remove_tree(directory, **options)

    async def main() -> None:
        removal = asyncio.create_task(checkpoints.remove(checkpoints.get(path).directory))
        assert await asyncio.to_thread(begins.wait, LIMIT_S)
        assert not checkpoints.exists(path, "weights")
        assert not removal.done()
        goes_on.set()
        await removal

    monkeypatch.setattr(shutil, "rmtree", slowly)
    asyncio.run(main())
    assert not list(tmp_path.rglob("state"))


def test_a_request_does_not_wait_for_a_removal_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free at once, and a later removal does not touch what is saved under it."""
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")
    goes_on, removed, remove_tree = threading.Event(), threading.Event(), shutil.rmtree

    def slowly(directory: Path, **options: Any) -> None:
        assert goes_on.wait(LIMIT_S)
        remove_tree(directory, **options)
        removed.set()

    monkeypatch.setattr(shutil, "rmtree", slowly)
    monkeypatch.setattr(checkpoint_directories, "REMOVAL_WAIT_S", 0.01)
    asyncio.run(checkpoints.remove(checkpoints.get(path).directory))
    save(checkpoints, path, "2")
    goes_on.set()
    assert removed.wait(LIMIT_S)
    (state,) = tmp_path.rglob("state")
    assert (checkpoints.get(path).directory / "state", state.read_text()) == (state, "2")


def test_a_removal_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")
    error, reported = PermissionError("read-only"), list[BaseException]()

    def fails(directory: Path, **options: Any) -> None:
        raise error

    monkeypatch.setattr(shutil, "rmtree", fails)
    monkeypatch.setattr(checkpoint_directories, "report", reported.append)
    asyncio.run(checkpoints.remove(checkpoints.get(path).directory))
    assert reported == [error]


def test_a_second_server_of_a_directory_removes_nothing_of_the_first(tmp_path: Path) -> None:
    first, second = ServerCheckpoints(tmp_path), ServerCheckpoints(tmp_path)
    first.recover()

    async def write() -> str:
        path = first.path("m", "weights", "a")
        async with first.writing(path, SAVED, overwrite=False) as place:
            (place / "state").write_text("1")
            second.recover()
        return path

    assert second.exists(asyncio.run(write()), "weights")


def test_a_lifetime_is_written_before_its_checkpoint_is_in_its_place(tmp_path: Path) -> None:
    """A kill between the two must not leave the lifetime of the state before."""
    clock = Clock()
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1", ttl_s=10)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            save(checkpoints, path, "2", overwrite=True)
    clock.now += 20
    restarted = ServerCheckpoints(tmp_path, now=clock)
    restarted.recover()
    restarted.expire()
    assert (restarted.get(path).directory / "state").read_text() == "1"


def test_a_copy_that_is_asked_for_twice_at_once_is_whole(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1")

    async def twice() -> set[str]:
        return set(await asyncio.gather(*(checkpoints.copy(path, "c", None) for _ in range(4))))

    (copied,) = asyncio.run(twice())
    asyncio.run(check_undamaged(copied, checkpoints.get(copied).directory))


def test_a_full_disk_is_a_disk_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")

    async def write() -> None:
        async with checkpoints.writing(path, SAVED, overwrite=False):
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(DiskError) as full:
        asyncio.run(write())
    assert full.value.errno == errno.ENOSPC
    assert not checkpoints.exists(path, "weights")
    assert not list((tmp_path / "m" / "weights").iterdir())


def test_a_checkpoint_expires_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    path = checkpoints.path("m:1", "weights", "a")
    kept = checkpoints.path("m:1", "weights", "kept")
    save(checkpoints, path, "1", ttl_s=50)
    save(checkpoints, kept, "2", ttl_s=50)
    checkpoints.set_ttl(kept, None)
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    checkpoints.recover()
    clock.now += 49
    assert [one.expires_at for one in checkpoints.of_model("m:1")] == [150.0, None]
    checkpoints.expire()
    clock.now += 1
    with pytest.raises(ApiError) as refused:
        checkpoints.parse(path, "weights")
    assert refused.value.status == 404
    for thread in started_threads(checkpoints.expire):
        thread.join(LIMIT_S)
    files = sorted(one.name for one in (tmp_path / "m.1" / "weights").iterdir())
    assert files == ["kept"]


def test_a_disk_that_refuses_removals_is_logged_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    paths = [checkpoints.path("m", "weights", name) for name in "ab"]
    for path in paths:
        save(checkpoints, path, "1", ttl_s=50)
    directories = {checkpoints.get(path).directory for path in paths}
    clock.now += 50

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with monkeypatch.context() as read_only:
        for name in ("rename", "unlink", "rmdir"):
            read_only.setattr(os, name, refuse)
        for _ in range(2):  # the second one comes too soon and tries nothing
            for thread in started_threads(checkpoints.expire):
                thread.join(LIMIT_S)
    assert len(caplog.records) == 2
    assert all(any(str(one) in line for line in caplog.messages) for one in directories)
    assert checkpoints.all() == []
    assert {one for one in directories if one.exists()} == directories
    clock.now += RETRY_S
    for thread in started_threads(checkpoints.expire):
        thread.join(LIMIT_S)
    assert not list((tmp_path / "m" / "weights").iterdir())


def started_threads(work: Callable[[], None]) -> set[threading.Thread]:
    """Run `work` and return the threads that it has started."""
    before = set(threading.enumerate())
    work()
    return set(threading.enumerate()) - before


def test_saving_again_replaces_the_time_to_live(tmp_path: Path) -> None:
    clock = Clock()
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1", ttl_s=10)
    save(checkpoints, path, "2", overwrite=True)
    clock.now += 10
    checkpoints.expire()
    assert checkpoints.exists(path, "weights")


def put_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("1")


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # reading it would never end


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    **{
        text: functools.partial(Path.write_text, data=text)
        for text in ("soon", "nan", "inf", "-1", "1e300", "9" * 22, "9" * 400, "")
    },
    "binary": functools.partial(Path.write_bytes, data=b"\xff\xfe\x00"),
    "directory": put_directory,
    "pipe": put_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_expiry_keeps_its_checkpoint_and_concerns_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    clock = Clock()
    before = ServerCheckpoints(tmp_path, now=clock)
    path, other = (before.path("m", "weights", name) for name in "ab")
    for each in (path, other):
        save(before, each, "1", ttl_s=50)
    file = tmp_path / "m" / "weights" / ".a.expires"
    DAMAGE[damage](file)
    checkpoints = ServerCheckpoints(tmp_path, now=clock)
    checkpoints.recover()
    (warning,) = caplog.records
    assert (warning.levelname, str(file) in warning.getMessage()) == ("WARNING", True)
    assert {one.path: one.expires_at for one in checkpoints.all()} == {path: None, other: 150.0}
    clock.now += 50
    for thread in started_threads(checkpoints.expire):
        thread.join(LIMIT_S)
    assert [one.path for one in checkpoints.all()] == [path]
    checkpoints.set_ttl(path, 10)
    assert checkpoints.get(path).expires_at == 160.0
    assert float(file.read_text()) == 160.0
    DAMAGE[damage](file)
    asyncio.run(checkpoints.remove(checkpoints.get(path).directory))
    assert not list((tmp_path / "m" / "weights").iterdir())


def test_a_damaged_expiry_without_a_checkpoint_is_removed_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "weights"
    (folder / ".gone.expires" / "inside").mkdir(parents=True)
    ServerCheckpoints(tmp_path).recover()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("damage", ["directory", "pipe"])
def test_a_saved_json_that_is_no_file_is_damage_of_its_checkpoint(
    tmp_path: Path, damage: str
) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path, other = (checkpoints.path("m", "sampler_weights", name) for name in "ab")
    for each in (path, other):
        save(checkpoints, each, "1")
    file = checkpoints.get(path).directory / "saved.json"
    DAMAGE[damage](file)
    checkpoints.recover()
    assert {one.path for one in checkpoints.all()} == {path, other}
    with refused(str(file)):
        checkpoints.description(checkpoints.get(path).directory)
    asyncio.run(checkpoints.remove(checkpoints.get(path).directory))
    assert [one.path for one in checkpoints.all()] == [other]


def test_a_checkpoint_that_is_deleted_while_it_is_listed_has_no_size(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1234")
    listed = checkpoints.get(path)
    assert listed.num_bytes == 4
    asyncio.run(checkpoints.remove(listed.directory))
    assert listed.num_bytes == 0


def test_a_copy_shares_files_until_one_is_deleted(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1234")
    copied = asyncio.run(checkpoints.copy(path, "copy-1", None))
    first, second = (checkpoints.get(one).directory / "state" for one in (path, copied))
    assert first.samefile(second)
    first.write_text("1235")  # damage of one is damage of both
    for one in (path, copied):
        with refused("path", one):
            asyncio.run(check_undamaged(one, checkpoints.get(one).directory))


def test_a_copy_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    checkpoints = ServerCheckpoints(tmp_path)
    path = checkpoints.path("m", "weights", "a")
    save(checkpoints, path, "1", ttl_s=50)
    copied = asyncio.run(checkpoints.copy(path, "copy-1", None))
    assert copied == "tinker://copy-1/weights/a"
    assert asyncio.run(checkpoints.copy(path, "copy-1", None)) == copied
    asyncio.run(checkpoints.remove(checkpoints.get(path).directory))
    _, directory = checkpoints.parse(copied, "weights")
    asyncio.run(check_undamaged(copied, directory))
    assert (directory / "state").read_text() == "1"
    assert checkpoints.get(copied).expires_at is None
    assert [one.path for one in checkpoints.all()] == [copied]
