"""Reward functions in processes of their own, and their pool behind the controller's `Scorer`.

A function that hangs cannot be stopped from within its process. So a process that holds a hung
function is replaced as soon as its other rollouts are scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.rewards import RewardRunner
from rlsys.types import Rollout
from rlsys.workers import RolloutText, Scored, ScoreTask

from .calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied
from .store import StoreAddress, StoreClient

SCORE_COLUMNS = ("prompt_token_ids", "token_ids", "policy_versions")


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class RewardActor(Heartbeat):
    def __init__(
        self,
        make_runner: Callable[[], RewardRunner],
        tokenizer: Any,
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._num_calls = 0
        self._runner = make_runner()
        self._tokenizer = tokenizer
        self._store = StoreClient(store)

    async def ping(self) -> None:
        """Answers when the actor is ready."""

    async def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    async def score(self, tasks: list[ScoreTask]) -> tuple[list[Scored], int]:
        """The outcomes, and how many functions hang in this process."""
        columns = await self._store.get_async([task.cell for task in tasks], SCORE_COLUMNS)
        texts = self._tokenizer.batch_decode(columns["token_ids"], skip_special_tokens=True)
        rollouts = [
            Rollout(
                group_id=task.group_id,
                index=task.index,
                prompt_text=task.prompt_text,
                completion_text=text,
                prompt_token_ids=prompt_ids.copy(),
                token_ids=token_ids.copy(),
                finish_reason=task.finish_reason,
                metadata=task.metadata,
            )
            for task, text, prompt_ids, token_ids in zip(
                tasks, texts, columns["prompt_token_ids"], columns["token_ids"], strict=True
            )
        ]
        self._num_calls = call = self._num_calls + 1
        self._tracer.begin("score", call, rollouts=len(rollouts))  # calls overlap
        self._tracer.job_begins()
        try:
            outcomes = await self._runner.score(rollouts)
        finally:
            self._tracer.job_ends()
            self._tracer.end("score", call)
        scored = [
            Scored(
                outcome=outcome,
                text=RolloutText(
                    prompt=rollout.prompt_text,
                    completion=rollout.completion_text,
                    token_ids=rollout.token_ids.tolist(),
                    policy_versions=versions.tolist(),
                )
                if task.record
                else None,
            )
            for outcome, rollout, task, versions in zip(
                outcomes, rollouts, tasks, columns["policy_versions"], strict=True
            )
        ]
        return scored, self._runner.num_stuck


class RayScorer:
    """The pool: each batch goes to the worker with the fewest rollouts under way."""

    def __init__(self, start_worker: Callable[[int], Worker], *, num_workers: int) -> None:
        self._start_worker = start_worker
        self._active = [start_worker(number) for number in range(num_workers)]
        self._num_started = num_workers
        self._load = dict.fromkeys(self._active, 0)  # retired workers too, until they are idle

    @property
    def workers(self) -> list[Worker]:
        return list(self._load)

    async def start(self, timeout_s: float) -> None:
        await asyncio.gather(*(worker.call("ping", timeout_s=timeout_s) for worker in self._active))

    async def score(self, tasks: Sequence[ScoreTask]) -> list[Scored]:
        """Raises WorkerDied if two workers in a row die over these tasks: a function ends them."""
        try:
            return await self._score(tasks)
        except WorkerDied:  # its node may have died
            return await self._score(tasks)

    async def _score(self, tasks: Sequence[ScoreTask]) -> list[Scored]:
        worker = min(self._active, key=self._load.__getitem__)
        self._load[worker] += len(tasks)
        try:
            scored: list[Scored]
            scored, num_stuck = await worker.call("score", list(tasks))
            if num_stuck:
                self._replace(worker)
            return scored
        except WorkerDied:
            self._replace(worker)
            raise
        finally:
            self._load[worker] -= len(tasks)
            if worker not in self._active and self._load[worker] == 0:
                del self._load[worker]
                worker.kill()

    def _replace(self, worker: Worker) -> None:
        """Send it nothing more. Its successor takes calls at once: they wait for its start."""
        if worker not in self._active:
            return
        successor = self._start_worker(self._num_started)
        self._num_started += 1
        self._active[self._active.index(worker)] = successor
        self._load[successor] = 0
