"""The configuration: typed sections, checked when they are constructed, before Ray starts.

All defaults are defined here. A recipe extends RunConfig with the fields of its algorithm. Errors
are `rlsys.errors.InvalidValue`. Sections first check the types of their fields (`conform`), which
also excludes infinite numbers and NaN.
"""

from rlsys.config.checks import MIN_CPUS
from rlsys.config.data_config import DataConfig, SamplingConfig
from rlsys.config.rollout_config import (
    RolloutConfig,
    check_quantized,
    check_sent_adapters,
    check_whole_weights,
)
from rlsys.config.run_config import AsyncConfig, ClusterConfig, ObserveConfig, RunConfig
from rlsys.config.scoring_config import HeldOutConfig, RewardConfig, check_samples
from rlsys.config.training_config import (
    AnyModelConfig,
    Checkpointing,
    FrozenModelConfig,
    JudgeConfig,
    ModelConfig,
    Precision,
    RoleConfig,
    TrainedRoleConfig,
    TrainerConfig,
)

__all__ = [
    "MIN_CPUS",
    "AnyModelConfig",
    "AsyncConfig",
    "Checkpointing",
    "ClusterConfig",
    "DataConfig",
    "FrozenModelConfig",
    "HeldOutConfig",
    "JudgeConfig",
    "ModelConfig",
    "ObserveConfig",
    "Precision",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainedRoleConfig",
    "TrainerConfig",
    "check_quantized",
    "check_samples",
    "check_sent_adapters",
    "check_whole_weights",
]
