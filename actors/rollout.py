"""A generation engine as a Ray actor, and its face to the controller, a `Replica`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from rlsys.dataflow.blocks import BlockRef, Columns
from rlsys.dataflow.signal import Signal
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.protocol import GenerationEngine
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.layout.transport.owned_file import local_copy
from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.types import Generation, GenerationRequest, WeightManifest
from rlsys.workers import Collected, FinishedRollout, ReplicaDied

from .calls import Worker, WorkerDied
from .store import ShardLost, StoreAddress, StoreClient
from .store_shards import StoreShards
from .trainer import RayLearner

# How long one `collect` waits for a rollout to end. Not a limit on rollouts: the next call goes on
# waiting. It bounds how late the death of an actor is noticed.
COLLECT_WAIT_S = 5.0

# How long rollouts that have ended wait for others to travel with, while the engine samples on: a
# call costs every process about a millisecond.
GATHER_S = 0.03

# For the controller to notice a dead shard and to start another.
NEW_SHARD_TIMEOUT_S = 60.0

# How often the tokens of long requests travel to the controller, and how many make a request long:
# what is lost when the process dies, against what telling costs.
PROGRESS_EVERY_S = 2.0
MIN_PROGRESS_TOKENS = 64


@ray.remote
class RolloutActor:
    """Writes finished rollouts to the store; only their metadata goes to the controller."""

    def __init__(
        self, make_engine: Callable[[], GenerationEngine], store: StoreAddress, tracer: Tracer
    ) -> None:
        self._tracer = tracer
        self._engine = make_engine()
        self._switch = WeightSwitch(self._engine)
        self._store = StoreClient(store)
        self._store_changed = Signal()
        self._prompts: dict[str, Sequence[int]] = {}
        self._priors: dict[str, Generation] = {}
        self._told_progress_at = time.monotonic()
        self._collecting: asyncio.Task[list[Generation]] | None = None

    async def start(self) -> None:
        await self._engine.start()

    async def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    async def submit(
        self, requests: list[GenerationRequest], priors: dict[str, Generation]
    ) -> None:
        self._tracer.instant("engine", "submit", rollouts=len(requests))
        self._switch.submit(
            [
                continued(request, priors[request.request_id])
                if request.request_id in priors
                else request
                for request in requests
            ]
        )
        if requests and not self._prompts:
            self._tracer.job_begins()
        self._prompts.update((r.request_id, r.prompt_token_ids) for r in requests)
        self._priors.update(priors)

    async def collect(self) -> Collected:
        generations = await self._next_generations()
        stats = self._engine.stats()
        self._tracer.counter("running", stats.num_running)
        self._tracer.counter("waiting", stats.num_waiting)
        partial = await self._progress()
        if not generations:
            return Collected(finished=[], partial=partial)
        generations = [self._whole(generation) for generation in generations]
        prompts = [self._prompts.pop(g.request_id) for g in generations]
        if not self._prompts:
            self._tracer.job_ends()
        for generation in generations:
            self._priors.pop(generation.request_id, None)
        block = await self._put(
            {
                "prompt_token_ids": [np.asarray(prompt, np.int32) for prompt in prompts],
                "token_ids": [g.token_ids for g in generations],
                "sampler_logprobs": [g.sampler_logprobs for g in generations],
                "policy_versions": [g.policy_versions for g in generations],
            }
        )
        finished = [
            FinishedRollout(
                request_id=g.request_id,
                cell=(block, place),
                num_prompt_tokens=len(prompt),
                num_tokens=len(g.token_ids),
                min_version=int(g.policy_versions.min(initial=np.iinfo(np.int32).max)),
                max_version=int(g.policy_versions.max(initial=0)),
                finish_reason=g.finish_reason,
            )
            for place, (g, prompt) in enumerate(zip(generations, prompts, strict=True))
        ]
        return Collected(finished=finished, partial=partial)

    async def use_store(self, address: StoreAddress) -> None:
        """The shard that this actor wrote to has died; there are others."""
        self._store = StoreClient(address)
        self._store_changed.notify()

    async def _put(self, columns: Columns) -> BlockRef:
        """Raises ShardLost if the shard has died and the controller names no other in time."""
        while True:
            store = self._store
            try:
                return await store.put_async(columns)
            except ShardLost as death:
                try:
                    async with asyncio.timeout(NEW_SHARD_TIMEOUT_S):
                        while self._store is store:
                            await self._store_changed.next()
                except TimeoutError:
                    raise death from None

    async def _progress(self) -> list[Generation]:
        """What long requests have so far, at most every PROGRESS_EVERY_S."""
        now = time.monotonic()
        if now - self._told_progress_at < PROGRESS_EVERY_S:
            return []
        self._told_progress_at = now
        running = await self._engine.progress()
        return [self._whole(g) for g in running if len(g.token_ids) >= MIN_PROGRESS_TOKENS]

    def _whole(self, generation: Generation) -> Generation:
        """With what another replica had sampled of it."""
        prior = self._priors.get(generation.request_id)
        return generation if prior is None else merged(prior, generation)

    async def abort(self, request_ids: list[str]) -> None:
        await self._engine.abort(request_ids)

    async def place(self) -> tuple[str, str]:
        """Ids of the node and of the actor."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_actor_id())

    async def update_weights(
        self, manifest: WeightManifest, content: npt.NDArray[np.uint8] | None, delayed: bool
    ) -> float:
        """Seconds during which nothing was sampled. `content` holds the version's bytes where its
        file lies on another node."""
        with self._tracer.span("engine", "update_weights", version=manifest.version):
            if content is None:
                return await self._switch.switch(manifest, delayed=delayed)
            with local_copy(manifest, content) as local:
                return await self._switch.switch(local, delayed=delayed)

    async def close(self) -> None:
        await self._engine.close()

    async def _next_generations(self) -> list[Generation]:
        generations = await self._ended_within(COLLECT_WAIT_S)
        deadline = time.monotonic() + GATHER_S
        while generations and self._is_sampling and (left := deadline - time.monotonic()) > 0:
            generations += await self._ended_within(left)
        return generations

    async def _ended_within(self, timeout_s: float) -> list[Generation]:
        # The engine's own collect is left waiting over several calls: cancelling it could lose what
        # it is about to return.
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._switch.collect())
        done, _ = await asyncio.wait([self._collecting], timeout=timeout_s)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()

    @property
    def _is_sampling(self) -> bool:
        stats = self._engine.stats()
        return stats.num_running + stats.num_waiting > 0


class RayReplica:
    def __init__(self, worker: Worker, learner: RayLearner, shards: StoreShards) -> None:
        self.worker = worker
        self._learner = learner
        self._shards = shards
        self.node_id = self._actor_id = ""

    @property
    def name(self) -> str:
        return self.worker.name

    async def start(self, timeout_s: float) -> None:
        self.node_id, self._actor_id = await self.worker.call("place", timeout_s=timeout_s)
        await self.worker.call("start", timeout_s=timeout_s)

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Generation]
    ) -> None:
        await self._call("submit", list(requests), dict(priors))

    async def collect(self) -> Collected:
        collected: Collected = await self._call("collect")
        return collected

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", list(request_ids))

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        is_local = self.node_id == self._learner.node_id
        content = None if is_local else self._learner.weights_content(manifest)
        pause_s: float = await self._call("update_weights", manifest, content, delayed)
        return pause_s

    async def bury(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        await self._shards.reclaim(self._actor_id, live_rows)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.worker.call(method, *args)
        except WorkerDied as death:
            raise ReplicaDied(str(death)) from None
