"""Paths of models for actors, which have another working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import ModelConfig, RolloutConfig, RunConfig
from rlsys.config.model_paths import weights_of, with_absolute_paths
from rlsys.config.training_config import FrozenModelConfig


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the models policy, draft and rival."""
    for name in ("policy", "draft", "rival"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_policy_and_its_draft_model_get_absolute_paths(here: Path) -> None:
    speculation = {"method": "draft_model", "model": "draft", "num_tokens": 3}
    config = RunConfig(
        model=ModelConfig(path="policy"),
        rollout=RolloutConfig(engine="vllm", speculation=speculation),
    )
    found = with_absolute_paths(config)
    assert found.model.path == str(here / "policy")
    assert found.rollout.speculation == {**speculation, "model": str(here / "draft")}
    assert with_absolute_paths(found) == found


@pytest.mark.parametrize("kind", [FrozenModelConfig, ModelConfig])
def test_a_role_begins_with_its_own_weights_or_those_of_the_policy(
    here: Path, kind: type[FrozenModelConfig | ModelConfig]
) -> None:
    assert weights_of(kind(path="rival"), "policy") == str(here / "rival")
    assert weights_of(kind(path="./rival"), "policy") == str(here / "rival")
    assert weights_of(kind(path=""), "policy") == str(here / "policy")


def test_names_on_the_hub_stay(here: Path) -> None:
    assert weights_of(FrozenModelConfig(path="Qwen/Qwen3-8B"), "policy") == "Qwen/Qwen3-8B"
    config = RunConfig(model=ModelConfig(path="Qwen/Qwen3-8B"))
    assert with_absolute_paths(config) == config
