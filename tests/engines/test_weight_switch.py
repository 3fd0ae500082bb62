"""Weight updates during generation, or after running requests have ended, seen from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from rlsys.engines.generation.generation_protocol import EngineStats
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
    """Engine whose requests end when a test says so; `calls` are in order."""

    context = 1 << 20

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: asyncio.Queue[list[str]] = asyncio.Queue()
        self.load_error: Exception | None = None
        self.prepare_error: Exception | None = None
        self.sampled: dict[str, list[int]] = {}  # by request, before it is aborted

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.calls.append("submit " + " ".join(r.request_id for r in requests))

    async def collect(self) -> list[Generation]:
        return [self._generation(name, FinishReason.STOP) for name in await self.ended.get()]

    def _generation(self, request_id: str, reason: FinishReason) -> Generation:
        tokens = np.array(self.sampled.pop(request_id, ()), np.int32)
        return Generation(
            request_id=request_id,
            token_ids=tokens,
            sampler_logprobs=tokens.astype(np.float32),
            policy_versions=np.zeros_like(tokens),
            finish_reason=reason,
        )

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

    async def release(self) -> None:
        self.calls.append("release")

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=0, num_running=0, num_generated_tokens=0, policy_version=0)

    async def close(self) -> None: ...


def requests(*names: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=n, prompt_token_ids=(1,), sampling=SamplingParams(), seed=0)
        for n in names
    ]


async def until_it_waits(task: asyncio.Task[None]) -> None:
    """Let the task run until it waits for the test."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()


def test_updates_during_generation_load_at_once() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b"))
        pause_s = await switch.switch(MANIFEST)
        assert 0 <= pause_s < 5
        switch.submit(requests("c"))
        assert engine.calls == ["submit a b", "prepare 1", *SWITCH, "submit c"]

    asyncio.run(scenario())


def test_an_engine_works_while_it_has_requests() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        works: list[bool] = []
        switch = WeightSwitch(engine, on_work=works.append)
        switch.submit(requests("a", "b"))
        switch.submit(requests("c"))
        engine.ended.put_nowait(["a", "c"])
        await switch.collect()
        assert works == [True]
        engine.ended.put_nowait(["b"])
        await switch.collect()
        assert works == [True, False]
        await switch.drained()
        switch.submit(requests("d"))  # held until the weights arrive
        assert works == [True, False]
        await switch.switch(MANIFEST)
        assert works == [True, False, True]

    asyncio.run(scenario())


def test_delayed_updates_wait_for_running_and_hold_new_requests() -> None:
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
        # The held batches stay whole and in order, and are not held again.
        assert engine.calls[1:] == ["prepare 1", *SWITCH, "submit c d", "submit e"]
        switch.submit(requests("f"))
        assert engine.calls[-1] == "submit f"

    asyncio.run(scenario())


def test_held_requests_can_be_aborted() -> None:
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


def test_delayed_updates_load_at_once_if_nothing_runs() -> None:
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
        with pytest.raises(ValueError) as found:  # noqa: PT011 - the same object
            await switch.switch(MANIFEST)
        assert found.value is error
        switch.submit(requests("a"))
        assert engine.calls == ["prepare 1", *(SWITCH if is_prepared else []), "submit a"]

    asyncio.run(scenario())


class Aborting(ScriptedEngine):
    """Engine that returns aborted requests with their tokens, in another order."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        self.prompts = [tuple(request.prompt_token_ids) for request in requests]

    async def collect(self) -> list[Generation]:
        names = await self.ended.get()
        return [self._generation(name[1:], FinishReason.ABORTED) for name in names]

    async def abort(self, request_ids: Collection[str]) -> None:
        await super().abort(request_ids)
        for name in reversed(list(request_ids)):
            self.ended.put_nowait([f"!{name}"])


def test_requests_continue_in_order_after_a_release() -> None:
    async def scenario() -> None:
        engine = Aborting()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b", "c"))
        collecting = asyncio.create_task(switch.collect())
        engine.sampled = {"b": [7, 8]}
        await switch.release()
        await switch.release()
        switch.submit(requests("d"))
        await switch.abort(["c"])
        assert engine.calls == ["submit a b c", "abort a b c", "release"]
        (held,) = await switch.progress()
        assert (held.request_id, held.token_ids.tolist()) == ("b", [7, 8])

        await switch.switch(MANIFEST)
        assert engine.calls[3:] == ["prepare 1", *SWITCH, "submit a b c", "submit d", "abort c"]
        (aborted,) = await collecting
        assert aborted.request_id == "c"

        engine.sampled = {"b": [9]}
        await switch.abort(["b"])  # by the caller
        (whole,) = await switch.collect()
        assert whole.token_ids.tolist() == [7, 8, 9]
        assert whole.finish_reason is FinishReason.ABORTED

    asyncio.run(scenario())


def test_a_request_continues_after_two_releases() -> None:
    async def scenario() -> None:
        engine = Aborting()
        switch = WeightSwitch(engine)
        switch.submit(requests("a"))
        collecting = asyncio.create_task(switch.collect())
        for tokens in ([7, 8], [9]):
            engine.sampled = {"a": tokens}
            await switch.release()
            await switch.switch(MANIFEST)
        assert engine.prompts == [(1, 7, 8, 9)]
        collecting.cancel()

    asyncio.run(scenario())


def test_a_released_engine_runs_nothing_before_it_has_weights() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        switch = WeightSwitch(engine)
        await switch.release()
        engine.prepare_error = FileNotFoundError("gone")
        switch.submit(requests("a"))
        with pytest.raises(FileNotFoundError):
            await switch.switch(MANIFEST)
        assert engine.calls == ["release", "prepare 1"]
        engine.prepare_error = None
        await switch.switch(MANIFEST)
        assert engine.calls[2:] == ["prepare 1", *SWITCH, "submit a"]

    asyncio.run(scenario())


def test_withdrawn_requests_return_their_tokens_and_end_nowhere_else() -> None:
    async def scenario() -> None:
        engine = Aborting()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b", "c"))
        collecting = asyncio.create_task(switch.collect())
        engine.sampled = {"a": [7, 8], "c": [9]}
        found = await switch.withdraw(["a", "b", "unknown"])
        assert {name: one and one.token_ids.tolist() for name, one in found.items()} == {
            "a": [7, 8],
            "b": None,
        }
        await switch.abort(["c"])
        (left,) = await collecting
        assert left.request_id == "c"

    asyncio.run(scenario())


def test_a_request_that_ends_before_it_is_withdrawn_is_collected() -> None:
    class Late(Aborting):
        async def collect(self) -> list[Generation]:
            names = await self.ended.get()
            return [self._generation(name.strip("!"), FinishReason.STOP) for name in names]

    async def scenario() -> None:
        engine = Late()
        switch = WeightSwitch(engine)
        switch.submit(requests("a"))
        collecting = asyncio.create_task(switch.collect())
        engine.sampled = {"a": [7]}
        assert await switch.withdraw(["a"]) == {}
        (whole,) = await collecting
        assert whole.finish_reason is FinishReason.STOP

    asyncio.run(scenario())


def test_held_requests_are_withdrawn_with_what_they_had_sampled() -> None:
    async def scenario() -> None:
        engine = Aborting()
        switch = WeightSwitch(engine)
        switch.submit(requests("a", "b"))
        collecting = asyncio.create_task(switch.collect())
        engine.sampled = {"a": [7]}
        await switch.release()
        switch.submit(requests("c"))
        found = await switch.withdraw(["a", "c"])
        assert {name: one and one.token_ids.tolist() for name, one in found.items()} == {
            "a": [7],
            "c": None,
        }
        await switch.switch(MANIFEST)
        assert engine.calls[-1] == "submit b"
        collecting.cancel()

    asyncio.run(scenario())
