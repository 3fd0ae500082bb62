"""Histories that a resume refuses before it changes a byte."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.append_only_file import Tally
from rlsys.common.manifest import write_manifest
from rlsys.errors import InvalidValue
from rlsys.runs.observe.step_log import StepLog
from rlsys.runs.resume import History, read_history
from rlsys.runs.run_files import RunFiles
from tests.errors import invalid
from tests.histories import GROUPS_PER_STEP, made_up_run, with_external_groups, write_run

NUM_STEPS = 12
RUN = made_up_run(4, num_steps=NUM_STEPS)
STEPS = RUN.checkpoints
NEWEST = f"checkpoints/step_{NUM_STEPS:06d}"


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return write_run(RUN, tmp_path / "run")


def read(files: RunFiles, num_steps: int = NUM_STEPS) -> History:
    return read_history(files, groups_per_step=GROUPS_PER_STEP, num_steps=num_steps)


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def checkpoint(files: RunFiles, step: int) -> Path:
    return files.checkpoints / f"step_{step:06d}"


def edit_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def test_a_resume_continues_from_the_newest_checkpoint(files: RunFiles) -> None:
    history = read(files)
    assert history.checkpoint.path == checkpoint(files, NUM_STEPS)
    assert history.state.prompts == RUN.prompt_order
    assert list(history.events) == list(RUN.events)


def flip(files: RunFiles) -> None:
    weights = checkpoint(files, NUM_STEPS) / "trainer" / "weights"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])


def two_damaged(files: RunFiles) -> None:
    flip(files)
    (checkpoint(files, STEPS[-2]) / "controller.json").unlink()


def all_damaged(files: RunFiles) -> None:
    for step in STEPS:
        (checkpoint(files, step) / "manifest.json").unlink()


def renamed(files: RunFiles) -> None:
    checkpoint(files, NUM_STEPS).rename(checkpoint(files, NUM_STEPS - 1))


def no_ledger(files: RunFiles) -> None:
    files.ledger.unlink()


def cut_ledger(files: RunFiles) -> None:
    last = max(i for i, event in enumerate(RUN.events) if event["event"] == "trained")
    edit_lines(files.ledger, lambda lines: lines[:last])


def empty_ledger(files: RunFiles) -> None:
    files.ledger.write_text("")


def damaged_ledger(files: RunFiles) -> None:
    edit_lines(files.ledger, lambda lines: [*lines[:3], "nonsense\n", *lines[3:]])


def contradicting_ledger(files: RunFiles) -> None:
    edit_lines(files.ledger, lambda lines: [lines[0], *lines])


def former_ledger(files: RunFiles) -> None:
    """As it was written before it had the tokens' versions."""
    edit_lines(
        files.ledger,
        lambda lines: [
            line.partition(', "oldest_versions"')[0] + "}\n" if "oldest" in line else line
            for line in lines
        ],
    )


def no_metrics(files: RunFiles) -> None:
    files.metrics.unlink()


def short_metrics(files: RunFiles) -> None:
    edit_lines(files.metrics, lambda lines: lines[:5])


def gap_in_metrics(files: RunFiles) -> None:
    edit_lines(files.metrics, lambda lines: [*lines[:5], *lines[6:]])


def empty_metrics(files: RunFiles) -> None:
    files.metrics.write_text("")


def damaged_metrics(files: RunFiles) -> None:
    edit_lines(files.metrics, lambda lines: [*lines[:5], '{"step"\n', *lines[5:]])


def short_rollouts(files: RunFiles) -> None:
    edit_lines(files.rollouts, lambda lines: lines[:5])


def empty_rollouts(files: RunFiles) -> None:
    files.rollouts.write_text("")


def doubled_rollouts(files: RunFiles) -> None:
    edit_lines(files.rollouts, lambda lines: [*lines[:5], *lines[3:]])


def rollouts_twice(files: RunFiles) -> None:
    edit_lines(files.rollouts, lambda lines: lines * 2)


def edited_rollouts(files: RunFiles) -> None:
    edit_lines(files.rollouts, lambda lines: [lines[0].replace("word", "sword"), *lines[1:]])


def metrics_are_a_pipe(files: RunFiles) -> None:
    files.metrics.unlink()
    os.mkfifo(files.metrics)


def swapped_issues(files: RunFiles) -> None:
    """Where the newest checkpoint does not know them: behind it."""
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    issued = [i for i, event in enumerate(RUN.events) if event["event"] == "issued"][-2:]

    def swap(lines: list[str]) -> list[str]:
        first, second = issued
        lines[first], lines[second] = lines[second], lines[first]
        return lines

    edit_lines(files.ledger, swap)


def swapped_early_issues(files: RunFiles) -> None:
    edit_lines(files.ledger, lambda lines: [lines[1], lines[0], *lines[2:]])


def former_state(files: RunFiles) -> None:
    """As controller.json was before it knew of the records."""
    edit_state(files, lambda state: state.pop("records"))


def no_prompts(files: RunFiles) -> None:
    edit_state(files, lambda state: state["prompts"].update(num_prompts=0))


def edit_state(files: RunFiles, edit: Callable[[dict[str, Any]], object]) -> None:
    """Of the newest checkpoint, with its manifest."""
    directory = checkpoint(files, NUM_STEPS)
    state = json.loads((directory / "controller.json").read_text())
    edit(state)
    (directory / "controller.json").write_text(json.dumps(state))
    write_manifest(directory)


def shorter_manifest(files: RunFiles) -> None:
    (checkpoint(files, NUM_STEPS) / "trainer" / "weights").unlink()
    path = checkpoint(files, NUM_STEPS) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["trainer/weights"]
    path.write_text(json.dumps(manifest))


def other_beginning(files: RunFiles) -> None:
    (files.checkpoints / ".beginning" / "weights").write_text("as taughT")


def no_beginning(files: RunFiles) -> None:
    shutil.rmtree(files.checkpoints / ".beginning")


def no_rollouts(files: RunFiles) -> None:
    files.rollouts.unlink()


def disordered_rollouts(files: RunFiles) -> None:
    edit_lines(files.rollouts, lambda lines: lines[::-1])


@pytest.mark.parametrize(
    ("damage", "name", "parts"),
    [
        (flip, NEWEST, ["is damaged", f"continue from CHECKPOINTS/step_{STEPS[-2]:06d}"]),
        (
            two_damaged,
            NEWEST,
            [
                f"Delete CHECKPOINTS/step_{STEPS[-2]:06d} and CHECKPOINTS/step_0000{NUM_STEPS} to "
                f"continue from CHECKPOINTS/step_{STEPS[-3]:06d}"
            ],
        ),
        (all_damaged, NEWEST, ["manifest.json is missing", "model.path="]),
        (
            renamed,
            "checkpoints/step_000011/controller.json",
            ["its step is 12", "Delete CHECKPOINTS/step_000011 to continue from CHECKPOINTS/"],
        ),
        (shorter_manifest, "checkpoints/step_000012", ["manifest.json was edited"]),
        (other_beginning, "checkpoints/.beginning", ["weights has another checksum"]),
        (no_beginning, "checkpoints/.beginning", ["is missing"]),
        (former_state, f"{NEWEST}/controller.json", ["KeyError"]),
        (no_prompts, f"{NEWEST}/controller.json", ["'num_prompts': 0"]),
        (no_ledger, "ledger.jsonl", ["is missing", "CHECKPOINTS/step_000012"]),
        (
            cut_ledger,
            "ledger.jsonl",
            [
                "was cut",
                f"Delete CHECKPOINTS/step_0000{NUM_STEPS} to continue from "
                f"CHECKPOINTS/step_{STEPS[-2]:06d}",
            ],
        ),
        (empty_ledger, "ledger.jsonl", ["has 0 lines", "another name"]),
        (damaged_ledger, "ledger.jsonl", ["line 4"]),
        (contradicting_ledger, "ledger.jsonl", ["edited or damaged"]),
        (swapped_early_issues, "ledger.jsonl", ["edited or damaged"]),
        (swapped_issues, "ledger.jsonl", ["event ", "prompt ", "truncate -s "]),
        (former_ledger, "ledger.jsonl", [f"step_0000{NUM_STEPS}"]),
        (no_metrics, "metrics.jsonl", ["is missing", "another name"]),
        (short_metrics, "metrics.jsonl", ["has 5 lines", "12"]),
        (gap_in_metrics, "metrics.jsonl", ["has 11 lines"]),
        (empty_metrics, "metrics.jsonl", ["has 0 lines"]),
        (damaged_metrics, "metrics.jsonl", ["12 lines", "line 6"]),
        (metrics_are_a_pipe, "metrics.jsonl", ["cannot be read"]),
        (no_rollouts, "rollouts.jsonl", ["is missing"]),
        (short_rollouts, "rollouts.jsonl", ["has 5 lines", "24"]),
        (empty_rollouts, "rollouts.jsonl", ["has 0 lines"]),
        (doubled_rollouts, "rollouts.jsonl", ["24 lines"]),
        (edited_rollouts, "rollouts.jsonl", ["24 lines"]),
        (rollouts_twice, "rollouts.jsonl, line 25", ["step 1,", "step 12", "truncate -s "]),
        (disordered_rollouts, "rollouts.jsonl", ["24 lines"]),
    ],
)
def test_files_that_do_not_belong_together_are_refused_and_left_alone(
    files: RunFiles, damage: Callable[[RunFiles], None], name: str, parts: list[str]
) -> None:
    damage(files)
    before = content(files.path)
    with invalid(str(files.path / name)) as error:
        read(files)
    for part in parts:
        assert part.replace("CHECKPOINTS", str(files.checkpoints)) in str(error.value)
    assert content(files.path) == before


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:99]), "it was cut"),
        (lambda path: path.write_bytes(bytes(range(256)) * 99), "line 1 "),
        (lambda path: edit_lines(path, lambda lines: [*lines[:1], *lines]), "does not begin with"),
        (
            lambda path: edit_lines(
                path, lambda lines: [lines[0].replace("0.0", "9.0"), *lines[1:]]
            ),
            "was edited or damaged",
        ),
    ],
)
def test_an_external_log_of_another_kind_is_refused_and_left_alone(
    tmp_path: Path, change: Callable[[Path], object], part: str
) -> None:
    """Older checkpoints cannot do without it, because issued groups stay issued."""
    files = write_run(with_external_groups(RUN), tmp_path / "run")
    assert read(files).state.external == Tally.of(files.external, 10**9)
    change(files.external)
    before = content(files.path)
    with invalid(str(files.external)) as error:
        read(files)
    assert part in error.value.rule
    assert "delete" not in error.value.fix.lower()
    assert content(files.path) == before


def test_a_checkpoint_of_before_external_logs_were_known_is_read(files: RunFiles) -> None:
    newest = checkpoint(files, NUM_STEPS)
    state = json.loads((newest / "controller.json").read_text())
    del state["external"]
    (newest / "controller.json").write_text(json.dumps(state))
    write_manifest(newest)
    assert read(files).state.external is None


def test_the_advice_for_a_damaged_checkpoint_works(files: RunFiles) -> None:
    flip(files)
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    assert read(files).checkpoint.step == STEPS[-2]


def fix_of(files: RunFiles) -> list[str]:
    """Return the command of the error."""
    with pytest.raises(InvalidValue) as refused:
        read(files)
    return shlex.split(refused.value.fix[refused.value.fix.index("truncate ") :])


@pytest.mark.parametrize("damage", [swapped_issues, rollouts_twice])
def test_the_advice_to_cut_a_file_works(
    files: RunFiles, damage: Callable[[RunFiles], None]
) -> None:
    damage(files)
    subprocess.run(fix_of(files), check=True)
    read(files)


def test_the_last_trained_step_may_be_after_the_checkpoint(files: RunFiles) -> None:
    assert read(files).last_step == NUM_STEPS
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    assert read(files).last_step == NUM_STEPS


def test_records_are_cut_to_those_of_the_checkpoint(files: RunFiles) -> None:
    """And the lines that then follow make the same file as before."""
    before = files.rollouts.read_bytes()
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    history = read(files)
    step, kept = history.checkpoint.step, history.state.records["rollouts.jsonl"]
    log = StepLog(files.rollouts, after_step=step, kept=kept)
    assert files.rollouts.read_bytes() == before[: kept.num_bytes]
    for line in RUN.rollouts:
        if line["step"] > step:
            log.append(line)
    log.close()
    assert files.rollouts.read_bytes() == before
    assert log.tally == Tally().plus(before)


def test_fewer_steps_than_were_trained_are_refused(files: RunFiles) -> None:
    with invalid("num_steps", 11):
        read(files, num_steps=11)
    assert read(files, num_steps=20).checkpoint.step == 12


def test_a_run_without_a_checkpoint_is_refused(files: RunFiles) -> None:
    for directory in (files.checkpoints, files.hf):
        shutil.rmtree(directory)
    with invalid("name", "run"):
        read(files)


def test_strays_are_reported_and_not_used(
    files: RunFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (files.checkpoints / "notes").mkdir()
    (files.checkpoints / "step_000099_copy").mkdir()
    with caplog.at_level(logging.WARNING):
        assert read(files).checkpoint.step == NUM_STEPS
    assert [record.getMessage().split()[0].rpartition("/")[2] for record in caplog.records] == [
        "notes",
        "step_000099_copy",
    ]


def test_lines_after_the_checkpoint_may_be_torn(files: RunFiles) -> None:
    """As a kill leaves it: events and lines beyond the checkpoint, the last ones half written."""
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    last = json.dumps({"event": "trained", "step": 12, "groups": [1, 2]})
    for path, text in ((files.ledger, last[:20]), (files.metrics, '{"st'), (files.rollouts, "{")):
        with path.open("a") as file:
            file.write(text)
    assert read(files).checkpoint.step == STEPS[-2]
