"""How token losses of a batch become one number.

Each is an `Aggregation`: from (group_size, group_num_tokens, row_num_tokens) of one rollout it
gives the weight of each of the rollout's tokens, and what the rollout adds to the denominator:

    loss = Σ weight · token loss / Σ denominator        over all tokens, all rollouts of the batch

Both sums run over the global batch, so the result does not depend on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from rlsys.algorithms.parameters import parameters

# (group_size, group_num_tokens, row_num_tokens) -> (weight of a token, part of the denominator)
Aggregation = Callable[[int, int, int], tuple[float, float]]


def token_mean(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """Mean over all tokens: DAPO, 2503.14476, equation 12."""
    return 1.0, float(row_num_tokens)


def sequence_mean(
    group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Mean over rollouts of the mean over a rollout's tokens: GRPO, 2402.03300, equation 3."""
    return 1.0 / max(row_num_tokens, 1), 1.0


def prompt_mean(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """Mean over prompts of the mean over all tokens of a prompt's group: ScaleRL, 2510.13786."""
    return 1.0 / max(group_num_tokens, 1), 1.0 / group_size


def sequence_sum(
    group_size: int, group_num_tokens: int, row_num_tokens: int
) -> tuple[float, float]:
    """Mean over rollouts of the sum over a rollout's tokens: the policy gradient as it is derived,
    where a long rollout counts for its length; REINFORCE, Williams (1992), RLOO, 2402.14740.
    """
    return 1.0, 1.0


@parameters
class token_sum:
    """Sum over all tokens of a step, whose number of rollouts is `num_rollouts`: the definition
    itself.

    Nothing is normalised, so the learning rate must fit the batch: the loss is `sequence_sum`'s
    times num_rollouts. A step of fewer rollouts counts as if it had them all.
    """

    num_rollouts: int

    def __post_init__(self) -> None:
        if self.num_rollouts < 1:
            raise ValueError(
                f"token_sum({self.num_rollouts}) sums up no rollouts; use rollouts_per_step."
            )

    def __call__(
        self, group_size: int, group_num_tokens: int, row_num_tokens: int
    ) -> tuple[float, float]:
        return 1.0, 1.0 / self.num_rollouts


@parameters
class constant_length:
    """Mean over rollouts of the token sum over a constant: Dr. GRPO, 2503.20783.

    `length` is usually the longest completion that is sampled, in tokens.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(
                f"constant_length({self.length}) divides by no length; use at least 1 token, "
                "usually sampling.max_tokens."
            )

    def __call__(
        self, group_size: int, group_num_tokens: int, row_num_tokens: int
    ) -> tuple[float, float]:
        return 1.0, float(self.length)
