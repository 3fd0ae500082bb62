"""Parts of algorithms: advantages, losses, corrections, aggregations and KL estimates.

Each is one function or class, which names its paper.
"""

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
from rlsys.algorithms.aggregation import (
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)
from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    distill,
    entropy_bonus,
    interpolate_proximal,
    kl_cov,
    m2po,
    observed,
    with_kl,
)
from rlsys.algorithms.corrections import (
    batch_weights,
    icepop,
    sequence_icepop,
    sequence_tis,
    tis,
)
from rlsys.algorithms.derived_metrics import derived_metrics
from rlsys.algorithms.group_functions import check_group_size, dynamic_sampling, min_group_size
from rlsys.algorithms.kl import k1, k2, k3, unbiased_k3
from rlsys.algorithms.kl_control import adaptive_kl, fixed_kl
from rlsys.algorithms.loss_inputs import (
    LossFn,
    LossInputs,
    MeanOver,
    ScoreInputs,
    TokenLoss,
    ValueInputs,
    needs_of,
    uses_advantages,
    whole_groups,
)
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    cross_entropy,
    dppo_mask,
    gmpo,
    gspo,
    reinforce,
    sapo_soft,
    top_k_distill,
)
from rlsys.algorithms.masks import clip_cov, high_entropy, opsm, reject, second_moment
from rlsys.algorithms.preferences import bradley_terry, dpo, ipo, orpo, simpo, slic
from rlsys.algorithms.token_advantages import (
    batch_normalised_weights,
    gae,
    kl_rewards,
    reinforce_plus_plus_token_advantage,
    whitened,
)
from rlsys.algorithms.turn_credit import turn_advantage, turn_batch_advantage, turn_mean_advantage
from rlsys.algorithms.values import clipped_value_loss, value_loss

__all__ = [
    "LossFn",
    "LossInputs",
    "MeanOver",
    "ScoreInputs",
    "TokenLoss",
    "ValueInputs",
    "adaptive_kl",
    "aipo",
    "batch_normalised_weights",
    "batch_weights",
    "bradley_terry",
    "check_group_size",
    "cispo",
    "clip_cov",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length",
    "corrected",
    "cross_entropy",
    "decoupled_clipped_surrogate",
    "derived_metrics",
    "distill",
    "distillation_advantage",
    "dpo",
    "dppo_mask",
    "dr_grpo_advantage",
    "dynamic_sampling",
    "entropy_bonus",
    "fixed_kl",
    "gae",
    "gmpo",
    "grpo_advantage",
    "gspo",
    "high_entropy",
    "icepop",
    "interpolate_proximal",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kl_cov",
    "kl_rewards",
    "m2po",
    "min_group_size",
    "needs_of",
    "observed",
    "opo_advantage",
    "opsm",
    "orpo",
    "pass_at_k_advantage",
    "prompt_mean",
    "reinforce",
    "reinforce_plus_plus_advantage",
    "reinforce_plus_plus_baseline_advantage",
    "reinforce_plus_plus_token_advantage",
    "reject",
    "remax_advantage",
    "rloo_advantage",
    "sapo_soft",
    "scale_rl_advantage",
    "second_moment",
    "sequence_icepop",
    "sequence_mean",
    "sequence_sum",
    "sequence_tis",
    "simpo",
    "slic",
    "tis",
    "token_mean",
    "token_sum",
    "top_k_distill",
    "turn_advantage",
    "turn_batch_advantage",
    "turn_mean_advantage",
    "unbiased_k3",
    "uses_advantages",
    "value_loss",
    "whitened",
    "whole_groups",
    "with_kl",
]


def __dir__() -> list[str]:
    """Return the names of the public API."""
    return sorted(__all__)
