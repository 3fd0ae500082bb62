"""Advantages and rewards of single tokens, over the packed rollouts of a whole batch.

Shape legend: R rollouts, N completion tokens of all of them, one rollout after another.

Rollout i has the tokens row_offsets[i] to row_offsets[i + 1] − 1 (`row_offsets` [R + 1] int64); it
may have none. `loss_mask` [N] is False for tokens that the policy did not sample, such as a tool's
output; without it, all tokens are sampled.
"""

from __future__ import annotations

import torch

from rlsys.algorithms.ratios import bounded_exp, log_ratio
from rlsys.errors import require

WHITENING_EPSILON = 1e-8


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    discount: float = 1.0,
    trace_decay: float = 1.0,
    loss_mask: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t: GAE, 1506.02438, equation 16.

    Tokens outside the loss mask are not steps: their advantage is 0 and their return is V. A reward
    on such a token counts for the last sampled token before it.

    Args:
        rewards: Reward r of each token [N].
        values: Value V of the text before each token [N].
        row_offsets: Tokens of each rollout [R + 1].
        discount: γ.
        trace_decay: λ.
        loss_mask: Sampled tokens [N].
        bootstrap_values: V after the last token [R]: 0 if the episode ended (the default), the
            critic's value if it was truncated.

    Returns:
        Advantages A [N], and returns A + V [N], the critic's targets.
    """
    if loss_mask is None:
        loss_mask = torch.ones_like(values, dtype=torch.bool)
    counts = torch.cat([row_offsets.new_zeros(1), loss_mask.cumsum(0)])  # [N + 1] of sampled tokens
    offsets = counts[row_offsets]
    row = rows_of(row_offsets)
    last_sampled = counts[1:] - 1  # [N] at or before the token, as an index of sampled tokens
    in_rollout = last_sampled >= offsets[row]  # false before the rollout's first sampled token
    sampled_rewards = rewards.new_zeros(int(counts[-1]))
    sampled_rewards.index_add_(0, last_sampled[in_rollout], rewards[in_rollout])

    found = _gae_of_sampled(
        sampled_rewards, values[loss_mask], offsets, discount, trace_decay, bootstrap_values
    )
    advantages = torch.zeros_like(values).masked_scatter(loss_mask, found)
    return advantages, advantages + values


def _gae_of_sampled(
    rewards: torch.Tensor,
    values: torch.Tensor,
    row_offsets: torch.Tensor,
    discount: float,
    trace_decay: float,
    bootstrap_values: torch.Tensor | None,
) -> torch.Tensor:
    row = rows_of(row_offsets)
    position = torch.arange(len(values), device=values.device)
    num_left = row_offsets[1:][row] - position  # [N] tokens of the rollout from this one on

    def ahead(x: torch.Tensor, steps: int) -> torch.Tensor:
        return torch.where(num_left > steps, x.roll(-steps), 0.0)

    next_values = ahead(values, 1)
    if bootstrap_values is not None:
        next_values = torch.where(num_left == 1, bootstrap_values[row], next_values)
    advantages = rewards + discount * next_values - values
    # Double the number of summed tokens each time: log2(longest rollout) iterations.
    steps, longest = 1, int(num_left.max()) if len(num_left) else 0
    while steps < longest:
        advantages = advantages + (discount * trace_decay) ** steps * ahead(advantages, steps)
        steps *= 2
    return advantages


def kl_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    coefficient: float,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return −β·(log π − log π_ref), plus the score at the last token: 1909.08593, equation 2.

    Tokens outside the loss mask have no penalty. The score of a rollout without tokens is lost.

    Args:
        scores: Score of each rollout [R].
        logprobs: Log-probabilities [N] under the policy that sampled, or π_prox.
        reference_logprobs: Log-probabilities [N] under the reference policy.
        row_offsets: Tokens of each rollout [R + 1].
        coefficient: β; 0 gives only the scores. `adaptive_kl` adapts it.
        loss_mask: Sampled tokens [N].

    Returns:
        Reward of each token [N].
    """
    rewards = -coefficient * log_ratio(logprobs, reference_logprobs).detach()
    if loss_mask is not None:
        rewards = rewards.masked_fill(~loss_mask, 0.0)
    lengths = row_offsets.diff()
    last = row_offsets[1:][lengths > 0] - 1
    return rewards.index_add(0, last, scores[lengths > 0].to(rewards.dtype))


def whitened(
    values: torch.Tensor, *, loss_mask: torch.Tensor | None = None, shift_mean: bool = True
) -> torch.Tensor:
    """Return (x − mean)/√(variance + 1e-8) over the batch's sampled tokens: code of 1909.08593.

    [N] -> [N], 0 at other tokens. It whitens advantages or, with shift_mean=False, which keeps the
    mean, rewards. As in that code the variance is the population's, and 1e-8 keeps values small
    that differ only by rounding. Equal values become exactly 0, or remain with shift_mean=False.
    """
    if loss_mask is None:
        loss_mask = torch.ones_like(values, dtype=torch.bool)
    chosen = values[loss_mask]
    if not len(chosen):
        return torch.zeros_like(values)
    mean = chosen.mean()
    if bool((chosen == chosen[0]).all()):
        white = torch.zeros_like(chosen) if shift_mean else chosen
    else:
        white = (chosen - mean) / (chosen.var(correction=0) + WHITENING_EPSILON).sqrt()
        if not shift_mean:
            white = white + mean
    return torch.zeros_like(values).masked_scatter(loss_mask, white)


def reinforce_plus_plus_token_advantage(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    coefficient: float,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return normalised score − β Σ_{i ≥ t} (log π − log π_ref)_i: REINFORCE++, 2501.03262.

    [R], [N], [N], [R + 1] -> [N], normalised over the sampled tokens of the batch. `coefficient` is
    β. `reinforce_plus_plus_advantage` needs no reference and normalises over rollouts.
    """
    rewards = kl_rewards(
        scores,
        logprobs,
        reference_logprobs,
        row_offsets,
        coefficient=coefficient,
        loss_mask=loss_mask,
    )
    values = torch.zeros_like(rewards)
    returns, _ = gae(rewards, values, row_offsets, loss_mask=loss_mask)
    return whitened(returns, loss_mask=loss_mask)


def batch_normalised_weights(
    proximal_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    *,
    cap: float = 2.0,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return min(w, cap)/mean, w = π_prox/μ: self-normalised weights, Owen (2013), chapter 9.2.

    [N], [N] -> [N]. Write the result to the column `importance_weights`, which the correction
    `batch_weights` reads: the mean runs over all sampled tokens of the batch, which no micro-batch
    has. The weights have mean 1, so truncation does not shrink the step.

    Raises:
        InvalidValue: `cap` is not positive.
    """
    require(
        cap > 0,
        "batch_normalised_weights: cap",
        cap,
        rule="must be positive",
        fix="Use 2 to 10.",
    )
    if loss_mask is None:
        loss_mask = torch.ones_like(proximal_logprobs, dtype=torch.bool)
    weights = bounded_exp(log_ratio(proximal_logprobs, sampler_logprobs)).clamp(max=cap)
    weights = weights.masked_fill(~loss_mask, 0.0).detach()
    mean = weights.sum() / loss_mask.sum().clamp(min=1)
    return torch.where(mean > 0, weights / mean.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)


def rows_of(row_offsets: torch.Tensor) -> torch.Tensor:
    """Return the rollout of each token [N] int64."""
    rows = torch.arange(len(row_offsets) - 1, device=row_offsets.device)
    return torch.repeat_interleave(rows, row_offsets.diff())
