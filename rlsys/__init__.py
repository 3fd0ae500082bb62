"""Asynchronous reinforcement learning for language models on Ray.

This module has all that a recipe needs: a configuration (`RunConfig` and its sections), the
algorithm as a `Dataflow` of functions from `rlsys.algorithms`, reward functions (`reward`,
`rlsys.rewards`), and `launch`. Each of them is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import rlsys.common.keyboard_interrupt  # noqa: F401  (before slow imports)
from rlsys.common.version import VERSION

if TYPE_CHECKING:
    from rlsys import algorithms, rewards
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
    from rlsys.environments.tools.mcp import mcp_tools
    from rlsys.environments.tools.tools import ToolError, tool
    from rlsys.errors import InvalidValue, RunFailed, require
    from rlsys.evaluation.held_out_data import HeldOut
    from rlsys.evaluation.playing import play
    from rlsys.launcher.launching import RunResult, WarmStart, launch, main
    from rlsys.launcher.tiny_models import OwnModel
    from rlsys.rewards import Reward, example_rollout, reward, sandbox
    from rlsys.runs.callbacks import STOP, CheckpointRecord, EvaluationRecord, StepRecord
    from rlsys.types import Rollout

__version__ = VERSION

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


# The names above, by the module that defines them. Each is imported on first use, so that commands
# and processes that need few of them start quickly.
_NAMES = {
    "rlsys.config": "AsyncConfig ClusterConfig DataConfig FrozenModelConfig HeldOutConfig "
    "JudgeConfig ModelConfig ObserveConfig RewardConfig RoleConfig RolloutConfig RunConfig "
    "SamplingConfig TrainedRoleConfig TrainerConfig",
    "rlsys.config.command_line": "parse",
    "rlsys.data.swarm.shared_pool": "Shared",
    "rlsys.dataflow.graph.graph": "Dataflow",
    "rlsys.dataflow.graph.stages": "IS_GREEDY NUM_TOKENS PREFERENCE TRUNCATED Prompts RewardFn",
    "rlsys.environments.environment": "Endpoint agent environment",
    "rlsys.environments.tools.mcp": "mcp_tools",
    "rlsys.environments.tools.tools": "ToolError tool",
    "rlsys.errors": "InvalidValue RunFailed require",
    "rlsys.evaluation.held_out_data": "HeldOut",
    "rlsys.evaluation.playing": "play",
    "rlsys.launcher.launching": "RunResult WarmStart launch main",
    "rlsys.launcher.tiny_models": "OwnModel",
    "rlsys.rewards": "Reward example_rollout reward sandbox",
    "rlsys.runs.callbacks": "STOP CheckpointRecord EvaluationRecord StepRecord",
    "rlsys.types": "Rollout",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("algorithms", "rewards"):
        return importlib.import_module(f"rlsys.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return only the names of the API, for completion in editors and notebooks."""
    return sorted([*__all__, "__version__"])
