"""Estimators of KL(p ‖ q) from tokens sampled from p.

In: log-probabilities of the sampled tokens under p and under q, each [N]. Out: one estimate per
token, [N]; their mean over tokens estimates the divergence, in nats. Names and properties are from
Schulman, "Approximating KL divergence" (2020). With x = log p − log q:

    k1 = x                  unbiased, can be negative, high variance
    k2 = x²/2               biased; its gradient is that of KL(p ‖ q) when p is the policy
    k3 = exp(−x) − 1 + x    unbiased, never negative

A log-probability of −inf counts as −10000, so every estimate is finite.

k3 grows like exp(−x), so one token in a million could decide the mean of a step. The value of k3 is
therefore at most 10, as in verl. The gradient is not cut to 0 there, because the tokens beyond the
bound are those that are farthest from the reference. It keeps its sign and is bounded in size:

    estimator      d/d log p of a token                      bound
    k1             1                                         none
    k2             x                                         none
    k3             1 − exp(−x)                               exp(−x) ≤ 13.6, where k3 reaches 10
    unbiased_k3    π_θ/μ · x                                 |x| ≤ 20, π_θ/μ ≤ e^20

The penalty against a reference policy has p = π_θ and q = π_ref. The gap between sampler and
trainer has p = μ and q = π_prox.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlsys.algorithms.ratios import MAX_LOG_RATIO, floored, log_ratio, ratio, with_slope

MAX_K3 = 10.0
# The y > 0 at which exp(y) − 1 − y = MAX_K3.
MAX_K3_EXPONENT = 2.610868638149876

Estimator = Literal["k1", "k2", "k3", "unbiased_k3"]


def k1(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """Return x = log p − log q: Schulman (2020). [N], [N] -> [N]."""
    return log_ratio(logprobs_p, logprobs_q)


def k2(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """Return x²/2: Schulman (2020). [N], [N] -> [N]."""
    return log_ratio(logprobs_p, logprobs_q).square() / 2


def k3(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """Return exp(−x) − 1 + x, at most 10: Schulman (2020). [N], [N] -> [N].

    The gradient by x is 1 − exp(−x) with exp(−x) at most 13.6. It does not vanish beyond a bound.
    """
    x = log_ratio(logprobs_p, logprobs_q)
    slope = -torch.expm1(x.neg().clamp(max=MAX_K3_EXPONENT))
    return with_slope(unbounded_k3(x).clamp(max=MAX_K3), slope, x)


def unbounded_k3(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return exp(−x) − 1 + x of log ratios x without a bound: it may be inf. [N] -> [N]."""
    # expm1, because exp(−x) − 1 loses every digit where the two policies nearly agree.
    return torch.expm1(-log_ratios) + log_ratios


def unbiased_k3(
    trainer_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor
) -> torch.Tensor:
    """Return π_θ/μ · k3, for tokens of μ instead of π_θ; DeepSeek-V3.2, 2512.02556. [N] -> [N].

    The gradient of the unbounded product by log π_θ is π_θ/μ · (k3 + 1 − exp(−x)) = π_θ/μ · x. It
    is stated here in that form: the bound of k3 does not enter it, and no large terms cancel.
    """
    rho = ratio(trainer_logprobs, sampler_logprobs).detach()
    x = log_ratio(trainer_logprobs, ref_logprobs)
    slope = rho * x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return with_slope(rho * k3(trainer_logprobs, ref_logprobs), slope, floored(trainer_logprobs))


def estimate(
    name: Estimator,
    trainer_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
) -> torch.Tensor:
    """Estimate KL(π_θ ‖ π_ref) from tokens of μ with the estimator `name`. [N] each -> [N]."""
    match name:
        case "k1":
            return k1(trainer_logprobs, ref_logprobs)
        case "k2":
            return k2(trainer_logprobs, ref_logprobs)
        case "k3":
            return k3(trainer_logprobs, ref_logprobs)
        case "unbiased_k3":
            return unbiased_k3(trainer_logprobs, ref_logprobs, sampler_logprobs)
