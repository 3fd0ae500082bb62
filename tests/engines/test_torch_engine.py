"""The torch engine from the event loop: waiting, weight updates, failures, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import EngineError, GenerationEngine
from rlsys.engines.generation.torch import torch_engine
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.errors import InvalidValue
from rlsys.launcher.tiny_models import Family
from rlsys.reallocation.transport.device_staging import DeviceShare
from rlsys.reallocation.transport.shared_device import DeviceSharingError
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import FinishReason, Generation, GenerationRequest, WeightManifest
from tests.engines import published
from tests.engines.torch_engine_harness import (
    FAMILIES,
    build_model,
    prompt,
    request,
    trainer_logprobs,
)
from tests.errors import invalid
from tests.reallocation.fake_device import FakeDevice, stage_on
from tests.tiers import rest_slow

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@asynccontextmanager
async def running_engine(model_path: Path, **options: Any) -> AsyncIterator[GenerationEngine]:
    config = RolloutConfig(max_running=16, kv_cache_gib=0.05)
    engine = TorchEngine(
        model_path, config, **{"dtype": "float32", "stop_token_ids": (), **options}
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: GenerationEngine, num: int) -> dict[str, Generation]:
    ended: dict[str, Generation] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while len(ended) < num:
            ended |= {one.request_id: one for one in await engine.collect()}
    return ended


async def until_generated(engine: GenerationEngine, num_tokens: int) -> None:
    """Poll, because tokens have no event."""
    async with asyncio.timeout(TIMEOUT_S):
        while engine.stats().num_generated_tokens < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def publish(path: Path, version: int, *, change: float) -> tuple[WeightManifest, Any]:
    """Publish a version with other weights than the model's; return it and its model."""
    model = load_causal_lm(path, dtype="float32")
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(change * torch.randn(parameter.shape, generator=generator))
    return published.publish(version, model.named_parameters()), model


def logprobs_under(
    model: Any, asked: GenerationRequest, generation: Generation
) -> np.ndarray[Any, Any]:
    tokens = generation.token_ids.tolist()
    logprobs = trainer_logprobs(model, [asked.prompt_token_ids], [tokens], temperature=1.0)
    found: np.ndarray[Any, Any] = logprobs[0].numpy()
    return found


def test_requests_are_answered_and_counted(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            assert engine.stats().num_generated_tokens == 0
            requests = [request(str(i), prompt(5, seed=i), seed=i, max_tokens=6) for i in range(20)]
            engine.submit(requests)
            assert engine.stats().num_waiting + engine.stats().num_running == 20
            ended = await collect(engine, 20)
            assert {len(one.token_ids) for one in ended.values()} == {6}
            assert all((one.policy_versions == 0).all() for one in ended.values())
            stats = engine.stats()
            assert (stats.num_waiting, stats.num_running) == (0, 0)
            assert stats.num_generated_tokens == 120

    asyncio.run(scenario())


async def greedy(engine: GenerationEngine, name: str) -> list[int]:
    engine.submit([request(name, prompt(6), max_tokens=20, top_k=1)])
    tokens: list[int] = (await collect(engine, 1))[name].token_ids.tolist()
    return tokens


def test_weights_are_loaded_from_the_memory_of_a_device(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that cannot open it, or whose trainer died, keeps its weights."""
    device = FakeDevice()
    found: list[FakeDevice | None] = [None]
    monkeypatch.setattr(torch_engine, "shared_device", lambda _: found[0])
    in_host, model = publish(model_path, 3, change=0.05)
    stage, on_device = stage_on(device, 3, dict(model.named_parameters()))

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            await load(engine, in_host)
            expected = await greedy(engine, "host")
        async with running_engine(model_path) as engine:
            before = await greedy(engine, "before")
            with pytest.raises(DeviceSharingError):
                await engine.prepare(on_device)
            found[0] = device
            await engine.prepare(on_device)
            monkeypatch.setattr(DeviceShare, "require_owner", dead)
            await engine.pause()
            with pytest.raises(MemoryGone):
                await engine.load()
            await engine.resume()
            assert await greedy(engine, "kept") == before
            monkeypatch.undo()
            monkeypatch.setattr(torch_engine, "shared_device", lambda _: device)
            await load(engine, on_device)
            assert await greedy(engine, "device") == expected
            assert before != expected
        assert device.opened == {}

    def dead(_: DeviceShare) -> None:
        raise MemoryGone("the trainer died")

    asyncio.run(scenario())
    stage.close()
    assert device.allocated == {}


def test_an_engine_that_copied_from_a_dying_trainer_ends(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = publish(model_path, 3, change=0.05)
    calls = iter([None, MemoryGone("the trainer died")])

    def require_owners(_: Weights) -> None:
        if (error := next(calls)) is not None:
            raise error

    monkeypatch.setattr(Weights, "require_owners", require_owners)

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            await engine.prepare(manifest)
            await engine.pause()
            with pytest.raises(EngineError) as ended:
                await engine.load()
            assert "the trainer died" in str(ended.value)

    asyncio.run(scenario())


async def load(engine: GenerationEngine, manifest: WeightManifest) -> None:
    await engine.prepare(manifest)
    await engine.pause()
    await engine.load()
    await engine.resume()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_agree_on_a_gpu(family: Family, tmp_path: Path) -> None:
    path = build_model(tmp_path, family)
    manifest, _ = publish(path, 1, change=0.0)

    async def scenario() -> dict[str, Generation]:
        async with running_engine(path, device="cuda") as engine:
            await engine.prepare(manifest)
            await engine.pause()
            await engine.load()
            await engine.resume()
            engine.submit(requests)
            return await collect(engine, len(requests))

    requests = [
        request(str(i), prompt(3 + 5 * i % 23, seed=i), seed=i, max_tokens=2 + 7 * i % 41, top_k=50)
        for i in range(40)
    ]
    ended = asyncio.run(scenario())
    model = load_causal_lm(path, dtype="float32", device="cuda")
    for asked in requests:
        expected = logprobs_under(model, asked, ended[asked.request_id])
        np.testing.assert_allclose(ended[asked.request_id].sampler_logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_the_models_own_end_of_sequence_stops_by_default(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path, stop_token_ids=None) as engine:
            engine.submit([request(str(i), prompt(4), seed=i, max_tokens=200) for i in range(64)])
            ended = (await collect(engine, 64)).values()
            stopped = [one for one in ended if one.finish_reason is FinishReason.STOP]
            assert stopped
            assert all(one.token_ids[-1] == 2 for one in stopped)
            assert all(2 not in one.token_ids[:-1] for one in ended)

    asyncio.run(scenario())


def test_stop_strings_are_read_with_the_models_tokenizer(model_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            engine.submit([request("free", prompt(4), max_tokens=60)])
            tokens = (await collect(engine, 1))["free"].token_ids.tolist()
            text = tokenizer.decode(tokens)
            stop = next(text[i : i + 2] for i in range(20, 60) if text[i : i + 2].isascii())
            engine.submit([request("stopped", prompt(4), max_tokens=60, stop=(stop,))])
            stopped = (await collect(engine, 1))["stopped"]
            assert stopped.finish_reason is FinishReason.STOP
            assert tokenizer.decode(stopped.token_ids) == text[: text.index(stop) + len(stop)]

    asyncio.run(scenario())


def test_weights_change_in_flight(model_path: Path) -> None:
    """Tokens carry the version that sampled them; the KV cache of the old version is kept."""

    async def scenario() -> None:
        manifest, model = publish(model_path, 5, change=0.05)
        asked = request("r", prompt(6), max_tokens=200)
        async with running_engine(model_path) as engine:
            engine.submit([asked])
            await until_generated(engine, 5)
            await engine.prepare(manifest)
            await engine.pause()
            generated = engine.stats().num_generated_tokens
            await asyncio.sleep(0.05)
            assert engine.stats().num_generated_tokens == generated
            await engine.load()
            await engine.resume()
            assert engine.stats().policy_version == 5
            one = (await collect(engine, 1))["r"]
            engine.submit([request("after", prompt(6), max_tokens=20)])
            after = (await collect(engine, 1))["after"]
        versions = one.policy_versions.tolist()
        assert versions == [0] * generated + [5] * (200 - generated)
        first = load_causal_lm(model_path, dtype="float32")
        old, new = (logprobs_under(m, asked, one) for m in (first, model))
        np.testing.assert_allclose(one.sampler_logprobs[:generated], old[:generated], atol=1e-4)
        # New weights with old keys and values: neither the old model's nor the new one's.
        assert np.abs(one.sampler_logprobs - old)[generated:].max() > 1e-3
        assert np.abs(one.sampler_logprobs - new)[generated:].max() > 1e-3
        assert (after.policy_versions == 5).all()
        asked_after = request("after", prompt(6))
        expected = logprobs_under(model, asked_after, after)
        np.testing.assert_allclose(after.sampler_logprobs, expected, atol=1e-4)

    asyncio.run(scenario())


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16", "float16"]))
def test_an_updated_engine_equals_a_fresh_one(dtype: str, tmp_path: Path) -> None:
    before, after = build_model(tmp_path / "before", "qwen3"), tmp_path / "after"
    build_model(after, "qwen3")
    model = load_causal_lm(after, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(after)
    manifest = published.publish(2, model.named_parameters())
    asked = [request(str(i), prompt(4 + i, seed=i), seed=i, max_tokens=20) for i in range(4)]

    async def sampled(path: Path, *versions: WeightManifest) -> dict[str, Generation]:
        async with running_engine(path, dtype=dtype) as engine:
            if versions:
                engine.submit([request("before", prompt(4))])  # with the old weights
                await collect(engine, 1)
            for version in versions:
                await engine.prepare(version)
                await engine.pause()
                await engine.load()
                await engine.resume()
            engine.submit(asked)
            return await collect(engine, len(asked))

    updated, fresh = asyncio.run(sampled(before, manifest)), asyncio.run(sampled(after))
    for name, one in fresh.items():
        np.testing.assert_array_equal(updated[name].token_ids, one.token_ids)
        np.testing.assert_array_equal(updated[name].sampler_logprobs, one.sampler_logprobs)


def test_weights_that_do_not_fit_change_nothing(model_path: Path, tmp_path: Path) -> None:
    manifest, model = publish(model_path, 6, change=0.05)
    named = list(model.named_parameters())
    missing = published.publish(7, named[:-1])
    misshapen = published.publish(7, [*named[:-1], (named[-1][0], torch.ones(3))])
    corrupt = published.publish(7, named)
    published.STAGES[-1].memory.kept[0].content[-8] ^= 1
    gone = published.publish(7, named)
    published.STAGES[-1].close()

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            await engine.prepare(manifest)
            with invalid("load"):
                await engine.load()
            for bad, kind, part in (
                (missing, InvalidValue, "model.norm.weight"),
                (misshapen, InvalidValue, "model.norm.weight"),
                (corrupt, DamagedWeightsError, "version 7"),
                (gone, MemoryGone, ""),
            ):
                with pytest.raises(kind) as refused:
                    await engine.prepare(bad)
                assert part in str(refused.value)
            asked = request("r", prompt(6), max_tokens=10)
            engine.submit([asked])
            one = (await collect(engine, 1))["r"]
        assert (one.policy_versions == 0).all()
        expected = logprobs_under(load_causal_lm(model_path, dtype="float32"), asked, one)
        np.testing.assert_allclose(one.sampler_logprobs, expected, atol=1e-4)

    asyncio.run(scenario())


def test_aborted_requests_come_out_of_collect(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            engine.submit([request(str(i), prompt(4), max_tokens=240) for i in range(20)])
            await until_generated(engine, 16 * 3)
            await engine.abort([str(i) for i in range(20)] + ["unknown"])
            ended = await collect(engine, 20)
            assert all(one.finish_reason is FinishReason.ABORTED for one in ended.values())
            assert {len(one.token_ids) > 0 for one in ended.values()} == {True, False}
            engine.submit([request("0", prompt(4), max_tokens=2)])  # the id is free again
            assert len((await collect(engine, 1))["0"].token_ids) == 2

    asyncio.run(scenario())


def test_progress_leaves_requests_running(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            assert await engine.progress() == []
            engine.submit([request(str(i), prompt(4), max_tokens=100) for i in range(20)])
            await until_generated(engine, 16 * 3)
            so_far = {one.request_id: one for one in await engine.progress()}
            assert set(so_far) == {str(i) for i in range(16)}  # four of them wait
            ended = await collect(engine, 20)
            for name, one in so_far.items():
                assert one.finish_reason is FinishReason.ABORTED
                length = len(one.token_ids)
                assert length >= 3
                assert one.token_ids.tolist() == ended[name].token_ids[:length].tolist()
                assert len(ended[name].token_ids) == 100

    asyncio.run(scenario())


def test_a_batch_with_an_invalid_request_is_rejected(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            good = request("good", prompt(4))
            with invalid("request 'bad': prompt_token_ids"):
                engine.submit([good, request("bad", prompt(300))])
            half = replace(good, sampling=replace(good.sampling, stop=("a", "\ud800")))
            with invalid("request 'good': stop", "\ud800"):
                engine.submit([half])
            with invalid("request_id", ["good", "good"]):
                engine.submit([good, good])
            assert engine.stats().num_waiting + engine.stats().num_running == 0
            engine.submit([good])
            with invalid("request_id", ["good"]):
                engine.submit([good])
            await collect(engine, 1)

    asyncio.run(scenario())


def test_the_event_loop_runs_while_the_engine_computes(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContinuousBatch, "step", _slow(ContinuousBatch.step, seconds=2.0))

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            engine.submit([request("r", prompt(4), max_tokens=2)])
            waiting = asyncio.create_task(collect(engine, 1))
            longest = 0.0
            while not waiting.done():
                start = time.perf_counter()
                await asyncio.sleep(0.005)
                longest = max(longest, time.perf_counter() - start)
            assert longest < 1.5

    asyncio.run(scenario())


@pytest.mark.filterwarnings("error")
def test_a_dead_thread_fails_all_waiting_calls(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def fail(self: ContinuousBatch) -> list[Generation]:
        entered.set()
        assert go.wait(TIMEOUT_S)
        raise ArithmeticError("not a number")

    monkeypatch.setattr(ContinuousBatch, "step", fail)

    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            engine.submit([request("r", prompt(4))])
            waiting = [asyncio.create_task(collect(engine, 1)) for _ in range(2)]
            assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
            pausing = asyncio.create_task(engine.pause())
            await asyncio.sleep(0)
            go.set()
            for task in (*waiting, pausing):
                with pytest.raises(EngineError) as info:
                    await asyncio.wait_for(task, TIMEOUT_S)
                assert "ArithmeticError('not a number')" in str(info.value)
                assert isinstance(info.value.__cause__, ArithmeticError)
            with pytest.raises(EngineError) as info:
                engine.submit([request("s", prompt(4))])
            assert "not a number" in str(info.value)

    asyncio.run(scenario())


def test_closing_ends_the_thread_during_requests(model_path: Path) -> None:
    async def scenario() -> None:
        async with running_engine(model_path) as engine:
            engine.submit([request(str(i), prompt(4), max_tokens=240) for i in range(32)])
            waiting = asyncio.create_task(engine.collect())
            await until_generated(engine, 32)
            await engine.close()
            await engine.close()
            assert "torch-engine" not in {thread.name for thread in threading.enumerate()}
            with pytest.raises(EngineError):
                await waiting
            with pytest.raises(EngineError):
                await engine.pause()

    asyncio.run(scenario())


def test_a_directory_without_a_model_fails_at_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(tmp_path, RolloutConfig(), dtype="float32")
        with pytest.raises(EngineError):
            await engine.pause()
        with invalid("model.path", str(tmp_path)):
            await engine.start()
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("order", rest_slow([1, -1]))
def test_results_do_not_depend_on_timing(model_path: Path, order: int) -> None:
    """Submit the same batches in order, at once or each after the previous one has ended."""
    groups: Sequence[list[GenerationRequest]] = [
        [request(f"{g}-{i}", prompt(5 + g, seed=g), seed=i, max_tokens=20) for i in range(4)]
        for g in range(4)
    ]

    async def scenario(at_once: bool) -> dict[str, Generation]:
        ended: dict[str, Generation] = {}
        async with running_engine(model_path) as engine:
            for group in groups[::order]:
                engine.submit(group)
                if not at_once:
                    ended |= await collect(engine, 4)
            return ended | await collect(engine, 16 - len(ended))

    first, second = asyncio.run(scenario(True)), asyncio.run(scenario(False))
    for name, one in first.items():
        assert one.token_ids.tolist() == second[name].token_ids.tolist()
        assert one.sampler_logprobs.tolist() == second[name].sampler_logprobs.tolist()


def _slow(step: Any, *, seconds: float) -> Any:
    def slow(self: ContinuousBatch) -> list[Generation]:
        time.sleep(seconds)
        ended: list[Generation] = step(self)
        return ended

    return slow
