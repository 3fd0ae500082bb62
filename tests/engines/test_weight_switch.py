"""New weights in the middle of generation, or when what runs has ended: what the engine sees."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from rlsys.engines.generation.protocol import EngineStats
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)

MANIFEST = WeightManifest(version=1)
SWITCH = ["pause", "load", "resume"]


class ScriptedEngine:
    """Requests end when the test says so; `calls` is what happened, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: asyncio.Queue[list[str]] = asyncio.Queue()
        self.load_error: Exception | None = None
        self.prepare_error: Exception | None = None

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.calls.append("submit " + " ".join(r.request_id for r in requests))

    async def collect(self) -> list[Generation]:
        return [
            Generation(
                request_id=request_id,
                token_ids=np.zeros(0, np.int32),
                sampler_logprobs=np.zeros(0, np.float32),
                policy_versions=np.zeros(0, np.int32),
                finish_reason=FinishReason.STOP,
            )
            for request_id in await self.ended.get()
        ]

    async def progress(self) -> list[Generation]:
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        if request_ids:
            self.calls.append("abort " + " ".join(sorted(request_ids)))

    async def pause(self) -> None:
        self.calls.append("pause")

    async def prepare(self, manifest: WeightManifest) -> None:
        self.calls.append(f"prepare {manifest.version}")
        if self.prepare_error:
            raise self.prepare_error

    async def load(self) -> None:
        self.calls.append("load")
        if self.load_error:
            raise self.load_error

    async def resume(self) -> None:
        self.calls.append("resume")

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=0, num_running=0, num_generated_tokens=0, policy_version=0)

    async def close(self) -> None: ...


def requests(*names: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=n, prompt_token_ids=(1,), sampling=SamplingParams(), seed=0)
        for n in names
    ]


async def until_it_waits(task: asyncio.Task[None]) -> None:
    """Let the task run as far as it can without outside help."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()


def test_in_flight_loads_at_once() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b"))
        pause_s = await switch.switch(MANIFEST)
        assert 0 <= pause_s < 5
        switch.submit(requests("c"))
        assert engine.calls == ["submit a b", "prepare 1", *SWITCH, "submit c"]

    asyncio.run(scenario())


def test_delayed_waits_for_what_runs_and_holds_what_comes() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b"))
        draining = asyncio.create_task(switch.drained())
        await until_it_waits(draining)
        switch.submit(requests("c", "d"))
        switch.submit(requests("e"))
        engine.ended.put_nowait(["b"])
        await switch.collect()
        await until_it_waits(draining)
        assert engine.calls == ["submit a b"]

        engine.ended.put_nowait(["a"])
        await switch.collect()
        await draining
        await switch.switch(MANIFEST)
        # The held batches stay whole and in order, and are not held a second time.
        assert engine.calls[1:] == ["prepare 1", *SWITCH, "submit c d", "submit e"]
        switch.submit(requests("f"))
        assert engine.calls[-1] == "submit f"

    asyncio.run(scenario())


def test_an_abort_reaches_requests_that_are_held() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        switch.submit(requests("a"))
        await_end = asyncio.create_task(switch.drained())
        await until_it_waits(await_end)
        switch.submit(requests("b", "c"))
        await switch.abort(["a", "c"])
        assert engine.calls[1:] == ["abort a"]
        engine.ended.put_nowait(["a"])
        await switch.collect()
        await await_end
        await switch.switch(MANIFEST)
        assert engine.calls[-2:] == ["submit b c", "abort c"]

    asyncio.run(scenario())


def test_delayed_loads_at_once_where_nothing_runs() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        await switch.drained()
        await switch.switch(MANIFEST)
        assert engine.calls == ["prepare 1", *SWITCH]

    asyncio.run(scenario())


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_weights_that_do_not_fit_leave_generation_running(delayed: bool, is_prepared: bool) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        error = ValueError("the checksum differs")
        engine.prepare_error, engine.load_error = (None, error) if is_prepared else (error, None)
        switch = WeightSwitch(engine)
        if delayed:
            await switch.drained()
        with pytest.raises(ValueError, match="checksum"):
            await switch.switch(MANIFEST)
        switch.submit(requests("a"))
        assert engine.calls == ["prepare 1", *(SWITCH if is_prepared else []), "submit a"]

    asyncio.run(scenario())
