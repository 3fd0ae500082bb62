"""Warnings before Ray starts."""

from __future__ import annotations

import os
from pathlib import Path

from rlsys.config import FrozenModelConfig, RoleConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.launcher.preflight import models_written_since
from rlsys.runs.checkpoint import Checkpoint


def test_a_frozen_model_newer_than_the_checkpoint_is_a_warning(tmp_path: Path) -> None:
    flow = Dataflow()
    flow.model("policy")
    flow.model("reference", RoleConfig())  # starts from the policy's weights
    teacher = tmp_path / "teacher"
    flow.model("teacher", RoleConfig(model=FrozenModelConfig(path=str(teacher))))
    checkpoint = Checkpoint(7, tmp_path / "step_000007")
    for directory in (teacher, checkpoint.path):
        directory.mkdir()
    weights = teacher / "model.safetensors"
    weights.write_text("1")
    os.utime(weights, (1000.0, 1000.0))
    os.utime(checkpoint.path, (2000.0, 2000.0))
    assert models_written_since(checkpoint, flow) == []
    os.utime(weights, (3000.0, 3000.0))
    (warning,) = models_written_since(checkpoint, flow)
    assert str(teacher) in warning
    assert str(checkpoint.path) in warning
