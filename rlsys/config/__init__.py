"""The configuration: small, typed, checked at construction, before Ray starts.

Every default stands here and nowhere else. A recipe extends RunConfig with its algorithm's fields.
An error names the value, the rule and the fix. Numbers are finite, whatever a class says besides:
`conform` sees to types first.
"""

from rlsys.config.checks import MIN_CPUS, require
from rlsys.config.run_config import (
    VLLM_TEMPERATURES,
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    HeldOutConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    check_quantized,
    check_samples,
)
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
    "VLLM_TEMPERATURES",
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
    "require",
]
