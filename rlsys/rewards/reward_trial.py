"""A trial call of each reward function on the first row of the data, before a run starts.

    rewards, first prompt ─► RewardRunner (processes as in the run) ─► warnings, or InvalidValue

A function that does not return a number fails every rollout, so it is refused. One that raises or
takes long on the trial's completion may work in the run: this gives a warning. A function that
declares itself slow, with a timeout_s above reward.timeout_s (a judge, a service), is only loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsys.common.local_process import ProcessEnded
from rlsys.config import RewardConfig
from rlsys.errors import ErrorCollector, InvalidValue, require
from rlsys.rewards.example_rollout import example_rollout
from rlsys.rewards.outcome import RETURN_NUMBER, RewardFailure
from rlsys.rewards.process.reward_pickle import pack_rewards
from rlsys.rewards.process.reward_runner import RewardRunner
from rlsys.rewards.reward import Reward
from rlsys.types import Prompt, Rollout

# Maximum time of a call in the trial.
TRIAL_S = 10.0

# The completion if the data has none: a number, text and JSON at once.
COMPLETION = "42"


def trial_rollout(prompt: Prompt, tokenizer: Any) -> Rollout:
    """Return a rollout of a prompt with its first completion, or with COMPLETION."""
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
    """Call each reward on the rollout, in the same kind of processes as in a run.

    Args:
        rewards: All reward functions of the run.
        rollout: The rollout of the trial.
        config: Limits of the processes.
        start_timeout_s: Time limit for loading the functions.

    Returns:
        A warning for each function that raised, took too long, or gave no finite number.

    Raises:
        InvalidValue: A function cannot be loaded, or did not return a number.
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
            require(
                failure.kind != "type",
                f"reward {failure.reward!r}",
                rule=failure.message.removesuffix(RETURN_NUMBER).rstrip(" ."),
                fix=RETURN_NUMBER,
            )
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
    """Load rewards, call them if there is a rollout, and return the first failure."""
    runner = RewardRunner(
        pack_rewards(rewards),
        concurrency=config.concurrency,
        timeout_s=config.timeout_s,
        memory_gib=config.memory_gib,
        start_timeout_s=start_timeout_s,
    )
    names = [one.name for one in rewards]
    try:
        await runner.start()
        if rollout is None:
            return None
        (result,) = await runner.score([rollout])
    except TimeoutError as error:
        raise InvalidValue(
            "cluster.start_timeout_s",
            start_timeout_s,
            rule=f"the reward functions {names} were not loaded within this time",
            fix="Import less in their modules, or raise it.",
        ) from error
    except ProcessEnded as error:
        raise InvalidValue(
            "rewards",
            names,
            rule=f"{error} while it loaded the functions",
            fix="Check what their modules do when they are imported.",
        ) from error
    finally:
        await runner.close()
    return result if isinstance(result, RewardFailure) else None
