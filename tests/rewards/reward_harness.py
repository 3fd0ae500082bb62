"""Reward functions in real processes, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from rlsys.rewards import (
    RewardFailure,
    RewardResult,
    RewardRunner,
    example_rollout,
    pack_rewards,
)
from rlsys.types import Rollout

T = TypeVar("T")

# Far more than any test takes, so that a test that would hang fails instead.
PATIENCE_S = 300.0

Result = RewardResult | RewardFailure


def rollout(index: int = 0, completion: str = "2", **metadata: Any) -> Rollout:
    return example_rollout(completion, prompt_text="1+1=", index=index, metadata=metadata)


def rollouts(count: int) -> list[Rollout]:
    return [rollout(index) for index in range(count)]


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@contextlib.asynccontextmanager
async def running(
    *functions: Any,
    limit_s: float = PATIENCE_S,
    concurrency: int = 16,
    memory_gib: float = 1.0,
) -> AsyncIterator[RewardRunner]:
    runner = RewardRunner(
        pack_rewards(functions),
        concurrency=concurrency,
        timeout_s=limit_s,
        memory_gib=memory_gib,
        start_timeout_s=PATIENCE_S,
    )
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


def score(*functions: Any, batch: list[Rollout], **options: Any) -> list[Result]:
    async def scenario() -> list[Result]:
        async with running(*functions, **options) as runner:
            return await runner.score(batch)

    return run(scenario)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another process. Raise AssertionError if the condition never holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)


def total(result: Result) -> float:
    assert isinstance(result, RewardResult), result
    return result.total


def failure(result: Result) -> RewardFailure:
    assert isinstance(result, RewardFailure), result
    return result
