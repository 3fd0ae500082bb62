"""Rollouts that an actor writes, over a fake engine and a fake store; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.cluster.calls import SELF_EXPLAINING
from actors.rollout.ray_replica import DEADLY
from actors.rollout.rollout_actor import RolloutActor
from actors.store import store_writer
from rlsys.controller.worker_protocols import RolloutText
from rlsys.dataflow.store.blocks import BlockRef, ColumnRef, layout_of
from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.runs.observe.trace import Tracer
from rlsys.types import (
    INJECTED,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
)

VERSION = 7


class Store:
    """Store that reads the same part for every cell and keeps what is written."""

    def __init__(self) -> None:
        self.written: list[dict[str, list[Any]]] = []

    async def get_async(self, cells: Sequence[ColumnRef], names: Sequence[str]) -> dict[str, Any]:
        part = {
            "token_ids": np.array([1, 2], np.int32),
            "sampler_logprobs": np.array([-0.1, -0.2], np.float32),
            "policy_versions": np.array([VERSION - 1] * 2, np.int32),
        }
        return {name: [part[name]] for name in names}

    async def put_async(self, columns: dict[str, list[Any]]) -> BlockRef:
        self.written.append(columns)
        return BlockRef("shard", 0, 0, layout_of(columns))


class Engine:
    """Engine that ends each request at once, with two more tokens."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += requests

    async def collect(self) -> list[Generation]:
        ended, self.requests = self.requests, []
        return [
            Generation(
                request_id=request.request_id,
                token_ids=np.array([3, 4], np.int32),
                sampler_logprobs=np.array([-0.3, -0.4], np.float32),
                policy_versions=np.array([VERSION] * 2, np.int32),
                finish_reason=FinishReason.STOP,
            )
            for request in ended
        ]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=0, num_running=0, num_generated_tokens=0, policy_version=VERSION
        )


def test_no_token_of_a_baseline_is_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: store)
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    gauges: dict[str, float] = {}
    reported_load: Any = SimpleNamespace(set=gauges.__setitem__)
    actor = actor_class(Engine, build_tokenizer("ab"), reported_load, None, Tracer("rollout-0"))
    part = BlockRef("shard", 0, 0, layout_of({"token_ids": [np.zeros(2, np.int32)]})), 0
    sampling = SamplingParams(max_tokens=8)
    requests = [
        GenerationRequest(
            request_id=f"0.{index}.0",
            prompt_token_ids=(5,),
            sampling=sampling.greedy if index else sampling,
            seed=index,
            is_baseline=index > 0,
            record=index != 1,
        )
        for index in range(3)
    ]

    async def scenario() -> Any:
        await actor.submit(requests, {"0.2.0": [part]})
        return await actor.collect()

    collected = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert gauges == {
        "engine_running": 0,
        "engine_waiting": 0,
        "engine_generated_tokens": 0,
        "engine_preempted": 0,
    }
    (columns,) = store.written
    assert [row.tolist() for row in columns["token_ids"]] == [[3, 4], [3, 4], [1, 2, 3, 4]]
    assert [row.tolist() for row in columns["policy_versions"]] == [
        [VERSION] * 2,
        [INJECTED] * 2,
        [INJECTED] * 4,
    ]
    reported = {one.request_id: (one.num_tokens, one.num_injected) for one in collected.finished}
    assert reported == {"0.0.0": (2, 0), "0.1.0": (2, 2), "0.2.0": (4, 4)}
    texts = {one.request_id: one.text for one in collected.finished}
    assert texts == {
        "0.0.0": RolloutText(
            prompt="", completion="ab", token_ids=[3, 4], policy_versions=[VERSION] * 2
        ),
        "0.1.0": None,
        "0.2.0": RolloutText(
            prompt="",
            completion="<bos><eos>ab",
            token_ids=[1, 2, 3, 4],
            policy_versions=[INJECTED] * 4,
        ),
    }


class Endless(Engine):
    """Engine that samples until it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: asyncio.Queue[str] = asyncio.Queue()

    async def collect(self) -> list[Generation]:
        name = await self.aborted.get()
        return [
            Generation(
                request_id=name,
                token_ids=np.array([3, 4], np.int32),
                sampler_logprobs=np.array([-0.3, -0.4], np.float32),
                policy_versions=np.array([VERSION] * 2, np.int32),
                finish_reason=FinishReason.ABORTED,
            )
        ]

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self.aborted.put_nowait(name)


def test_withdrawn_requests_return_the_tokens_that_were_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: store)
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    reported_load: Any = SimpleNamespace(set=lambda name, value: None)
    actor = actor_class(Endless, build_tokenizer("ab"), reported_load, None, Tracer("rollout-0"))
    part = BlockRef("shard", 0, 0, layout_of({"token_ids": [np.zeros(2, np.int32)]})), 0
    requests = [
        GenerationRequest(
            request_id=f"0.{index}.0",
            prompt_token_ids=(5,),
            sampling=SamplingParams(max_tokens=8),
            seed=index,
        )
        for index in range(2)
    ]

    async def scenario() -> Any:
        await actor.submit(requests, {"0.1.0": [part]})
        collecting = asyncio.create_task(actor.collect())
        withdrawn = await actor.withdraw(["0.0.0", "0.1.0", "of another replica"])
        collecting.cancel()
        return withdrawn

    withdrawn = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert sorted(withdrawn.request_ids) == ["0.0.0", "0.1.0"]
    # The second request has two tokens from another replica, which are in the store already.
    assert {(one.request_id, one.start, one.num_tokens) for one in withdrawn.parts} == {
        ("0.0.0", 0, 2),
        ("0.1.0", 2, 2),
    }
    (columns,) = store.written
    assert [row.tolist() for row in columns["token_ids"]] == [[3, 4], [3, 4]]


class Diverged(Engine):
    """Engine whose second completion has a token without a finite probability."""

    async def collect(self) -> list[Generation]:
        first, second = await super().collect()
        logprobs = np.array([-0.1, np.nan], np.float32)
        return [first, replace(second, sampler_logprobs=logprobs).until_failure()]


def test_a_rollout_without_finite_probabilities_is_an_error_that_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one after which a replica is replaced, since all replicas have these weights."""
    store = Store()
    monkeypatch.setattr(store_writer, "StoreClient", lambda address: store)
    actor_class: Any = RolloutActor.__ray_actor_class__  # type: ignore[attr-defined]
    reported_load: Any = SimpleNamespace(set=lambda name, value: None)
    actor = actor_class(Diverged, build_tokenizer("ab"), reported_load, None, Tracer("rollout-0"))
    sampling = SamplingParams(max_tokens=8)
    requests = [
        GenerationRequest(request_id=name, prompt_token_ids=(5,), sampling=sampling, seed=0)
        for name in ("0.0.0", "0.1.0")
    ]

    async def scenario() -> None:
        await actor.submit(requests, {})
        await actor.collect()

    with pytest.raises(FloatingPointError) as found:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert f"version {VERSION}" in str(found.value)
    assert not isinstance(found.value, DEADLY)
    assert isinstance(found.value, SELF_EXPLAINING)
    assert store.written == []
