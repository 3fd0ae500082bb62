"""Finite ratios of two policies' probabilities of the sampled tokens.

In: log-probabilities [N]; a token that a policy excludes has −inf. Out: [N], finite. The gradients
are finite too, and exactly 0 where a bound of this file applies.

A function that multiplies a bounded value f with another ratio r must not pass only the gradient
of r: the derivative of r · f is r · (f + f'), and with f' = 0 the rest may have the wrong sign.
`with_slope` states the derivative of such a function explicitly.
"""

from __future__ import annotations

import math

import torch

from rlsys.algorithms.parameters import require_field
from rlsys.errors import require

# Replaces −inf: its exp is 0 in every type, and 0 times it is 0, while 0 · −inf is NaN. No policy
# that can be trained comes near it.
LOWEST_LOGPROB = -1e4

# Without a bound exp overflows, and inf multiplied by a mask's 0 is NaN. A ratio of e^20 is far
# beyond every clip.
MAX_LOG_RATIO = 20.0


def floored(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [N] of at least LOWEST_LOGPROB, without a gradient below it."""
    return logprobs.clamp(min=LOWEST_LOGPROB)


def log_ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log π − log π_base of each token [N], 0 where both are −inf."""
    return floored(logprobs) - floored(base_logprobs)


def ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """Return π/π_base of each token [N], at most e^20."""
    return bounded_exp(log_ratio(logprobs, base_logprobs))


def bounded_exp(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return exp of log ratios [N], at most e^20."""
    return log_ratios.clamp(max=MAX_LOG_RATIO).exp()


def with_slope(values: torch.Tensor, slope: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    """Return `values` with the gradient `slope` by the finite `variable`, and no other gradient.

    [N], [N], [N] -> [N].
    """
    return values.detach() + slope.detach() * (variable - variable.detach())


def check_cap(owner: object, name: str) -> None:
    """Raise InvalidValue unless the field `name`, an upper bound of a ratio, is positive."""
    require_field(
        owner,
        name,
        getattr(owner, name) > 0,
        rule="must be positive, since 0 stops every gradient",
        fix="Use 2 to 10.",
    )


def check_coefficient(owner: object, name: str = "coefficient") -> None:
    """Raise InvalidValue unless the coefficient `name` of a penalty is finite and not negative."""
    require_field(
        owner,
        name,
        0 <= getattr(owner, name) < math.inf,
        rule="must be finite and at least 0, since below 0 the penalty is a reward",
        fix="Use such as 0.001.",
    )


def check_bounds(name: str, low: float, high: float) -> None:
    """Raise InvalidValue for bounds of a ratio that exclude 1, where the policies agree."""
    require(
        0 <= low <= 1 <= high and low != high,
        f"{name}: (low, high)",
        (low, high),
        rule="must enclose 1, where the policies agree",
        fix="Use such as 0.5 and 5.",
    )
