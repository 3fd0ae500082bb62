"""The soft penalty for completions that are too long."""

from __future__ import annotations

from functools import partial

from rlsys.errors import require
from rlsys.rewards.reward import Reward
from rlsys.types import Rollout


def length_penalty(num_tokens: float, *, max_tokens: int, cache_tokens: int) -> float:
    """Return the penalty for the length of a completion: DAPO, 2503.14476, equation 13.

    It is 0 up to max_tokens − cache_tokens, then falls linearly to −1 at max_tokens, and is −1
    beyond. The paper uses 16384 + 4096 and 4096. Use it in advantages that depend on the length;
    `overlong_penalty` is the same as a reward.

    Args:
        num_tokens: Tokens of the completion.
        max_tokens: Length with the full penalty, in tokens.
        cache_tokens: Range of lengths in which the penalty grows, in tokens.
    """
    too_many = max(num_tokens - (max_tokens - cache_tokens), 0)
    return -min(too_many / cache_tokens, 1.0)


def overlong_penalty(max_tokens: int, cache_tokens: int, *, weight: float = 1.0) -> Reward:
    """Return `length_penalty` as a reward, to add to the reward of the answer.

    Example: `rewards=(numeric_answer(), overlong_penalty(...))`.

    Args:
        max_tokens: Length with the full penalty, in tokens.
        cache_tokens: Range of lengths in which the penalty grows, in tokens.
        weight: Factor of the penalty in the total.

    Raises:
        InvalidValue: `cache_tokens` leaves no range in which the penalty can grow.
    """
    require(
        0 < cache_tokens <= max_tokens,
        "overlong_penalty: cache_tokens",
        cache_tokens,
        rule=f"must be above 0 and at most max_tokens={max_tokens}",
        fix="Use a fifth of max_tokens, for example.",
    )
    function = partial(_overlong, max_tokens=max_tokens, cache_tokens=cache_tokens)
    return Reward(function=function, name="overlong_penalty", weight=weight)


def _overlong(rollout: Rollout, *, max_tokens: int, cache_tokens: int) -> float:
    return length_penalty(len(rollout.token_ids), max_tokens=max_tokens, cache_tokens=cache_tokens)
