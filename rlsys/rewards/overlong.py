"""The soft penalty for completions that are too long."""

from __future__ import annotations

from functools import partial

from rlsys.rewards.reward import Reward
from rlsys.types import Rollout


def length_penalty(num_tokens: float, *, max_tokens: int, cache_tokens: int) -> float:
    """0 up to max_tokens − cache_tokens completion tokens, then linear down to −1 at max_tokens,
    and −1 beyond: DAPO, 2503.14476, equation 13, with 16384 + 4096 and 4096.

    For advantages that look at the length besides; `overlong_penalty` is a reward of it.
    """
    too_many = max(num_tokens - (max_tokens - cache_tokens), 0)
    return -min(too_many / cache_tokens, 1.0)


def overlong_penalty(max_tokens: int, cache_tokens: int, *, weight: float = 1.0) -> Reward:
    """`length_penalty` as a reward beside that of the answer:
    `rewards=(numeric_answer(), overlong_penalty(...))`.

    Raises ValueError for cache_tokens that leave no range.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens={cache_tokens}, max_tokens={max_tokens} leave no range for the penalty "
            "to grow; use 0 < cache_tokens <= max_tokens, such as a fifth of it."
        )
    function = partial(_overlong, max_tokens=max_tokens, cache_tokens=cache_tokens)
    return Reward(function=function, name="overlong_penalty", weight=weight)


def _overlong(rollout: Rollout, *, max_tokens: int, cache_tokens: int) -> float:
    return length_penalty(len(rollout.token_ids), max_tokens=max_tokens, cache_tokens=cache_tokens)
