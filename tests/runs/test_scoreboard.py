"""Damaged and missing evaluations.jsonl and best/."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.atomic_files import DiskError
from rlsys.common.manifest import faults_of, write_manifest
from rlsys.evaluation.held_out import export_path
from rlsys.runs.evaluation_log import EvaluationLog, find_damage, find_missing
from rlsys.runs.resume import read_history
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_history import read_evidence
from tests.errors import invalid
from tests.histories import GROUPS_PER_STEP, made_up_run, write_run
from tests.tiers import rest_slow


def evaluate(files: RunFiles, board: EvaluationLog, step: int, mean: float) -> None:
    exported = export_path(files.evaluating, step)
    exported.mkdir(parents=True)
    (exported / "model.safetensors").write_text(f"of step {step}")
    board.add(step, {"eval/mean@4": mean, "eval/prompts": 8}, exported)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Files of a run with the best evaluation at step 8."""
    files = write_run(made_up_run(2), tmp_path / "run")
    board = EvaluationLog(files, after_step=0)
    for step, mean in ((0, 0.25), (4, 0.5), (8, 0.75), (12, 0.5)):
        evaluate(files, board, step, mean)
    board.close()
    return files


def test_written_evaluations_are_undamaged(files: RunFiles) -> None:
    assert [*find_damage(files), *find_missing(files)] == []
    assert read_evidence(files.path)[1] == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def better_in_the_end(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[-1].replace("0.5", "0.9")]))


def doubled(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def last_line_doubled(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))


def later_lines(*steps: int) -> Callable[[Path], None]:
    """Lines that nothing was evaluated for."""

    def add_lines(path: Path) -> None:
        last = json.loads(path.read_bytes().splitlines()[-1])
        with path.open("a") as file:
            file.writelines(json.dumps({**last, "step": step}) + "\n" for step in steps)

    return add_lines


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    """To nothing."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("nowhere")


def a_loop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("name", "damage", "part"),
    rest_slow(
        [
            ("evaluations.jsonl", flip, "does not begin with the 4 lines"),
            ("evaluations.jsonl", halve, "it was cut"),
            ("evaluations.jsonl", no_last_line, "has 3 lines"),
            ("evaluations.jsonl", better_in_the_end, "it was edited or damaged"),
            ("evaluations.jsonl", a_pipe, "cannot be read"),
            ("evaluations.jsonl", doubled, "has step 0 in line 5, after step 12"),
            ("evaluations.jsonl", last_line_doubled, "has step 12 in line 5, after step 12"),
            ("evaluations.jsonl", later_lines(7), "has step 7 in line 5, after step 12"),
            ("evaluations.jsonl", later_lines(16, 20), "has 6 lines, and the run wrote 4"),
            ("evaluations.jsonl", a_link, "is missing"),
            ("evaluations.jsonl", a_loop, "cannot be read"),
            (".evaluated", a_link, "cannot be read"),
            (".evaluated", a_loop, "cannot be read"),
            ("best", a_link, "manifest.json is missing"),
            ("best", a_loop, "manifest.json is damaged"),
            (".evaluated", halve, "cannot be read"),
            ("best/model.safetensors", flip, "model.safetensors has another checksum"),
            ("best/model.safetensors", halve, "model.safetensors has 4 bytes"),
            ("best/model.safetensors", Path.unlink, "model.safetensors is missing"),
            ("best/evaluation.json", flip, "evaluation.json has another checksum"),
            ("best/manifest.json", flip, "manifest.json"),
            ("best/manifest.json", Path.unlink, "manifest.json is missing"),
        ],
        first=8,
    ),
)
def test_damage_is_refused_and_audited_and_its_fix_works(
    files: RunFiles, name: str, damage: Callable[[Path], None], part: str
) -> None:
    damage(files.path / name)
    kept = files.path / name.partition("/")[0]
    with invalid(str(kept)) as error:
        read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    assert part in error.value.rule
    assert read_evidence(files.path)[1] == [str(error.value)]
    kept.rename(files.path.parent / "away")
    read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    EvaluationLog(files, after_step=12).close()
    assert find_damage(files) == []


def of_another_run(files: RunFiles) -> None:
    """Replace best/ by that of another run, with a better model after the same steps."""
    other = write_run(made_up_run(3), files.path.parent / "other")
    other.config.write_text(json.dumps({"config": {}, "run_id": "other"}))
    board = EvaluationLog(other, after_step=0)
    evaluate(other, board, 8, 0.9)
    board.close()
    shutil.rmtree(files.best)
    shutil.copytree(other.best, files.best)


def of_no_run(files: RunFiles) -> None:
    """As it was written before it had a run."""
    entry = json.loads((files.best / "evaluation.json").read_text())
    del entry["run_id"]
    (files.best / "evaluation.json").write_text(json.dumps(entry))
    write_manifest(files.best)


def with_other_weights(files: RunFiles) -> None:
    (files.best / "model.safetensors").write_text("of no step")
    write_manifest(files.best)


def edited(files: RunFiles, **fields: Any) -> None:
    entry = json.loads((files.best / "evaluation.json").read_text())
    (files.best / "evaluation.json").write_text(json.dumps({**entry, **fields}))
    write_manifest(files.best)


def better(files: RunFiles) -> None:
    edited(files, **{"eval/mean@4": 0.9})


def beyond_the_run(files: RunFiles) -> None:
    edited(files, step=99)


def with_no_number(files: RunFiles) -> None:
    edited(files, **{"eval/mean@4": "0.75"})


def with_no_json(files: RunFiles) -> None:
    (files.best / "evaluation.json").write_text("{")
    write_manifest(files.best)


@pytest.mark.parametrize(
    ("exchange", "part"),
    rest_slow(
        [
            (of_another_run, 'run_id="other"'),
            (of_no_run, "run_id=null"),
            (with_other_weights, "another checksum than .evaluated"),
            (better, "another checksum than .evaluated"),
            (beyond_the_run, "another checksum than .evaluated"),
            (with_no_number, "no evaluation in its evaluation.json"),
            (with_no_json, "cannot be read (JSONDecodeError"),
        ],
        first=3,
    ),
)
def test_an_undamaged_model_that_was_not_kept_there_is_refused(
    files: RunFiles, exchange: Callable[[RunFiles], None], part: str
) -> None:
    exchange(files)
    assert faults_of(files.best) == []
    with invalid(str(files.best)) as error:
        read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    assert part in error.value.rule
    assert read_evidence(files.path)[1] == [str(error.value)]


def test_the_model_of_another_run_is_known_by_its_id_alone(files: RunFiles) -> None:
    of_another_run(files)
    files.evaluated.unlink()
    (fault,) = find_damage(files)
    assert fault.field == str(files.best)
    assert '"other"' in fault.rule


def test_an_earlier_best_model_is_not_put_back(files: RunFiles) -> None:
    """A copy of it, of the same run."""
    shutil.copytree(files.best, files.path.parent / "earlier")
    board = EvaluationLog(files, after_step=12)
    evaluate(files, board, 16, 0.9)
    board.close()
    assert [*find_damage(files), *find_missing(files)] == []
    shutil.rmtree(files.best)
    shutil.copytree(files.path.parent / "earlier", files.best)
    (fault,) = find_damage(files)
    assert fault.field == str(files.best)
    assert ".evaluated" in fault.rule


@pytest.mark.parametrize("name", ["evaluations.jsonl", ".evaluated", "best"])
def test_missing_files_are_reported_and_not_needed(
    files: RunFiles, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = files.path / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (fault,) = read_evidence(files.path)[1]
    assert fault.startswith(str(path))
    read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    (message,) = caplog.messages
    assert message.startswith(fault)


def test_a_worse_model_in_the_place_of_the_best_is_found(files: RunFiles) -> None:
    shutil.rmtree(files.best)
    board = EvaluationLog(files, after_step=12)
    evaluate(files, board, 16, 0.5)
    board.close()
    (fault,) = find_missing(files)
    assert fault.startswith(str(files.best))
    assert "of step 16" in fault
    assert "of step 8" in fault


def test_evaluations_are_consistent_at_every_moment(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill anywhere leaves what the next start takes for its own."""
    moments = []

    def note(_: int) -> None:
        moments.append(find_damage(files))

    monkeypatch.setattr(os, "fsync", note)
    board = EvaluationLog(files, after_step=4)
    assert not board.has(8)
    evaluate(files, board, 8, 0.6)
    board.go_back(4)
    evaluate(files, board, 8, 0.8)
    board.close()
    assert len(moments) > 8
    assert not any(moments)
    steps = [json.loads(line)["step"] for line in files.evaluations.read_text().splitlines()]
    assert steps == [0, 4, 8]
    assert find_missing(files) == []


def test_lines_must_be_in_order_also_after_an_interrupted_removal(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the removal: any number of them may be there."""

    class Killed(Exception):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr("rlsys.runs.evaluation_log.StepLog", kill)
    with pytest.raises(Killed):
        EvaluationLog(files, after_step=4)
    assert [*find_damage(files), *find_missing(files)] == []
    last_line_doubled(files.evaluations)
    (fault,) = find_damage(files)
    assert "has step 12 in line 5, after step 12" in fault.rule


def test_no_second_line_is_added_where_the_first_could_not_be_sealed(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may have room for a line and none for a file; the run goes on, and is killed."""
    board = EvaluationLog(files, after_step=12)
    written = 0

    def write_atomically(path: Path, text: str) -> None:
        nonlocal written
        written += 1
        if written > 1:  # the first is the seal before the line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rlsys.runs.evaluation_log.write_atomically", write_atomically)
    for step in (16, 20, 24):
        with pytest.raises(DiskError) as refused:
            evaluate(files, board, step, 0.1)
        assert refused.value.errno == errno.ENOSPC
    board.close()
    assert len(files.evaluations.read_text().splitlines()) == 5
    assert find_damage(files) == []
