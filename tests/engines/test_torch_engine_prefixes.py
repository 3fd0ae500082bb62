"""Conversations in the torch engine: later turns reuse earlier ones with the same results."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.engines.generation.torch import continuous_batch
from rlsys.engines.generation.torch.backbone import Backbone
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.kv_cache import SlotCache
from rlsys.engines.generation.torch.prefix_cache import Prefixes
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.reallocation.transport.weight_views import Weights, open_verified
from rlsys.types import Generation, GenerationRequest
from scripts.bench import layouts
from scripts.bench.environment_prefixes import Shape, build_engine, play
from tests.engines import published
from tests.engines.torch_engine_harness import (
    batch_of,
    build_model,
    prompt,
    request,
    run,
    trainer_logprobs,
)
from tests.tiers import rest_slow

# Windows of 8 and 11 tokens, soft caps, sinks and experts; fused if the engine supports it.
MODELS: Mapping[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: layouts.build_model(path, "qwen3"),
    "llama": lambda path: layouts.build_model(path, "llama"),
    "gemma2": lambda path: build_model(path, "gemma2"),
    "gemma3": lambda path: build_model(path, "gemma3"),
    "mistral": lambda path: layouts.build_model(path, "mistral"),
    "gpt_oss": lambda path: layouts.build_model(path, "gpt_oss"),
    "qwen3_moe": lambda path: layouts.build_model(path, "qwen3_moe"),
    "deepseek_v3": lambda path: layouts.build_model(path, "deepseek_v3"),
}
FUSED = ("qwen3", "llama", "gemma2", "gemma3", "mistral")

FIRST, SAMPLED, ADDED, NUM_TURNS = 23, 11, 9, 4  # at most 24 + 3 · 20 + 11 tokens
LENGTHS = [FIRST + turn * (SAMPLED + ADDED) for turn in range(NUM_TURNS)]


def outcome(generation: Generation) -> tuple[list[int], list[float]]:
    return generation.token_ids.tolist(), generation.sampler_logprobs.tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_causal_lm(build_model(tmp_path_factory.mktemp("qwen3"), "qwen3"), dtype="float32")


def small_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Draw tokens that are in every model's vocabulary."""
    return tuple(3 + token % 20 for token in prompt(length, seed))


Turns = dict[str, tuple[GenerationRequest, Generation]]


def converse(
    batch: ContinuousBatch, names: Sequence[str], *, num_turns: int = NUM_TURNS, **options: Any
) -> Turns:
    """Run turns of several conversations side by side; return generations by "NAME-TURN"."""
    prompts = {name: small_prompt(FIRST + ord(name) % 2, seed=ord(name)) for name in names}
    turns: Turns = {}
    for turn in range(num_turns):
        requests = [
            request(
                f"{name}-{turn}",
                prompts[name],
                seed=100 * turn + ord(name),
                **{"max_tokens": SAMPLED, "temperature": 0.8, **options},
            )
            for name in names
        ]
        ended = run(batch, requests)
        for name, asked in zip(names, requests, strict=True):
            generation = ended[asked.request_id]
            turns[asked.request_id] = asked, generation
            added = small_prompt(ADDED, seed=1000 * turn + ord(name))
            prompts[name] = (*prompts[name], *generation.token_ids.tolist(), *added)
    return turns


def assert_is_what_a_trainer_computes(
    model: Any, turns: Turns, temperature: float = 0.8, atol: float = 5e-5
) -> None:
    """Allow for Qwen3, which amplifies rounding: without reuse it differs by 1.2e-5."""
    expected = trainer_logprobs(
        model,
        [asked.prompt_token_ids for asked, _ in turns.values()],
        [generation.token_ids.tolist() for _, generation in turns.values()],
        temperature=temperature,
    )
    for (_, generation), trainer in zip(turns.values(), expected, strict=True):
        np.testing.assert_allclose(generation.sampler_logprobs, trainer, atol=atol)


@pytest.mark.parametrize("kind", rest_slow(MODELS, only=("qwen3", "gemma3")))
def test_conversations_equal_whole_passes(kind: str, tmp_path: Path) -> None:
    """Sample, and take the likeliest token, with concurrent requests of other lengths."""
    model = load_causal_lm(MODELS[kind](tmp_path), dtype="float32")
    assert Backbone(model).is_fused == (kind in FUSED)
    for top_k in (0, 1):
        batch = batch_of(model)
        turns = converse(batch, "abc", top_k=top_k)
        without = converse(batch_of(model, reuses_prefixes=False), "abc", top_k=top_k)
        for name, (_, generation) in turns.items():
            assert generation.token_ids.tolist() == without[name][1].token_ids.tolist()
            np.testing.assert_allclose(
                generation.sampler_logprobs, without[name][1].sampler_logprobs, atol=1e-5
            )
        assert_is_what_a_trainer_computes(model, turns, atol=1e-5)
        # "b" begins with 23 tokens, "a" and "c" with 24. After a turn all but the last are there.
        assert batch.num_prompt_tokens == sum(LENGTHS) * 3 + 2 * NUM_TURNS
        assert batch.num_reused_tokens == 3 * (32 + 48 + 64)


def test_conversations_do_not_depend_on_other_requests(model: Any) -> None:
    """Compare bitwise, like single turns."""
    together = converse(batch_of(model), "abcdefgh")
    alone = converse(batch_of(model), "c")
    few_slots = converse(batch_of(model, max_running=2), "hgfedcba")
    for name, (_, generation) in alone.items():
        assert outcome(generation) == outcome(together[name][1])
    for name, (_, generation) in few_slots.items():
        assert outcome(generation) == outcome(together[name][1])


def test_a_single_turn_is_bitwise_the_same_whatever_is_parked(model: Any) -> None:
    """Share examples or a system prompt, among conversations."""
    system = prompt(40)
    requests = [
        request(str(i), [*system, *prompt(1 + 7 * i, seed=i)], seed=i, max_tokens=5 + 3 * i)
        for i in range(6)
    ]
    requests += [dataclasses.replace(one, request_id="9" + one.request_id) for one in requests]
    batch = batch_of(model, max_running=3)
    converse(batch, "abc")
    num_reused = batch.num_reused_tokens
    found: dict[str, Generation] = {}
    for some in (requests[:4], requests[4:5], requests[5:]):
        found |= run(batch, some)
    assert batch.num_reused_tokens == num_reused
    fresh = run(batch_of(model, reuses_prefixes=False), requests)
    for name, generation in found.items():
        assert outcome(generation) == outcome(fresh[name])


def forks(base: Generation, first: Sequence[int]) -> list[GenerationRequest]:
    """Fork twice after the whole completion, once with other tokens, once from within it."""
    tokens = base.token_ids.tolist()
    after = [*first, *tokens, *prompt(7, seed=1)]
    return [
        request("same-1", after, seed=1),
        request("same-2", after, seed=2),
        request("other", [*first, *tokens, *prompt(20, seed=2)], seed=3),
        request("within", [*first, *tokens[:15], *prompt(5, seed=3)], seed=4),
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_several_requests_continue_one(model: Any, at_once: bool) -> None:
    first = prompt(34)
    batch = batch_of(model)
    base = run(batch, [request("base", first, max_tokens=30)])["base"]
    requests = forks(base, first)
    ended = run(batch, requests) if at_once else {}
    for one in () if at_once else requests:
        ended |= run(batch, [one])
    assert batch.num_reused_tokens == 4 * 48  # independent of their order
    assert_is_what_a_trainer_computes(
        model, {one.request_id: (one, ended[one.request_id]) for one in requests}, temperature=1.0
    )


def batch_with_prefixes(
    model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[ContinuousBatch, Prefixes[Any]]:
    """Return a batch and what it has parked."""
    parked: Prefixes[Any] = Prefixes()
    monkeypatch.setattr(continuous_batch, "Prefixes", lambda: parked)
    return batch_of(model, **options), parked


def test_running_requests_have_priority_over_parked_ones(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run conversations in too little memory: fewer prefixes, the same results."""
    bytes_per_token = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, float32
    max_tokens = 3 * 112
    names = "abcdefgh"
    batch, parked = batch_with_prefixes(
        model, monkeypatch, kv_cache_gib=max_tokens * bytes_per_token / 2**30
    )
    reserve, most = SlotCache.reserve, 0

    def watched(cache: SlotCache, num_slots: int, longest: int) -> None:
        nonlocal most
        reserve(cache, num_slots, longest)
        most = max(most, cache.num_slots * cache.capacity + parked.num_tokens)

    monkeypatch.setattr(SlotCache, "reserve", watched)
    turns = converse(batch, names)
    monkeypatch.undo()
    free = batch_of(model)
    assert 0 < most <= max_tokens
    for name, (_, generation) in converse(free, names).items():
        assert turns[name][1].token_ids.tolist() == generation.token_ids.tolist()
    assert batch.num_reused_tokens < free.num_reused_tokens
    assert_is_what_a_trainer_computes(model, turns)


def test_another_salt_finds_nothing(model: Any) -> None:
    batch = batch_of(model)
    base = run(batch, [request("base", prompt(34), cache_salt="x", max_tokens=30)])["base"]
    after = [*prompt(34), *base.token_ids.tolist(), 5, 6]
    run(batch, [request("1", after), request("2", after, cache_salt="y")])
    assert batch.num_reused_tokens == 0
    run(batch, [request("3", after, cache_salt="x")])
    assert batch.num_reused_tokens == 48


def test_num_shared_tokens_limits_reuse(model: Any) -> None:
    """Use a template that drops the thinking of earlier turns."""
    batch = batch_of(model)
    run(batch, [request("base", prompt(40), max_tokens=30)])
    after = [*prompt(40), *prompt(30, seed=9)]
    run(batch, [request("1", after)])
    assert batch.num_reused_tokens == 0
    declared = request("2", after, num_shared_tokens=40)
    generation = run(batch, [declared])["2"]
    assert batch.num_reused_tokens == 32
    assert_is_what_a_trainer_computes(model, {"2": (declared, generation)}, temperature=1.0)


def test_requests_that_end_for_good_are_not_parked(model: Any) -> None:
    batch = batch_of(model)
    base = run(batch, [request("base", prompt(34), max_tokens=30, goes_on=False)])["base"]
    run(batch, [request("after", [*prompt(34), *base.token_ids.tolist(), 5])])
    assert batch.num_reused_tokens == 0


def published_weights(model: Any, version: int, factor: float) -> Weights:
    tensors = model_tensors(model)
    scaled = [(name, tensor.detach() * factor) for name, tensor in tensors.items()]
    return open_verified(published.publish(version, scaled), tensors)


def test_nothing_is_reused_across_a_weight_update(tmp_path: Path) -> None:
    """Check requests that ended before the change, and those that ran across it."""
    model = load_causal_lm(build_model(tmp_path, "qwen3"), dtype="float32")
    batch = batch_of(model)
    ended = run(batch, [request("ended", prompt(34), max_tokens=30)])
    batch.submit([request("running", prompt(34, seed=1), max_tokens=30)])
    batch.step()
    weights = published_weights(model, 1, 1.02)
    batch.load(weights, batch.prepare(weights))
    ended |= run(batch, [])
    assert set(ended["running"].policy_versions.tolist()) == {0, 1}
    requests = [
        request(name, [*first, *ended[name].token_ids.tolist(), 5, 6])
        for name, first in (("ended", prompt(34)), ("running", prompt(34, seed=1)))
    ]
    again = run(batch, requests)
    assert batch.num_reused_tokens == 0
    turns = {one.request_id: (one, again[one.request_id]) for one in requests}
    assert_is_what_a_trainer_computes(model, turns, temperature=1.0)
    # Everything since the change is reused.
    after = [*requests[0].prompt_token_ids, *again["ended"].token_ids.tolist(), 7]
    last = request("last", after)
    turns = {"last": (last, run(batch, [last])["last"])}
    assert batch.num_reused_tokens == 64
    assert_is_what_a_trainer_computes(model, turns, temperature=1.0)


def test_release_drops_parked_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal_lm(build_model(tmp_path, "qwen3"), dtype="float32")
    weights = published_weights(model, 1, 1.0)
    batch, parked = batch_with_prefixes(model, monkeypatch)
    base = run(batch, [request("base", prompt(34), max_tokens=30)])["base"]
    assert parked.num_tokens > 0
    batch.release()
    assert parked.num_tokens == 0
    batch.load(weights, batch.prepare(weights))
    after = request("after", [*prompt(34), *base.token_ids.tolist(), 5, 6])
    turns = {"after": (after, run(batch, [after])["after"])}
    assert batch.num_reused_tokens == 0
    assert_is_what_a_trainer_computes(model, turns, temperature=1.0)


def test_an_aborted_request_continues_from_its_tokens(model: Any) -> None:
    whole = run(batch_of(model), [request("whole", prompt(37), seed=3, max_tokens=40)])["whole"]
    batch = batch_of(model)
    batch.submit([request("begun", prompt(37), seed=3, max_tokens=40)])
    for _ in range(15):
        batch.step()
    (begun,) = batch.abort(["begun"])
    done = begun.token_ids.tolist()
    assert len(done) == 16
    rest = run(
        batch,
        [request("rest", [*prompt(37), *done], seed=3, max_tokens=24, num_prior_tokens=16)],
    )["rest"]
    assert batch.num_reused_tokens == 48
    assert [*done, *rest.token_ids.tolist()] == whole.token_ids.tolist()
    np.testing.assert_allclose(rest.sampler_logprobs, whole.sampler_logprobs[16:], atol=1e-5)


def test_the_experts_of_reused_tokens_are_recorded(tmp_path: Path) -> None:
    model = load_causal_lm(layouts.build_model(tmp_path, "qwen3_moe"), dtype="float32")
    batch = batch_of(model, records_routing=True)
    turns = converse(batch, "abc")
    without = converse(batch_of(model, records_routing=True, reuses_prefixes=False), "abc")
    assert batch.num_reused_tokens == 3 * (32 + 48 + 64)
    for name, (asked, generation) in turns.items():
        experts = generation.routed_experts
        assert experts is not None
        assert len(experts) == len(asked.prompt_token_ids) + SAMPLED - 1
        np.testing.assert_array_equal(experts, without[name][1].routed_experts)


def test_the_highest_priority_is_admitted_first_and_equal_ones_in_order(model: Any) -> None:
    batch = batch_of(model, max_running=1)
    priorities = {"a": 0, "b": 2, "c": 0, "d": 2, "e": -1, "f": 1}
    batch.submit(
        [
            request(name, prompt(5), priority=priority, max_tokens=1)
            for name, priority in priorities.items()
        ]
    )
    assert [one.request_id for one in batch.abort(["f", "c"])] == ["f", "c"]
    order = list(itertools.chain.from_iterable(iter_steps(batch)))
    assert order == ["b", "d", "a", "e"]


def iter_steps(batch: ContinuousBatch) -> list[list[str]]:
    steps = []
    while batch.has_work:
        steps.append([one.request_id for one in batch.step()])
    return steps


def test_a_model_that_cannot_run_a_prompt_in_parts_reuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "rlsys.engines.generation.torch.kv_cache.attention_behind",
        lambda query, *rest: torch.zeros_like(query).transpose(1, 2),
    )
    model = load_causal_lm(build_model(tmp_path, "qwen3"), dtype="float32")
    assert not Backbone(model).resumes
    assert "Qwen3ForCausalLM" in caplog.text
    batch = batch_of(model)
    assert_is_what_a_trainer_computes(model, converse(batch, "ab", num_turns=2))
    assert batch.num_reused_tokens == 0


@pytest.mark.parametrize("reuses", rest_slow([True, False]))
def test_an_engine_counts_reused_tokens(reuses: bool, tmp_path: Path) -> None:
    """Run the benchmark's conversations: most tokens are reused, or none."""
    shape = Shape(first_tokens=20, num_groups=1, width=32, num_layers=1)
    path = build_tiny_model(tmp_path, width=32, num_layers=1, max_context=shape.context)

    async def conversations() -> tuple[float, EngineStats]:
        engine = build_engine("torch", path, shape, 1, reuses=reuses)
        await engine.start()
        try:
            played = await play(engine, shape, seed=0)
            return played.num_reused / played.num_reusable, engine.stats()
        finally:
            await engine.close()

    rate, stats = asyncio.run(asyncio.wait_for(conversations(), 300.0))
    assert stats.num_prompt_tokens > 8 * 8 * 20
    if reuses:
        assert 0.93 < rate < 1
        assert 0 < stats.num_reused_tokens < stats.num_prompt_tokens
    else:
        assert stats.num_reused_tokens == rate == 0
