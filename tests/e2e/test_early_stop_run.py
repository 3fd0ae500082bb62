"""A whole run that stops early, with callbacks, a profile, kept checkpoints and a pushed model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.export_seal import early_end, exported_step
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import ROOT, SMALL_QUICKSTART, Job, start

SCRIPT = """
import json, os, sys, threading, time
import rlsys
from recipes.arithmetic import CHARACTERS, correct, held_out, problems, warm_start
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig

calls = open(os.environ["CALLS"], "a", buffering=1)

def record(kind):
    def write(one):
        calls.write(json.dumps([kind, one.step, os.getpid()]) + "\\n")
        if kind == "checkpoint":
            assert (one.path / "manifest.json").is_file()
        if kind == "evaluation":
            raise RuntimeError("a mistake in a callback")
        if kind == "step" and one.step == int(os.environ.get("STOP_AT", 0)):
            return rlsys.STOP
    return write

@rlsys.main
def main():
    cfg = rlsys.parse(QuickstartConfig).config
    result = rlsys.launch(
        cfg,
        grpo(cfg, [correct], rows=problems(cfg)),
        own_model=rlsys.OwnModel(name="addition", characters=CHARACTERS),
        warm_start=warm_start(cfg),
        held_out=held_out(),
        on_step=record("step"),
        on_evaluation=record("evaluation"),
        on_checkpoint=record("checkpoint"),
    )
    print("stopped:", result.stopped, "pid:", os.getpid())

main()
"""


def finished(script: Path, arguments: Sequence[str], **environment: str) -> Job:
    """Run the script to its end, without an error and without a process that is left behind."""
    job = start(str(script), arguments, script.parent, **environment)
    try:
        assert job.wait() == 0, job.output
        assert job.left_behind() == {}
    finally:
        job.end()
    return job


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_stops_early_and_ends_like_any_other(tmp_path: Path) -> None:
    script, calls, pushed = tmp_path / "script.py", tmp_path / "calls", tmp_path / "pushed"
    script.write_text(SCRIPT)
    files = RunFiles(tmp_path / "runs" / "quickstart")
    always = [
        *SMALL_QUICKSTART,
        *("--runs-dir", str(tmp_path / "runs"), "--num-steps", "30", "--keep-every", "2"),
        *("--evaluation.every", "100", "--evaluation.num-prompts", "8", "--resume", "auto"),
    ]
    stop = ["--stop-when", "reward/mean > -1 for 3"]
    once = ["--push-to", f"file://{pushed}", "--profile-steps", "2:3"]
    environment = {"CALLS": str(calls), "PYTHONPATH": str(ROOT)}

    job = finished(script, [*always, *stop, *once], **environment)
    assert "Stopping after step 4 of 30" in job.output
    assert [line["step"] for line in read_metrics(files.metrics)] == [1, 2, 3, 4]
    assert exported_step(files.hf) == 4
    end = early_end(files.hf)
    assert end is not None
    assert "reward/mean" in end.reason
    assert f"stopped: {end.reason}" in job.output
    evidence, faults = read_evidence(files.path)
    verdict = audit(evidence)
    assert [*faults, *verdict.faults] == []
    assert verdict.finished
    assert {2, 4} <= set(evidence.checkpoints)
    assert {path.name for path in pushed.iterdir()} == {path.name for path in files.hf.iterdir()}
    (profile,) = files.profile.iterdir()
    assert profile.name == "trainer-0-step-000002.json.gz"
    with gzip.open(profile) as file:
        operations = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"step 2", "step 2: accumulate", "step 2: optimizer_step", "aten::mm"} <= operations

    found = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [step for kind, step, _ in found if kind == "step"] == [1, 2, 3, 4]
    assert [step for kind, step, _ in found if kind == "evaluation"] == [0, 4]
    assert [step for kind, step, _ in found if kind == "checkpoint"] == [2, 4]
    (pid,) = {pid for _, _, pid in found}
    assert f"pid: {pid}" in job.output  # in the launching process
    assert job.output.count("raised RuntimeError") == 1

    # The same command changes nothing, and another condition continues the run.
    again = finished(script, [*always, *stop], **environment)
    assert "has stopped early after step 4" in again.output
    assert len(read_metrics(files.metrics)) == 4

    longer = finished(script, always, **environment, STOP_AT="5")
    last_step = exported_step(files.hf)
    assert last_step is not None
    assert 6 <= last_step < 30
    assert "rlsys.STOP" in longer.output
    evidence, faults = read_evidence(files.path)
    assert [*faults, *audit(evidence).faults] == []
    assert audit(evidence).finished
    assert {2, 4} < set(evidence.checkpoints)
