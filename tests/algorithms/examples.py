"""Losses and corrections as a command line names them: at least one of everything there is."""

from __future__ import annotations

# With the policy gradient where nothing has moved, and none without an advantage.
POLICY_LOSSES = (
    "reinforce",
    "clipped_surrogate(0.2, 0.28)",
    "clipped_surrogate(0.2, 0.28, dual_clip=3.0)",
    "decoupled_clipped_surrogate(0.2, 0.2, max_weight=2.0)",
    "interpolate_proximal(decoupled_clipped_surrogate(0.2, 0.2, max_weight=2.0))",
    "gspo",
    "gmpo",
    "corrected(gmpo(denominator='proximal'), sequence_icepop)",
    "cispo",
    "cispo(4.0, 0.5)",
    "aipo(4.0)",
    "m2po",
    "sapo_soft",
    "dppo_mask",
    "entropy_bonus(reinforce, 0.01)",
    "corrected(clipped_surrogate(denominator='proximal'), tis)",
    "corrected(gspo(denominator='proximal'), sequence_tis(2.0, geometric_mean=True))",
    "corrected(sapo_soft(denominator='proximal'), icepop)",
    "corrected(reinforce, sequence_tis(2.0))",
    "corrected(reinforce, icepop)",
    "corrected(reinforce, batch_weights)",
    "corrected(cispo, opsm(0.5))",
    "corrected(cispo, reject('ratio', 0.5, 2.0))",
    "corrected(cispo, reject('k3', high=0.01, over='mean'))",
    "corrected(cispo, second_moment)",
    "corrected(cispo, high_entropy)",
    "corrected(clipped_surrogate, clip_cov)",
    "with_kl(cispo, 'k2', 0.1)",
    "with_kl(cispo, 'k3', 0.1)",
    "corrected(with_kl(reinforce, 'unbiased_k3', 0.1), opsm(0.5))",
    "kl_cov(clipped_surrogate(denominator='proximal'), 2.0)",
    "observed(cispo)",
)

PAIR_LOSSES = (
    "dpo",
    "dpo(0.1, label_smoothing=0.1)",
    "dpo(0.1, label_smoothing=0.1, robust=True)",
    "ipo",
    "slic",
    "simpo",
    "orpo",
)

LOSSES = ("cross_entropy", *POLICY_LOSSES, *PAIR_LOSSES, "distill(reinforce)", "distill(cispo)")

# Of more than the tokens that were sampled.
WIDE_LOSSES = ("top_k_distill", "entropy_bonus(top_k_distill, 0.01)")

OTHERS = {
    "value_loss": ("value_loss", "clipped_value_loss(0.5)"),
    "score_loss": ("bradley_terry", "bradley_terry(0.01)"),
    "group_advantage": (
        "grpo_advantage",
        "grpo_advantage(epsilon=0.5)",
        "dr_grpo_advantage",
        "rloo_advantage",
        "opo_advantage",
        "remax_advantage",
        "pass_at_k_advantage(2)",
        "dynamic_sampling(rloo_advantage)",
        "dynamic_sampling(pass_at_k_advantage(2), by_last_column=True)",
    ),
    "batch_advantage": (
        "reinforce_plus_plus_advantage",
        "reinforce_plus_plus_baseline_advantage",
        "scale_rl_advantage(epsilon=1e-6)",
    ),
    "token_advantage": (
        "gae(discount=0.99, trace_decay=0.95)",
        "reinforce_plus_plus_token_advantage(coefficient=0.01)",
        "kl_rewards(coefficient=0.01)",
        "whitened",
        "batch_normalised_weights(cap=5)",
        "turn_advantage(discount=0.9)",
        "turn_mean_advantage",
        "turn_batch_advantage(epsilon=1e-6)",
    ),
    "aggregation": (
        "token_mean",
        "sequence_mean",
        "prompt_mean",
        "constant_length(512)",
        "sequence_sum",
        "token_sum(64)",
    ),
    "kl_control": ("fixed_kl(0.05)", "adaptive_kl(0.2, 6.0)"),
}
