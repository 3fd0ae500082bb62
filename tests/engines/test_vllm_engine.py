"""The vLLM engine on the CPU wheel, compared with Hugging Face and with a freshly loaded engine."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.util
import itertools
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.engines.generation.sampling import stream_key, uniforms
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.errors import InvalidValue
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.reallocation.transport.shared_device import DeviceSharingError
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams, WeightManifest
from tests.engines import published
from tests.engines.structures import CHOICE, structure
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    collect_all,
    engine_processes,
    generate,
    gone,
    hf_logprobs,
    load,
    make_engine,
    make_requests,
    publish,
    update,
)
from tests.errors import invalid
from tests.reallocation.fake_device import FakeDevice, stage_on
from tests.tiers import rest_slow

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

Run = Callable[[Coroutine[Any, Any, Any]], Any]
RANDOM = np.random.default_rng(0)
# The first fills nine blocks of the prefix cache (32 tokens each on the CPU), the last is short.
PROMPTS = [RANDOM.integers(3, 259, size=n).tolist() for n in (5, 17, 300, 1)]
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))
    loop.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [build_tiny_model(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(paths: list[Path]) -> list[Any]:
    return [load(path) for path in paths]


@pytest.fixture(scope="module")
def manifests(models: list[Any]) -> list[WeightManifest]:
    return [publish(model, version) for version, model in enumerate(models)]


@pytest.fixture(scope="module")
def running(paths: list[Path], run: Run) -> Iterator[VLLMEngine]:
    engine = make_engine(paths[0])
    run(engine.start())
    yield engine
    processes = engine_processes(engine)
    run(engine.close())
    assert gone(processes, within_s=0)


@pytest.fixture(scope="module")
def fresh(paths: list[Path], run: Run) -> Iterator[VLLMEngine]:
    """Start an engine with the weights of version 1. The last test kills it."""
    engine = make_engine(paths[1], max_context=1000)
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture
def engine(running: VLLMEngine, manifests: list[WeightManifest], run: Run) -> VLLMEngine:
    """Return the module's engine, at version 0."""
    run(update(running, manifests[0]))
    return running


def greedy(engine: VLLMEngine, name: str) -> Coroutine[Any, Any, list[Generation]]:
    return generate(engine, make_requests(PROMPTS, name, temperature=0.0, max_tokens=32))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    rest_slow(
        [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 3, 1.0), (0.7, 8, 0.6)],
        only=((1.0, 0, 1.0), (0.7, 8, 0.6)),
    ),
)
def test_logprobs_are_those_before_truncation(
    engine: VLLMEngine, models: list[Any], run: Run, temperature: float, top_k: int, top_p: float
) -> None:
    requests = make_requests(
        PROMPTS, "cut", temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=24
    )
    for prompt, generation in zip(PROMPTS, run(generate(engine, requests)), strict=True):
        expected = hf_logprobs(models, prompt, generation, temperature=temperature)
        np.testing.assert_allclose(generation.sampler_logprobs, expected, atol=1e-4)


def test_greedy_and_sampling_requests_share_a_batch(
    engine: VLLMEngine, models: list[Any], run: Run
) -> None:
    """Expect log-probabilities at the temperature of the other requests."""
    sampled = make_requests(PROMPTS, "sampled", temperature=0.7, max_tokens=24)
    others = [
        dataclasses.replace(one, request_id=f"greedy-{i}", sampling=one.sampling.greedy)
        for i, one in enumerate(sampled, len(sampled))
    ]
    found = run(generate(engine, [*sampled, *others]))
    likeliest = run(generate(engine, make_requests(PROMPTS, "0", temperature=0.0, max_tokens=24)))
    for asked, mine, other, expected in zip(
        PROMPTS, found[len(sampled) :], found, likeliest, strict=False
    ):
        np.testing.assert_array_equal(mine.token_ids, expected.token_ids)
        assert mine.token_ids.tolist() != other.token_ids.tolist()
        logprobs = hf_logprobs(models, asked, mine, temperature=0.7)
        np.testing.assert_allclose(mine.sampler_logprobs, logprobs, atol=1e-4)


def test_running_requests_continue_with_new_weights_and_exact_versions(
    engine: VLLMEngine, models: list[Any], manifests: list[WeightManifest], run: Run
) -> None:
    async def update_in_flight() -> list[Generation]:
        engine.submit(make_requests(PROMPTS, "long", max_tokens=200, temperature=0.8))
        # Each of the others has sampled a few tokens when this one ends.
        engine.submit(make_requests([[7]], "short", max_tokens=5, stop_token_ids=()))
        ended = await collect_all(engine, 1)
        assert ended[0].request_id == "short-0"
        await update(engine, manifests[1])
        return await collect_all(engine, len(PROMPTS))

    for prompt, generation in zip(PROMPTS, run(update_in_flight()), strict=True):
        assert sorted(set(generation.policy_versions.tolist())) == [0, 1]
        assert (np.diff(generation.policy_versions) >= 0).all()
        # One token with the wrong version would be off by about 0.1.
        expected = hf_logprobs(models, prompt, generation, temperature=0.8)
        np.testing.assert_allclose(generation.sampler_logprobs, expected, atol=1e-4)
    assert engine.stats().policy_version == 1


@pytest.mark.slow
def test_updated_engine_equals_a_freshly_loaded_one_to_the_bit(
    engine: VLLMEngine, fresh: VLLMEngine, manifests: list[WeightManifest], run: Run
) -> None:
    old = run(greedy(engine, "old"))  # leaves the prompts' keys and values in the prefix cache
    run(update(engine, manifests[1]))
    updated = run(greedy(engine, "new"))
    expected = run(greedy(fresh, "new"))
    for a, b, c in zip(old, updated, expected, strict=True):
        assert not np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(b.token_ids, c.token_ids)
        assert np.array_equal(b.sampler_logprobs, c.sampler_logprobs)


@pytest.mark.slow
def test_updated_and_fresh_engine_sample_alike_from_the_same_seeds(
    engine: VLLMEngine, fresh: VLLMEngine, manifests: list[WeightManifest], run: Run
) -> None:
    """Sample with other weights before, which must have no effect."""
    sampling = {"temperature": 1.0, "max_tokens": 48}
    run(generate(engine, make_requests(PROMPTS, "before", **sampling)))
    run(update(engine, manifests[1]))
    updated = run(generate(engine, make_requests(PROMPTS, "alike", **sampling)))
    expected = run(generate(fresh, make_requests(PROMPTS, "alike", **sampling)))
    for a, b in zip(updated, expected, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)


async def torch_generate(path: Path, requests: list[GenerationRequest]) -> dict[str, Generation]:
    engine = TorchEngine(path, RolloutConfig(), dtype="float32")
    await engine.start()
    try:
        engine.submit(requests)
        ended: list[Generation] = []
        while len(ended) < len(requests):
            ended += await engine.collect()
    finally:
        await engine.close()
    return {generation.request_id: generation for generation in ended}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 8, "top_p": 0.6}],
    ids=["whole distribution", "cut"],
)
def test_both_engines_draw_the_same_completions_from_the_same_seeds(
    engine: VLLMEngine, paths: list[Path], run: Run, sampling: dict[str, Any]
) -> None:
    requests = make_requests(PROMPTS, "drawn", max_tokens=32, **sampling)
    theirs = run(generate(engine, requests))
    ours = run(torch_generate(paths[0], requests))
    for generation in theirs:
        expected = ours[generation.request_id]
        assert generation.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(
            generation.sampler_logprobs, expected.sampler_logprobs, atol=1e-4
        )
    continued = [
        dataclasses.replace(
            request,
            request_id=f"continued-{index}",
            prompt_token_ids=[*request.prompt_token_ids, *generation.token_ids[:10].tolist()],
            num_prior_tokens=10,
            sampling=dataclasses.replace(request.sampling, max_tokens=22),
        )
        for index, (request, generation) in enumerate(zip(requests, theirs, strict=True))
        if len(generation.token_ids) == 32
    ]
    assert continued
    whole = {g.request_id.rsplit("-")[-1]: g for g in theirs}
    for request, rest in zip(continued, run(generate(engine, continued)), strict=True):
        tokens = [*request.prompt_token_ids[-10:], *rest.token_ids.tolist()]
        assert tokens in [generation.token_ids.tolist() for generation in whole.values()]


@pytest.fixture
def indifferent(
    running: VLLMEngine, paths: list[Path], tmp_path: Path, run: Run
) -> tuple[VLLMEngine, Path]:
    """Return the module's engine with equally likely tokens, and a model with its weights."""
    path = tmp_path / "indifferent"
    shutil.copytree(paths[0], path)
    model = load(path)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    model.save_pretrained(path)
    run(update(running, publish(model, 2)))
    return running, path


def drawn(seed: int, num_tokens: int) -> list[int]:
    """Return what a request samples from equally likely tokens."""
    keys = np.full(num_tokens, stream_key(seed), np.uint64)
    return [int(259 * number) for number in uniforms(keys, np.arange(num_tokens))]


def seed_that_draws(accept: Callable[[list[int]], bool], num_tokens: int) -> int:
    return next(seed for seed in itertools.count() if accept(drawn(seed, num_tokens)))


def is_printable(token_ids: list[int]) -> bool:
    """Return whether a token is an ASCII character from ! to ~ (tokens 3 to 96)."""
    return all(3 <= token <= 96 for token in token_ids)


def test_both_engines_stop_at_the_same_strings_special_tokens_included(
    indifferent: tuple[VLLMEngine, Path], run: Run
) -> None:
    """Use a special token, a string of three tokens, and one that begins in the prior tokens."""
    engine, path = indifferent
    num_tokens = 26
    seed = seed_that_draws(
        lambda tokens: tokens[25] == BOS and EOS not in tokens and is_printable(tokens[10:13]),
        num_tokens,
    )
    tokens = drawn(seed, num_tokens)
    word = "".join(chr(token - 3 + ord("!")) for token in tokens[10:13])

    def request(number: int, stop: str, num_prior: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"stop-{number}",
            prompt_token_ids=[9, *tokens[:num_prior]],
            num_prior_tokens=num_prior,
            sampling=SamplingParams(max_tokens=40, stop=("never", stop)),
            seed=seed,
        )

    requests = [request(0, "<bos>", 0), request(1, word, 0), request(2, word, 12)]
    ours = run(torch_generate(path, requests))
    for generation, expected in zip(
        run(generate(engine, requests)), [tokens, tokens[:13], tokens[12:13]], strict=True
    ):
        assert generation.finish_reason is FinishReason.STOP
        assert generation.token_ids.tolist() == expected
        assert ours[generation.request_id].token_ids.tolist() == expected


def test_both_engines_end_at_the_same_tokens(
    indifferent: tuple[VLLMEngine, Path], run: Run
) -> None:
    engine, path = indifferent
    seed = seed_that_draws(lambda tokens: tokens[20] == EOS, 21)
    requests = make_requests([[9]] * (seed + 1), "end", max_tokens=40)[-1:]
    (ours,) = run(torch_generate(path, requests)).values()
    (theirs,) = run(generate(engine, requests))
    tokens = drawn(seed, 21)
    for generation in (ours, theirs):
        assert generation.finish_reason is FinishReason.STOP
        assert generation.token_ids.tolist() == tokens[: tokens.index(EOS) + 1]
    requests = make_requests([[9]] * (seed + 1), "on", max_tokens=40, stop_at_eos=False)[-1:]
    (ours,) = run(torch_generate(path, requests)).values()
    (theirs,) = run(generate(engine, requests))
    for generation in (ours, theirs):
        assert generation.finish_reason is FinishReason.LENGTH
        assert generation.token_ids.tolist() == drawn(seed, 40)


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def with_a_longer_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(256, 128)


def with_an_unknown_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(3)


def with_changed_bytes(tensors: dict[str, torch.Tensor]) -> None:
    """Mark a version whose bytes the test changes after publication."""


@pytest.mark.parametrize(
    ("damage", "name", "kind"),
    rest_slow(
        [
            (without_one, "model.layers.1.self_attn.k_proj.weight", InvalidValue),
            (with_a_longer_one, "q_proj.weight", InvalidValue),
            (with_an_unknown_one, "lm_head.weight", InvalidValue),
            (with_changed_bytes, "version 1", DamagedWeightsError),
        ]
    ),
)
def test_weights_that_do_not_fit_are_rejected_and_the_old_ones_stay(
    engine: VLLMEngine,
    models: list[Any],
    run: Run,
    damage: Callable[[dict[str, torch.Tensor]], None],
    name: str,
    kind: type[ValueError],
) -> None:
    before = run(greedy(engine, "before"))
    tensors = {name: tensor.detach() for name, tensor in model_tensors(models[1]).items()}
    damage(tensors)
    manifest = published.publish(1, tensors.items())
    if damage is with_changed_bytes:
        published.STAGES[-1].memory.kept[0].content[-1] ^= 1
    with pytest.raises(kind) as refused:
        run(engine.prepare(manifest))
    assert name in str(refused.value)
    for a, b in zip(before, run(greedy(engine, "after")), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        assert (b.policy_versions == 0).all()


def test_memory_of_a_gpu_that_its_workers_cannot_open_is_refused_and_the_old_weights_stay(
    engine: VLLMEngine, models: list[Any], manifests: list[WeightManifest], run: Run
) -> None:
    stage, manifest = stage_on(FakeDevice(), 1, model_tensors(models[1]))
    with pytest.raises(DeviceSharingError):
        run(engine.prepare(manifest))
    for one in run(greedy(engine, "refused")):
        assert (one.policy_versions == 0).all()
    run(update(engine, manifests[1]))
    for one in run(greedy(engine, "next")):
        assert (one.policy_versions == 1).all()
    stage.close()


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([5] * 2048, {}, ": prompt_token_ids"),
        ([], {}, ": prompt_token_ids"),
        ([259], {}, ""),
        ([5], {"temperature": 0.001}, ": temperature"),
        ([5], {"temperature": 2.1}, ": temperature"),
        ([5], {"max_tokens": 0}, ""),
    ],
)
def test_requests_that_can_never_run_are_rejected_with_their_batch(
    engine: VLLMEngine, prompt: list[int], sampling: dict[str, Any], field: str
) -> None:
    good = make_requests([[5]], "good")
    with invalid(f"request 'bad-0'{field}"):
        engine.submit([*good, *make_requests([prompt], "bad", **sampling)])
    assert engine.stats().num_waiting == 0


def test_an_id_in_use_is_rejected(engine: VLLMEngine, run: Run) -> None:
    async def submit_twice() -> None:
        requests = make_requests([[5]], "twice", max_tokens=50)
        with invalid("request_id", "twice-0"):
            engine.submit([*requests, *requests])
        engine.submit(requests)
        with invalid("request_id", "twice-0"):
            engine.submit(requests)
        await collect_all(engine, 1)

    run(submit_twice())


def test_completions_have_the_right_finish_reason(engine: VLLMEngine, run: Run) -> None:
    async def sample(name: str, **sampling: Any) -> Generation:
        (generation,) = await generate(engine, make_requests([[9]], name, **sampling))
        return generation

    full = run(sample("full", temperature=0.0, max_tokens=20))
    token_ids = full.token_ids.tolist()
    assert EOS not in token_ids
    assert (len(token_ids), full.finish_reason) == (20, FinishReason.LENGTH)

    stop_at = max(token_ids.index(token_id) for token_id in token_ids)
    token = run(
        sample("token", temperature=0.0, max_tokens=20, stop_token_ids=(token_ids[stop_at],))
    )
    assert token.token_ids.tolist() == token_ids[: stop_at + 1]  # the stop token included
    assert token.finish_reason == FinishReason.STOP

    tokenizer = engine._llm.get_tokenizer()
    text = tokenizer.decode([token_ids[stop_at]])
    string = run(sample("string", temperature=0.0, max_tokens=20, stop=(text,)))
    assert string.token_ids.tolist() == token_ids[: len(string.token_ids)]
    assert text in tokenizer.decode(string.token_ids)
    assert string.finish_reason == FinishReason.STOP
    assert len(string.sampler_logprobs) == len(string.token_ids)


@pytest.mark.slow
def test_the_context_limits_a_completion(fresh: VLLMEngine, run: Run) -> None:
    requests = make_requests([[5] * 990, [6] * 995], "edge", max_tokens=50, temperature=0.0)
    first, second = run(generate(fresh, requests))
    assert (len(first.token_ids), first.finish_reason) == (10, FinishReason.LENGTH)
    assert (len(second.token_ids), second.finish_reason) == (5, FinishReason.LENGTH)
    with invalid("request 'over-0': prompt_token_ids"):
        fresh.submit(make_requests([[5] * 1000], "over"))


def test_aborted_requests_return_sampled_tokens(engine: VLLMEngine, run: Run) -> None:
    async def abort_some() -> None:
        engine.submit(make_requests([[5], [6]], "long", max_tokens=2000, temperature=0.5))
        engine.submit(make_requests([[7]], "short", max_tokens=3))
        await collect_all(engine, 1)
        engine.submit(make_requests([[8]], "unsent", max_tokens=2000))
        await engine.abort(["unsent-0", "long-0", "long-1", "never heard of"])
        ended = {g.request_id: g for g in await collect_all(engine, 3)}
        assert {g.finish_reason for g in ended.values()} == {FinishReason.ABORTED}
        assert len(ended["unsent-0"].token_ids) == 0
        for name in ("long-0", "long-1"):
            generation = ended[name]
            assert 0 < len(generation.token_ids) < 2000
            assert len(generation.token_ids) == len(generation.sampler_logprobs)
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    run(abort_some())


def test_progress_is_a_prefix_of_the_completion(engine: VLLMEngine, run: Run) -> None:
    async def look() -> None:
        engine.submit(make_requests([[5]], "watched", max_tokens=400))
        engine.submit(make_requests([[7]], "first", max_tokens=3))
        await collect_all(engine, 1)
        (so_far,) = await engine.progress()
        (whole,) = await collect_all(engine, 1)
        num_tokens = len(so_far.token_ids)
        assert so_far.request_id == whole.request_id
        assert 0 < num_tokens <= len(whole.token_ids)
        assert so_far.token_ids.tolist() == whole.token_ids[:num_tokens].tolist()
        assert so_far.sampler_logprobs.tolist() == whole.sampler_logprobs[:num_tokens].tolist()
        assert len(so_far.policy_versions) == num_tokens
        assert await engine.progress() == []

    run(look())


def test_stats_count_requests_and_tokens(engine: VLLMEngine, run: Run) -> None:
    async def count() -> None:
        start = engine.stats().num_generated_tokens
        await engine.pause()
        engine.submit(make_requests([[5], [6], [7]], "counted", max_tokens=10))
        assert (engine.stats().num_waiting, engine.stats().num_running) == (3, 0)
        await engine.resume()
        generations = await collect_all(engine, 3)
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        assert engine.stats().num_generated_tokens == start + num_tokens
        assert (engine.stats().num_waiting, engine.stats().num_running) == (0, 0)

    run(count())


def test_a_directory_without_a_model_is_refused_before_anything_starts(
    tmp_path: Path, run: Run
) -> None:
    with invalid("model.path", str(tmp_path)):
        run(make_engine(tmp_path).start())


@pytest.mark.slow
def test_requests_without_finite_probabilities_fail_and_the_engine_lives(
    fresh: VLLMEngine, models: list[Any], run: Run
) -> None:
    diverged = copy.deepcopy(models[0])
    diverged.model.layers[0].input_layernorm.weight.data.fill_(torch.nan)

    async def failed() -> list[Generation]:
        await update(fresh, publish(diverged, 7))
        fresh.submit(make_requests(PROMPTS, "plain", max_tokens=8))
        fresh.submit(make_requests(PROMPTS[:1], "cut", max_tokens=8, top_k=3, top_p=0.5))
        fresh.submit(make_requests(PROMPTS[:1], "greedy", max_tokens=8, temperature=0.0))
        constrained = {"structure": structure(CHOICE), "max_tokens": 40}
        fresh.submit(make_requests(PROMPTS[:1], "constrained", **constrained))
        fresh.submit(make_requests(PROMPTS[:1], "long", max_tokens=900))
        found: list[Generation] = []
        while len(found) < len(PROMPTS) + 4:
            assert await fresh.progress() == []  # ends the long request
            found += await fresh.collect()
        return found

    for one in run(failed()):
        assert (one.finish_reason, len(one.token_ids)) == (FinishReason.FAILED, 0), one
        with pytest.raises(FloatingPointError) as raised:
            one.raise_failure()
        assert "version 7" in str(raised.value)


@pytest.mark.slow
def test_a_dead_engine_core_ends_all_waiting_calls(fresh: VLLMEngine, run: Run) -> None:
    async def kill_while_waiting() -> None:
        processes = engine_processes(fresh)
        await fresh.pause()
        fresh.submit(make_requests([[5]], "lost"))
        waiting = asyncio.create_task(fresh.collect())
        await asyncio.sleep(0)
        processes[0].send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineError):
            await waiting
        for call in (fresh.pause, fresh.resume, fresh.collect):
            with pytest.raises(EngineError):
                await call()
        with pytest.raises(EngineError):
            fresh.submit(make_requests([[5]], "late"))
        assert time.monotonic() - start < 60
        await fresh.close()
        await fresh.close()
        assert gone(processes, within_s=60)

    run(kill_while_waiting())
