"""Client of a replica's engine in an environment worker: requests the turns of its episodes.

episodes ──sample──► GenerationClient ──ask, in batches──► RolloutActor (engine)
    ▲                       └──◄──answers, a long poll──┘
    └── a future each
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlsys.common.background_tasks import start_task
from rlsys.environments.workers.generation_broker import Ask, Refused
from rlsys.types import Generation, GenerationRequest

# Turns requested within this time are sent together: a call costs about a millisecond.
GATHER_TURNS_S = 0.001


class GenerationClient:
    """Client for the worker with this name; `replica` is the handle of the engine's actor."""

    def __init__(self, worker: str, replica: Any) -> None:
        self._worker = worker
        self._replica = replica
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._asks: list[Ask] = []
        self._ended: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.num_sampled = 0

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return the sampled turn of a request. Raises ValueError if the engine refuses it."""
        if self._failure is not None:
            raise self._failure
        if self._listening is None:
            self._listening = start_task(self._listen(), fail=self._fail, returns=False)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        episode, _, turn = request.request_id.rpartition(".")
        self._asks.append(Ask(episode=episode, turn=int(turn), request=request))
        self._send_soon()
        try:
            generation: Generation = await answer
            return generation
        finally:
            self._waiting.pop(request.request_id, None)

    def ended(self, episodes: Sequence[str]) -> None:
        """Tell the engine to forget these episodes."""
        self._ended += episodes
        self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = start_task(self._send(), fail=self._fail)
            self._sending.add_done_callback(self._sent)

    async def _send(self) -> None:
        while self._asks or self._ended:
            await asyncio.sleep(GATHER_TURNS_S)
            asks, self._asks = self._asks, []
            ended, self._ended = self._ended, []
            await self._replica.ask.remote(self._worker, asks, ended)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        if self._failure is None and (self._asks or self._ended):
            self._send_soon()

    async def _listen(self) -> None:
        while True:
            for one in await self._replica.answers.remote(self._worker):
                is_refused = isinstance(one, Refused)
                self.num_sampled += 0 if is_refused else len(one.token_ids)
                answer = self._waiting.get(one.request_id)
                if answer is None or answer.done():
                    continue
                if is_refused:
                    answer.set_exception(one.error)
                else:
                    answer.set_result(one)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
