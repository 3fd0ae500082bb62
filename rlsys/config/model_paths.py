"""Paths of models as actors read them, whose working directory may be another one.

    model.path, rollout.speculation.model ─► with_absolute_paths ─► RunConfig of the actors
    ROLE.model.path                       ─► weights_of          ─► path of a role's first weights

A path that is no directory here is a name on the hub, and stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlsys.config.rollout_config import RolloutConfig
from rlsys.config.run_config import RunConfig
from rlsys.config.training_config import AnyModelConfig


def absolute_path(path: str) -> str:
    """Return the absolute path of a model's directory, or a hub name unchanged."""
    return str(Path(path).absolute()) if path and Path(path).is_dir() else path


def rollout_with_absolute_paths(rollout: RolloutConfig) -> RolloutConfig:
    """Return the section with an absolute path of the draft model, if it has one."""
    if not (draft := rollout.speculation.get("model")):
        return rollout
    return replace(rollout, speculation={**rollout.speculation, "model": absolute_path(draft)})


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of the policy and of its draft model."""
    return replace(
        config,
        model=replace(config.model, path=absolute_path(config.model.path)),
        rollout=rollout_with_absolute_paths(config.rollout),
    )


def weights_of(model: AnyModelConfig, initial: str | Path) -> str:
    """Return where a role's first weights are: its own path, or `initial` if it has none."""
    return absolute_path(model.path or str(initial))
