"""What algorithms are made of: advantages, losses and their corrections, aggregation, KL estimates;
one function each, with its paper."""

from rlsys.algorithms.advantages import (
    distillation_advantage,
    dr_grpo_advantage,
    grpo_advantage,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_plus_plus_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
    rloo_advantage,
    scale_rl_advantage,
)
from rlsys.algorithms.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    entropy_bonus,
    interpolate_proximal,
    with_kl,
)
from rlsys.algorithms.corrections import icepop, opsm, sequence_tis, tis
from rlsys.algorithms.groups import check_group_size, dynamic_sampling, min_group_size
from rlsys.algorithms.inputs import (
    LossInputs,
    ScoreInputs,
    ValueInputs,
    needs_of,
    uses_advantages,
    whole_groups,
)
from rlsys.algorithms.kl import k1, k2, k3, unbiased_k3
from rlsys.algorithms.kl_control import adaptive_kl, fixed_kl
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    dppo_mask,
    gspo,
    reinforce,
    sapo_soft,
)
from rlsys.algorithms.metrics import derived_metrics
from rlsys.algorithms.token_advantages import (
    batch_normalised_weights,
    gae,
    kl_rewards,
    reinforce_plus_plus_token_advantage,
    whitened,
)
from rlsys.algorithms.values import clipped_value_loss, value_loss

__all__ = [
    "LossInputs",
    "ScoreInputs",
    "ValueInputs",
    "adaptive_kl",
    "aipo",
    "batch_normalised_weights",
    "check_group_size",
    "cispo",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length",
    "corrected",
    "decoupled_clipped_surrogate",
    "derived_metrics",
    "distillation_advantage",
    "dppo_mask",
    "dr_grpo_advantage",
    "dynamic_sampling",
    "entropy_bonus",
    "fixed_kl",
    "gae",
    "grpo_advantage",
    "gspo",
    "icepop",
    "interpolate_proximal",
    "k1",
    "k2",
    "k3",
    "kl_rewards",
    "min_group_size",
    "needs_of",
    "opo_advantage",
    "opsm",
    "pass_at_k_advantage",
    "prompt_mean",
    "reinforce",
    "reinforce_plus_plus_advantage",
    "reinforce_plus_plus_baseline_advantage",
    "reinforce_plus_plus_token_advantage",
    "remax_advantage",
    "rloo_advantage",
    "sapo_soft",
    "scale_rl_advantage",
    "sequence_mean",
    "sequence_tis",
    "tis",
    "token_mean",
    "unbiased_k3",
    "uses_advantages",
    "value_loss",
    "whitened",
    "whole_groups",
    "with_kl",
]
