"""Advantages and rewards of single tokens, over the packed rollouts of a whole batch.

Shape legend: R rollouts, N completion tokens of all of them, one rollout after another.

`row_offsets` [R + 1] int64 says which tokens are whose: those of rollout i are row_offsets[i] up to
row_offsets[i + 1]; a rollout may have none. `loss_mask` [N] is False for tokens that the policy did
not sample, such as a tool's output.
"""

from __future__ import annotations

import torch

from rlsys.algorithms.ratios import bounded_exp, check_cap, log_ratio

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
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t: GAE, 1506.02438, equation 16.

    `rewards` and `values` are [N]; out come (advantages [N], returns [N]), where the returns A + V
    are the critic's targets. `bootstrap_values` [R] is V after the last token: 0 where the episode
    ended (the default), the critic's value where it was cut off.

    Tokens outside the loss mask are no steps: advantage 0, return V, and a reward on one of them
    goes to the last token before it that the policy sampled.
    """
    if loss_mask is None:
        loss_mask = torch.ones_like(values, dtype=torch.bool)
    counts = torch.cat([row_offsets.new_zeros(1), loss_mask.cumsum(0)])  # [N + 1] of sampled tokens
    offsets = counts[row_offsets]
    row = rows_of(row_offsets)
    earner = counts[1:] - 1  # [N], among the sampled tokens
    earned = earner >= offsets[row]  # else the rollout's first tokens are not its own
    sampled_rewards = rewards.new_zeros(int(counts[-1]))
    sampled_rewards.index_add_(0, earner[earned], rewards[earned])

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
    left = row_offsets[1:][row] - position  # [N] tokens of the rollout from this one on

    def ahead(x: torch.Tensor, steps: int) -> torch.Tensor:
        return torch.where(left > steps, x.roll(-steps), 0.0)

    next_values = ahead(values, 1)
    if bootstrap_values is not None:
        next_values = torch.where(left == 1, bootstrap_values[row], next_values)
    advantages = rewards + discount * next_values - values
    # Sums over 1, 2, 4, ... tokens: as many rounds as the longest rollout's length has bits.
    steps, longest = 1, int(left.max()) if len(left) else 0
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
    """Rewards of tokens, −β·(log π − log π_ref), and the rollout's score on its last: 1909.08593,
    equation 2.

    `scores` [R], `logprobs` [N] by the policy that sampled (or π_prox), out: [N]. β = 0 gives the
    scores alone; `adaptive_kl` steers it. Tokens outside the loss mask cost nothing. A rollout
    without tokens has no place for its score.
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
    """(x − mean)/√(variance + 1e-8) over all sampled tokens of the batch, 0 elsewhere:
    1909.08593's code. [N] -> [N].

    Whitening of advantages, or, with shift_mean=False, which leaves the mean where it is, of
    rewards. That code takes the population's variance, and adds 1e-8: what differs by rounding
    alone stays small. Equal values become exactly 0, or stay.
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
    """A_t = score − β Σ_{i ≥ t} (log π − log π_ref)_i, normalised over all tokens of the batch:
    REINFORCE++, 2501.03262. [R], [N], [N], [R + 1] -> [N].

    `coefficient` is β. `reinforce_plus_plus_advantage` does without a reference, over rollouts.
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
    """min(w, cap)/mean of these over the batch, w = π_prox/μ: self-normalised importance weights,
    Owen (2013), chapter 9.2.

    [N], [N] -> [N], for column `importance_weights`, which correction `batch_weights` reads: the
    mean runs over all sampled tokens of the batch, and no pass of the trainer sees them all. Their
    mean is 1, so that truncation does not shrink the step.
    """
    check_cap("cap", cap)
    if loss_mask is None:
        loss_mask = torch.ones_like(proximal_logprobs, dtype=torch.bool)
    weights = bounded_exp(log_ratio(proximal_logprobs, sampler_logprobs)).clamp(max=cap)
    weights = weights.masked_fill(~loss_mask, 0.0).detach()
    mean = weights.sum() / loss_mask.sum().clamp(min=1)
    return torch.where(mean > 0, weights / mean.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)


def rows_of(row_offsets: torch.Tensor) -> torch.Tensor:
    """The rollout of each token, [N] int64."""
    rows = torch.arange(len(row_offsets) - 1, device=row_offsets.device)
    return torch.repeat_interleave(rows, row_offsets.diff())
