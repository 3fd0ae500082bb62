"""Rewards whose libraries replace functions of the standard library, or end the event loop."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from rlsys.rewards import RewardFailure
from rlsys.types import Rollout
from tests.rewards.reward_harness import rollouts, score, total
from tests.tiers import rest_slow


def replacing(rollout: Rollout) -> float:
    """Replace json's functions by functions with other types, like orjson's."""

    def dumps(value: Any) -> bytes:
        return b"replaced"

    def loads(text: Any) -> Any:
        raise TypeError("replaced")

    json.dumps, json.loads = dumps, loads  # type: ignore[assignment]
    return float(rollout.index)


async def replacing_async(rollout: Rollout) -> float:
    return replacing(rollout)


@pytest.mark.parametrize("function", rest_slow([replacing, replacing_async]))
def test_a_reward_that_replaces_json_is_scored(function: Any) -> None:
    assert [total(result) for result in score(function, batch=rollouts(4))] == [0, 1, 2, 3]


async def stopping(rollout: Rollout) -> float:
    """End the event loop of all async rewards."""
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 1.0


async def exiting(rollout: Rollout) -> float:
    """End the event loop by a task that raises SystemExit."""

    async def exit_later() -> None:
        sys.exit(3)

    asyncio.get_running_loop().create_task(exit_later())
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize("function", rest_slow([stopping, exiting]))
def test_a_reward_that_ends_the_event_loop_fails_at_once(function: Any) -> None:
    """No time limit is needed: the end of the loop's thread ends the process."""
    (result,) = score(function, batch=rollouts(1))
    assert isinstance(result, RewardFailure)
    assert result.kind == "crash"
