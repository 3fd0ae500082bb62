"""Aggregation of the token losses of a batch into one number.

An `Aggregation` maps (group_size, group_num_tokens, row_num_tokens) of one rollout to the weight
of each of its tokens and to its part of the denominator:

    loss = Σ weight · token loss / Σ denominator        over all tokens, all rollouts of the batch

Both sums run over the global batch, so the result does not depend on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from rlsys.algorithms.parameters import parameters, require_field

# (group_size, group_num_tokens, row_num_tokens) -> (weight of a token, part of the denominator)
Aggregation = Callable[[int, int, int], tuple[float, float]]


def token_mean(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """Return weight and denominator of a mean over all tokens: DAPO, 2503.14476, equation 12."""
    return 1.0, float(row_num_tokens)


def sequence_mean(
    group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Return weight and denominator of a mean of rollout means: GRPO, 2402.03300, equation 3."""
    return 1.0 / max(row_num_tokens, 1), 1.0


def prompt_mean(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """Return weight and denominator of a mean of prompt means: ScaleRL, 2510.13786."""
    return 1.0 / max(group_num_tokens, 1), 1.0 / group_size


def sequence_sum(
    group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Return weight and denominator of a mean of rollout sums: REINFORCE, Williams (1992).

    This is the policy gradient as it is derived: a rollout's weight grows with its length. RLOO
    (2402.14740) uses it too.
    """
    return 1.0, 1.0


@parameters
class token_sum:
    """Sum over all tokens of a step of `num_rollouts` rollouts: the definition itself.

    The sum is not normalised, so the learning rate must fit the batch: the loss is num_rollouts
    times that of `sequence_sum`. A step with fewer rollouts is scaled as if it had all of them.
    """

    num_rollouts: int

    def __post_init__(self) -> None:
        require_field(
            self,
            "num_rollouts",
            self.num_rollouts >= 1,
            rule="must be at least 1",
            fix="Use rollouts_per_step.",
        )

    def __call__(
        self, group_size: int, group_num_tokens: int, row_num_tokens: int
    ) -> tuple[float, float]:
        """Return the weight of a token and the rollout's part of the denominator."""
        return 1.0, 1.0 / self.num_rollouts


@parameters
class constant_length:
    """Mean over rollouts of their token sums divided by a constant: Dr. GRPO, 2503.20783.

    `length` is usually the maximum length of a completion, in tokens.
    """

    length: int

    def __post_init__(self) -> None:
        require_field(
            self,
            "length",
            self.length >= 1,
            rule="must be at least 1 token",
            fix="Use sampling.max_tokens.",
        )

    def __call__(
        self, group_size: int, group_num_tokens: int, row_num_tokens: int
    ) -> tuple[float, float]:
        """Return the weight of a token and the rollout's part of the denominator."""
        return 1.0, float(self.length)
