"""Engine that the policies of one base model share, as a GenerationEngine for each policy.

    policy 0 ──► PolicyView ─┐                                    ┌─ tokens of policy 0
    policy 1 ──► PolicyView ─┴─► engine: one batch, one KV cache ─┴─ tokens of policy 1

Each policy has its own requests, updates and versions. Two policies may use the same request id: a
view puts its number before the ids of its requests. Updates are prepared at the same time and
loaded one after the other, each in a pause of the whole engine, since it runs one batch.

The counters of a view are those of the whole engine, except the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlsys.engines.generation.generation_protocol import EngineStats, GenerationEngine
from rlsys.types import Generation, GenerationRequest, WeightManifest

MARK = "/"  # between the number of a policy and the id of its request


class MultiPolicyEngine(GenerationEngine, Protocol):
    """An engine that serves several policies, numbered from 0."""

    @property
    def policy_versions(self) -> Sequence[int]:
        """Return the versions of all policies, by number."""

    def submit(self, requests: Sequence[GenerationRequest], *, policy: int = 0) -> None:
        """Queue a batch of a policy. Request ids differ between policies."""

    async def prepare(self, manifest: WeightManifest, *, policy: int = 0) -> None:
        """Prepare an update of a policy; see `GenerationEngine.prepare`."""

    async def load(self, *, policy: int = 0) -> None:
        """Switch a policy to its prepared version while paused; the others keep theirs."""


@dataclass(frozen=True, kw_only=True)
class PolicyEngines:
    """The engines of the main policy and, by name, of others that share its memory."""

    own: GenerationEngine
    others: Mapping[str, GenerationEngine]


class SharedEngine:
    """An engine between the views of its policies."""

    def __init__(self, engine: MultiPolicyEngine) -> None:
        self.engine = engine
        self.updating = asyncio.Lock()  # held from `pause` to `resume`
        self._starting: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._ended: dict[int, list[Generation]] = {}  # not collected yet, by policy

    async def start(self) -> None:
        """Start the engine once; every caller waits for it and gets its error."""
        if self._starting is None:
            self._starting = asyncio.create_task(self.engine.start())
        await asyncio.shield(self._starting)

    async def collect(self, policy: int) -> list[Generation]:
        """Wait until a request of the policy has ended, and keep what ends of others for them."""
        while policy not in self._ended:
            if self._collecting is None or self._collecting.done():
                # The task outlasts a cancelled call, which could lose the results of others.
                self._collecting = asyncio.create_task(self._collect())
            await asyncio.shield(self._collecting)
        return self._ended.pop(policy)

    async def _collect(self) -> None:
        for generation in await self.engine.collect():
            policy, ended = _without_policy(generation)
            self._ended.setdefault(policy, []).append(ended)

    async def progress(self, policy: int) -> list[Generation]:
        """Return what the running requests of the policy have sampled."""
        running = map(_without_policy, await self.engine.progress())
        return [generation for number, generation in running if number == policy]

    async def close(self) -> None:
        """Close the engine for all policies. Idempotent."""
        await self.engine.close()


class PolicyView:
    """A GenerationEngine of one policy of a shared engine."""

    def __init__(self, shared: SharedEngine, policy: int) -> None:
        self._shared = shared
        self._engine = shared.engine
        self._policy = policy

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        return self._engine.context

    async def start(self) -> None:
        """See `GenerationEngine.start`."""
        await self._shared.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        named = [replace(one, request_id=self._named(one.request_id)) for one in requests]
        self._engine.submit(named, policy=self._policy)

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        return await self._shared.collect(self._policy)

    async def progress(self) -> list[Generation]:
        """See `GenerationEngine.progress`."""
        return await self._shared.progress(self._policy)

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        await self._engine.abort([self._named(name) for name in request_ids])

    async def pause(self) -> None:
        """Pause all policies, after the update of another one has ended."""
        await self._shared.updating.acquire()
        try:
            await self._engine.pause()
        except BaseException:
            self._shared.updating.release()
            raise

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        await self._engine.prepare(manifest, policy=self._policy)

    async def load(self) -> None:
        """See `GenerationEngine.load`."""
        await self._engine.load(policy=self._policy)

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        try:
            await self._engine.resume()
        finally:
            self._shared.updating.release()

    async def release(self) -> None:
        """Refuse: an update would not bring back the weights of the base model."""
        raise NotImplementedError("an engine of several policies keeps its memory")

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`; all but the version count every policy."""
        versions = self._engine.policy_versions
        return replace(self._engine.stats(), policy_version=versions[self._policy])

    async def close(self) -> None:
        """Close the engine for all policies."""
        await self._shared.close()

    def _named(self, request_id: str) -> str:
        return f"{self._policy}{MARK}{request_id}"


def views_of(engine: MultiPolicyEngine, num_policies: int) -> list[PolicyView]:
    """Return the views of all policies of an engine, which is not started yet."""
    shared = SharedEngine(engine)
    return [PolicyView(shared, policy) for policy in range(num_policies)]


def _without_policy(generation: Generation) -> tuple[int, Generation]:
    """Return the policy of a generation, and the generation under the id of its policy."""
    policy, _, name = generation.request_id.partition(MARK)
    return int(policy), replace(generation, request_id=name)
