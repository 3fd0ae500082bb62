"""What algorithms are made of: advantages, losses and their corrections, aggregation, KL estimates;
one function each, with its paper."""

from rlsys.algorithms.advantages import (
    distillation_advantage,
    dr_grpo_advantage,
    gae,
    grpo_advantage,
    reinforce_plus_plus_advantage,
    rloo_advantage,
    scale_rl_advantage,
)
from rlsys.algorithms.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    entropy_bonus,
    interpolate_proximal,
)
from rlsys.algorithms.corrections import icepop, opsm, sequence_tis, tis
from rlsys.algorithms.inputs import LossInputs
from rlsys.algorithms.kl import k1, k2, k3, unbiased_k3
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    clipped_value_loss,
    dppo_mask,
    gspo,
    reinforce,
    sapo_soft,
)

__all__ = [
    "LossInputs",
    "aipo",
    "cispo",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length",
    "corrected",
    "decoupled_clipped_surrogate",
    "distillation_advantage",
    "dppo_mask",
    "dr_grpo_advantage",
    "entropy_bonus",
    "gae",
    "grpo_advantage",
    "gspo",
    "icepop",
    "interpolate_proximal",
    "k1",
    "k2",
    "k3",
    "opsm",
    "prompt_mean",
    "reinforce",
    "reinforce_plus_plus_advantage",
    "rloo_advantage",
    "sapo_soft",
    "scale_rl_advantage",
    "sequence_mean",
    "sequence_tis",
    "tis",
    "token_mean",
    "unbiased_k3",
]
