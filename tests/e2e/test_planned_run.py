"""A run with --plan auto on this machine: planned, trained, compared, resumed, calibrated with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlsys.commands.plan_command import main
from rlsys.planner.cpu_probe import num_cores, save_probe
from rlsys.planner.run_record import read_record
from rlsys.planner.stack_profile import read_profile
from rlsys.runs.audit import audit
from rlsys.runs.run_files import RunFiles, read_config
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import quickstart
from tests.planner.cpu_examples import cpu_probe


@pytest.mark.slow
def test_a_planned_run_is_compared_with_its_plan_and_calibrates_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    save_probe(cpu_probe(cores=num_cores()))
    planned = ["--plan", "auto", "--asynchrony.max-staleness", "1", "--num-steps"]
    job = quickstart(tmp_path, *planned, "8")
    assert job.returncode == 0, job.output
    assert f"1x{num_cores()}xCPU" in job.output
    assert "predicted" in job.output
    files = RunFiles(tmp_path / "runs" / "quickstart")
    record = read_record(files.plan)
    assert record.prediction is not None
    assert record.cluster == f"1x{num_cores()}xCPU"
    assert 3 <= record.prompt_tokens <= 6  # such as 34+7=
    config = read_config(files.config)
    assert config["asynchrony"]["max_staleness"] == 1
    assert config["trainer"]["layout"] == record.settings["trainer.layout"]
    plan = tomllib.loads(files.plan_settings.read_text())
    assert plan["trainer"]["layout"] == config["trainer"]["layout"]
    assert plan["rollout"]["num_replicas"] == config["rollout"]["num_replicas"]

    again = quickstart(tmp_path, *planned, "9", "--resume")
    assert again.returncode == 0, again.output
    assert read_record(files.plan).settings == record.settings
    evidence, faults = read_evidence(files.path)
    assert [*faults, *audit(evidence).faults] == []

    profile = tmp_path / "profile.json"
    assert main(["--calibrate", str(files.path), "--profile", str(profile)]) == 0
    assert read_profile(profile).engines.keys() == {"torch"}
