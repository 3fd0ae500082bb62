"""Pool of reward workers, over fakes that answer, hang or die."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from actors.cluster.calls import Worker, WorkerDied
from actors.workers.reward_actor import RayScorer, ScoredPart
from rlsys.controller.worker_protocols import Score, Scored, ScoreTask
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason

ONE = Scored(outcome=RewardResult(total=1.0, components={}))


class FakeWorker(Worker):
    """Worker that scores everything 1, `per_answer` rollouts in each answer.

    It dies with answer number `dies_at`, or when it starts (0).
    """

    def __init__(
        self, number: int, *, per_answer: int = 1 << 20, dies_at: int | None = None
    ) -> None:
        super().__init__(f"reward-{number}", None, timeout_s=1)
        self.per_answer = per_answer
        self.dies_at = dies_at
        self.num_answers = 0
        self.num_scored = 0
        self.killed = False
        self._left: dict[int, list[int]] = {}

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)  # lets other tasks run, as a remote call does
        if self.dies_at is not None and self.num_answers >= self.dies_at:
            raise WorkerDied(f"{self.name} died during {method}")
        self.num_answers += 1
        if method == "start":
            return None
        number = args[0]
        if method == "score":
            self._left[number] = [*range(len(args[1]))]
        left = self._left[number]
        scored, left[:] = left[: self.per_answer], left[self.per_answer :]
        self.num_scored += len(scored)
        return ScoredPart(scores=dict.fromkeys(scored, ONE), is_last=not left)

    def kill(self) -> None:
        self.killed = True


def pool(
    workers: Sequence[FakeWorker], *, num_workers: int, deaths: list[str] | None = None
) -> RayScorer:
    """Return a pool of the first workers; the others are their successors."""
    return RayScorer(
        lambda number: workers[number],
        num_workers=num_workers,
        on_death=([] if deaths is None else deaths).append,
    )


def tasks(count: int) -> list[ScoreTask]:
    block: Any = None  # only workers read it
    return [
        ScoreTask(
            group_id=0,
            index=index,
            cell=(block, index),
            prompt_text="",
            metadata={},
            finish_reason=FinishReason.STOP,
        )
        for index in range(count)
    ]


def score(scorer: RayScorer, *sizes: int) -> list[dict[int, Score]]:
    """Score batches of these sizes at once; return the scores of each."""

    async def one(size: int) -> dict[int, Score]:
        found: dict[int, Score] = {}

        def tell(scores: Mapping[int, Score]) -> None:
            assert not found.keys() & scores.keys()
            found.update(scores)

        await scorer.score(tasks(size), tell)
        assert sorted(found) == [*range(size)]
        return found

    async def run() -> list[dict[int, Score]]:
        return await asyncio.gather(*map(one, sizes))

    return asyncio.run(run())


def test_a_batch_is_divided_among_all_workers() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    score(pool(workers, num_workers=2), 64)
    assert [worker.num_scored for worker in workers] == [32, 32]


def test_small_batches_go_to_the_least_loaded_worker() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    score(pool(workers, num_workers=2), 3, 1, 1)
    assert [worker.num_scored for worker in workers] == [3, 2]


def test_scores_are_reported_as_they_arrive() -> None:
    parts: list[list[int]] = []
    scorer = pool([FakeWorker(0, per_answer=2)], num_workers=1)
    asyncio.run(scorer.score(tasks(5), lambda scores: parts.append([*scores])))
    assert parts == [[0, 1], [2, 3], [4]]


def test_the_single_successor_of_a_dead_worker_scores_the_rest() -> None:
    workers = [FakeWorker(0, per_answer=2, dies_at=3), FakeWorker(1)]
    deaths: list[str] = []
    scorer = pool(workers, num_workers=1, deaths=deaths)
    found = score(scorer, 6, 3)
    assert [*found[0].values(), *found[1].values()] == [ONE] * 9
    assert workers[0].killed
    assert workers[0].num_scored + workers[1].num_scored == 9
    assert workers[0].num_scored > 0
    assert scorer.workers == [workers[1]]
    (death,) = deaths  # reported once, though both batches noticed
    assert "reward-0 died" in death


@pytest.mark.parametrize("dies_at", [0, 1])
def test_rollouts_with_which_three_workers_die_fail(dies_at: int) -> None:
    workers = [FakeWorker(number, dies_at=dies_at) for number in range(3)]
    scorer = pool([*workers, FakeWorker(3)], num_workers=1)
    (found,) = score(scorer, 2)
    for result in found.values():
        assert isinstance(result, Scored)
        assert isinstance(result.outcome, RewardFailure)
        assert result.outcome.kind == "crash"
        assert "reward-2 died" in result.outcome.message
    assert [*score(scorer, 1)[0].values()] == [ONE]


def test_a_worker_and_a_successor_on_a_lost_node_cost_no_rollout() -> None:
    # The node dies with the worker, and the cluster notices after the successor's start.
    workers = [FakeWorker(0, dies_at=1), FakeWorker(1, dies_at=0), FakeWorker(2)]
    assert [*score(pool(workers, num_workers=1), 2)[0].values()] == [ONE] * 2


def test_repeated_deaths_during_the_start_are_an_error() -> None:
    workers = [FakeWorker(number, dies_at=0) for number in range(4)]
    with pytest.raises(WorkerDied) as died:
        asyncio.run(pool(workers, num_workers=1).start(1.0))
    assert "reward-2" in str(died.value)


def test_an_error_of_the_callback_is_raised() -> None:
    def tell(scores: Mapping[int, Score]) -> None:
        raise ValueError("rows are gone")

    workers = [FakeWorker(0)]
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="rows are gone")):
        asyncio.run(pool(workers, num_workers=1).score(tasks(2), tell))
    assert not workers[0].killed
