"""Saved states of a trainer whose client goes back to earlier ones."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.tinker_server.primitive_trainer_actor import HostedEngine
from rlsys.engines.training.adapters import FrozenWeights
from rlsys.engines.training.trainer_state import finish_state
from rlsys.tinker_server.call_engine import PrimitiveEngine
from tests.engines.training_harness import tiny_model
from tests.tinker_server.test_shared_engines import engine_of, train, trained


def save(hosted: HostedEngine, directory: Path) -> Path:
    directory.mkdir()
    held = hosted.hold()
    finish_state(directory, [held.write(directory)])
    held.release()
    return directory


def weights_in(model_path: Path, directory: Path) -> dict[str, torch.Tensor]:
    engine: PrimitiveEngine = engine_of(model_path, "r4a32", 5, FrozenWeights())
    engine.load_weights(directory, optimizer=False)
    return trained(engine)


def test_a_state_is_saved_anew_after_a_load_of_any_step(tmp_path: Path) -> None:
    """Steps repeat, so the step does not identify the state."""
    path = tiny_model(tmp_path / "model")
    hosted = HostedEngine(engine_of(path, "r4a32", 0, FrozenWeights()))
    train(hosted.engine, 0, 0)
    first = save(hosted, tmp_path / "first")
    train(hosted.engine, 1, 1)
    second = save(hosted, tmp_path / "second")
    hosted.engine.load_weights(first, optimizer=True)
    again = save(hosted, tmp_path / "again")  # step 1, after step 2
    train(hosted.engine, 2, 2)
    now = trained(hosted.engine)
    other = save(hosted, tmp_path / "other")  # step 2 of another history
    found = {one.name: weights_in(path, one) for one in (first, second, again, other)}
    assert all(torch.equal(found["again"][name], one) for name, one in found["first"].items())
    assert all(torch.equal(found["other"][name], one) for name, one in now.items())
    assert any(not torch.equal(found["second"][name], one) for name, one in now.items())
