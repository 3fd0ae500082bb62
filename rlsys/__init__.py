"""Asynchronous reinforcement learning for language models on Ray.

This module has all that a recipe needs: a configuration (`RunConfig` and its sections), the
algorithm as a `Dataflow` of functions from `rlsys.algorithms`, reward functions (`reward`,
`rlsys.rewards`), and `launch`. Ray and torch are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import rlsys.common.keyboard_interrupt  # noqa: F401  (before slow imports)
from rlsys import rewards
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    FrozenModelConfig,
    HeldOutConfig,
    JudgeConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.command_line import parse
from rlsys.data.swarm.shared_pool import Shared
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import (
    IS_GREEDY,
    NUM_TOKENS,
    PREFERENCE,
    TRUNCATED,
    Prompts,
    RewardFn,
)
from rlsys.environments.environment import Endpoint, agent, environment
from rlsys.errors import InvalidValue, RunFailed, require
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launcher.launching import RunResult, WarmStart, launch, main
from rlsys.launcher.tiny_models import OwnModel
from rlsys.rewards import Reward, example_rollout, reward, sandbox
from rlsys.runs.callbacks import STOP, CheckpointRecord, EvaluationRecord, StepRecord
from rlsys.types import Rollout

if TYPE_CHECKING:
    from rlsys import algorithms
    from rlsys.environments.tools.mcp import mcp_tools
    from rlsys.environments.tools.tools import ToolError, tool
    from rlsys.evaluation.playing import play

__version__ = "0.1.0"

__all__ = [
    "IS_GREEDY",
    "NUM_TOKENS",
    "PREFERENCE",
    "STOP",
    "TRUNCATED",
    "AsyncConfig",
    "CheckpointRecord",
    "ClusterConfig",
    "DataConfig",
    "Dataflow",
    "Endpoint",
    "EvaluationRecord",
    "FrozenModelConfig",
    "HeldOut",
    "HeldOutConfig",
    "InvalidValue",
    "JudgeConfig",
    "ModelConfig",
    "ObserveConfig",
    "OwnModel",
    "Prompts",
    "Reward",
    "RewardConfig",
    "RewardFn",
    "RoleConfig",
    "Rollout",
    "RolloutConfig",
    "RunConfig",
    "RunFailed",
    "RunResult",
    "SamplingConfig",
    "Shared",
    "StepRecord",
    "ToolError",
    "TrainedRoleConfig",
    "TrainerConfig",
    "WarmStart",
    "agent",
    "algorithms",
    "environment",
    "example_rollout",
    "launch",
    "main",
    "mcp_tools",
    "parse",
    "play",
    "require",
    "reward",
    "rewards",
    "sandbox",
    "tool",
]


# Modules of names that are imported on first use, because they import pydantic or torch.
LATER = {
    "ToolError": "rlsys.environments.tools.tools",
    "mcp_tools": "rlsys.environments.tools.mcp",
    "play": "rlsys.evaluation.playing",
    "tool": "rlsys.environments.tools.tools",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    if name == "algorithms":  # imports torch, which takes seconds
        return importlib.import_module("rlsys.algorithms")
    raise AttributeError(f"module 'rlsys' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return only the names of the API, for completion in editors and notebooks."""
    return sorted([*__all__, "__version__"])
