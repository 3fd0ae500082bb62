"""What a resumed run refuses, by a sentence, before it changes a byte."""

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
from rlsys.runs.observe.step_log import StepLog
from rlsys.runs.resume import History, read_history
from rlsys.runs.run_directory import RunFiles
from tests.histories import GROUPS_PER_STEP, made_up_run, with_external_groups, write_run

NUM_STEPS = 12
RUN = made_up_run(4, num_steps=NUM_STEPS)
STEPS = RUN.checkpoints


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


def test_it_goes_on_from_the_newest_checkpoint(files: RunFiles) -> None:
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
    ("damage", "words"),
    [
        (
            flip,
            rf"step_0000{NUM_STEPS} is damaged: trainer/weights has another checksum.*delete "
            rf"\S+/step_0000{NUM_STEPS} to continue from \S+/step_{STEPS[-2]:06d}, which is whole",
        ),
        (
            two_damaged,
            rf"step_0000{NUM_STEPS} is damaged: .*delete \S+/step_{STEPS[-2]:06d} and "
            rf"\S+/step_0000{NUM_STEPS} to continue from \S+/step_{STEPS[-3]:06d}",
        ),
        (
            all_damaged,
            "is damaged: manifest.json is missing; there is nothing to go on from, as no older one "
            r"is whole: start again under another name, .*\(model.path=\S+/hf",
        ),
        (
            renamed,
            r"step_000011/controller.json does not belong .*it is of step 12.* Restore it from a "
            r"copy; without one, delete \S+/step_000011 to continue from \S+, which is whole",
        ),
        (
            shorter_manifest,
            r"step_000012 is damaged: manifest.json was edited: .* to continue from \S+, which is",
        ),
        (
            other_beginning,
            r"/.beginning is damaged: weights has another checksum .* A reference or a critic beg.*"
            "restore them from a copy, .* or start again under another name",
        ),
        (no_beginning, r"/.beginning is missing. A reference or a critic begins with the weights"),
        (former_state, r"controller.json does not belong .*written by another version of rlsys"),
        (no_prompts, r"controller.json does not belong .*prompts are \{.*'num_prompts': 0\}"),
        (
            no_ledger,
            r"ledger.jsonl is missing, and \S+/step_000012 builds on .* a copy; without one",
        ),
        (
            cut_ledger,
            r"ledger.jsonl has \d+ lines \([\d,]+ bytes\) where there were \d+ .*: it was cut, "
            rf"and \S+/step_0000{NUM_STEPS} builds on what was there. Restore it from a copy; "
            rf"without one, delete \S+/step_0000{NUM_STEPS} to continue from "
            rf"\S+/step_{STEPS[-2]:06d}, which is whole; later steps are trained again",
        ),
        (empty_ledger, r"ledger.jsonl has 0 lines .*no older one is whole: start again under anot"),
        (damaged_ledger, r"ledger.jsonl does not begin with the .* lines .*: line 4 is no JSON"),
        (contradicting_ledger, r"ledger.jsonl does not begin with .*; it was edited or damaged"),
        (swapped_early_issues, r"ledger.jsonl does not begin with the .* it was edited or damaged"),
        (
            swapped_issues,
            r"ledger.jsonl contradicts itself: event \d+: group \d+ was issued for prompt \d+ "
            r"where group \d+ for prompt \d+ is next; .*Its first \d+ lines are whole.*without "
            r"one, cut it there: truncate -s \d+ \S+/ledger.jsonl",
        ),
        (former_ledger, r"ledger.jsonl (does not begin|has \d+ lines)"),
        (no_metrics, r"metrics.jsonl is missing.*no older one is whole: start again under another"),
        (
            short_metrics,
            r"metrics.jsonl has 5 lines \(\d+ bytes\) where there were 12 .*it was cut",
        ),
        (gap_in_metrics, r"metrics.jsonl has 11 lines"),
        (empty_metrics, r"metrics.jsonl has 0 lines"),
        (damaged_metrics, r"metrics.jsonl does not begin with the 12 lines .*: line 6 is no JSON"),
        (metrics_are_a_pipe, r"metrics.jsonl cannot be read \(\S+ is no ordinary file\)"),
        (no_rollouts, r"rollouts.jsonl is missing.*Restore it from a copy"),
        (short_rollouts, r"rollouts.jsonl has 5 lines \(\d+,\d+ bytes\) where there were 24"),
        (empty_rollouts, r"rollouts.jsonl has 0 lines"),
        (doubled_rollouts, r"rollouts.jsonl does not begin with the 24 lines"),
        (edited_rollouts, r"rollouts.jsonl does not begin with the 24 lines"),
        (
            rollouts_twice,
            r"rollouts.jsonl, line 25 is of step 1, but stands behind .* step 12: .*truncate -s",
        ),
        (disordered_rollouts, r"rollouts.jsonl does not begin with the 24 lines"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_and_left_alone(
    files: RunFiles, damage: Callable[[RunFiles], None], words: str
) -> None:
    damage(files)
    before = content(files.path)
    with pytest.raises(ValueError, match=words):
        read(files)
    assert content(files.path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "is missing, and"),
        (lambda path: path.write_bytes(path.read_bytes()[:99]), "it was cut, and"),
        (lambda path: path.write_bytes(bytes(range(256)) * 99), "line 1 is no JSON"),
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
    tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    """No older checkpoint can do without it: what is issued stays so."""
    files = write_run(with_external_groups(RUN), tmp_path / "run")
    assert read(files).state.external == Tally.of(files.external, 10**9)
    change(files.external)
    before = content(files.path)
    with pytest.raises(ValueError, match=rf"external.jsonl .*{words}.* without one, start again"):
        read(files)
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
    """The command that a message gives."""
    with pytest.raises(ValueError, match="without one, cut it") as refused:
        read(files)
    return shlex.split(str(refused.value)[str(refused.value).index("truncate ") :])


@pytest.mark.parametrize("damage", [swapped_issues, rollouts_twice])
def test_the_advice_to_cut_a_file_works(
    files: RunFiles, damage: Callable[[RunFiles], None]
) -> None:
    damage(files)
    subprocess.run(fix_of(files), check=True)
    read(files)


def test_what_was_written_behind_the_newest_checkpoint_is_told(files: RunFiles) -> None:
    assert read(files).last_step == NUM_STEPS
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    assert read(files).last_step == NUM_STEPS


def test_records_are_cut_to_what_the_checkpoint_builds_on(files: RunFiles) -> None:
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
    with pytest.raises(ValueError, match=r"num_steps=11 lies below step 12, which this run has re"):
        read(files, num_steps=11)
    assert read(files, num_steps=20).checkpoint.step == 12


def test_a_run_without_a_checkpoint_says_so(files: RunFiles) -> None:
    for directory in (files.checkpoints, files.hf):
        shutil.rmtree(directory)
    with pytest.raises(ValueError, match="holds no checkpoint to resume from"):
        read(files)


def test_strays_are_told_and_not_used(files: RunFiles, caplog: pytest.LogCaptureFixture) -> None:
    (files.checkpoints / "notes").mkdir()
    (files.checkpoints / "step_000099_copy").mkdir()
    with caplog.at_level(logging.WARNING):
        assert read(files).checkpoint.step == NUM_STEPS
    assert [record.getMessage().split()[0].rpartition("/")[2] for record in caplog.records] == [
        "notes",
        "step_000099_copy",
    ]


def test_what_came_after_the_checkpoint_may_be_torn(files: RunFiles) -> None:
    """As a kill leaves it: events and lines beyond the checkpoint, the last ones half written."""
    shutil.rmtree(checkpoint(files, NUM_STEPS))
    last = json.dumps({"event": "trained", "step": 12, "groups": [1, 2]})
    for path, text in ((files.ledger, last[:20]), (files.metrics, '{"st'), (files.rollouts, "{")):
        with path.open("a") as file:
            file.write(text)
    assert read(files).checkpoint.step == STEPS[-2]
