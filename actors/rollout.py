"""A generation engine as a Ray actor, and its face to the controller, a `Replica`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import ray

from actors.calls import Worker
from actors.store import StoreAddress, StoreClient
from actors.trainer import RayLearner
from rlsys.engines.generation.protocol import GenerationEngine
from rlsys.layout.transport.shm import local_copy
from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.types import Generation, GenerationRequest, WeightManifest
from rlsys.workers import FinishedRollout

# How long one `collect` waits for a rollout to end. Not a limit on rollouts: the next call goes on
# waiting. It bounds how late the death of an actor is noticed.
COLLECT_WAIT_S = 10.0


@ray.remote
class RolloutActor:
    """Writes finished rollouts to the store; only their metadata goes to the controller."""

    def __init__(
        self, make_engine: Callable[[], GenerationEngine], store: StoreAddress, tracer: Tracer
    ) -> None:
        self._tracer = tracer
        self._engine = make_engine()
        self._store = StoreClient(store)
        self._prompts: dict[str, Sequence[int]] = {}
        self._collecting: asyncio.Task[list[Generation]] | None = None

    async def start(self) -> None:
        await self._engine.start()

    async def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    async def submit(self, requests: list[GenerationRequest]) -> None:
        self._tracer.instant("engine", "submit", rollouts=len(requests))
        self._engine.submit(requests)
        self._prompts.update((r.request_id, r.prompt_token_ids) for r in requests)

    async def collect(self) -> list[FinishedRollout]:
        generations = await self._next_generations()
        stats = self._engine.stats()
        self._tracer.counter("running", stats.num_running)
        self._tracer.counter("waiting", stats.num_waiting)
        if not generations:
            return []
        prompts = [self._prompts.pop(g.request_id) for g in generations]
        block = await self._store.put_async(
            {
                "prompt_token_ids": [np.asarray(prompt, np.int32) for prompt in prompts],
                "token_ids": [g.token_ids for g in generations],
                "sampler_logprobs": [g.sampler_logprobs for g in generations],
                "policy_versions": [g.policy_versions for g in generations],
            }
        )
        return [
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

    async def abort(self, request_ids: list[str]) -> None:
        await self._engine.abort(request_ids)

    async def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def update_weights(
        self, manifest: WeightManifest, content: npt.NDArray[np.uint8] | None
    ) -> float:
        """Seconds during which nothing was sampled. `content` holds the version's bytes where its
        file lies on another node."""
        if content is None:
            return await self._load(manifest)
        with local_copy(manifest, content) as local:
            return await self._load(local)

    async def _load(self, manifest: WeightManifest) -> float:
        with self._tracer.span("engine", "update_weights", version=manifest.version):
            start = time.perf_counter()
            await self._engine.pause()
            try:
                await self._engine.load(manifest)
            finally:
                await self._engine.resume()
            return time.perf_counter() - start

    async def close(self) -> None:
        await self._engine.close()

    async def _next_generations(self) -> list[Generation]:
        # The engine's own collect is left waiting over several calls: cancelling it could lose what
        # it is about to return.
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._engine.collect())
        done, _ = await asyncio.wait([self._collecting], timeout=COLLECT_WAIT_S)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()


class RayReplica:
    def __init__(self, worker: Worker, learner: RayLearner) -> None:
        self.worker = worker
        self._learner = learner
        self._node_id = ""

    @property
    def name(self) -> str:
        return self.worker.name

    async def start(self) -> None:
        self._node_id = await self.worker.call("node_id")
        await self.worker.call("start")

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        await self.worker.call("submit", list(requests))

    async def collect(self) -> list[FinishedRollout]:
        finished: list[FinishedRollout] = await self.worker.call("collect")
        return finished

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.worker.call("abort", list(request_ids))

    async def update_weights(self, manifest: WeightManifest) -> float:
        is_local = self._node_id == self._learner.node_id
        content = None if is_local else self._learner.weights_content(manifest)
        pause_s: float = await self.worker.call("update_weights", manifest, content)
        return pause_s
