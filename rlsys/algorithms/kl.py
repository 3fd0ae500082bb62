"""Estimators of KL(p ‖ q) from tokens sampled from p.

In: log-probabilities of the sampled tokens under p and under q, each [N]. Out: one estimate a
token, [N]; their mean over tokens estimates the divergence, in nats. Names and properties are from
Schulman, "Approximating KL divergence" (2020). With x = log p − log q:

    k1 = x                  unbiased, can be negative, high variance
    k2 = x²/2               biased; its gradient is the one of KL(p ‖ q) when p is the policy
    k3 = exp(−x) − 1 + x    unbiased, never negative

A log-probability of −inf counts as −10000, so every estimate is finite. k3 grows like exp(−x), and
one token in a million could decide the mean of a step: x is cut to ±20 and k3 to 10, as in verl.
A token beyond either bound adds a constant and has no gradient.

The penalty against a reference policy has p = π_θ and q = π_ref; the gap between sampler and
trainer has p = μ and q = π_prox.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from rlsys.algorithms.ratios import MAX_LOG_RATIO, log_ratio, ratio

MAX_K3 = 10.0

Estimator = Literal["k1", "k2", "k3", "unbiased_k3"]


def k1(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """x = log p − log q: Schulman (2020). [N], [N] -> [N]."""
    return log_ratio(logprobs_p, logprobs_q)


def k2(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """x²/2: Schulman (2020). [N], [N] -> [N]."""
    return log_ratio(logprobs_p, logprobs_q).square() / 2


def k3(logprobs_p: torch.Tensor, logprobs_q: torch.Tensor) -> torch.Tensor:
    """exp(−x) − 1 + x, at most 10: Schulman (2020). [N], [N] -> [N]."""
    x = log_ratio(logprobs_p, logprobs_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(−x) − 1 loses every digit where the two policies nearly agree.
    return (torch.expm1(-x) + x).clamp(max=MAX_K3)


def unbiased_k3(
    trainer_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor
) -> torch.Tensor:
    """π_θ/μ · k3: corrects for tokens that came from μ and not from π_θ; DeepSeek-V3.2, 2512.02556.

    The gradient flows through the ratio too.
    """
    return ratio(trainer_logprobs, sampler_logprobs) * k3(trainer_logprobs, ref_logprobs)


def estimate(
    name: Estimator,
    trainer_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
) -> torch.Tensor:
    """KL(π_θ ‖ π_ref) of tokens of μ by the estimator of that name, [N]."""
    match name:
        case "k1":
            return k1(trainer_logprobs, ref_logprobs)
        case "k2":
            return k2(trainer_logprobs, ref_logprobs)
        case "k3":
            return k3(trainer_logprobs, ref_logprobs)
        case "unbiased_k3":
            return unbiased_k3(trainer_logprobs, ref_logprobs, sampler_logprobs)


def check_estimator(name: str) -> None:
    """Raise ValueError for a name that is no estimator's."""
    if name not in get_args(Estimator):
        raise ValueError(
            f"estimator={name!r} is unknown; use one of {', '.join(get_args(Estimator))}."
        )
