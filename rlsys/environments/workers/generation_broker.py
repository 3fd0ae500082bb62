"""Broker between environment workers and the engine that they share, with replay of answers.

    worker ──ask──► broker ──► engine
       ▲              │  └── keeps the replies of every running episode
       └───answers────┘

The state of an episode is lost when its worker dies. Another worker then replays the episode from
its start and sends the same requests, which the broker answers from memory or with the request that
still runs. So no reply is lost or sampled twice.

A request that the engine can never run is answered with `Refused`. It fails its own episode only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlsys.common.async_condition import AsyncCondition
from rlsys.errors import InvalidValue
from rlsys.types import FinishReason, Generation, GenerationRequest


class Engine(Protocol):
    """Methods of rlsys.engines.generation.weight_switch.WeightSwitch that the broker uses."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start requests."""

    async def collect(self) -> list[Generation]:
        """Wait until at least one request has ended and return all that have."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Request of turn number `turn` of an episode. The answer has its request_id."""

    episode: str
    turn: int
    request: GenerationRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Answer to a request that the engine can never run."""

    request_id: str
    error: ValueError


@dataclass(kw_only=True, eq=False, slots=True)
class _Asked:
    ask: Ask
    worker: str  # that waits for the answer
    answer: Generation | None = None


class GenerationBroker:
    """Requests and replies of the running episodes of one engine. `run` must be running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._running: dict[str, _Asked] = {}  # by the engine's request id
        self._episodes: defaultdict[str, dict[int, tuple[str, _Asked]]] = defaultdict(dict)
        self._answers: defaultdict[str, list[Generation | Refused]] = defaultdict(list)
        self._answered = AsyncCondition()
        self._failure: BaseException | None = None
        self.num_replayed = 0  # turns that were answered from memory

    async def run(self) -> None:
        """Distribute the replies of the engine.

        Raises:
            EngineError: The engine died.
            FloatingPointError: The model gives no finite probabilities.
        """
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
        """Submit requests. `answers(worker)` returns the replies."""
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
            self._submit(new)
        self._answered.notify()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit a batch, which the engine takes or refuses as a whole."""
        try:
            self._engine.submit(requests)
        except ValueError as error:
            if len(requests) == 1:
                self._refuse(requests[0].request_id, error)
                return
            for request in requests:  # find the ones at fault
                self._submit([request])

    def _refuse(self, name: str, error: ValueError) -> None:
        asked = self._running.pop(name)
        ask = asked.ask
        del self._episodes[ask.episode][ask.turn]
        if not isinstance(error, InvalidValue):
            error = ValueError(str(error))  # of a class that other processes may not have
        self._answers[asked.worker].append(Refused(request_id=ask.request.request_id, error=error))

    async def answers(self, worker: str, timeout_s: float) -> list[Generation | Refused]:
        """Return the replies since the last call; wait up to `timeout_s` for the first one.

        Raises the error that ended `run`.
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
        """Forget episodes that have ended or were aborted, and abort their running requests."""
        names: list[str] = []
        for episode in episodes:
            for name, asked in self._episodes.pop(episode, {}).values():
                if asked.answer is None:
                    names.append(name)
        if names:
            await self._engine.abort(names)

    def _ended(self, generation: Generation) -> None:
        generation.raise_failure()
        asked = self._running.pop(generation.request_id)
        if generation.finish_reason is FinishReason.ABORTED:
            return
        asked.answer = generation
        known = self._episodes.get(asked.ask.episode, {}).get(asked.ask.turn)
        if known is not None and known[1] is asked:
            self._answer(asked, generation)

    def _answer(self, asked: _Asked, generation: Generation) -> None:
        answer = replace(generation, request_id=asked.ask.request.request_id)
        self._answers[asked.worker].append(answer)


def _is_same(before: GenerationRequest, now: GenerationRequest) -> bool:
    return (
        before.sampling == now.sampling
        and before.seed == now.seed
        and list(before.prompt_token_ids) == list(now.prompt_token_ids)
    )
