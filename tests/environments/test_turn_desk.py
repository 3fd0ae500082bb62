"""Replay of replies by the generation broker: no request is sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environment.generation_client import GenerationClient
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.workers.generation_broker import Ask, GenerationBroker, Refused
from rlsys.errors import InvalidValue, require
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams
from tests.errors import error_about


class Engine:
    """Replies with one token, the number of requests so far, a second after each request."""

    def __init__(self) -> None:
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.failure: EngineError | None = None
        self.ended: asyncio.Queue[Generation] = asyncio.Queue()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            require(
                request.sampling.max_tokens > 0, "max_tokens", 0, rule="must be positive", fix=""
            )
        for request in requests:
            self.submitted.append(request)
            number = len(self.submitted)
            asyncio.get_running_loop().call_later(1.0, self._end, request.request_id, number)

    def _end(self, name: str, number: int) -> None:
        if name not in self.aborted:
            self.ended.put_nowait(reply(name, number))

    async def collect(self) -> list[Generation]:
        if self.failure is not None:
            raise self.failure
        return [await self.ended.get()]

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self.aborted.append(name)
            aborted = replace(reply(name, 0), finish_reason=FinishReason.ABORTED)
            self.ended.put_nowait(aborted)


def reply(name: str, number: int) -> Generation:
    return Generation(
        request_id=name,
        token_ids=np.array([number], np.int32),
        sampler_logprobs=np.zeros(1, np.float32),
        policy_versions=np.zeros(1, np.int32),
        finish_reason=FinishReason.STOP,
    )


def ask(episode: str, turn: int, prompt: Sequence[int] = (1, 2), name: str = "") -> Ask:
    request = GenerationRequest(
        request_id=name or f"{episode}.{turn}",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(),
        seed=0,
    )
    return Ask(episode=episode, turn=turn, request=request)


async def all_answers(desk: GenerationBroker, worker: str, num: int) -> dict[str, int]:
    found: dict[str, int] = {}
    while len(found) < num:
        answers = await desk.answers(worker, 10.0)
        assert answers, "nothing came"
        for one in answers:
            assert isinstance(one, Generation)
            found[one.request_id] = int(one.token_ids[0])
    return found


def unrunnable(episode: str, turn: int) -> Ask:
    asked = ask(episode, turn)
    return replace(asked, request=replace(asked.request, sampling=SamplingParams(max_tokens=0)))


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    """A replay of the episode is refused too, and does not wait for an answer."""

    async def run() -> None:
        desk = GenerationBroker(Engine())
        running = asyncio.create_task(desk.run())
        asks = [ask("a", 1), unrunnable("b", 1), ask("c", 1)]
        desk.ask("one", asks)
        (refused,) = await desk.answers("one", 0.5)
        assert isinstance(refused, Refused)
        assert refused.request_id == "b.1"
        assert isinstance(refused.error, InvalidValue)
        assert refused.error.field == "max_tokens"
        assert await all_answers(desk, "one", 2) == {"a.1": 1, "c.1": 2}
        desk.ask("heir", asks)
        found = await desk.answers("heir", 0.5)
        assert [one.request_id for one in found] == ["a.1", "c.1", "b.1"]
        running.cancel()

    run_in_virtual_time(run())


def test_the_client_raises_the_refusal_in_its_episode_only() -> None:
    async def run() -> None:
        desk = GenerationBroker(Engine())
        running = asyncio.create_task(desk.run())

        async def answers(worker: str) -> list[Generation | Refused]:
            return await desk.answers(worker, 10.0)

        async def take(worker: str, asks: Sequence[Ask], ended: Sequence[str]) -> None:
            desk.ask(worker, asks)

        replica = SimpleNamespace(
            ask=SimpleNamespace(remote=take), answers=SimpleNamespace(remote=answers)
        )
        client = GenerationClient("one", replica)
        requests = [one.request for one in (ask("a", 1), unrunnable("b", 1), ask("c", 1))]
        found = await asyncio.gather(*map(client.sample, requests), return_exceptions=True)
        assert [type(one) for one in found] == [Generation, InvalidValue, Generation]
        assert isinstance(await client.sample(ask("a", 2).request), Generation)
        running.cancel()

    run_in_virtual_time(run())


def test_answers_go_to_the_worker_that_asked() -> None:
    async def run() -> None:
        desk = GenerationBroker(Engine())
        running = asyncio.create_task(desk.run())
        desk.ask("one", [ask("a", 1), ask("b", 1)])
        desk.ask("two", [ask("c", 1)])
        assert await all_answers(desk, "two", 1) == {"c.1": 3}
        assert await all_answers(desk, "one", 2) == {"a.1": 1, "b.1": 2}
        assert await desk.answers("one", 5.0) == []  # a long poll ends
        running.cancel()

    run_in_virtual_time(run())


def test_a_replacement_gets_earlier_replies_and_waits_for_running_ones() -> None:
    async def run() -> None:
        engine = Engine()
        desk = GenerationBroker(engine)
        running = asyncio.create_task(desk.run())
        desk.ask("dead", [ask("a", 1)])
        assert await all_answers(desk, "dead", 1) == {"a.1": 1}
        desk.ask("dead", [ask("a", 2, [1, 2, 3])])
        await asyncio.sleep(0.5)  # it dies; turn 2 is being sampled
        desk.ask("heir", [ask("a", 1)])
        assert await all_answers(desk, "heir", 1) == {"a.1": 1}
        desk.ask("heir", [ask("a", 2, [1, 2, 3])])
        assert await all_answers(desk, "heir", 1) == {"a.2": 2}
        assert len(engine.submitted) == 2
        assert desk.num_replayed == 2
        running.cancel()

    run_in_virtual_time(run())


def test_another_prompt_at_the_same_turn_is_sampled_anew() -> None:
    async def run() -> None:
        engine = Engine()
        desk = GenerationBroker(engine)
        running = asyncio.create_task(desk.run())
        desk.ask("one", [ask("a", 1, [1, 2])])
        assert await all_answers(desk, "one", 1) == {"a.1": 1}
        desk.ask("two", [ask("a", 1, [1, 3])])
        assert await all_answers(desk, "two", 1) == {"a.1": 2}
        running.cancel()

    run_in_virtual_time(run())


def test_forgotten_requests_are_aborted_and_sampled_again() -> None:
    async def run() -> None:
        engine = Engine()
        desk = GenerationBroker(engine)
        running = asyncio.create_task(desk.run())
        desk.ask("one", [ask("a", 1)])
        await desk.forget(["a", "unknown"])
        assert engine.aborted == [engine.submitted[0].request_id]
        desk.ask("one", [ask("a", 1)])
        assert await all_answers(desk, "one", 1) == {"a.1": 2}
        running.cancel()

    run_in_virtual_time(run())


def test_all_workers_get_the_error_of_the_engine() -> None:
    async def run() -> None:
        engine = Engine()
        engine.failure = EngineError("out of memory")
        desk = GenerationBroker(engine)
        with error_about(EngineError, "out of memory"):
            await desk.run()
        with error_about(EngineError, "out of memory"):
            await desk.answers("one", 10.0)

    run_in_virtual_time(run())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["turn", "die", "wait"]), max_size=30), st.integers(1, 4))
def test_over_any_deaths_each_turn_is_sampled_once(
    schedule: Sequence[str], num_episodes: int
) -> None:
    """Workers that play anew from the first turn, as after a death, get the same replies."""

    async def run() -> None:
        engine = Engine()
        desk = GenerationBroker(engine)
        running = asyncio.create_task(desk.run())
        said: dict[tuple[int, int], int] = {}
        depth, life = 0, 0

        async def turn(number: int) -> None:
            asks = [ask(f"e{n}", number, [n, number]) for n in range(num_episodes)]
            desk.ask(f"life {life}", asks)
            answers = await all_answers(desk, f"life {life}", num_episodes)
            for n in range(num_episodes):
                token = answers[f"e{n}.{number}"]
                assert said.setdefault((n, number), token) == token

        for event in schedule:
            if event == "turn":
                depth += 1
                await turn(depth)
            elif event == "wait":
                await asyncio.sleep(3.0)
            else:
                life += 1
                for number in range(1, depth + 1):
                    await turn(number)
        assert len(engine.submitted) == depth * num_episodes
        running.cancel()

    run_in_virtual_time(run())


def test_a_reply_without_finite_probabilities_fails_all() -> None:
    async def main() -> None:
        engine = Engine()
        broker = GenerationBroker(engine)
        running = asyncio.create_task(broker.run())
        broker.ask("worker", [ask("episode", 0)])
        bad = replace(reply("x", 1), sampler_logprobs=np.full(1, np.nan, np.float32))
        engine.ended.put_nowait(bad.until_failure())
        with error_about(FloatingPointError, "version 0"):
            await broker.answers("worker", 100.0)
        with error_about(FloatingPointError, "version 0"):
            await running

    run_in_virtual_time(main())
