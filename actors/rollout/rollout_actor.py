"""A generation engine as a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray

from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    RolloutText,
    RowsLost,
    StepPart,
    Withdrawn,
)
from rlsys.dataflow.graph.stages import EXPERTS_COLUMN
from rlsys.dataflow.store.blocks import ColumnRef, Columns
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.shared_engine import PolicyEngines
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.environments.workers.generation_broker import Ask, GenerationBroker, Refused
from rlsys.reallocation.transport.group_transport import GroupReceiver
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.weight_deltas import Inbox, WeightDelta, WeightOffer
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Sampled,
    WeightManifest,
    WeightShare,
)

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat
from ..cluster.gauges import Gauges
from ..cluster.long_poll import COLLECT_WAIT_S, LongPoll
from ..store.row_transfer import recorded
from ..store.store_actor import StoreAddress
from ..store.store_writer import StoreWriter
from .engine_load import EngineLoad

# How long ended rollouts wait for others while the engine samples: a call costs every process about
# a millisecond.
GATHER_S = 0.03

# How often new tokens of running requests are written to the store, and how many at least. Fewer
# writes cost less; more writes lose less when the process dies.
PROGRESS_EVERY_S = 2.0
MIN_PROGRESS_TOKENS = 64

PART_COLUMNS = ("token_ids", "sampler_logprobs", "policy_versions")


class PolicyRollouts:
    """Rollouts of one policy: its engine samples them, and they are written to the store.

    Only metadata goes to the controller, and the text of recorded rollouts, which `tokenizer`
    decodes.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Any,
        load: EngineLoad,
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._load = load
        self._boundary = TokenizerBoundary(tokenizer) if tokenizer is not None else None
        self._tracer = tracer
        self._engine = engine
        self._switch = WeightSwitch(self._engine, on_work=partial(load.book_work, tracer))
        self._inbox = Inbox()
        self._receiver = GroupReceiver(ray.util.get_node_ip_address())
        self._store = StoreWriter(store)
        self._broker = GenerationBroker(self._switch)
        self._serving: asyncio.Task[None] | None = None
        self._requests: dict[str, GenerationRequest] = {}  # running requests
        self._priors: dict[str, Generation] = {}  # tokens that another replica sampled before
        self._num_reported: dict[str, int] = {}  # tokens of running requests in the store
        self._num_sampled = 0  # tokens at the last `collect`
        self._progress_at = time.monotonic()
        self._ended = LongPoll(self._switch.collect)

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    async def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()

    async def submit(
        self, requests: list[GenerationRequest], priors: dict[str, list[ColumnRef]]
    ) -> None:
        """Submit requests; those in `priors` continue what another replica sampled."""
        self._tracer.instant("engine", "submit", rollouts=len(requests))
        known = {
            request.request_id: prior
            for request in requests
            if (cells := priors.get(request.request_id))
            and (prior := await self._prior(cells, len(request.prompt_token_ids)))
        }
        self._switch.submit(
            [
                continued(request, known[request.request_id])
                if request.request_id in known
                else request
                for request in requests
            ]
        )
        self._requests.update((request.request_id, request) for request in requests)
        self._priors.update(known)
        self._num_reported.update((name, len(prior.token_ids)) for name, prior in known.items())

    async def _prior(self, cells: list[ColumnRef], num_prompt_tokens: int) -> Generation | None:
        """Return the parts that another replica sampled as one generation, if available."""
        has_experts = EXPERTS_COLUMN in cells[0][0].layout.columns
        names = (*PART_COLUMNS, EXPERTS_COLUMN) if has_experts else PART_COLUMNS
        try:
            parts = await self._store.client.get_async(cells, names)
        except RowsLost:
            return None
        token_ids, logprobs, versions = (np.concatenate(parts[name]) for name in PART_COLUMNS)
        experts = None
        if has_experts:
            num_inputs = num_prompt_tokens + len(token_ids) - 1
            experts = np.concatenate(parts[EXPERTS_COLUMN]).reshape(num_inputs, -1)
        return Generation(
            request_id="",
            token_ids=token_ids,
            sampler_logprobs=logprobs,
            policy_versions=versions,
            finish_reason=FinishReason.ABORTED,
            routed_experts=experts,
        )

    async def collect(self) -> Collected:
        """Return ended rollouts and new tokens of running ones, after a bounded wait.

        Raises:
            FloatingPointError: The policy gives no finite probabilities. No other replica would
                sample the rollout, so the run ends.
        """
        generations = await self._ended.gathered(GATHER_S, self._is_sampling)
        for generation in generations:
            generation.raise_failure()
        stats = self._load.report()
        parts: list[StepPart] = []
        num_new = stats.num_generated_tokens - self._num_sampled
        self._num_sampled = stats.num_generated_tokens
        if time.monotonic() - self._progress_at >= PROGRESS_EVERY_S:
            parts = await self.progress(MIN_PROGRESS_TOKENS)
        if not generations:
            return Collected(finished=[], parts=parts, num_sampled=num_new)
        requests = [self._requests.pop(generation.request_id) for generation in generations]
        generations = [
            _as_recorded(request, self._whole(generation))
            for request, generation in zip(requests, generations, strict=True)
        ]
        for generation in generations:
            self._priors.pop(generation.request_id, None)
            self._num_reported.pop(generation.request_id, None)
        block = await self._store.put(
            {
                "prompt_token_ids": [
                    np.asarray(request.prompt_token_ids, np.int32) for request in requests
                ],
                "token_ids": [g.token_ids for g in generations],
                "sampler_logprobs": [g.sampler_logprobs for g in generations],
                "policy_versions": [g.policy_versions for g in generations],
                **_experts(generations, [slice(None)] * len(generations)),
            }
        )
        finished = [
            _finished(
                generation,
                (block, place),
                num_prompt_tokens=len(request.prompt_token_ids),
                text=self._recorded(request, generation),
            )
            for place, (request, generation) in enumerate(zip(requests, generations, strict=True))
        ]
        return Collected(finished=finished, parts=parts, num_sampled=num_new)

    def _recorded(self, request: GenerationRequest, generation: Generation) -> RolloutText | None:
        if not request.record:
            return None
        assert self._boundary is not None, "only the policy's rollouts are recorded"
        return recorded(generation, self._boundary, request.sampling.stop)

    async def progress(self, at_least: int) -> list[StepPart]:
        """Write the new tokens of requests with at least `at_least` of them to the store."""
        self._progress_at = time.monotonic()
        return await self._parts(await self._switch.progress(), at_least)

    async def withdraw(self, request_ids: list[str]) -> Withdrawn:
        """Stop sampling requests, and write their new tokens to the store."""
        stopped = await self._switch.withdraw(request_ids)
        parts = await self._parts([g for g in stopped.values() if g is not None], 1)
        for name in stopped:
            self._requests.pop(name, None)
            self._priors.pop(name, None)
            self._num_reported.pop(name, None)
        return Withdrawn(request_ids=list(stopped), parts=parts)

    async def _parts(self, generations: Sequence[Generation], at_least: int) -> list[StepPart]:
        """Write the tokens of running requests that are not in the store yet."""
        new = [
            (g, start)
            for g in map(self._whole, generations)
            if g.request_id in self._requests
            and len(g.token_ids) - (start := self._num_reported.get(g.request_id, 0)) >= at_least
        ]
        if not new:
            return []
        self._num_reported.update((g.request_id, len(g.token_ids)) for g, _ in new)
        # The part's inputs follow those of the earlier parts; the first part includes the prompt.
        inputs = [
            slice(
                len(self._requests[g.request_id].prompt_token_ids) + start - 1 if start else 0, None
            )
            for g, start in new
        ]
        block = await self._store.put(
            {
                **{name: [getattr(g, name)[start:] for g, start in new] for name in PART_COLUMNS},
                **_experts([g for g, _ in new], inputs),
            }
        )
        return [
            StepPart(
                request_id=g.request_id,
                start=start,
                cell=(block, place),
                num_tokens=len(g.token_ids) - start,
                min_version=Sampled.of(g.policy_versions[start:]).oldest,
            )
            for place, (g, start) in enumerate(new)
        ]

    async def use_store(self, address: StoreAddress) -> None:
        """Use another address of the store after this actor's shard died."""
        self._store.use(address)

    def _whole(self, generation: Generation) -> Generation:
        """Return the generation including the tokens that another replica sampled."""
        prior = self._priors.get(generation.request_id)
        return generation if prior is None else merged(prior, generation)

    # Methods for environment workers. With an environment, only they submit requests.
    async def ask(self, worker: str, asks: list[Ask], ended: list[str]) -> None:
        """Submit turns of a worker's episodes; `ended` are episodes that need no more turns."""
        self._serve_turns()
        await self._broker.forget(ended)
        self._broker.ask(worker, asks)

    async def answers(self, worker: str) -> list[Generation | Refused]:
        """Return the turns sampled for the worker since the last call (long poll)."""
        self._serve_turns()
        return await self._broker.answers(worker, COLLECT_WAIT_S)

    async def serve_turns(self) -> None:
        """Raise EngineError when the engine dies (long poll)."""
        await asyncio.wait([self._serve_turns()], timeout=COLLECT_WAIT_S)
        self._load.report()
        if self._serve_turns().done():
            self._serve_turns().result()

    def _serve_turns(self) -> asyncio.Task[None]:
        if self._serving is None:
            self._serving = asyncio.create_task(self._broker.run())
        return self._serving

    async def release(self) -> None:
        """Free the memory of the engine until new weights arrive."""
        with self._tracer.span("engine", "release"):
            await self._switch.release()

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests."""
        await self._switch.abort(request_ids)

    async def place(self) -> tuple[str, str]:
        """Return the ids of the node and of the actor."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_actor_id())

    async def drain(self) -> bool:
        """Hold new requests until the next weights, and let running ones end.

        Returns False if they have not ended after a while; call again.
        """
        try:
            async with asyncio.timeout(COLLECT_WAIT_S):
                await self._switch.drained()
        except TimeoutError:
            return False
        return True

    async def update_weights(self, manifest: WeightManifest) -> float:
        """Load a version from memory of this node; return the seconds without sampling.

        Raises:
            MemoryGone: The version has been freed.
            DamagedWeightsError: The bytes differ from those that were published.
        """
        if not manifest.shares:
            return await self._switch.switch(manifest)
        with (
            self._tracer.span("engine", "update_weights", version=manifest.version),
            contextlib.ExitStack() as opened,
        ):
            # Open now and keep open: the memory may be reused while the switch waits.
            weights = await asyncio.to_thread(Weights, manifest)
            opened.callback(weights.close)
            return await self._switch.switch(weights.local)

    async def import_weights(
        self, manifest: WeightManifest, link: Link | None, *sent: WeightDelta | WeightOffer | None
    ) -> tuple[WeightShare, ...]:
        """Receive what this node lacks of a version, for all readers of the node.

        `sent` are deltas, or offers of what ranks send over the link.

        Returns:
            Shares in memory of this process, which keeps them until the next version.

        Raises:
            LinkError: A link did not form, broke or took too long.
            DamagedWeightsError: The changes are not based on the version of this process.
        """
        with self._tracer.span("engine", "import_weights", version=manifest.version):
            return await asyncio.to_thread(self._import, manifest, link, sent)

    def _import(
        self,
        manifest: WeightManifest,
        link: Link | None,
        sent: Sequence[WeightDelta | WeightOffer | None],
    ) -> tuple[WeightShare, ...]:
        ranks = [share.rank for share in manifest.shares]
        self._inbox.keep(ranks)
        self._receiver.keep(ranks)
        taken = [self._inbox.take(one) for one in sent if isinstance(one, WeightDelta)]
        if link is not None:
            offers = [one for one in sent if isinstance(one, WeightOffer)]
            taken += self._receiver.receive(self._inbox, offers, link)
        node_id = ray.get_runtime_context().get_node_id()
        return tuple(replace(share, node=node_id) for share in taken)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    def _is_sampling(self) -> bool:
        stats = self._engine.stats()
        return stats.num_running + stats.num_waiting > 0


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class RolloutActor(Heartbeat, PolicyRollouts):
    """Actor of one engine, with the methods of PolicyRollouts for its main policy.

    If the engine serves other policies too, `for_policy` calls the methods for one of them.
    """

    def __init__(
        self,
        make_engine: Callable[[], GenerationEngine | PolicyEngines],
        tokenizer: Any,
        gauges: Gauges,
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        made = make_engine()
        engines = made if isinstance(made, PolicyEngines) else PolicyEngines(own=made, others={})
        load = EngineLoad(engines.own, tracer, gauges)
        super().__init__(engines.own, tokenizer, load, store, tracer)
        # Episodes of environments are decoded by their workers.
        self._others = {
            name: PolicyRollouts(engine, None, load, store, tracer.of(f"{name}-{tracer.process}"))
            for name, engine in engines.others.items()
        }

    async def for_policy(self, policy: str, method: str, *args: Any) -> Any:
        """Call a method of PolicyRollouts for another policy of the engine."""
        return await getattr(self._others[policy], method)(*args)


def _experts(generations: Sequence[Generation], inputs: Sequence[slice]) -> Columns:
    """Return the column of routed experts for these inputs; empty if none are recorded."""
    recorded = [g.routed_experts for g in generations]
    present = [experts for experts in recorded if experts is not None]
    if not present:
        return {}
    none = present[0][:0]  # for a request that was aborted before it ran
    return {
        EXPERTS_COLUMN: [
            (none if experts is None else experts[inputs_of_request]).flatten()
            for experts, inputs_of_request in zip(recorded, inputs, strict=True)
        ]
    }


def _as_recorded(request: GenerationRequest, generation: Generation) -> Generation:
    return generation.as_baseline if request.is_baseline else generation


def _finished(
    generation: Generation, cell: ColumnRef, *, num_prompt_tokens: int, text: RolloutText | None
) -> FinishedRollout:
    sampled = Sampled.of(generation.policy_versions)
    return FinishedRollout(
        request_id=generation.request_id,
        cell=cell,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(generation.token_ids),
        min_version=sampled.oldest,
        max_version=sampled.newest,
        finish_reason=generation.finish_reason,
        num_injected=sampled.num_injected,
        text=text,
    )
