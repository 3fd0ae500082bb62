"""Ratios of two policies' probabilities of the sampled tokens, always finite.

In: log-probabilities [N], of which any may be −inf (a token that a policy excludes). Out: [N],
finite. The gradients are finite too, and exactly 0 where a bound of this file holds.

A function of a bounded value that multiplies it with another ratio must not let that ratio's
gradient through alone: the derivative of r · f is r · (f + f'), and with f' = 0 the rest may have
the wrong sign. `with_slope` states the derivative of such a function explicitly.
"""

from __future__ import annotations

import math

import torch

# Stands for −inf: its exp is 0 in every type, and 0 times it is 0, where 0 · −inf is NaN. No policy
# that can be trained comes near.
LOWEST_LOGPROB = -1e4

# exp of more overflows in float16 and, multiplied by a mask's 0, gives NaN in any type. A ratio of
# e^20 is far beyond every clip.
MAX_LOG_RATIO = 20.0


def floored(logprobs: torch.Tensor) -> torch.Tensor:
    """The log-probabilities, at least LOWEST_LOGPROB; below it they have no gradient. [N]."""
    return logprobs.clamp(min=LOWEST_LOGPROB)


def log_ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """Log π − log π_base of each token, [N]; 0 where both are −inf."""
    return floored(logprobs) - floored(base_logprobs)


def ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """π/π_base of each token, at most e^20, [N]."""
    return bounded_exp(log_ratio(logprobs, base_logprobs))


def bounded_exp(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(max=MAX_LOG_RATIO).exp()


def with_slope(values: torch.Tensor, slope: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    """Return `values` with the gradient `slope` by the finite `variable`, and no other gradient.

    [N], [N], [N] -> [N].
    """
    return values.detach() + slope.detach() * (variable - variable.detach())


def check_cap(name: str, cap: float) -> None:
    """Raise ValueError for an upper bound of a ratio that leaves nothing."""
    if not cap > 0:
        raise ValueError(f"{name}={cap} stops every gradient; use a positive cap, usually 2 to 10.")


def check_coefficient(coefficient: float) -> None:
    """Raise ValueError for a coefficient of a penalty that would reward, or is no number."""
    if not 0 <= coefficient < math.inf:
        raise ValueError(
            f"coefficient={coefficient} turns the penalty around; use 0 or more, such as 0.001."
        )


def check_bounds(name: str, low: float, high: float) -> None:
    """Raise ValueError for bounds of a ratio outside of which lies what the policies agree on."""
    if not 0 <= low <= 1 <= high or low == high:
        raise ValueError(
            f"{name}({low}, {high}) drops tokens on which the policies agree; use bounds around 1, "
            "such as 0.5 and 5."
        )
