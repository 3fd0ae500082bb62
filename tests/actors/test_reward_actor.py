"""A reward actor over a store whose shards can die, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.workers import reward_actor as reward_module
from actors.workers.reward_actor import RewardActor, ScoredPart
from rlsys.controller.worker_protocols import RowsLost, Score, Scored, ScoreTask, Unreadable
from rlsys.dataflow.store.blocks import BlockRef, layout_of
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.rewards import RewardResult, RewardRunner, pack_rewards
from rlsys.runs.observe.trace import Tracer
from rlsys.types import FinishReason, Rollout

PATIENCE_S = 300.0


TOKENIZER = build_tokenizer("0123456789")


class Store:
    """Store in which rollout i has the digit i as its completion; shard "dead" cannot be read."""

    def __init__(self, address: Any) -> None:
        pass

    async def get_async(self, cells: Sequence[Any], columns: Sequence[str]) -> dict[str, Any]:
        shards = {block.shard for block, _ in cells}
        if "dead" in shards:
            raise RowsLost("shard dead has died")
        rows = [np.array(TOKENIZER(str(place))["input_ids"], np.int32) for _, place in cells]
        return dict.fromkeys(columns, rows)


def task(place: int, shard: str) -> ScoreTask:
    layout = layout_of({"token_ids": [np.zeros(1, np.int32)]})
    return ScoreTask(
        group_id=0,
        index=place,
        cell=(BlockRef(shard, 0, 0, layout), place),
        prompt_text="?",
        metadata={},
        finish_reason=FinishReason.STOP,
    )


def sleeps_at_odd(rollout: Rollout) -> float:
    if rollout.index % 2:
        time.sleep(1.0)
    return float(rollout.completion_text)


def make_runner() -> RewardRunner:
    return RewardRunner(
        pack_rewards([sleeps_at_odd]),
        concurrency=16,
        timeout_s=PATIENCE_S,
        memory_gib=1.0,
        start_timeout_s=PATIENCE_S,
    )


@pytest.mark.slow
def test_rows_of_a_lost_shard_are_unreadable_and_slow_scores_arrive_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_module, "StoreClient", Store)
    actor_class: Any = RewardActor.__ray_actor_class__  # type: ignore[attr-defined]
    runners: list[RewardRunner] = []

    def make() -> RewardRunner:
        runners.append(make_runner())
        return runners[0]

    actor = actor_class(make, TOKENIZER, (), None, Tracer("reward-0"))
    tasks = [task(place, "dead" if place == 2 else "alive") for place in range(5)]

    async def scenario() -> list[dict[int, Score]]:
        await actor.start()
        parts: list[dict[int, Score]] = []
        part: ScoredPart = await actor.score(7, tasks)
        parts.append({**part.scores})
        while not part.is_last:
            part = await actor.more(7)
            parts.append({**part.scores})
        await runners[0].close()
        return parts

    parts = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert len(parts) > 1
    assert not {1, 3} & parts[0].keys()
    found = {place: score for part in parts for place, score in part.items()}
    assert found.pop(2) == Unreadable()
    totals = {}
    for place, score in found.items():
        assert isinstance(score, Scored)
        assert isinstance(score.outcome, RewardResult)
        totals[place] = score.outcome.total
    assert totals == {0: 0.0, 1: 1.0, 3: 3.0, 4: 4.0}
