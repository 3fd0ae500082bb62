"""Before an engine that environment workers share: their turns, and what they were answered.

    worker ──ask──► desk ──► engine
       ▲             │  └── remembers the replies of every running episode
       └──answers────┘

A worker that dies takes its episodes' state along. Its successor plays them again from the
beginning, and asks what its predecessor asked: that is answered out of memory, or by the request
that still runs. So nothing that was sampled is lost or sampled twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlsys.common.async_condition import AsyncCondition
from rlsys.types import FinishReason, Generation, GenerationRequest


class Engine(Protocol):
    """Of rlsys.engines.generation.weight_switch.WeightSwitch what this needs."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    async def collect(self) -> list[Generation]: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Turn number `turn` of an episode. `request.request_id` names the answer."""

    episode: str
    turn: int
    request: GenerationRequest


@dataclass(kw_only=True, eq=False, slots=True)
class _Asked:
    ask: Ask
    worker: str  # that waits for the answer
    answer: Generation | None = None


class GenerationBroker:
    """`run` must be running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._running: dict[str, _Asked] = {}  # by the engine's request id
        self._episodes: defaultdict[str, dict[int, tuple[str, _Asked]]] = defaultdict(dict)
        self._answers: defaultdict[str, list[Generation]] = defaultdict(list)
        self._answered = AsyncCondition()
        self._failure: BaseException | None = None
        self.num_replayed = 0  # turns that were answered out of memory

    async def run(self) -> None:
        """Hands out what the engine has sampled. Raises EngineError."""
        try:
            while True:
                for generation in await self._engine.collect():
                    self._ended(generation)
                self._answered.notify()
        except Exception as error:
            self._failure = error
            self._answered.notify()
            raise

    def ask(self, worker: str, asks: Sequence[Ask]) -> None:
        """Answers come out of `answers(worker)`. Raises ValueError for a request that can never
        run.
        """
        new: list[GenerationRequest] = []
        for ask in asks:
            _, known = self._episodes[ask.episode].get(ask.turn, ("", None))
            if known is not None and _is_same(known.ask.request, ask.request):
                self.num_replayed += 1
                known.ask, known.worker = ask, worker
                if known.answer is not None:
                    self._answer(known, known.answer)
                continue
            name = f"{ask.episode}#{ask.turn}.{next(self._names)}"
            asked = _Asked(ask=ask, worker=worker)
            self._running[name] = asked
            self._episodes[ask.episode][ask.turn] = (name, asked)
            new.append(replace(ask.request, request_id=name))
        if new:
            self._engine.submit(new)
        self._answered.notify()

    async def answers(self, worker: str, timeout_s: float) -> list[Generation]:
        """What has been answered since the last call; waits for the first, `timeout_s` at most.
        Raises what ended `run`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._answered.until(
                    lambda: bool(self._answers[worker]) or self._failure is not None
                )
        except TimeoutError:
            return []
        if self._failure is not None:
            raise self._failure
        return self._answers.pop(worker)

    async def forget(self, episodes: Iterable[str]) -> None:
        """They have ended, or nobody wants them: what still runs of them is aborted."""
        names: list[str] = []
        for episode in episodes:
            for name, asked in self._episodes.pop(episode, {}).values():
                if asked.answer is None:
                    names.append(name)
        if names:
            await self._engine.abort(names)

    def _ended(self, generation: Generation) -> None:
        asked = self._running.pop(generation.request_id)
        if generation.finish_reason is FinishReason.ABORTED:
            return
        asked.answer = generation
        known = self._episodes.get(asked.ask.episode, {}).get(asked.ask.turn)
        if known is not None and known[1] is asked:
            self._answer(asked, generation)

    def _answer(self, asked: _Asked, generation: Generation) -> None:
        named = replace(generation, request_id=asked.ask.request.request_id)
        self._answers[asked.worker].append(named)


def _is_same(before: GenerationRequest, now: GenerationRequest) -> bool:
    return (
        before.sampling == now.sampling
        and before.seed == now.seed
        and list(before.prompt_token_ids) == list(now.prompt_token_ids)
    )
