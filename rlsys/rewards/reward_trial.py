"""One call of each reward function before a run starts, on the first row of its data.

    rewards, first prompt ─► RewardRunner (processes as in the run) ─► warnings, or ValueError

A function that returns no number fails every rollout, so it is refused. One that raises or takes
long on the trial's completion may do well in the run: that is a warning. A function that declares
itself slow, with a timeout_s above reward.timeout_s (a judge, a service), is loaded and not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsys.config import RewardConfig, require
from rlsys.errors import ErrorCollector
from rlsys.rewards.example_rollout import example_rollout
from rlsys.rewards.outcome import RewardFailure
from rlsys.rewards.process.reward_pickle import pack_rewards
from rlsys.rewards.process.reward_process import ProcessEnded
from rlsys.rewards.process.reward_runner import RewardRunner
from rlsys.rewards.reward import Reward
from rlsys.types import Prompt, Rollout

# Limit for one call of the trial, where the function's own is not less.
TRIAL_S = 10.0

# A completion where the data holds none: a number, text and JSON.
COMPLETION = "42"


def trial_rollout(prompt: Prompt, tokenizer: Any) -> Rollout:
    """Return a rollout of a prompt with its first completion, or a made one."""
    text, token_ids = COMPLETION, tokenizer(COMPLETION, add_special_tokens=False)["input_ids"]
    if prompt.completions:
        text, token_ids = prompt.completions[0].text, prompt.completions[0].token_ids
    return example_rollout(
        text,
        prompt_text=prompt.text,
        prompt_token_ids=prompt.token_ids,
        token_ids=token_ids,
        metadata=prompt.metadata,
    )


async def try_rewards(
    rewards: Sequence[Reward], rollout: Rollout, config: RewardConfig, *, start_timeout_s: float
) -> list[str]:
    """Call each reward on the rollout, in processes as the run has them.

    Args:
        rewards: All reward functions of the run.
        rollout: What they are called with.
        config: Limits of the processes.
        start_timeout_s: Limit for the functions to be loaded.

    Returns:
        A warning for each function that raised, took too long, or gave no finite number.

    Raises:
        ValueError: A function cannot be loaded, or returned something that is no number.
    """
    slow = [one for one in rewards if (one.timeout_s or 0) > config.timeout_s]
    left = [one for one in rewards if one not in slow]
    failures: list[RewardFailure] = []
    if slow:
        await _failure(slow, None, config, start_timeout_s)
    while left:
        limited = [replace(one, timeout_s=_limit_s(one, config)) for one in left]
        found = await _failure(limited, rollout, config, start_timeout_s)
        if found is None:
            break
        failures.append(found)
        left = [one for one in left if one.name != found.reward]
    mistakes = ErrorCollector()
    for failure in failures:
        with mistakes.collect():
            require(failure.kind != "type", f"reward {failure.message}")
    mistakes.raise_found()
    return [
        f"reward {one.reward!r} gave no value on a trial with the first row and the completion "
        f"{rollout.completion_text[:40]!r}: {one.message}"
        for one in failures
    ]


def _limit_s(one: Reward, config: RewardConfig) -> float:
    return min(TRIAL_S, one.timeout_s or config.timeout_s)


async def _failure(
    rewards: Sequence[Reward],
    rollout: Rollout | None,
    config: RewardConfig,
    start_timeout_s: float,
) -> RewardFailure | None:
    """Load rewards and, where there is a rollout, call them; return the first failure."""
    runner = RewardRunner(
        pack_rewards(rewards),
        concurrency=config.concurrency,
        timeout_s=config.timeout_s,
        memory_gib=config.memory_gib,
        start_timeout_s=start_timeout_s,
    )
    names = ", ".join(repr(one.name) for one in rewards)
    try:
        await runner.start()
        if rollout is None:
            return None
        (result,) = await runner.score([rollout])
    except (TimeoutError, ProcessEnded) as error:
        raise ValueError(
            f"the reward functions {names} were not loaded within cluster.start_timeout_s="
            f"{start_timeout_s:g} ({error or type(error).__name__}). Import less, or raise it."
        ) from error
    finally:
        await runner.close()
    return result if isinstance(result, RewardFailure) else None
