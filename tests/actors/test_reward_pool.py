"""The pool of reward workers, over fakes that answer, hang or die."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.calls import Worker, WorkerDied
from actors.reward import RayScorer
from rlsys.rewards import RewardResult
from rlsys.types import FinishReason
from rlsys.workers import Scored, ScoreTask


class FakeWorker(Worker):
    """Scores everything 1, says that `num_stuck` functions hang, or dies of its first batch."""

    def __init__(self, number: int, *, num_stuck: int = 0, dies: bool = False) -> None:
        super().__init__(f"reward-{number}", None, timeout_s=1)
        self.num_stuck = num_stuck
        self.dies = dies
        self.num_scored = 0
        self.killed = False

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)  # as a remote call, it lets others run
        if self.dies:
            raise WorkerDied(f"{self.name} died during {method}")
        self.num_scored += len(args[0])
        result = Scored(outcome=RewardResult(total=1.0, components={}), text=None)
        return [result] * len(args[0]), self.num_stuck

    def kill(self) -> None:
        self.killed = True


def pool(workers: Sequence[FakeWorker], *, num_workers: int) -> RayScorer:
    """Of the first workers; the others follow in their turn."""
    return RayScorer(lambda number: workers[number], num_workers=num_workers)


def tasks(count: int) -> list[ScoreTask]:
    block: Any = None  # workers read it, the pool does not
    return [
        ScoreTask(
            group_id=0,
            index=index,
            cell=(block, index),
            prompt_text="",
            metadata={},
            finish_reason=FinishReason.STOP,
            record=False,
        )
        for index in range(count)
    ]


def score(scorer: RayScorer, *sizes: int) -> list[int]:
    """Batches of these sizes at once; how many scores came back for each."""

    async def run() -> list[list[Scored]]:
        return await asyncio.gather(*(scorer.score(tasks(size)) for size in sizes))

    return [len(scored) for scored in asyncio.run(run())]


def test_batches_go_to_the_least_loaded_worker() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    assert score(pool(workers, num_workers=2), 3, 1, 1) == [3, 1, 1]
    assert [worker.num_scored for worker in workers] == [3, 2]


def test_a_worker_with_a_hung_function_is_replaced_when_it_is_idle() -> None:
    workers = [FakeWorker(0, num_stuck=1), FakeWorker(1)]
    scorer = pool(workers, num_workers=1)
    assert score(scorer, 2) == [2]
    assert workers[0].killed
    assert scorer.workers == [workers[1]]


def test_batches_of_a_dead_worker_are_scored_by_its_one_successor() -> None:
    workers = [FakeWorker(0, dies=True), FakeWorker(1)]
    scorer = pool(workers, num_workers=1)
    assert score(scorer, 2, 3) == [2, 3]
    assert workers[1].num_scored == 5
    assert scorer.workers == [workers[1]]


def test_a_batch_that_kills_two_workers_is_given_up() -> None:
    workers = [FakeWorker(number, dies=True) for number in range(3)]
    with pytest.raises(WorkerDied, match="reward-1 died"):
        score(pool(workers, num_workers=1), 1)
