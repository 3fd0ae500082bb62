"""Updates of an engine's weights: during generation, or after running requests have ended.

The engine has no weights while the trainer works on its device.

submit ─► [held from `drained` or `release` to `switch`] ─► engine ─► collect
switch:             prepare; pause, load, resume        running requests continue with new weights
drained, switch:    hold, wait; the same, submit held   every completion has one version
release, switch:    hold, abort; the same, submit held  aborted requests continue from their tokens
withdraw:           abort                               another engine continues from their tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlsys.common.async_condition import AsyncCondition
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.types import FinishReason, Generation, GenerationRequest, WeightManifest


class WeightSwitch:
    """A layer in front of an engine, through which every request is submitted and collected.

    Args:
        engine: The engine.
        on_work: Called with True when the engine gets its first request, and with False when it has
            none left. Held requests are not in the engine.
    """

    def __init__(
        self, engine: GenerationEngine, *, on_work: Callable[[bool], None] = lambda works: None
    ) -> None:
        self._engine = engine
        self._on_work = on_work
        self._works = False
        self._running: dict[str, GenerationRequest] = {}  # by id, in the order of submission
        self._partial: dict[str, Generation] = {}  # what requests had sampled at `release`
        self._held: list[list[GenerationRequest]] = []  # batches, kept whole
        self._cancelled: set[str] = set()  # running requests that the caller aborted
        self._abort_later: set[str] = set()  # held requests that the caller aborted
        # Running requests that are being withdrawn, and their tokens once they have stopped.
        self._withdrawn: dict[str, Generation | None] = {}
        self._is_holding = False
        self._is_released = False
        self._ended = AsyncCondition()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue a batch; it is held until the next `switch` if necessary."""
        if self._is_holding:
            self._held.append(list(requests))
            return
        self._engine.submit([self._rest(request) for request in requests])
        self._running.update((request.request_id, request) for request in requests)
        self._report_work()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel requests; `collect` returns each, held ones after the next `switch`."""
        held = {request.request_id for requests in self._held for request in requests}
        self._abort_later |= held.intersection(request_ids)
        self._cancelled |= self._running.keys() & set(request_ids)
        await self._engine.abort([name for name in request_ids if name not in held])

    async def withdraw(self, request_ids: Sequence[str]) -> dict[str, Generation | None]:
        """Stop sampling requests and return their tokens, as ABORTED; None for those without any.

        Requests that end by themselves meanwhile are missing: `collect` returns them. It must be
        waiting meanwhile.
        """
        wanted = set(request_ids)
        found: dict[str, Generation | None] = {}
        for requests in self._held:
            for request in [one for one in requests if one.request_id in wanted]:
                requests.remove(request)
                found[request.request_id] = self._partial.pop(request.request_id, None)
        running = wanted & self._running.keys()
        self._withdrawn |= dict.fromkeys(running)
        await self._engine.abort(list(running))
        await self._ended.until(lambda: not running & self._running.keys())
        for name in running:
            if (generation := self._withdrawn.pop(name)) is not None:
                found[name] = generation if len(generation.token_ids) else None
        return found

    async def collect(self) -> list[Generation]:
        """Wait until at least one request has ended and return all that have."""
        while True:
            ended = [
                self._whole(generation)
                for generation in await self._engine.collect()
                if not self._is_interrupted(generation)
            ]
            for generation in ended:
                self._running.pop(generation.request_id, None)
                self._partial.pop(generation.request_id, None)
                self._cancelled.discard(generation.request_id)
            self._report_work()
            self._ended.notify()
            if ended:
                return ended

    async def progress(self) -> list[Generation]:
        """Return what running and held requests have sampled so far, as ABORTED."""
        running = [self._whole(generation) for generation in await self._engine.progress()]
        held = [request.request_id for requests in self._held for request in requests]
        return running + [self._partial[name] for name in held if name in self._partial]

    async def drained(self) -> None:
        """Hold new requests and wait until none runs; `switch` must follow."""
        self._is_holding = True
        await self._ended.until(lambda: not self._running)

    async def release(self) -> None:
        """Free the engine's memory.

        Running requests are held with their tokens, and so are new ones. All continue in their
        order after the next `switch`. `collect` must be waiting meanwhile.
        """
        if self._is_released:
            return
        order = {name: place for place, name in enumerate(self._running)}
        self._held.insert(0, [])  # for interrupted requests
        self._is_holding = True
        await self._engine.abort(list(order))
        await self._ended.until(lambda: not self._running)
        self._held[0].sort(key=lambda request: order[request.request_id])
        await self._engine.release()
        self._is_released = True

    async def switch(self, manifest: WeightManifest) -> float:
        """Load a version, mostly during generation, and return the seconds without sampling.

        On an error the old weights, if there are any, stay and generation continues.
        """
        try:
            await self._engine.prepare(manifest)
            pause_s = await self._load()
            self._is_released = False
            return pause_s
        finally:
            if not self._is_released:
                await self._submit_held()

    async def _submit_held(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for requests in held:
            if requests:
                self.submit(requests)
        abort, self._abort_later = self._abort_later, set()
        if abort:
            await self.abort(list(abort))

    async def _load(self) -> float:
        start = time.perf_counter()
        await self._engine.pause()
        try:
            await self._engine.load()
        finally:
            await self._engine.resume()
        return time.perf_counter() - start

    def _report_work(self) -> None:
        if self._works != bool(self._running):
            self._works = not self._works
            self._on_work(self._works)

    def _rest(self, request: GenerationRequest) -> GenerationRequest:
        partial = self._partial.get(request.request_id)
        return request if partial is None else continued(request, partial)

    def _whole(self, generation: Generation) -> Generation:
        partial = self._partial.get(generation.request_id)
        return generation if partial is None else merged(partial, generation)

    def _is_interrupted(self, generation: Generation) -> bool:
        """Return whether `release` or `withdraw` aborted a request, not its caller.

        Hold the request, or keep its tokens for `withdraw`.
        """
        name = generation.request_id
        if generation.finish_reason is not FinishReason.ABORTED or name in self._cancelled:
            return False
        if name not in self._running:
            return False
        if name in self._withdrawn:
            self._withdrawn[name] = self._whole(generation)
            self._partial.pop(name, None)
            del self._running[name]
            return True
        if len(generation.token_ids):
            self._partial[name] = self._whole(generation)
        self._held[0].append(self._running.pop(name))
        return True
