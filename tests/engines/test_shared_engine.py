"""Several policies in one engine: requests, updates and versions of each, over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats
from rlsys.engines.generation.shared_engine import MultiPolicyEngine, PolicyView, views_of
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)

T = TypeVar("T")

PREPARE_S, LOAD_S = 1.0, 2.0


class Engine:
    """Engine whose requests end, and which fails, when a test says so; it records its calls."""

    context = 1 << 10

    def __init__(self, num_policies: int = 2) -> None:
        self.policy_versions = [0] * num_policies
        self.prepared = [0] * num_policies
        self.running: dict[str, int] = {}  # policies by request id
        self.ended: list[str] = []
        self.changed = AsyncCondition()
        self.failure: Exception | None = None
        self.refuses: Exception | None = None  # the error of `pause` and `load`
        self.calls: list[str] = []
        self.num_starts = 0
        self.is_paused = False

    async def start(self) -> None:
        self.num_starts += 1
        await asyncio.sleep(1.0)
        self._check()

    def submit(self, requests: Sequence[GenerationRequest], *, policy: int = 0) -> None:
        for request in requests:
            assert request.request_id not in self.running
            self.running[request.request_id] = policy

    def end(self, *positions: int) -> None:
        """End requests by their positions in the order of submission."""
        names = [*self.running]
        self.ended += [names[position] for position in positions]
        self.changed.notify()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _generation(self, name: str, policy: int) -> Generation:
        return Generation(
            request_id=name,
            token_ids=np.array([policy], np.int32),
            sampler_logprobs=np.array([-0.5], np.float32),
            policy_versions=np.array([self.policy_versions[policy]], np.int32),
            finish_reason=FinishReason.STOP,
        )

    async def collect(self) -> list[Generation]:
        await self.changed.until(lambda: bool(self.ended) or self.failure is not None)
        self._check()
        ended, self.ended = self.ended, []
        return [self._generation(name, self.running.pop(name)) for name in ended]

    async def progress(self) -> list[Generation]:
        return [self._generation(name, policy) for name, policy in self.running.items()]

    async def abort(self, request_ids: Collection[str]) -> None:
        self.ended += [name for name in request_ids if name in self.running]
        self.changed.notify()

    async def pause(self) -> None:
        assert not self.is_paused
        if self.refuses is not None:
            raise self.refuses
        self.is_paused = True
        self.calls.append("pause")

    async def prepare(self, manifest: WeightManifest, *, policy: int = 0) -> None:
        self.calls.append(f"prepare {policy}")
        await asyncio.sleep(PREPARE_S)
        self.prepared[policy] = manifest.version

    async def load(self, *, policy: int = 0) -> None:
        assert self.is_paused
        self.calls.append(f"load {policy}")
        await asyncio.sleep(LOAD_S)
        if self.refuses is not None:
            raise self.refuses
        self.policy_versions[policy] = self.prepared[policy]

    async def resume(self) -> None:
        assert self.is_paused
        self.is_paused = False
        self.calls.append("resume")

    async def release(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=1,
            num_running=len(self.running),
            num_generated_tokens=9,
            policy_version=self.policy_versions[0],
        )

    async def close(self) -> None:
        self.failure = EngineError("closed")
        self.changed.notify()


def build() -> tuple[Engine, PolicyView, PolicyView]:
    engine = Engine()
    used: MultiPolicyEngine = engine
    own, rival = views_of(used, 2)
    return engine, own, rival


def requests(*names: str) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=8)
    return [
        GenerationRequest(request_id=name, prompt_token_ids=[1], sampling=sampling, seed=0)
        for name in names
    ]


def names(found: Sequence[Generation]) -> list[str]:
    return [one.request_id for one in found]


def policies(found: Sequence[Generation]) -> set[int]:
    return {int(one.token_ids[0]) for one in found}


def run(work: Coroutine[Any, Any, T]) -> T:
    return run_in_virtual_time(work)


def test_policies_with_the_same_request_ids_get_their_own_completions() -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        own.submit(requests("0.0#1", "0.0/1"))
        rival.submit(requests("0.0#1"))
        assert names(await rival.progress()) == ["0.0#1"]
        assert policies(await rival.progress()) == {1}
        waiting = asyncio.create_task(rival.collect())
        engine.end(1)
        assert names(await own.collect()) == ["0.0/1"]
        assert not waiting.done()
        engine.end(0, 1)
        found = await waiting
        assert (names(found), policies(found)) == (["0.0#1"], {1})
        found = await own.collect()
        assert (names(found), policies(found)) == (["0.0#1"], {0})

    run(scenario())


def test_an_aborted_request_is_that_of_its_policy() -> None:
    _, own, rival = build()

    async def scenario() -> None:
        own.submit(requests("a"))
        rival.submit(requests("a", "b"))
        await rival.abort(["a", "unknown"])
        found = await rival.collect()
        assert (names(found), policies(found)) == (["a"], {1})
        assert names(await own.progress()) == ["a"]
        assert names(await rival.progress()) == ["b"]

    run(scenario())


def test_a_cancelled_wait_loses_no_completion() -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        own.submit(requests("a"))
        rival.submit(requests("b"))
        both = [asyncio.create_task(view.collect()) for view in (own, rival)]
        await asyncio.sleep(1.0)
        for one in both:
            one.cancel()
        engine.end(0, 1)
        await asyncio.sleep(1.0)
        assert names(await own.collect()) == ["a"]
        assert names(await rival.collect()) == ["b"]

    run(scenario())


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_every_completion_reaches_its_policy_once(owners: list[int], random: Any) -> None:
    """End requests of three policies in any order and in batches of any size."""
    engine = Engine(3)
    views = views_of(engine, 3)
    expected = {policy: owners.count(policy) for policy in range(3)}
    found: dict[int, list[Generation]] = {policy: [] for policy in range(3)}

    async def collect(policy: int) -> None:
        while len(found[policy]) < expected[policy]:
            found[policy] += await views[policy].collect()

    async def scenario() -> None:
        for number, policy in enumerate(owners):
            views[policy].submit(requests(str(number)))
        collecting = [asyncio.create_task(collect(policy)) for policy in range(3)]
        while engine.running:
            left = len(engine.running)
            engine.end(*random.sample(range(left), random.randint(1, left)))
            await asyncio.sleep(random.choice([0.0, 1.0]))
            while engine.ended:  # noqa: ASYNC110 - the fake engine has no event for it
                await asyncio.sleep(1.0)
        await asyncio.gather(*collecting)

    run(scenario())
    for policy, of_policy in found.items():
        assert policies(of_policy) <= {policy}
        numbers = [number for number, owner in enumerate(owners) if owner == policy]
        assert sorted(map(int, names(of_policy))) == numbers


def test_updates_at_the_same_time_are_loaded_in_pauses_of_their_own() -> None:
    engine, own, rival = build()

    async def scenario() -> float:
        clock = asyncio.get_running_loop().time
        start = clock()
        await asyncio.gather(
            WeightSwitch(own).switch(WeightManifest(version=3)),
            WeightSwitch(rival).switch(WeightManifest(version=7)),
        )
        return clock() - start

    assert run(scenario()) == PREPARE_S + 2 * LOAD_S
    assert engine.calls[:2] == ["prepare 0", "prepare 1"]
    assert engine.calls[2:] == ["pause", "load 0", "resume", "pause", "load 1", "resume"]
    assert engine.policy_versions == [3, 7]


def test_an_update_leaves_the_version_of_other_policies() -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        own.submit(requests("a"))
        await WeightSwitch(rival).switch(WeightManifest(version=5))
        assert (own.stats().policy_version, rival.stats().policy_version) == (0, 5)
        assert own.stats().num_running == rival.stats().num_running == 1
        engine.end(0)
        (found,) = await own.collect()
        assert found.policy_versions.tolist() == [0]

    run(scenario())


def test_a_failed_update_lets_the_next_one_pause() -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        engine.refuses = EngineError("no memory")
        with pytest.raises(EngineError):
            await own.pause()
        engine.refuses = None
        await own.pause()
        engine.refuses = EngineError("no memory")
        with pytest.raises(EngineError):
            await own.load()
        engine.refuses = None
        await own.resume()
        async with asyncio.timeout(10.0):
            await WeightSwitch(rival).switch(WeightManifest(version=1))

    run(scenario())
    assert engine.policy_versions == [0, 1]


def test_the_engine_starts_once_for_all() -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        await asyncio.gather(own.start(), rival.start())

    run(scenario())
    assert engine.num_starts == 1


def test_every_policy_gets_the_failure_of_a_start() -> None:
    engine, own, rival = build()
    engine.failure = EngineError("no memory")

    async def scenario() -> list[Any]:
        return [*await asyncio.gather(own.start(), rival.start(), return_exceptions=True)]

    assert run(scenario()) == [engine.failure, engine.failure]


@pytest.mark.parametrize("closes", [False, True])
def test_the_death_of_the_engine_reaches_every_policy(closes: bool) -> None:
    engine, own, rival = build()

    async def scenario() -> None:
        waiting = [asyncio.create_task(view.collect()) for view in (own, rival)]
        await asyncio.sleep(1.0)
        if closes:
            await rival.close()
            await own.close()
        else:
            engine.failure = EngineError("its processes have ended")
            engine.changed.notify()
        for one in waiting:
            with pytest.raises(EngineError):
                await one
        with pytest.raises(EngineError):
            await own.collect()

    run(scenario())
