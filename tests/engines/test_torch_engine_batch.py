"""Continuous batching without threads: numbers, slots, ends of requests, limits."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.engines.devices.cpu import linear_function
from rlsys.engines.generation.torch import fused_decoder
from rlsys.engines.generation.torch.backbone import Backbone
from rlsys.engines.generation.torch.kv_cache import SlotCache, slot_capacity
from rlsys.engines.models.attention import AttentionRule
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.errors import NOT_GIVEN
from rlsys.launcher.tiny_models import Family
from rlsys.types import FinishReason, Generation
from tests.engines.torch_engine_harness import (
    FAMILIES,
    batch_of,
    build_model,
    prompt,
    request,
    run,
    trainer_logprobs,
)
from tests.errors import invalid
from tests.tiers import rest_slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_causal_lm(build_model(tmp_path_factory.mktemp("qwen3"), "qwen3"), dtype="float32")


def outcome(generation: Generation) -> tuple[list[int], list[float]]:
    return generation.token_ids.tolist(), generation.sampler_logprobs.tolist()


def test_greedy_and_sampling_requests_share_a_batch(model: Any) -> None:
    """Ignore the seed, and compare log-probabilities with the trainer's."""
    asked = prompt(9)
    requests = [request(str(seed), asked, seed=seed, max_tokens=12, top_p=0.9) for seed in range(6)]
    greedy = [dataclasses.replace(one, sampling=one.sampling.greedy) for one in requests[4:]]
    ended = run(batch_of(model), [*requests[:4], *greedy])

    token_ids = torch.tensor([asked])
    with torch.no_grad():
        for _ in range(12):
            likeliest = model(input_ids=token_ids).logits[:, -1].argmax(-1, keepdim=True)
            token_ids = torch.cat([token_ids, likeliest], dim=1)
    expected = token_ids[0, len(asked) :].tolist()
    for name in "45":
        assert ended[name].token_ids.tolist() == expected
        (logprobs,) = trainer_logprobs(model, [asked], [expected], temperature=1.0)
        np.testing.assert_allclose(ended[name].sampler_logprobs, logprobs, atol=1e-5)
    sampled = {tuple(ended[name].token_ids.tolist()) for name in "0123"}
    assert len(sampled) == 4
    assert tuple(expected) not in sampled


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", rest_slow(FAMILIES, only=("gemma3",)))
def test_sampler_and_trainer_agree(
    family: Family, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use mixed lengths, more requests than slots, sliding windows and soft caps."""
    if not fused:
        monkeypatch.setattr(
            "rlsys.engines.generation.torch.backbone.is_llama_like", lambda model: False
        )
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    assert Backbone(model).is_fused == fused
    prompts = [prompt(3 + 5 * i % 23, seed=i) for i in range(20)]
    ended = run(
        batch_of(model, max_running=8),
        [
            request(str(i), prompt, seed=i, max_tokens=2 + 7 * i % 41, temperature=0.8)
            for i, prompt in enumerate(prompts)
        ],
    )
    generations = [ended[str(i)] for i in range(20)]
    assert [len(one.token_ids) for one in generations] == [2 + 7 * i % 41 for i in range(20)]
    expected = trainer_logprobs(
        model, prompts, [one.token_ids.tolist() for one in generations], temperature=0.8
    )
    difference = torch.cat(
        [
            torch.from_numpy(one.sampler_logprobs) - trainer
            for one, trainer in zip(generations, expected, strict=True)
        ]
    )
    assert abs(difference.mean()) <= 1e-6
    assert difference.abs().max() <= 1e-4


@pytest.mark.parametrize("onednn", rest_slow([True, False]))
def test_both_matrix_products_agree(
    onednn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use both products, of which the CPU selects one."""
    monkeypatch.setattr("rlsys.engines.devices.onednn_linear.is_faster", lambda: onednn)
    model = load_causal_lm(build_model(tmp_path, "qwen3"), dtype="float32")
    ended = run(batch_of(model), [request("a", prompt(7), max_tokens=20)])["a"]
    (expected,) = trainer_logprobs(model, [prompt(7)], [ended.token_ids.tolist()], temperature=1.0)
    np.testing.assert_allclose(ended.sampler_logprobs, expected, atol=1e-5)


def test_a_completion_does_not_depend_on_other_requests(model: Any) -> None:
    """Compare bitwise, with other concurrent requests, order and slots."""
    requests = [
        request(str(i), prompt(1 + 3 * i % 17, seed=i), seed=i, max_tokens=3 + 5 * i % 29)
        for i in range(24)
    ]
    together = run(batch_of(model, max_running=24), requests)
    few_slots = run(batch_of(model, max_running=3), requests)
    alone = {one.request_id: run(batch_of(model), [one])[one.request_id] for one in requests[:4]}
    batch = batch_of(model, max_running=24)
    dripping: dict[str, Generation] = {}
    left = iter(requests)
    while len(dripping) < len(requests):
        batch.submit(itertools.islice(left, 2))
        dripping |= {one.request_id: one for one in batch.step()}
    for name, generation in together.items():
        for other in (few_slots, alone, dripping):
            if name in other:
                assert outcome(other[name]) == outcome(generation)


def test_a_group_shares_its_prompt_but_not_its_draws(model: Any) -> None:
    group = [request(str(i), prompt(9), seed=i, max_tokens=20) for i in range(6)]
    ended = run(batch_of(model), [*group, request("same", prompt(9), seed=2, max_tokens=20)])
    assert len({tuple(ended[str(i)].token_ids.tolist()) for i in range(6)}) == 6
    assert outcome(ended["same"]) == outcome(ended["2"])


def test_a_continued_request_draws_what_an_uninterrupted_one_does(model: Any) -> None:
    whole = run(batch_of(model), [request("whole", prompt(7), seed=3, max_tokens=20)])["whole"]
    done = whole.token_ids[:8].tolist()
    rest = run(
        batch_of(model),
        [request("rest", [*prompt(7), *done], seed=3, max_tokens=12, num_prior_tokens=8)],
    )["rest"]
    assert rest.token_ids.tolist() == whole.token_ids[8:].tolist()
    np.testing.assert_allclose(rest.sampler_logprobs, whole.sampler_logprobs[8:], atol=1e-5)


def test_a_free_slot_is_used_at_once(model: Any) -> None:
    batch = batch_of(model, max_running=2)
    batch.submit(
        [
            request("long", prompt(4), max_tokens=9),
            request("short", prompt(5), max_tokens=2),
            request("next", prompt(6), max_tokens=3),
        ]
    )
    ended = batch.step()  # prefill and one decode: two tokens each
    assert [one.request_id for one in ended] == ["short"]
    assert (batch.num_running, batch.num_waiting) == (1, 1)
    batch.step()
    assert (batch.num_running, batch.num_waiting) == (2, 0)


def test_stop_tokens_end_a_completion_and_stay_in_it(model: Any) -> None:
    free = run(batch_of(model), [request("free", prompt(5), max_tokens=30)])["free"]
    tokens = free.token_ids.tolist()
    assert free.finish_reason is FinishReason.LENGTH
    by_model: tuple[dict[str, Any], dict[str, Any]] = ({"stop_token_ids": (tokens[6], 1)}, {})
    by_request: tuple[dict[str, Any], dict[str, Any]] = ({}, {"stop_token_ids": (tokens[6],)})
    for options, sampling in (by_model, by_request):
        stopped = run(
            batch_of(model, **options), [request("s", prompt(5), max_tokens=30, **sampling)]
        )["s"]
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids.tolist() == tokens[: tokens.index(tokens[6]) + 1]


def test_stop_strings_end_a_completion_and_may_span_tokens_and_interruptions(model: Any) -> None:
    tokens = run(batch_of(model), [request("f", prompt(5), max_tokens=40)])["f"].token_ids.tolist()
    stop = "".join(map(chr, tokens[10:13]))
    text = "".join(map(chr, tokens))
    expected = tokens[: text.index(stop) + 3]
    stopped = run(
        batch_of(model), [request("s", prompt(5), max_tokens=40, stop=("never seen", stop))]
    )["s"]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == expected

    done = tokens[:11]  # interrupted within the stop string
    continued = run(
        batch_of(model),
        [request("c", [*prompt(5), *done], max_tokens=29, num_prior_tokens=11, stop=(stop,))],
    )["c"]
    assert continued.token_ids.tolist() == expected[11:]


def test_a_stop_string_in_injected_text_ends_nothing(model: Any) -> None:
    """Use injected text that ends with the stop string: sampling must go on."""
    tokens = run(batch_of(model), [request("f", prompt(5), max_tokens=40)])["f"].token_ids.tolist()
    stop = "".join(map(chr, tokens[10:13]))
    assert "".join(map(chr, tokens)).count(stop) == 1
    done = tokens[:13]
    continued = run(
        batch_of(model),
        [request("c", [*prompt(5), *done], max_tokens=27, num_prior_tokens=13, stop=(stop,))],
    )["c"]
    assert continued.token_ids.tolist() == tokens[13:]


def test_the_prompt_does_not_count_for_stop_strings(model: Any) -> None:
    first = prompt(5)
    text = "".join(map(chr, first))
    ended = run(batch_of(model), [request("s", first, max_tokens=5, stop=(text[-2:],))])["s"]
    assert len(ended.token_ids) == 5


def test_the_context_ends_a_completion(model: Any) -> None:
    ended = run(batch_of(model), [request("c", prompt(250), max_tokens=100)])["c"]
    assert ended.finish_reason is FinishReason.LENGTH
    assert len(ended.token_ids) == 6  # of a context of 256


def test_abort_returns_sampled_tokens(model: Any) -> None:
    batch = batch_of(model, max_running=2)
    batch.submit([request(name, prompt(4), max_tokens=9) for name in "abc"])
    batch.step()
    aborted = {one.request_id: one for one in batch.abort(["a", "c", "unknown"])}
    assert {name: len(one.token_ids) for name, one in aborted.items()} == {"a": 2, "c": 0}
    assert all(one.finish_reason is FinishReason.ABORTED for one in aborted.values())
    assert (batch.num_running, batch.num_waiting) == (1, 0)
    untouched = run(batch_of(model), [request("b", prompt(4), max_tokens=9)])["b"]
    rest = run(batch, [])
    assert outcome(rest["b"]) == outcome(untouched)


def test_requests_wait_for_cache_memory(model: Any) -> None:
    bytes_per_token = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, float32
    batch = batch_of(model, kv_cache_gib=100 * bytes_per_token / 2**30)
    batch.submit([request(str(i), prompt(10), seed=i, max_tokens=22) for i in range(5)])
    most_running = 0
    ended: dict[str, Generation] = {}
    while batch.has_work:
        ended |= {one.request_id: one for one in batch.step()}
        most_running = max(most_running, batch.num_running)
    assert most_running == 3  # of 32 tokens each in 100
    free = run(
        batch_of(model),
        [request(str(i), prompt(10), seed=i, max_tokens=22) for i in range(5)],
    )
    for name, one in ended.items():
        assert one.token_ids.tolist() == free[name].token_ids.tolist()
    with invalid("rollout.kv_cache_gib", 100 * bytes_per_token / 2**30):
        batch.check(request("big", prompt(10), max_tokens=102))


@pytest.mark.parametrize(
    ("bad", "field", "value"),
    [
        (request("r", prompt(256)), "prompt_token_ids", NOT_GIVEN),
        (request("r", ()), "prompt_token_ids", NOT_GIVEN),
        (request("r", (3, 100_000)), "prompt_token_ids", NOT_GIVEN),
        (request("r", (3,), max_tokens=0), "max_tokens", 0),
        (request("r", (3,), temperature=0.0), "temperature", 0.0),
    ],
)
def test_requests_that_can_never_run_are_rejected(
    model: Any, bad: Any, field: str, value: Any
) -> None:
    with invalid(f"request 'r': {field}", value):
        batch_of(model).check(bad)


def test_an_architecture_with_other_state_is_rejected(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotCache, "attend_one", lambda self, layer, query, *rest: query)
    with invalid("model.path"):
        Backbone(model)


def test_a_fused_decoder_with_other_numbers_is_not_used(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Backbone(model).is_fused

    def doubled(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        product = linear_function(weight, bias)
        return lambda x: 2 * product(x)

    monkeypatch.setattr(fused_decoder, "linear_function", doubled)
    assert not Backbone(model).is_fused


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=12))
def test_the_cache_follows_its_sequences_within_its_limit(sizes: list[tuple[int, int]]) -> None:
    """Grow and shrink by sizes (sequences, tokens of each), keeping what both sizes contain."""
    max_tokens = 9 * slot_capacity(300)
    cache = SlotCache(max_slots=9, max_tokens=max_tokens)
    num_kept = (0, 0)
    for slots, tokens in sizes:
        cache.reserve(slots, tokens)
        assert slots <= cache.num_slots
        assert tokens <= cache.capacity <= max(32, 16 + tokens * 1.125 * 4 / 3)
        assert cache.num_slots * cache.capacity <= max_tokens
        key = torch.zeros(1, 1, 1, 2)
        cache.begin_prefill(0, torch.zeros(0, dtype=torch.long))
        cache.attend(0, key, key, key, AttentionRule(scaling=1.0))
        held = [cache.copy(slot, 0, cache.capacity)[0][0] for slot in range(cache.num_slots)]
        keys = torch.stack(held)  # [S, 1, C, 2]
        common = (min(slots, num_kept[0]), min(tokens, num_kept[1]))
        assert (keys[: common[0], :, : common[1]] == 1).all()
        assert keys.isfinite().all()
        ones = torch.ones(1, tokens, 2)
        for slot in range(slots):
            cache.restore(slot, 0, tokens, {0: (ones, ones)})
        num_kept = (slots, tokens)


def test_slot_capacity_is_monotone_and_tight() -> None:
    rooms = [slot_capacity(tokens) for tokens in range(1, 5000)]
    assert rooms == sorted(rooms)
    assert all(
        tokens <= given <= max(32, tokens * 1.125 + 16) for tokens, given in enumerate(rooms, 1)
    )
