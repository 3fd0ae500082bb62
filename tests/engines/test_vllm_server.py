"""The engine of a server of rollout.urls, over HTTP with the real worker calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.generation.sampling import stream_key
from rlsys.engines.generation.vllm import vllm_server_engine
from rlsys.engines.generation.vllm.vllm_server_client import parse_metrics
from rlsys.engines.generation.vllm.vllm_server_engine import ServerEngine, served_generation
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.reallocation.transport.weight_views import stage_whole
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams
from scripts.bench.layouts import build_model
from tests.engines.served_model import ServedModel, serving
from tests.errors import error_about, invalid

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=0)


@pytest.fixture(scope="module")
def config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await work()

    return asyncio.run(limited())


def make_engine(path: Path, url: str, **options: Any) -> ServerEngine:
    rollout = RolloutConfig(engine="vllm", urls=(url,), **options)
    return ServerEngine(str(path), rollout, url=url, dtype="float32", max_context=64)


def request(name: str, prompt: list[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**sampling), seed=3
    )


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return model_tensors(load_causal_lm(path, dtype="float32"))


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_server_gets_the_weights_before_it_is_admitted_and_each_version_after(
    path: Path, config: Any, is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server on another node gets the bytes in pieces."""
    monkeypatch.setattr(vllm_server_engine, "PIECE_BYTES", 100_000)
    initial = tensors_of(path)
    doubled = {name: 2 * tensor for name, tensor in initial.items()}

    async def update() -> ServedModel:
        served = ServedModel(config, is_remote=is_remote)
        async with serving(served) as url:
            engine = make_engine(path, url)
            await engine.start()
            assert served.version == "0"
            assert not served.is_paused
            assert served.aborted == {"all"}  # requests of an earlier client
            for name, tensor in initial.items():
                assert torch.equal(served.worker.loaded[name], tensor)
            staged, manifest = stage_whole(1, doubled)
            await engine.prepare(manifest)
            staged.close()
            await engine.pause()
            await engine.load()
            await engine.resume()
            assert engine.stats().policy_version == 1
            await engine.close()
        return served

    served = run(update)
    assert served.version == "1"
    for name, tensor in doubled.items():
        assert torch.equal(served.worker.loaded[name], tensor)
    num_bytes = sum(tensor.nbytes for tensor in initial.values())
    assert (served.num_received > 2 * (num_bytes // 100_000)) == is_remote


async def collect(engine: ServerEngine, num: int) -> dict[str, Generation]:
    found: dict[str, Generation] = {}
    while len(found) < num:
        found |= {one.request_id: one for one in await engine.collect()}
    return found


def test_requests_carry_their_stream_and_cache_and_answers_their_versions(
    path: Path, config: Any
) -> None:
    async def sample() -> tuple[dict[str, Generation], ServedModel]:
        served = ServedModel(config)
        async with serving(served) as url:
            engine = make_engine(path, url)
            await engine.start()
            served.max_tokens_at_once = 2
            first = request("a", [5, 6, 7], max_tokens=5, stop_token_ids=(7,))
            engine.submit([first, request("b", [9], max_tokens=6, stop_at_eos=False)])
            with invalid("request_id", "a"):
                engine.submit([request("a", [1])])
            with invalid("request 'long': prompt_token_ids"):
                engine.submit([request("long", [1] * 512)])
            with invalid("request 'tool': structure"):
                engine.submit([request("tool", [1], structure="{}")])
            await served.until_requests(3)
            served.version = "4"
            served.go_on.set()
            found = await collect(engine, 2)
            assert await engine.progress() == []
            stats = engine.stats()
            assert (stats.kv_usage, stats.num_running, stats.num_waiting) == (0.25, 0, 0)
            await engine.close()
        return found, served

    found, served = run(sample)
    assert found["a"].token_ids.tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_array_equal(found["a"].sampler_logprobs, np.full(5, -0.5, np.float32))
    assert found["a"].policy_versions.tolist() == [0, 0, 4, 4, 4]
    assert found["b"].policy_versions.tolist() == [0, 0, 4, 4, 4, 4]
    streams = [body["sampling_params"]["extra_args"]["rlsys_stream"] for body in served.bodies]
    assert streams[1:] == [[stream_key(3), 0]] * 2
    assert [body["sampling_params"]["stop_token_ids"] for body in served.bodies[1:]] == [[2, 7], []]
    salts = {body["cache_salt"] for body in served.bodies}
    assert len(salts) == 1  # all after the first weights
    ids = [body["request_id"] for body in served.bodies]
    assert len(set(ids)) == len(ids) == 3
    assert all("priority" not in body for body in served.bodies)  # the server has none


def test_an_aborted_request_returns_its_tokens(path: Path, config: Any) -> None:
    async def abort() -> dict[str, Generation]:
        served = ServedModel(config)
        async with serving(served) as url:
            engine = make_engine(path, url)
            await engine.start()
            served.max_tokens_at_once = 2
            engine.submit([request("b", [9], max_tokens=6)])
            await served.until_requests(2)
            await engine.abort(["b", "unknown"])
            found = await collect(engine, 1)
            await engine.close()
            return found

    (made,) = run(abort).values()
    assert made.finish_reason is FinishReason.ABORTED
    assert made.token_ids.tolist() == [1, 2]
    assert made.policy_versions.tolist() == [0, 0]


def test_experts_of_requests_come_from_the_worker(tmp_path: Path) -> None:
    from transformers import AutoConfig

    path = build_model(tmp_path / "moe", "qwen3_moe")  # two layers, two experts of a token

    async def sample() -> Generation:
        served = ServedModel(AutoConfig.from_pretrained(path))
        async with serving(served) as url:
            engine = make_engine(path, url, replay_routing=True)
            await engine.start()
            engine.submit([request("a", [5, 6, 7], max_tokens=4)])
            (made,) = (await collect(engine, 1)).values()
            await engine.close()
            return made

    experts = run(sample).routed_experts
    assert experts is not None
    assert experts.dtype == np.uint8
    assert experts.tolist() == [[n] * 4 for n in range(6)]


def test_a_server_that_ends_is_the_end_of_its_engine(path: Path, config: Any) -> None:
    async def end() -> None:
        served = ServedModel(config)
        async with serving(served) as url:
            engine = make_engine(path, url)
            await engine.start()
            served.max_tokens_at_once = 1
            engine.submit([request("a", [5], max_tokens=3)])
            await served.until_requests(2)
            served.go_on.set()
            await collect(engine, 1)
        for call in (engine.progress, engine.collect, engine.pause):
            with error_about(EngineError, url):
                await call()
        await engine.close()

    run(end)


def test_a_server_that_loses_a_version_is_not_admitted(path: Path, config: Any) -> None:
    class Forgetful(ServedModel):
        async def update_version(self, request: Any) -> Any:
            answer = await super().update_version(request)
            self.version = "7"
            return answer

    async def start() -> None:
        async with serving(Forgetful(config)) as url:
            engine = make_engine(path, url)
            try:
                with error_about(EngineError, url, "7"):
                    await engine.start()
            finally:
                await engine.close()

    run(start)


def test_a_clamped_log_probability_is_not_finite() -> None:
    choice: dict[str, Any] = {
        "token_ids": [4, 5],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -9999.0}]},
        "weight_versions": [{"version": "2", "start": 0, "end": 2}],
        "finish_reason": "stop",
    }
    found = served_generation("a", [choice]).until_failure()
    assert (found.finish_reason, found.token_ids.tolist()) == (FinishReason.FAILED, [4])
    wrong: list[Any] = [[], None, "text", [1], [{}], [choice | {"weight_versions": None}]]
    for choices in (*wrong, [choice | {"logprobs": 3}], [choice | {"token_ids": ["x", "y"]}]):
        with error_about(EngineError, "a"):
            served_generation("a", choices)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("/weight_info", {}),
        ("/weight_info", "<html>"),
        ("/pause", 500),
        ("rlsys_server_start", {"results": ["yes"]}),
        ("rlsys_server_prepare", {"results": [{}]}),
        ("rlsys_server_is_prepared", {"results": [{"is_prepared": "no"}]}),
        ("rlsys_load", {"results": None}),
        ("/inference/v1/generate", {"choices": []}),
        ("/inference/v1/generate", [1]),
    ],
)
def test_an_answer_of_another_shape_is_an_error_of_the_engine(
    path: Path, config: Any, name: str, answer: Any
) -> None:
    async def start() -> None:
        served = ServedModel(config)
        served.answers[name] = answer
        async with serving(served) as url:
            engine = make_engine(path, url)
            try:
                with pytest.raises(EngineError):
                    await engine.start()
            finally:
                await engine.close()

    run(start)


def test_metrics_are_summed_over_labels() -> None:
    page = '# TYPE x counter\nx{a="1 2"} 3\nx{a="2"} 4.5\ny 1e3\nbroken line here\n'
    assert parse_metrics(page) == {"x": 7.5, "y": 1000.0}
