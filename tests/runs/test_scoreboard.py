"""What is told of evaluations.jsonl and best/ when they are damaged or gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.manifest import faults_of, write_manifest
from rlsys.evaluation.held_out import export_path
from rlsys.runs.evaluation_log import EvaluationLog, damages_of, losses_of
from rlsys.runs.resume import read_history
from rlsys.runs.run_directory import RunFiles
from rlsys.runs.run_history import read_evidence
from tests.histories import GROUPS_PER_STEP, made_up_run, write_run


def evaluate(files: RunFiles, board: EvaluationLog, step: int, mean: float) -> None:
    exported = export_path(files.evaluating, step)
    exported.mkdir(parents=True)
    (exported / "model.safetensors").write_text(f"of step {step}")
    board.add(step, {"eval/mean@4": mean, "eval/prompts": 8}, exported)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Of a run whose evaluation of step 8 was the best."""
    files = write_run(made_up_run(2), tmp_path / "run")
    board = EvaluationLog(files, after_step=0)
    for step, mean in ((0, 0.25), (4, 0.5), (8, 0.75), (12, 0.5)):
        evaluate(files, board, step, mean)
    board.close()
    return files


def test_what_was_written_is_whole(files: RunFiles) -> None:
    assert damages_of(files) == losses_of(files) == []
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


def behind(*steps: int) -> Callable[[Path], None]:
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
    ("name", "damage", "words"),
    [
        ("evaluations.jsonl", flip, "does not begin with the 4 lines"),
        ("evaluations.jsonl", halve, "it was cut"),
        ("evaluations.jsonl", no_last_line, "has 3 lines"),
        ("evaluations.jsonl", better_in_the_end, "it was edited or damaged"),
        ("evaluations.jsonl", a_pipe, "is not a regular file"),
        ("evaluations.jsonl", doubled, "has one of step 0 in line 5, behind one of step 12"),
        ("evaluations.jsonl", last_line_doubled, "lines were doubled or moved"),
        ("evaluations.jsonl", behind(7), "has one of step 7 in line 5, behind one of step 12"),
        ("evaluations.jsonl", behind(16, 20), "has 6 lines where there were 4, and one that was"),
        ("evaluations.jsonl", a_link, "evaluations.jsonl is missing"),
        ("evaluations.jsonl", a_loop, "evaluations.jsonl cannot be read"),
        (".evaluated", a_link, ".evaluated cannot be read"),
        (".evaluated", a_loop, ".evaluated cannot be read"),
        ("best", a_link, "best is damaged: manifest.json is missing"),
        ("best", a_loop, "best is damaged: manifest.json is damaged"),
        (".evaluated", halve, ".evaluated cannot be read"),
        ("best/model.safetensors", flip, "best is damaged: model.safetensors has another checksum"),
        ("best/model.safetensors", halve, "best is damaged: model.safetensors has 4 bytes"),
        ("best/model.safetensors", Path.unlink, "best is damaged: model.safetensors is missing"),
        ("best/evaluation.json", flip, "best is damaged: evaluation.json has another checksum"),
        ("best/manifest.json", flip, "best is damaged: manifest.json"),
        ("best/manifest.json", Path.unlink, "best is damaged: manifest.json is missing"),
    ],
)
def test_damage_is_refused_and_audited_and_its_fix_works(
    files: RunFiles, name: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(files.path / name)
    (fault,) = read_evidence(files.path)[1]
    assert words in fault
    with pytest.raises(ValueError, match="without one, move it away: the run goes on") as refused:
        read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    assert fault in str(refused.value)
    (files.path / name.partition("/")[0]).rename(files.path.parent / "away")
    read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    EvaluationLog(files, after_step=12).close()
    assert damages_of(files) == []


def of_another_run(files: RunFiles) -> None:
    """Whose model is better, after the same steps."""
    other = write_run(made_up_run(3), files.path.parent / "other")
    other.config.write_text(json.dumps({"config": {}, "run_id": "other"}))
    board = EvaluationLog(other, after_step=0)
    evaluate(other, board, 8, 0.9)
    board.close()
    shutil.rmtree(files.best)
    shutil.copytree(other.best, files.best)


def of_no_run(files: RunFiles) -> None:
    """As it was written before it had a run."""
    told = json.loads((files.best / "evaluation.json").read_text())
    del told["run_id"]
    (files.best / "evaluation.json").write_text(json.dumps(told))
    write_manifest(files.best)


def with_other_weights(files: RunFiles) -> None:
    (files.best / "model.safetensors").write_text("of no step")
    write_manifest(files.best)


def told_differently(files: RunFiles, **fields: Any) -> None:
    told = json.loads((files.best / "evaluation.json").read_text())
    (files.best / "evaluation.json").write_text(json.dumps({**told, **fields}))
    write_manifest(files.best)


def better(files: RunFiles) -> None:
    told_differently(files, **{"eval/mean@4": 0.9})


def beyond_the_run(files: RunFiles) -> None:
    told_differently(files, step=99)


def with_no_number(files: RunFiles) -> None:
    told_differently(files, **{"eval/mean@4": "0.75"})


def with_no_json(files: RunFiles) -> None:
    (files.best / "evaluation.json").write_text("{")
    write_manifest(files.best)


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (of_another_run, 'best has run_id="other" in its evaluation.json where this run\'s is'),
        (of_no_run, "best has run_id=null in its evaluation.json where this run's is"),
        (with_other_weights, "best is not the model that was kept there, of which .evaluated"),
        (better, "best is not the model that was kept there"),
        (beyond_the_run, "best is not the model that was kept there"),
        (with_no_number, "best has no evaluation in its evaluation.json"),
        (with_no_json, "best has an evaluation.json that cannot be read"),
    ],
)
def test_a_whole_model_that_was_not_kept_there_is_refused(
    files: RunFiles, exchange: Callable[[RunFiles], None], words: str
) -> None:
    exchange(files)
    assert faults_of(files.best) == []
    (fault,) = read_evidence(files.path)[1]
    assert words in fault
    with pytest.raises(ValueError, match="without one, move it away: the run goes on") as refused:
        read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    assert fault in str(refused.value)


def test_the_model_of_another_run_is_known_by_its_id_alone(files: RunFiles) -> None:
    of_another_run(files)
    files.evaluated.unlink()
    (fault,) = damages_of(files)
    assert "it is another run's" in fault


def test_an_earlier_best_model_is_not_put_back(files: RunFiles) -> None:
    """A copy of it, of the same run."""
    shutil.copytree(files.best, files.path.parent / "earlier")
    board = EvaluationLog(files, after_step=12)
    evaluate(files, board, 16, 0.9)
    board.close()
    assert damages_of(files) == losses_of(files) == []
    shutil.rmtree(files.best)
    shutil.copytree(files.path.parent / "earlier", files.best)
    (fault,) = damages_of(files)
    assert "best is not the model that was kept there" in fault


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evaluations.jsonl", "evaluations.jsonl is missing"),
        (".evaluated", ".evaluated is missing, which says what stood in evaluations.jsonl"),
        ("best", "best is missing; the best model was that of step 8"),
    ],
)
def test_what_is_gone_is_told_and_done_without(
    files: RunFiles, caplog: pytest.LogCaptureFixture, name: str, words: str
) -> None:
    path = files.path / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (fault,) = read_evidence(files.path)[1]
    assert fault.endswith(words)
    read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=20)
    assert caplog.messages == [f"{fault}; the run goes on without"]


def test_a_worse_model_in_the_place_of_the_best_is_told(files: RunFiles) -> None:
    shutil.rmtree(files.best)
    board = EvaluationLog(files, after_step=12)
    evaluate(files, board, 16, 0.5)
    board.close()
    (fault,) = losses_of(files)
    assert fault.endswith("best holds the model of step 16; that of step 8 was better")


def test_evaluations_are_whole_at_every_moment(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill anywhere leaves what the next start takes for its own."""
    moments = []

    def note(_: int) -> None:
        moments.append(damages_of(files))

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
    assert losses_of(files) == []


def test_lines_that_stood_there_while_some_were_removed_rise_too(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before they were: any number of them may stand there."""

    class Killed(Exception):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr("rlsys.runs.evaluation_log.StepLog", kill)
    with pytest.raises(Killed):
        EvaluationLog(files, after_step=4)
    assert damages_of(files) == losses_of(files) == []
    last_line_doubled(files.evaluations)
    (fault,) = damages_of(files)
    assert "lines were doubled or moved" in fault


def test_no_second_line_is_added_where_the_first_could_not_be_told(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may have room for a line and none for a file; the run goes on, and is killed."""
    board = EvaluationLog(files, after_step=12)
    written = 0

    def write_atomically(path: Path, text: str) -> None:
        nonlocal written
        written += 1
        if written > 1:  # what stood before the line is written yet
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rlsys.runs.evaluation_log.write_atomically", write_atomically)
    for step in (16, 20, 24):
        with pytest.raises(OSError, match="the disk is full"):
            evaluate(files, board, step, 0.1)
    board.close()
    assert len(files.evaluations.read_text().splitlines()) == 5
    assert damages_of(files) == []
